// Runs that were stopped and resumed against runs that never stopped: bit for bit.
#include <chrono>
#include <csignal>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <tests/integration/training_runs.h>

#include <gradus/train/training_state.h>

namespace gradus::integration {
namespace {

using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;

class ResumeTest : public TrainingRuns {
 protected:
  bool has_state(const std::string& run) const {
    for (const std::string& name : states(run)) {
      if (name.starts_with("step-")) return true;
    }
    return false;
  }
  void expect_same_run(const std::string& whole, const std::string& broken) const {
    ASSERT_EQ(numeric_difference(metrics(whole), metrics(broken)), "");
    for (const char* file : {"model.safetensors", "optimizer.safetensors", "rng.safetensors"}) {
      EXPECT_TRUE(read_text(state_file(whole, file)) == read_text(state_file(broken, file)))
          << file;
    }
  }
};

TEST_F(ResumeTest, TenInterruptionsAtRandomStepsChangeNoBit) {
  // Dropout, accumulation with a smaller last micro-batch, recomputation, clipping and evaluation
  // all take part; an epoch ends on the way (about 800 sequences in batches of 10).
  const Flags flags{{"steps", "150"},     {"dropout", "0.2"},
                    {"batch", "10"},      {"seed", "5"},
                    {"eval-every", "40"}, {"save-every", "7"},
                    {"clip-norm", "1"},   {"plan", "micro-batch=4,recompute=1"}};
  train("whole", flags);

  constexpr int kInterruptions = 10;
  constexpr int kSignals[] = {SIGINT, SIGTERM, SIGKILL};
  std::mt19937 random(77);
  std::int64_t target = 0;
  int interruptions = 0;
  while (interruptions < kInterruptions) {
    target += 1 + static_cast<std::int64_t>(random() % 11);
    const int signal = kSignals[interruptions % 3];
    SCOPED_TRACE(testing::Message() << "signal " << signal << " at step " << target);
    GradusProcess process(interruptions == 0
                              ? train_arguments("broken", flags)
                              : std::vector<std::string>{"train", "--resume", path("broken")});
    const auto reached = [&] { return steps_done("broken") >= target; };
    // metrics.jsonl still holds what a killed process did after its last save: start from a resumed
    // log.
    if (interruptions > 0) {
      ASSERT_TRUE(process.wait_until(
          [&] { return process.output().find("resumed from ") != std::string::npos; }));
    }
    ASSERT_TRUE(process.wait_until(reached)) << "the run ended or hung before it was interrupted";
    process.send(signal);
    const Ended ended = process.wait();
    ASSERT_EQ(signal == SIGKILL ? ended.signal : ended.code,
              signal == SIGKILL ? SIGKILL : 128 + signal)
        << "it was not interrupted: " << ended.out << ended.err;
    ++interruptions;
    if (signal == SIGKILL) continue;
    EXPECT_THAT(ended.out, HasSubstr("continue with: gradus train --resume " + path("broken")));
    const auto found = train::find_training_state(path("broken"));
    ASSERT_TRUE(found.newest.has_value());
    EXPECT_EQ(found.newest->run.step, steps_done("broken")) << "a stop signal saves the last step";
  }
  ASSERT_LT(steps_done("broken"), 150);
  resume("broken");
  expect_same_run("whole", "broken");
}

TEST_F(ResumeTest, KilledWhileSavingItKeepsAWholeStateOfTheLastStepOrTheOneBefore) {
  const Flags flags{{"steps", "60"},
                    {"dropout", "0.1"},
                    {"save-every", "1"},
                    {"keep", "2"},
                    {"plan", "micro-batch=2,recompute=1"}};
  Flags unsaved = flags;
  unsaved["save-every"] = "0";
  train("whole", unsaved);
  std::mt19937 random(4);
  int kills = 0;
  for (int round = 0; round < 10; ++round) {
    const std::int64_t before = steps_done("broken");
    GradusProcess process(round == 0
                              ? train_arguments("broken", flags)
                              : std::vector<std::string>{"train", "--resume", path("broken")});
    // A save takes most of each step here, so a kill after a random part of a step mostly hits one.
    if (!process.wait_until([&] { return steps_done("broken") > before && has_state("broken"); })) {
      break;  // the run is done
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 12000));
    process.send(SIGKILL);
    if (process.wait().signal != SIGKILL) break;
    ++kills;
    SCOPED_TRACE(testing::Message() << "kill " << kills);
    const std::int64_t done = steps_done("broken");
    const auto found = train::find_training_state(path("broken"));
    EXPECT_THAT(found.damaged, testing::IsEmpty());
    ASSERT_TRUE(found.newest.has_value());
    EXPECT_THAT(found.newest->run.step, AnyOf(done, done - 1)) << "of " << done << " steps";
    for (const std::string& name : states("broken")) {
      EXPECT_THAT(name, testing::StartsWith("step-")) << "a dead writer's files are removed";
    }
  }
  EXPECT_GE(kills, 6);
  resume("broken");
  expect_same_run("whole", "broken");
  EXPECT_EQ(states("broken").size(), 2u);
}

TEST_F(ResumeTest, AnInterruptedRunResumesUnderItsMemoryLimitWithTheSamePlan) {
  // An automatic plan depends on measured times: a resumed run must take the saved one, not choose
  // again.
  const Flags flags{{"steps", "90"}, {"dropout", "0.1"},   {"layers", "4"},   {"context", "32"},
                    {"batch", "16"}, {"save-every", "10"}, {"memory", "3MiB"}};
  GradusProcess process(train_arguments("broken", flags));
  ASSERT_TRUE(process.wait_until([&] { return steps_done("broken") >= 13; }));
  process.send(SIGTERM);
  const Ended stopped = process.wait();
  ASSERT_EQ(stopped.code, 128 + SIGTERM) << stopped.out << stopped.err;
  const auto plan = train::find_training_state(path("broken")).newest->run.plan;
  const Ended resumed = resume("broken");
  EXPECT_THAT(resumed.out, Not(HasSubstr("measuring a step")));
  EXPECT_LE(highest_peak(metrics("broken")), 3 << 20);

  // What a plan drops changes no number: the whole run needs only the same micro-batches.
  ASSERT_EQ(train::find_training_state(path("broken")).newest->run.plan, plan);
  Flags same = flags;
  same.erase("memory");
  same["plan"] = "micro-batch=" + std::to_string(plan.largest(16)) + ",recompute=0";
  train("whole", same);
  ASSERT_EQ(train::find_training_state(path("whole")).newest->run.plan.micro_batches,
            plan.micro_batches);
  expect_same_run("whole", "broken");
}

TEST_F(ResumeTest, AFinishedRunResumesToNothingAndALongerOneGoesOn) {
  train("run", {{"steps", "10"}});
  const std::string model = read_text(state_file("run", "model.safetensors"));
  resume("run");
  EXPECT_TRUE(read_text(state_file("run", "model.safetensors")) == model);
  EXPECT_EQ(metrics("run").size(), 10u);
  const Ended longer = run_gradus({"train", "--resume", path("run"), "--steps", "15"});
  EXPECT_EQ(longer.code, 0) << longer.err;
  EXPECT_EQ(metrics("run").size(), 15u);
}

TEST_F(ResumeTest, KilledBeforeTheFirstSaveItResumesFromTheStart) {
  const Flags flags{{"steps", "100"}, {"dropout", "0.1"}, {"save-every", "0"}};
  train("whole", flags);
  GradusProcess process(train_arguments("broken", flags));
  ASSERT_TRUE(process.wait_until([&] { return steps_done("broken") >= 5; }));
  process.send(SIGKILL);
  ASSERT_EQ(process.wait().signal, SIGKILL);
  EXPECT_THAT(states("broken"), testing::ElementsAre(testing::HasSubstr("step-000000000")));
  ASSERT_EQ(resume("broken").code, 0);
  expect_same_run("whole", "broken");
}

TEST_F(ResumeTest, AChangedCorpusIsRefusedBecauseTheRunWouldGoOnWithOtherData) {
  train("run", {{"steps", "6"}});
  const std::string model = read_text(state_file("run", "model.safetensors"));
  const std::string text = read_text(path("text.txt"));
  write_text(path("text.txt"), text.substr(text.size() / 2) + text.substr(0, text.size() / 2));
  expect_refusal(run_gradus({"train", "--resume", path("run"), "--steps", "9"}), 1, {"corpus"});
  EXPECT_EQ(metrics("run").size(), 6u);
  EXPECT_TRUE(read_text(state_file("run", "model.safetensors")) == model);
  write_text(path("text.txt"), text);
  EXPECT_EQ(run_gradus({"train", "--resume", path("run"), "--steps", "9"}).code, 0);
}

TEST_F(ResumeTest, AnotherModelOrOptimizerThanTheSavedOneIsRefusedByName) {
  train("run", {{"steps", "6"}});
  const std::string model = read_text(state_file("run", "model.safetensors"));
  const std::vector<std::string> resume{"train", "--resume", path("run"), "--steps", "9"};
  const std::pair<std::vector<std::string>, std::string> table[] = {
      {{"--layers", "3"}, "blocks.2."},
      {{"--width", "64"}, "wte.weight"},
      {{"--optimizer", "sgd"}, "optimizer"}};
  for (const auto& [change, part] : table) {
    SCOPED_TRACE(change[1]);
    std::vector<std::string> arguments = resume;
    arguments.insert(arguments.end(), change.begin(), change.end());
    expect_refusal(run_gradus(arguments), 1, {part});
    EXPECT_EQ(metrics("run").size(), 6u);
  }
  EXPECT_TRUE(read_text(state_file("run", "model.safetensors")) == model);
  EXPECT_EQ(run_gradus(resume).code, 0);
}

TEST_F(ResumeTest, AStopSignalDuringStartUpLeavesARunThatResumesFromStepZero) {
  const Flags flags{{"steps", "12"}, {"dropout", "0.1"}};
  train("whole", flags);
  GradusProcess process(train_arguments("broken", flags));
  // The configuration is the last thing written before the first step, or it is past that already.
  ASSERT_TRUE(
      process.wait_until([&] { return std::filesystem::exists(path("broken") + "/tensorboard"); }));
  process.send(SIGTERM);
  const Ended ended = process.wait();
  ASSERT_THAT(ended.code, AnyOf(128 + SIGTERM, 0)) << ended.signal << ended.err;
  resume("broken");
  expect_same_run("whole", "broken");
}

}  // namespace
}  // namespace gradus::integration
