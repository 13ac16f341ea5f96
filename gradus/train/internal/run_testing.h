#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <gradus/report/metrics.h>
#include <gradus/state/atomic_file.h>
#include <gradus/train/trainer.h>

#include <tests/support/private_state.h>

namespace gradus::train::internal {

/// Tests that run whole trainings, in a directory of their own.
class RunTest : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    const auto* const test = testing::UnitTest::GetInstance()->current_test_info();
    directory = std::filesystem::temp_directory_path() /
                ("gradus_" + std::string(test->test_suite_name()) + "_" +
                 std::to_string(::getpid()) + "_" + test->name());
    std::filesystem::remove_all(directory);
    std::filesystem::create_directories(directory);
  }
  void TearDown() override { std::filesystem::remove_all(directory); }

  void write_corpus(int words) const {
    std::mt19937 random(1);
    std::ofstream text(directory / "corpus.txt");
    const char* vocabulary[] = {"in", "the", "beginning", "was", "word", "and", "light", "earth"};
    for (int i = 0; i < words; ++i) text << vocabulary[random() % 8] << (i % 9 == 8 ? ".\n" : " ");
  }
  /// A language model of three layers on write_corpus()'s text.
  TrainConfig on_corpus(const std::string& out) const {
    TrainConfig config;
    config.model = {
        .layers = 3, .heads = 2, .width = 32, .context = 32, .dropout = 0.1, .bias = true};
    config.data = {.corpus = "file:" + (directory / "corpus.txt").string(),
                   .tokenizer = "bytes",
                   .vocabulary = 256,
                   .cache = (directory / "cache").string(),
                   .validation_ratio = 0.1};
    config.train = {.steps = 8,
                    .batch = 8,
                    .seed = 3,
                    .threads = 1,
                    .device = "cpu",
                    .eval_every = 4,
                    .eval_sequences = 4,
                    .save_every = 0,
                    .keep = 2,
                    .out = (directory / out).string()};
    config.optimizer.warmup = 2;
    config.sample.tokens = 0;
    return config;
  }

  /// @param stop_after_asking  The run is told to stop when it has asked more often than that.
  TrainOutcome run(const TrainConfig& config, bool resume = false, int stop_after_asking = -1) {
    std::ostringstream out;
    int asked = 0;
    TrainerEnvironment environment{
        .out = out,
        .terminal = {},
        .should_stop = [&] { return stop_after_asking >= 0 && ++asked > stop_after_asking; },
        .date = "today"};
    const TrainOutcome outcome = train(config, resume, environment);
    printed = out.str();
    return outcome;
  }
  static std::vector<report::StepMetrics> metrics(const TrainConfig& config) {
    return report::read_metrics(std::filesystem::path(config.train.out) / "metrics.jsonl");
  }
  /// What training computed, without times and memory.
  static std::vector<std::pair<double, std::map<std::string, double>>> numbers(
      const TrainConfig& config) {
    std::vector<std::pair<double, std::map<std::string, double>>> result;
    for (const auto& step : metrics(config)) {
      auto extra = step.extra;
      extra["grad_norm"] = step.grad_norm;
      extra["tokens"] = static_cast<double>(step.tokens);
      extra["validation"] = step.validation_loss.value_or(-1.0);
      result.emplace_back(step.loss, extra);
    }
    return result;
  }
  static std::string file_of(const TrainOutcome& outcome, const char* name) {
    return state::read_file(std::filesystem::path(outcome.state_path) / name);
  }
  static std::string private_difference(const TrainOutcome& left, const TrainOutcome& right) {
    return tests::private_difference(
        std::filesystem::path(left.state_path) / "privacy.safetensors",
        std::filesystem::path(right.state_path) / "privacy.safetensors");
  }

  std::filesystem::path directory;
  std::string printed;  ///< By the last run.
};

}  // namespace gradus::train::internal
