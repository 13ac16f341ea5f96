// Training inside a hard memory limit that plain training of the same batch exceeds.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>
#include <tests/integration/training_runs.h>

#include <gradus/base/byte_count.h>
#include <gradus/train/training_state.h>

namespace gradus::integration {
namespace {

using testing::HasSubstr;

// Deep and with a large batch for its size: activations are nearly all of the memory.
Flags deep(const Flags& changes = {}) {
  Flags flags{{"layers", "4"}, {"context", "32"}, {"batch", "16"}, {"steps", "20"}};
  for (const auto& [name, value] : changes) flags[name] = value;
  return flags;
}

class MemoryTest : public TrainingRuns {
 protected:
  std::int64_t plain_peak_bytes() const {
    train("plain-for-size", deep({{"steps", "3"}}));
    return highest_peak(metrics("plain-for-size"));
  }
  train::RunState last_state(const std::string& run) const {
    const auto found = train::find_training_state(path(run));
    EXPECT_TRUE(found.newest.has_value()) << run;
    return found.newest ? found.newest->run : train::RunState{};
  }
};

// The row of the summary that begins with `name`, or "".
std::string summary_row(const Ended& ended, const std::string& name) {
  for (const std::string& line : lines(ended.out)) {
    if (line.starts_with(name + "  ")) return line.substr(line.find_first_not_of(' ', name.size()));
  }
  return "";
}

TEST_F(MemoryTest, MixedPrecisionIsPlannedForAndReported) {
  const Ended plain = train("plain", deep({{"precision", "bf16"}, {"steps", "5"}}));
  const std::int64_t limit = highest_peak(metrics("plain")) * 3 / 5;
  const Ended ended = train("limited", deep({{"precision", "bf16"},
                                             {"optimizer", "adafactor"},
                                             {"clip-value", "0.1"},
                                             {"steps", "5"},
                                             {"memory", std::to_string(limit)}}));
  EXPECT_LE(highest_peak(metrics("limited")), limit);
  EXPECT_EQ(summary_row(ended, "precision"), "bf16");
  EXPECT_THAT(read_text(path("limited") + "/report.html"), HasSubstr("adafactor"));

  // Fixed far too high: every step overflows, is skipped, and is counted.
  const Ended skipped =
      train("skipped", deep({{"precision", "fp16"}, {"loss-scale", "1e9"}, {"steps", "3"}}));
  EXPECT_THAT(summary_row(skipped, "skipped steps"), testing::StartsWith("3 "));
  const std::string page = read_text(path("skipped") + "/report.html");
  EXPECT_THAT(page, HasSubstr("Loss scale"));
  EXPECT_THAT(page, HasSubstr("3 of 3 (100.0%)"));
}

TEST_F(MemoryTest, AutoFinishesUnderHalfOfWhatPlainTrainingNeedsWithThePlainLosses) {
  train("plain", deep({{"dropout", "0"}}));
  const std::int64_t plain = highest_peak(metrics("plain")), limit = plain / 2;
  const Ended ended =
      train("auto", deep({{"dropout", "0"}, {"memory", std::to_string(limit)}, {"plan", "auto"}}));

  const auto expected = metrics("plain"), got = metrics("auto");
  ASSERT_EQ(got.size(), 20u);
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_NEAR(got[i].loss, expected[i].loss, 1e-5) << "step " << i + 1;
  EXPECT_LE(highest_peak(got), limit);
  for (const auto& step : got)
    EXPECT_EQ(step.peak.total(), step.peak_bytes) << "step " << step.step;

  const auto state = last_state("auto");
  EXPECT_TRUE(state.plan.micro_batches > 1 || state.plan.budget);
  EXPECT_EQ(state.peak_bytes, highest_peak(got));
  EXPECT_EQ(summary_row(ended, "memory limit"), base::format_bytes(limit));
  EXPECT_THAT(summary_row(ended, "measured peak"),
              HasSubstr(base::format_bytes(highest_peak(got)) + " ("));
  EXPECT_THAT(summary_row(ended, "plain training needs"),
              HasSubstr(base::format_bytes(state.plain_peak_bytes)));
  // Predicted from micro-batches of two and three sequences, measured with sixteen.
  EXPECT_NEAR(static_cast<double>(state.plain_peak_bytes), static_cast<double>(plain),
              0.03 * static_cast<double>(plain));
}

TEST_F(MemoryTest, ThePredictedPlainNeedIsWithinThreePerCentForOtherShapesToo) {
  const Flags shapes[] = {
      {{"layers", "1"}, {"batch", "3"}, {"dropout", "0.1"}},
      {{"layers", "3"}, {"batch", "9"}, {"dropout", "0.1"}, {"context", "48"}, {"heads", "4"}},
      {{"layers", "2"},
       {"batch", "32"},
       {"dropout", "0"},
       {"width", "64"},
       {"bias", "false"},
       {"optimizer", "sgd"}},
  };
  int index = 0;
  for (const Flags& shape : shapes) {
    SCOPED_TRACE(index);
    const std::string name = std::to_string(index++);
    train("plain" + name, deep([&] {
            Flags f = shape;
            f["steps"] = "3";
            f["warmup"] = "1";
            return f;
          }()));
    const auto measured = static_cast<double>(highest_peak(metrics("plain" + name)));
    // Tight enough that a plan is looked for.
    Flags limited = shape;
    limited.insert({{"steps", "2"},
                    {"warmup", "1"},
                    {"memory", std::to_string(std::llround(0.8 * measured))}});
    limited["steps"] = "2";
    const Ended ended = try_train("auto" + name, deep(limited));
    ASSERT_EQ(ended.code, 0) << ended.err;
    const auto predicted = static_cast<double>(last_state("auto" + name).plain_peak_bytes);
    EXPECT_NEAR(predicted, measured, 0.03 * measured);
  }
}

TEST_F(MemoryTest, PlainTrainingPastTheLimitFailsWithOneLineAndTheDirectoryServesAPlanThatFits) {
  const std::string limit = std::to_string(plain_peak_bytes() / 2);
  const Ended failed = try_train("run", deep({{"memory", limit}, {"plan", "none"}}));
  expect_refusal(failed, 1,
                 {"[memory] device memory limit of " + base::format_bytes(std::stoll(limit)),
                  "aten::", " needs ", "Largest live tensors: ", "activations made by aten::"});
  EXPECT_EQ(states("run").size(), 1u);  // that of step 0
  // Nothing was trained, so the directory holds no run that would stand in the way.
  const Ended again = try_train("run", deep({{"memory", limit}, {"plan", "auto"}}));
  EXPECT_EQ(again.code, 0) << again.err;
  if (again.code == 0) {
    EXPECT_EQ(metrics("run").size(), 20u);
    EXPECT_THAT(read_text(path("run") + "/config.toml"), HasSubstr("plan = 'auto'"));
  }
}

TEST_F(MemoryTest, ALimitReachedInTheMiddleOfARunKeepsWhatWasSaved) {
  train("run", deep({{"steps", "6"}, {"save-every", "3"}}));
  const std::string limit = std::to_string(highest_peak(metrics("run")) / 2);
  const Ended failed = run_gradus(
      {"train", "--resume", path("run"), "--steps", "9", "--memory", limit, "--plan", "none"});
  expect_refusal(failed, 1, {"[memory] device memory limit", "aten::"});
  EXPECT_EQ(last_state("run").step, 6);
  EXPECT_EQ(metrics("run").size(), 6u);
  const Ended resumed = run_gradus(
      {"train", "--resume", path("run"), "--steps", "9", "--memory", limit, "--plan", "auto"});
  EXPECT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_THAT(resumed.out, HasSubstr("a new plan may round differently from here on"));
  const auto all = metrics("run");
  ASSERT_EQ(all.size(), 9u);
  for (std::size_t i = 6; i < 9; ++i)
    EXPECT_LE(all[i].peak_bytes, std::stoll(limit)) << "step " << i + 1;
}

TEST_F(MemoryTest,
       WithDropoutRecomputationUnderALimitIsBitEqualToPlainTrainingOfTheSameMicroBatch) {
  const std::string dropout = "0.2";
  train("plain", deep({{"dropout", dropout}, {"plan", "micro-batch=5,recompute=0"}}));
  const std::int64_t plain = highest_peak(metrics("plain"));
  std::int64_t least = plain;
  for (const char* recompute : {"2", "4"}) {
    SCOPED_TRACE(recompute);
    const std::string run = std::string("limited") + recompute,
                      limit = std::to_string(plain * 9 / 10);
    train(run, deep({{"dropout", dropout},
                     {"memory", limit},
                     {"plan", std::string("micro-batch=5,recompute=") + recompute}}));
    EXPECT_EQ(numeric_difference(metrics("plain"), metrics(run)), "");
    EXPECT_TRUE(read_text(state_file("plain", "model.safetensors")) ==
                read_text(state_file(run, "model.safetensors")));
    EXPECT_LT(highest_peak(metrics(run)), least) << "more recomputed blocks must need less";
    least = highest_peak(metrics(run));
  }
}

TEST_F(MemoryTest, MeasuringAPlanAndDroppingByItChangeNoNumberOfTheRun) {
  // The micro-batches that auto chose, asked for outright and without a limit: the same run to the
  // bit, dropout included, whatever was dropped and made again.
  const std::int64_t plain = plain_peak_bytes();
  for (const std::int64_t limit : {plain / 2, plain * 3 / 10}) {
    SCOPED_TRACE(limit);
    const std::string run = "auto" + std::to_string(limit), same = "asked" + std::to_string(limit);
    train(run, deep({{"dropout", "0.2"}, {"memory", std::to_string(limit)}}));
    const auto plan = last_state(run).plan;
    train(same,
          deep({{"dropout", "0.2"},
                {"plan", "micro-batch=" + std::to_string(plan.largest(16)) + ",recompute=0"}}));
    ASSERT_EQ(last_state(same).plan.micro_batches, plan.micro_batches);
    EXPECT_EQ(numeric_difference(metrics(same), metrics(run)), "");
    EXPECT_LE(highest_peak(metrics(run)), limit);
  }
}

TEST_F(MemoryTest, PlanPrintsTheTableAndWritesThePageAndTrainsNothing) {
  const std::int64_t plain = plain_peak_bytes();
  Flags flags = deep({{"dropout", "0.1"},
                      {"memory", std::to_string(plain * 4 / 10)},
                      {"html", path("plan.html")},
                      {"json", path("plan.json")}});
  std::vector<std::string> arguments = train_arguments("nothing", flags);
  arguments[0] = "plan";
  // What is of training and of samples only.
  for (auto flag = arguments.begin(); flag != arguments.end();) {
    if (*flag == "--sample-tokens" || *flag == "--prompt") {
      flag = arguments.erase(flag, flag + 2);
    } else {
      ++flag;
    }
  }
  const Ended ended = run_gradus(arguments);
  ASSERT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(ended.err, "");
  EXPECT_FALSE(std::filesystem::exists(path("nothing")));
  EXPECT_THAT(ended.out, HasSubstr("plain training needs "));
  const auto all = lines(ended.out);
  EXPECT_EQ(std::count_if(all.begin(), all.end(),
                          [](const std::string& line) { return line.starts_with("> "); }),
            1)
      << ended.out;
  const auto json = nlohmann::json::parse(read_text(path("plan.json")));
  const auto measured = json.at("measured").at("peak_bytes").get<double>();
  EXPECT_LE(measured, static_cast<double>(plain) * 0.4);
  EXPECT_NEAR(json.at("predicted").at("peak_bytes").get<double>(), measured, 0.03 * measured);
  const std::string page = read_text(path("plan.html"));
  EXPECT_THAT(page, HasSubstr(json.at("plan").get<std::string>()));
  EXPECT_THAT(page, HasSubstr("id=\"timeline\""));
}

TEST_F(MemoryTest, ALimitBelowTheLeastPossibleIsRefusedAndNothingIsLeftBehind) {
  const std::int64_t plain = plain_peak_bytes();
  expect_refusal(try_train("low", deep({{"memory", std::to_string(plain / 12)}})), 1,
                 {"[plan] the memory limit of " + base::format_bytes(plain / 12) +
                      " is below what this model needs: at least ",
                  "raise --memory"});
  // Too little for the weights alone.
  expect_refusal(try_train("lower", deep({{"memory", "100KiB"}})), 1,
                 {"[memory] device memory limit of 100.0 KiB", "parameters"});
  for (const char* run : {"low", "lower"}) {
    EXPECT_EQ(states(run).size(), 0u);
    EXPECT_FALSE(std::filesystem::exists(path(run) + "/metrics.jsonl"));
  }
  train("low", deep({{"steps", "6"}}));
}

}  // namespace
}  // namespace gradus::integration
