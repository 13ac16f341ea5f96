#include <tests/integration/training_runs.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <random>
#include <sstream>

#include <stdlib.h>

#include <gmock/gmock.h>

#include <gradus/base/error.h>

namespace gradus::integration {
namespace {

namespace fs = std::filesystem;

// Words in random order: enough regularity for the loss to fall, and the same text on every run.
std::string small_text() {
  static constexpr const char* kWords[] = {"the", "of",   "and",   "lord", "in",     "that",
                                           "his", "to",   "shall", "unto", "he",     "for",
                                           "a",   "king", "house", "day",  "people", "said"};
  std::mt19937 random(20);
  std::string text;
  for (int line = 0; line < 250; ++line) {
    for (int word = 0; word < 11; ++word) text += std::string(kWords[random() % 18]) + " ";
    text += "amen\n";
  }
  return text;
}

}  // namespace

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

void TrainingRuns::SetUp() {
  std::string pattern = (fs::temp_directory_path() / "gradus-integration-XXXXXX").string();
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  directory_ = pattern;
  write_text(path("text.txt"), small_text());
}

void TrainingRuns::TearDown() {
  std::error_code ignored;
  if (!directory_.empty()) fs::remove_all(directory_, ignored);
}

std::vector<std::string> TrainingRuns::train_arguments(const std::string& run,
                                                       const Flags& changes) const {
  Flags flags{{"layers", "2"},
              {"heads", "2"},
              {"width", "32"},
              {"context", "16"},
              {"batch", "4"},
              {"tokenizer", "bytes"},
              {"corpus", "file:" + path("text.txt")},
              {"cache", path("cache")},
              {"sample-tokens", "0"},
              {"threads", "1"},
              {"steps", "20"},
              {"warmup", "2"},
              {"validation-ratio", "0.1"},
              {"eval-sequences", "8"},
              {"out", path(run)}};
  for (const auto& [name, value] : changes) flags[name] = value;
  std::vector<std::string> arguments{"train"};
  for (const auto& [name, value] : flags) {
    arguments.push_back("--" + name);
    arguments.push_back(value);
  }
  return arguments;
}

Ended TrainingRuns::train(const std::string& run, const Flags& changes) const {
  Ended ended = try_train(run, changes);
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(ended.err, "");
  return ended;
}

Ended TrainingRuns::resume(const std::string& run) const {
  Ended ended = run_gradus({"train", "--resume", path(run)});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(ended.err, "");
  return ended;
}

std::vector<report::StepMetrics> TrainingRuns::metrics(const std::string& run) const {
  return report::read_metrics(path(run) + "/metrics.jsonl");
}

std::int64_t TrainingRuns::steps_done(const std::string& run) const {
  const std::string file = path(run) + "/metrics.jsonl";
  if (!fs::exists(file)) return 0;
  const auto all = report::read_metrics(file);
  return all.empty() ? 0 : all.back().step;
}

std::vector<std::string> TrainingRuns::states(const std::string& run) const {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(path(run) + "/states", error)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string TrainingRuns::state_file(const std::string& run, const std::string& name) const {
  const std::vector<std::string> names = states(run);
  EXPECT_FALSE(names.empty()) << run;
  return path(run) + "/states/" + (names.empty() ? "none" : names.back()) + "/" + name;
}

std::int64_t highest_peak(const std::vector<report::StepMetrics>& metrics) {
  std::int64_t highest = 0;
  for (const auto& step : metrics) highest = std::max(highest, step.peak_bytes);
  return highest;
}

std::string numeric_difference(const std::vector<report::StepMetrics>& expected,
                               const std::vector<report::StepMetrics>& got) {
  if (expected.size() != got.size()) {
    return base::join("one has ", expected.size(), " steps, the other ", got.size());
  }
  const auto bits = [](double value) { return std::bit_cast<std::uint64_t>(value); };
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto &l = expected[i], &r = got[i];
    if (l.step != r.step) return base::join("line ", i + 1, ": step ", l.step, " and ", r.step);
    const std::string where = base::join("step ", l.step, ": ");
    if (bits(l.loss) != bits(r.loss)) return base::join(where, "loss ", l.loss, " and ", r.loss);
    if (bits(l.lr) != bits(r.lr)) return base::join(where, "learning rate ", l.lr, " and ", r.lr);
    if (bits(l.grad_norm) != bits(r.grad_norm)) return where + "gradient norms differ";
    if (l.validation_loss != r.validation_loss) return where + "validation losses differ";
  }
  return "";
}

void expect_refusal(const Ended& ended, int code, const std::vector<std::string>& parts) {
  EXPECT_EQ(ended.code, code) << "signal " << ended.signal;
  EXPECT_EQ(lines(ended.err).size(), 1u) << ended.err;
  EXPECT_TRUE(ended.err.starts_with("gradus: error: ")) << ended.err;
  for (const std::string& part : parts) EXPECT_THAT(ended.err, testing::HasSubstr(part));
}

}  // namespace gradus::integration
