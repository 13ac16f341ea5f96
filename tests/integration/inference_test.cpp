// What a trained model is for: eval, sample, info and launch, and loading it in Python.
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include <integration_paths.h>
#include <sys/wait.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/remainder.h>
#include <gmock/gmock.h>
#include <tests/integration/training_runs.h>

#include <gradus/base/error.h>
#include <gradus/models/gpt.h>
#include <gradus/state/safetensors.h>
#include <gradus/train/config.h>
#include <gradus/train/language_model.h>
#include <gradus/train/training_state.h>

namespace gradus::integration {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class InferenceTest : public TrainingRuns {};

TEST_F(InferenceTest, EvalPrintsTheLossOfTheLastEvaluation) {
  train("run",
        {{"steps", "20"}, {"eval-every", "20"}, {"eval-sequences", "10"}, {"dropout", "0.3"}});
  const double expected = *metrics("run").back().validation_loss;
  const std::regex pattern(
      "step 20: validation loss ([0-9.e+-]+) nats a token, perplexity ([0-9.e+-]+) \\((\\d+) "
      "sequences of 16 tokens\\)\n");
  // The run's own number of sequences, and the same asked for.
  for (const auto& more : {std::vector<std::string>{}, {"--eval-sequences", "10"}}) {
    std::vector<std::string> arguments{"eval", path("run")};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Ended ended = run_gradus(arguments);
    ASSERT_EQ(ended.code, 0) << ended.err;
    std::smatch match;
    ASSERT_TRUE(std::regex_match(ended.out, match, pattern)) << ended.out;
    // Six digits are printed; micro-batches of eval are others than the run's.
    EXPECT_NEAR(std::stod(match[1]), expected, 2e-5);
    EXPECT_NEAR(std::stod(match[2]), std::exp(expected), 2e-3);
    EXPECT_EQ(match[3], "10");
  }
  EXPECT_THAT(run_gradus({"eval", path("run"), "--eval-sequences", "3"}).out,
              HasSubstr("(3 sequences of"));
}

TEST_F(InferenceTest, EvalRefusesACorpusThatTheModelDoesNotKnow) {
  train("run", {{"steps", "3"}, {"warmup", "1"}});
  expect_refusal(run_gradus({"eval", path("run"), "--corpus", "file:" + path("text.txt"),
                             "--tokenizer", "sentencepiece", "--vocabulary", "290"}),
                 1, {"corpus", "trained on"});
}

TEST_F(InferenceTest, SampleStartsWithThePromptAndIsDeterministicForASeed) {
  train("run", {{"steps", "20"}});
  const auto sample = [&](const std::string& seed, const std::string& temperature = "0.9") {
    const Ended ended =
        run_gradus({"sample", path("run"), "--prompt", "the king", "--sample-tokens", "40",
                    "--seed", seed, "--temperature", temperature});
    EXPECT_EQ(ended.code, 0) << ended.err;
    EXPECT_TRUE(ended.out.starts_with("the king")) << ended.out;
    return ended.out;
  };
  const std::string first = sample("1");
  EXPECT_EQ(first.size(), 8u + 40u + 1u) << "bytes of prompt, of tokens, and a newline";
  EXPECT_EQ(sample("1"), first);
  EXPECT_NE(sample("2"), first);
  EXPECT_EQ(sample("1", "0"), sample("2", "0")) << "at temperature 0 there is no choice";
}

TEST_F(InferenceTest, TheSampleAtTheEndOfARunIsTheOneThatSamplePrints) {
  const Ended trained =
      train("run", {{"steps", "10"}, {"sample-tokens", "20"}, {"prompt", "unto"}});
  const Ended sampled = run_gradus({"sample", path("run")});
  ASSERT_EQ(sampled.code, 0) << sampled.err;
  EXPECT_THAT(trained.out, HasSubstr("\nsample:\n" + sampled.out));
}

TEST_F(InferenceTest, InfoNamesVersionsAndDevices) {
  const Ended ended = run_gradus({"info"});
  EXPECT_EQ(ended.code, 0);
  EXPECT_EQ(ended.err, "");
  for (const char* part :
       {"gradus", "LibTorch  2.", "cpu", "fast dtypes: float32", "memory limits", "distributed"}) {
    EXPECT_THAT(ended.out, HasSubstr(part));
  }
  const Ended version = run_gradus({"--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_THAT(ended.out, HasSubstr(version.out.substr(0, version.out.find('\n'))));
}

TEST_F(InferenceTest, LaunchPrintsWhatEveryRankPrints) {
  const Ended ended =
      run_gradus({"launch", "-n", "2", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_THAT(lines(ended.out), testing::UnorderedElementsAre("[0] 0 of 2", "[1] 1 of 2"));
}

TEST_F(InferenceTest, ARunIsEvaluatedWhileItTrainsAndNeitherDisturbsTheOther) {
  const Flags flags{{"steps", "40"}, {"save-every", "1"}, {"dropout", "0.1"}};
  Flags unsaved = flags;
  unsaved["save-every"] = "0";
  train("whole", unsaved);
  GradusProcess process(train_arguments("run", flags));
  ASSERT_TRUE(process.wait_until([&] { return steps_done("run") >= 3; }));
  for (int i = 0; i < 2; ++i) {
    const Ended ended = run_gradus({"eval", path("run")});
    EXPECT_EQ(ended.code, 0) << ended.err;
    EXPECT_EQ(ended.err, "");
  }
  EXPECT_EQ(process.wait().code, 0);
  EXPECT_EQ(numeric_difference(metrics("whole"), metrics("run")), "");
}

class SavedModelTest : public TrainingRuns {
 protected:
  void SetUp() override {
    TrainingRuns::SetUp();
    if (!fs::exists(kPython))
      GTEST_SKIP() << "no Python at " << kPython << ": run scripts/setup.sh";
  }
};

TEST_F(SavedModelTest, PythonLoadsItAndGivesTheSameLogits) {
  train("run", {{"steps", "25"}, {"lr", "3e-3"}, {"dropout", "0.1"}});
  const auto config = train::load_config(path("run") + "/config.toml");
  models::Gpt gpt = train::make_gpt(config, 256);
  gpt->eval();
  const auto found = train::find_training_state(path("run"));
  ASSERT_TRUE(found.newest.has_value());
  train::load_model(*found.newest, train::named_tensors(*gpt));

  const at::NoGradGuard no_grad;
  const at::Tensor ids =
      at::remainder(at::arange(5 * config.model.context, at::kLong) * 37, 251).view({5, -1});
  const at::Tensor logits = gpt->forward(ids);
  // The second file is off by a little more than the tolerance: the comparison must see it.
  for (const auto& [name, shift] : {std::pair{"right", 0.0}, std::pair{"wrong", 3e-5}}) {
    state::save_safetensors(path(name), {{"ids", ids}, {"logits", logits + shift}},
                            {{"context", std::to_string(config.model.context)},
                             {"layers", std::to_string(config.model.layers)},
                             {"heads", std::to_string(config.model.heads)},
                             {"width", std::to_string(config.model.width)},
                             {"bias", std::to_string(config.model.bias)}});
  }
  const std::string command = base::join(
      "'", kPython, "' '", kIntegrationFolder, "/check_logits.py' '", found.newest->path,
      "/model.safetensors' '", path("right"), "' '", path("wrong"), "' >'", path("log"), "' 2>&1");
  const int code = WEXITSTATUS(std::system(command.c_str()));
  const std::string log = read_text(path("log"));
  if (code == 77) GTEST_SKIP() << log;
  const auto verdicts = lines(log);
  ASSERT_EQ(verdicts.size(), 2u) << log;
  EXPECT_TRUE(verdicts[0].starts_with("same logits: ")) << log;
  EXPECT_TRUE(verdicts[1].starts_with("other logits: ")) << log;
}

}  // namespace
}  // namespace gradus::integration
