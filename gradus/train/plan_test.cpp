#include <gradus/train/plan.h>

#include <algorithm>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>

namespace gradus::train {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

base::MemoryTimeline timeline(const std::vector<std::int64_t>& totals) {
  base::MemoryTimeline result;
  for (const std::int64_t total : totals) {
    base::MemoryPoint point;
    point.live[base::MemoryCategory::workspace] = total;
    result.push_back(point);
  }
  return result;
}

// A machine whose memory and time are known: weights W, activations A a sequence and segment, G of
// gradients.
struct Machine {
  std::int64_t segments = 4, weights = 1000, activations = 100, gradients = 250;
  std::int64_t limit = 0;
  double overhead = 0.01, forward = 1.0;
  int runs = 0;
  std::int64_t hidden =
      0;  // bytes a sequence that appear only from 8 sequences on: what a prediction cannot know

  std::int64_t peak(std::int64_t size, std::int64_t recomputed, bool accumulating) const {
    const std::int64_t kept = (segments - recomputed) * activations + recomputed * 10;
    const std::int64_t one_again = recomputed > 0 ? activations : 0;
    return std::max(weights + 500, weights + (accumulating ? gradients : 0) +
                                       size * (kept + one_again) + (size >= 8 ? hidden * size : 0));
  }
  TrialRunner runner() {
    return [this](std::int64_t size, std::int64_t recomputed,
                  bool accumulating) -> std::optional<Trial> {
      ++runs;
      if (limit > 0 && peak(size, recomputed, accumulating) > limit) return std::nullopt;
      Trial trial;
      // Two moments, the second of which wins only for many sequences: a line through peaks would
      // miss it.
      const auto moments = [&](bool again) {
        const std::int64_t kept = (segments - recomputed) * activations + recomputed * 10;
        const std::int64_t top = weights + (again ? gradients : 0) +
                                 size * (kept + (recomputed > 0 ? activations : 0)) +
                                 (size >= 8 ? hidden * size : 0);
        return timeline({weights, weights + 500, top, weights});
      };
      trial.first = moments(false);
      if (accumulating) trial.second = moments(true);
      trial.optimizer_peak_bytes = weights + gradients;
      trial.seconds =
          overhead + static_cast<double>(size) * forward *
                         (3.0 + static_cast<double>(recomputed) / static_cast<double>(segments));
      return trial;
    };
  }
};

TEST(PlanTest, SizesAreEqualButForOne) {
  EXPECT_THAT((Plan{.micro_batches = 3}.sizes(8)), ElementsAre(3, 3, 2));
  EXPECT_THAT((Plan{.micro_batches = 4}.sizes(2)), ElementsAre(1, 1));
  EXPECT_EQ((Plan{.micro_batches = 3}.largest(8)), 3);
}

TEST(PlanTest, ParsesRequests) {
  EXPECT_TRUE(parse_plan_request("auto", 8, 4).automatic);
  EXPECT_EQ(parse_plan_request("none", 8, 4).plan, (Plan{1, 0}));
  EXPECT_EQ(parse_plan_request("micro-batch=3,recompute=2", 8, 4).plan, (Plan{3, 2}));
  EXPECT_EQ(parse_plan_request("recompute=0,micro-batch=8", 8, 4).plan, (Plan{1, 0}));
  for (const char* text :
       {"", "fast", "micro-batch=3", "micro-batch=9,recompute=0", "micro-batch=3,recompute=5",
        "micro-batch=3,recompute=x", "micro-batch=3,recompute=1,recompute=1", "micro-batch=3,,"}) {
    SCOPED_TRACE(text);
    EXPECT_THROW(parse_plan_request(text, 8, 4), UserError);
  }
}

TEST(PlanTest, PredictsThePeakAsTheLargestMomentAndNotAlongThePeaks) {
  // Moments 100 + 10 n and 50 + 40 n: the second overtakes the first between one and two sequences.
  Trial small, large;
  small.first = timeline({0, 110, 90, 0});
  large.first = timeline({0, 120, 130, 0});
  EXPECT_EQ(predict_peak(small, 1, large, 2, 10, false), 450);
  large.optimizer_peak_bytes = 1000;
  EXPECT_EQ(predict_peak(small, 1, large, 2, 10, false), 1000);
  small.second = timeline({0, 500});
  large.second = timeline({0, 900});
  EXPECT_EQ(predict_peak(small, 1, large, 2, 3, true), 1300);
}

TEST(PlanTest, FallsBackToALineThroughThePeaksWhereProgramsDiffer) {
  Trial small, large;
  small.first = timeline({0, 100});
  large.first = timeline({0, 5, 160, 0});
  EXPECT_EQ(predict_peak(small, 1, large, 2, 4, false), 280);
  EXPECT_THROW(predict_peak(small, 1, large, 1, 4, false), UserError);
}

TEST(PlanTest, ChoosesPlainTrainingWhereItFits) {
  Machine machine;
  machine.limit = 100000;
  const PlanChoice choice = choose_plan(32, 4, machine.limit, machine.runner());
  EXPECT_EQ(choice.plan, (Plan{1, 0}));
  EXPECT_EQ(choice.plain_peak_bytes, machine.peak(32, 0, false));
  EXPECT_THAT(choice.reason, HasSubstr("plain training fits"));
}

TEST(PlanTest, ChoosesSmallerMicroBatchesBeforeRecomputationWhereThatIsFaster) {
  Machine machine;
  machine.limit = 1000 + 250 + 400 * 8;  // eight plain sequences
  const PlanChoice choice = choose_plan(32, 4, machine.limit, machine.runner());
  EXPECT_EQ(choice.plan, (Plan{4, 0}));
  EXPECT_LE(choice.trial_peak_bytes, machine.limit);
  EXPECT_EQ(choice.plain_peak_bytes, machine.peak(32, 0, false));
}

TEST(PlanTest, RecomputesWhereMicroBatchesAreDear) {
  Machine machine;
  machine.overhead = 50.0;
  machine.limit = machine.peak(32, 4, false) + 10;
  const PlanChoice choice = choose_plan(32, 4, machine.limit, machine.runner());
  EXPECT_EQ(choice.plan, (Plan{1, 4}));
}

TEST(PlanTest, FitsOneSequenceWithEverythingRecomputed) {
  Machine machine;
  machine.limit = machine.peak(1, 4, true);
  const PlanChoice choice = choose_plan(32, 4, machine.limit, machine.runner());
  EXPECT_EQ(choice.plan.largest(32), 1);
  EXPECT_EQ(choice.plain_peak_bytes,
            0);  // two sequences fit with nothing: not known, so not claimed
}

TEST(PlanTest, WhatATrialRefusesIsNotChosen) {
  Machine machine;
  machine.hidden = 1000;
  machine.limit = 1000 + 250 + 400 * 8;
  const PlanChoice choice = choose_plan(32, 4, machine.limit, machine.runner());
  EXPECT_LT(choice.plan.largest(32), 8);
  EXPECT_LE(machine.peak(choice.plan.largest(32), choice.plan.recomputed, true), machine.limit);
}

TEST(PlanTest, RefusesALimitBelowTheLeastPossible) {
  Machine machine;
  machine.limit = machine.peak(1, 4, true) - 1;
  EXPECT_THROW(choose_plan(32, 4, machine.limit, machine.runner()), UserError);
}

TEST(PlanTest, HandlesABatchOfOneAndOfTwo) {
  for (const std::int64_t batch : {1, 2}) {
    Machine machine;
    machine.limit = machine.peak(batch, 4, batch > 1) + 100;
    const PlanChoice choice = choose_plan(batch, 4, machine.limit, machine.runner());
    EXPECT_LE(choice.trial_peak_bytes, machine.limit);
  }
}

TEST(PlanTest, EveryRandomMachineGetsAPlanThatFits) {
  std::mt19937 random(5);
  for (int i = 0; i < 200; ++i) {
    Machine machine;
    const std::int64_t batch = 1 + static_cast<std::int64_t>(random() % 40);
    machine.segments = 1 + static_cast<std::int64_t>(random() % 14);
    machine.activations = 1 + static_cast<std::int64_t>(random() % 1000);
    machine.overhead = static_cast<double>(random() % 100) / 10.0;
    const std::int64_t least = machine.peak(1, machine.segments, batch > 1);
    const std::int64_t most = std::max(machine.peak(batch, 0, false), least);
    machine.limit =
        least + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most - least + 1));
    SCOPED_TRACE(testing::Message() << "machine " << i);
    const PlanChoice choice = choose_plan(batch, machine.segments, machine.limit, machine.runner());
    EXPECT_LE(machine.peak(choice.plan.largest(batch), choice.plan.recomputed,
                           choice.plan.micro_batches > 1),
              machine.limit);
    EXPECT_LE(machine.runs, 40);
  }
}

}  // namespace
}  // namespace gradus::train
