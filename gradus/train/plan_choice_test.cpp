#include <gradus/train/plan_choice.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/plan/synthetic_trace.h>

namespace gradus::train {
namespace {

using recompute::StepTrace;
using ::testing::HasSubstr;

// A machine whose memory and time are known: weights, gradients, and a chain of segments that each
// make and save activations of so many bytes a sequence. It runs what it is told to by simulation.
struct Machine {
  std::int64_t segments = 4, weights = 1000, activations = 100, gradients = 250, workspace = 50;
  std::int64_t limit = 0;
  double overhead_s = 0.01, forward_s = 1.0;  // of a micro-batch, of a sequence
  // Bytes a sequence that appear only from 8 sequences on: what a prediction cannot know.
  std::int64_t hidden = 0;
  // What forward calls need on the way, and what backward has in memory from its start.
  std::int64_t forward_workspace = 0, early_gradients = 0;
  // Bytes a sequence of an activation in smaller form; 0: there is none.
  std::int64_t small = 0;
  int runs = 0, beyond_the_limit = 0;

  StepTrace trace(std::int64_t size, bool later) const {
    const auto n = static_cast<std::size_t>(segments);
    StepTrace trace = plan::testing::chain_trace(
        std::vector<std::int64_t>(n, activations * size),
        std::vector<double>(n, forward_s * static_cast<double>(size) / static_cast<double>(n)));
    const std::int64_t rest = weights + (later ? gradients : 0) + (size >= 8 ? hidden * size : 0);
    for (auto& moment : trace.moments) {
      moment.rest_bytes = rest + (moment.backward ? early_gradients : 0);
      moment.other_bytes =
          moment.rest_bytes + workspace + (moment.backward ? 0 : forward_workspace);
    }
    trace.seconds = overhead_s + 3.0 * forward_s * static_cast<double>(size);
    return trace;
  }
  std::vector<plan::CompressedResult> compressed(std::int64_t size) const {
    if (small == 0) return {};
    return std::vector<plan::CompressedResult>(
        trace(size, false).calls.size(), {.bytes = small * size,
                                          .encode_seconds = 1e-3 * static_cast<double>(size),
                                          .decode_seconds = 1e-3 * static_cast<double>(size)});
  }
  std::int64_t optimizer_peak() const { return weights + gradients + workspace; }
  std::int64_t plain_peak(std::int64_t size, bool accumulating) const {
    std::int64_t peak = optimizer_peak();
    for (const bool later : {false, accumulating})
      peak = std::max(peak, plan::simulate(trace(size, later), {}, 0).peak_bytes);
    return peak;
  }
  // Least limit under which a step of one sequence at a time is known to run.
  std::int64_t least(bool accumulating) const {
    return std::max(optimizer_peak(),
                    plan::least_bytes(trace(1, accumulating),
                                      {.limit_bytes = 1 << 20, .compressed = compressed(1)}));
  }

  std::optional<MeasuredPass> pass(const TrialRequest& request, bool later,
                                   std::int64_t bound) const {
    MeasuredPass pass;
    pass.trace = trace(request.size, later);
    pass.compressed = compressed(request.size);
    const auto found =
        request.plans == nullptr ? nullptr : request.plans->find(request.size, later);
    recompute::EvictionPlan plan = found == nullptr ? recompute::EvictionPlan{} : *found;
    if (found == nullptr && request.encode && small > 0) {
      plan = plan::eviction_plan(
          pass.trace, std::vector<recompute::Disposition>(pass.trace.calls.size(),
                                                          recompute::Disposition::leave));
    }
    const plan::Simulation done = plan::simulate(pass.trace, plan, request.budget ? bound : 0,
                                                 {.compressed = pass.compressed});
    if (!done.feasible || (bound > 0 && done.peak_bytes > bound)) return std::nullopt;
    pass.peak_bytes = pass.trace.peak_bytes = done.peak_bytes;
    pass.seconds = pass.trace.seconds + done.replay_seconds + done.move_seconds;
    if (!request.budget) pass.trace = {}, pass.compressed = {};
    return pass;
  }
  TrialRunner runner() {
    return [this](const TrialRequest& request) -> std::optional<Trial> {
      ++runs;
      const std::int64_t bound = request.limit_bytes.value_or(limit);
      beyond_the_limit += bound == 0 || bound > limit ? 1 : 0;
      Trial trial;
      trial.optimizer_peak_bytes = optimizer_peak();
      if (bound > 0 && trial.optimizer_peak_bytes > bound) return std::nullopt;
      auto first = pass(request, false, bound);
      if (!first) return std::nullopt;
      trial.first = std::move(*first);
      if (request.accumulating) {
        trial.later = pass(request, true, bound);
        if (!trial.later) return std::nullopt;
      }
      return trial;
    };
  }
  PlanChoice choose(std::int64_t batch, std::optional<Plan> only = std::nullopt) {
    return choose_plan({.batch = batch,
                        .limit_bytes = limit,
                        .only = only,
                        .compress = small > 0,
                        .planning_s = 0.05},
                       runner());
  }
  // Whether a step of the chosen plan runs.
  bool runs_step(const PlanChoice& choice, std::int64_t batch) {
    return runner()({.size = choice.plan.largest(batch),
                     .accumulating = choice.plan.micro_batches > 1,
                     .budget = choice.plan.budget,
                     .plans = &choice.passes})
        .has_value();
  }
};

TEST(PlanChoiceTest, ChoosesPlainTrainingWhereItFits) {
  Machine machine;
  machine.limit = 100000;
  const PlanChoice choice = machine.choose(32);
  EXPECT_EQ(choice.plan, Plan{});
  EXPECT_EQ(choice.plain_peak_bytes, machine.plain_peak(32, false));
  EXPECT_EQ(choice.predicted_peak_bytes, choice.trial_peak_bytes);
  EXPECT_THAT(choice.reason, HasSubstr("plain training fits"));
  EXPECT_EQ(machine.beyond_the_limit, 0);
}

TEST(PlanChoiceTest, ChoosesSmallerMicroBatchesBeforeDroppingWhereThatIsFaster) {
  Machine machine;
  machine.limit = machine.plain_peak(8, true);
  const PlanChoice choice = machine.choose(32);
  EXPECT_EQ(choice.plan, (Plan{.micro_batches = 4}));
  EXPECT_LE(choice.trial_peak_bytes, machine.limit);
  EXPECT_EQ(choice.plain_peak_bytes, machine.plain_peak(32, false));
}

TEST(PlanChoiceTest, DropsAndRunsAgainWhereMicroBatchesAreDear) {
  Machine machine;
  machine.overhead_s = 50.0;
  machine.limit = machine.weights + (machine.plain_peak(32, false) - machine.weights) * 4 / 5;
  const PlanChoice choice = machine.choose(32);
  EXPECT_EQ(choice.plan, (Plan{.micro_batches = 1, .budget = true}));
  EXPECT_LE(choice.trial_peak_bytes, machine.limit);
  ASSERT_TRUE(choice.memory.has_value());
  EXPECT_NEAR(choice.predicted_seconds, choice.trial_seconds, 1e-6);
  const PlanCandidate& row = choice.candidates[choice.chosen];
  EXPECT_EQ(row.plan, choice.plan);
  EXPECT_GT(row.recomputed.bytes, 0);
  EXPECT_EQ(row.kept.bytes + row.recomputed.bytes, 4 * 32 * machine.activations);
}

TEST(PlanChoiceTest, LeavesToCompressionWhatIsCheaperToCompress) {
  Machine machine{.small = 10};
  machine.overhead_s = 50.0;
  machine.limit = machine.weights + (machine.plain_peak(32, false) - machine.weights) * 4 / 5;
  const PlanChoice choice = machine.choose(32);
  EXPECT_EQ(choice.plan, (Plan{.micro_batches = 1, .budget = true}));
  EXPECT_TRUE(choice.passes.compress());
  EXPECT_LE(choice.trial_peak_bytes, machine.limit);
  EXPECT_EQ(choice.predicted_peak_bytes, choice.trial_peak_bytes);
  EXPECT_NEAR(choice.predicted_seconds, choice.trial_seconds, 1e-6);
  const PlanCandidate& row = choice.candidates[choice.chosen];
  EXPECT_GT(row.compressed.bytes, 0);
  EXPECT_EQ(row.kept.bytes + row.recomputed.bytes + row.compressed.bytes,
            4 * 32 * machine.activations);
}

TEST(PlanChoiceTest, ALimitThatOnlyCompressionMeetsIsMetWithinIt) {
  for (const std::int64_t batch : {1, 16}) {
    // No activation can be made again beside the gradients, nor all be kept.
    Machine plain{
        .segments = 9, .activations = 5000, .forward_workspace = 20000, .early_gradients = 20000};
    Machine machine = plain;
    machine.small = 50;
    const std::int64_t without = plain.least(batch > 1), with = machine.least(batch > 1);
    ASSERT_LT(with, without * 95 / 100);
    plain.limit = machine.limit = (with + without) / 2;
    EXPECT_THROW(plain.choose(batch), UserError);
    const PlanChoice choice = machine.choose(batch);
    EXPECT_TRUE(choice.passes.compress());
    EXPECT_TRUE(machine.runs_step(choice, batch));
    EXPECT_EQ(machine.beyond_the_limit, 0);
  }
}

TEST(PlanChoiceTest, FitsOneSequenceAtTheLeastLimit) {
  Machine machine;
  machine.segments = 9;
  machine.limit = machine.least(true);
  const PlanChoice choice = machine.choose(32);
  EXPECT_EQ(choice.plan.largest(32), 1);
  EXPECT_TRUE(machine.runs_step(choice, 32));
  EXPECT_EQ(choice.plain_peak_bytes, 0);  // two sequences fit with nothing: not known, not claimed
}

TEST(PlanChoiceTest, WhatATrialRefusesIsNotChosen) {
  Machine machine;
  machine.hidden = 1000;
  machine.limit = 1000 + 250 + 50 + 400 * 9;
  const PlanChoice choice = machine.choose(32);
  EXPECT_LT(choice.plan.largest(32), 8);
  EXPECT_TRUE(machine.runs_step(choice, 32));
  EXPECT_TRUE(std::any_of(choice.candidates.begin(), choice.candidates.end(),
                          [](const PlanCandidate& candidate) { return candidate.refused; }));
}

TEST(PlanChoiceTest, RefusesALimitBelowTheLeastAndTheNumberItNamesIsEnough) {
  for (const std::int64_t batch : {1, 32}) {
    Machine machine{.segments = 9, .activations = 5000};
    machine.limit = machine.least(batch > 1) * 9 / 10;
    std::string message;
    try {
      machine.choose(batch);
    } catch (const UserError& error) {
      message = error.what();
    }
    ASSERT_THAT(message, HasSubstr("below what this model needs: at least "));
    EXPECT_THAT(message, HasSubstr("raise --memory"));
    const std::int64_t named = std::atoll(message.substr(message.find("at least ") + 9).c_str());
    EXPECT_GT(named, machine.limit);
    EXPECT_LT(named, machine.least(batch > 1) * 1.1);
    machine.limit = named;
    EXPECT_TRUE(machine.runs_step(machine.choose(batch), batch));
  }
}

TEST(PlanChoiceTest, ALimitBelowTheOptimizersNeedIsRefusedByNumberToo) {
  Machine machine{.segments = 2, .weights = 1 << 20, .gradients = 1 << 20};
  machine.limit = (2 << 20) - 1;
  try {
    machine.choose(4);
    FAIL() << "nothing fits";
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr("at least "));
  }
}

TEST(PlanChoiceTest, HandlesABatchOfOneAndOfTwo) {
  for (const std::int64_t batch : {1, 2}) {
    Machine machine;
    machine.limit = machine.least(batch > 1) + 100;
    const PlanChoice choice = machine.choose(batch);
    EXPECT_LE(choice.trial_peak_bytes, machine.limit);
    EXPECT_TRUE(machine.runs_step(choice, batch));
  }
}

TEST(PlanChoiceTest, PassesOfAKnownPlanKeepItsMicroBatches) {
  Machine machine;
  machine.limit = machine.plain_peak(4, true);
  const Plan known{.micro_batches = 3, .budget = true};
  const PlanChoice choice = machine.choose(16, known);
  EXPECT_EQ(choice.plan, known);
  EXPECT_TRUE(machine.runs_step(choice, 16));
  EXPECT_LE(choice.trial_peak_bytes, machine.limit);
}

TEST(PlanChoiceTest, EveryRandomMachineGetsAPlanThatFits) {
  std::mt19937 random(5);
  for (int i = 0; i < 60; ++i) {
    Machine machine;
    const std::int64_t batch = 1 + static_cast<std::int64_t>(random() % 40);
    machine.segments = 1 + static_cast<std::int64_t>(random() % 14);
    machine.activations = 1 + static_cast<std::int64_t>(random() % 1000);
    machine.overhead_s = static_cast<double>(random() % 100) / 10.0;
    const std::int64_t least = machine.least(batch > 1);
    const std::int64_t most = std::max(machine.plain_peak(batch, false), least);
    machine.limit =
        least + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most - least + 1));
    SCOPED_TRACE(::testing::Message() << "machine " << i);
    const PlanChoice choice = machine.choose(batch);
    EXPECT_LE(choice.trial_peak_bytes, machine.limit);
    EXPECT_LE(machine.runs, 40);
    EXPECT_TRUE(machine.runs_step(choice, batch));
  }
}

}  // namespace
}  // namespace gradus::train
