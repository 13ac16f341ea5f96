#include <gradus/optim/schedule.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include <gradus/base/error.h>

namespace gradus::optim {
namespace {

TEST(ScheduleTest, ConstantIsConstant) {
  const auto schedule = constant_schedule(0.25);
  EXPECT_EQ(schedule(0), 0.25);
  EXPECT_EQ(schedule(1000000), 0.25);
}

TEST(ScheduleTest, WarmsUpLinearlyThenFallsAlongHalfACosineToTheFloor) {
  const auto schedule = warmup_cosine_schedule(
      {.peak_lr = 1.0, .warmup_steps = 4, .total_steps = 12, .min_ratio = 0.2});
  EXPECT_DOUBLE_EQ(schedule(0), 0.2);
  EXPECT_DOUBLE_EQ(schedule(3), 0.8);
  EXPECT_DOUBLE_EQ(schedule(4), 1.0);
  EXPECT_DOUBLE_EQ(schedule(6),
                   0.2 + 0.8 * 0.5 * (1.0 + std::sqrt(0.5)));  // a quarter of the way: cos(pi / 4)
  EXPECT_DOUBLE_EQ(schedule(8), 0.6);
  EXPECT_DOUBLE_EQ(schedule(12), 0.2);
  EXPECT_DOUBLE_EQ(schedule(1000), 0.2);
  for (int step = 4; step < 12; ++step) EXPECT_GT(schedule(step), schedule(step + 1));
}

TEST(ScheduleTest, WithoutWarmupStartsAtThePeak) {
  const auto schedule = warmup_cosine_schedule(
      {.peak_lr = 3.0, .warmup_steps = 0, .total_steps = 2, .min_ratio = 0.0});
  EXPECT_DOUBLE_EQ(schedule(0), 3.0);
  EXPECT_DOUBLE_EQ(schedule(1), 1.5);
  EXPECT_DOUBLE_EQ(schedule(2), 0.0);
}

TEST(ScheduleTest, OptionsOutOfRangeAreRefused) {
  EXPECT_THROW(constant_schedule(-1.0), UserError);
  EXPECT_THROW(constant_schedule(std::nan("")), UserError);
  EXPECT_THROW(warmup_cosine_schedule({.peak_lr = INFINITY}), UserError);
  EXPECT_THROW(warmup_cosine_schedule({.total_steps = 0}), UserError);
  EXPECT_THROW(warmup_cosine_schedule({.warmup_steps = 5, .total_steps = 5}), UserError);
  EXPECT_THROW(warmup_cosine_schedule({.warmup_steps = -1, .total_steps = 5}), UserError);
  EXPECT_THROW(warmup_cosine_schedule({.total_steps = 5, .min_ratio = 1.5}), UserError);
  EXPECT_THROW(constant_schedule(1.0)(-1), UserError);
}

TEST(ScheduleTest, WarmUpLeadsIntoAnySchedule) {
  const auto schedule =
      with_warmup(4, linear_schedule({.lr = 1.0, .start_factor = 0.5, .total_steps = 2}));
  EXPECT_DOUBLE_EQ(schedule(0), 0.1);
  EXPECT_DOUBLE_EQ(schedule(3), 0.4);
  EXPECT_DOUBLE_EQ(schedule(4), 0.5);
  EXPECT_DOUBLE_EQ(schedule(5), 0.25);
  EXPECT_DOUBLE_EQ(schedule(6), 0.0);
  EXPECT_DOUBLE_EQ(with_warmup(0, constant_schedule(2.0))(0), 2.0);
  // The same curve as the schedule that has a warm-up of its own.
  const auto own = warmup_cosine_schedule(
      {.peak_lr = 3.0, .warmup_steps = 5, .total_steps = 25, .min_ratio = 0.1});
  const auto composed =
      with_warmup(5, cosine_schedule({.peak_lr = 3.0, .total_steps = 20, .min_lr = 0.3}));
  for (int step = 0; step < 30; ++step) EXPECT_NEAR(own(step), composed(step), 1e-14);
}

TEST(ScheduleTest, SchedulesFollowOneAnotherEachFromItsOwnStart) {
  const auto schedule = sequential_schedule(
      {constant_schedule(1.0), exponential_schedule(4.0, 0.5), constant_schedule(9.0)}, {2, 4});
  const std::vector<double> expected{1.0, 1.0, 4.0, 2.0, 9.0, 9.0};
  for (std::size_t step = 0; step < expected.size(); ++step) {
    EXPECT_DOUBLE_EQ(schedule(static_cast<std::int64_t>(step)), expected[step]);
  }
}

TEST(ScheduleTest, InverseSquareRootIsVaswanisFormula) {
  const double d_model = 512;
  const double warmup = 4000;
  const auto schedule = inverse_square_root_schedule(
      {.peak_lr = 1.0 / std::sqrt(d_model * warmup), .warmup_steps = 4000});
  for (const std::int64_t step : {0, 1, 100, 3998, 3999, 4000, 100000}) {
    const double t = static_cast<double>(step) + 1;
    EXPECT_NEAR(schedule(step),
                std::pow(d_model, -0.5) * std::min(std::pow(t, -0.5), t * std::pow(warmup, -1.5)),
                1e-16);
  }
}

TEST(ScheduleTest, StepsMultiplyAtTheirMilestones) {
  const auto steps = step_schedule(1.0, 3, 0.5);
  EXPECT_DOUBLE_EQ(steps(2), 1.0);
  EXPECT_DOUBLE_EQ(steps(3), 0.5);
  EXPECT_DOUBLE_EQ(steps(8), 0.25);
  const auto milestones = multistep_schedule(1.0, {2, 5, 5}, 0.5);
  EXPECT_DOUBLE_EQ(milestones(1), 1.0);
  EXPECT_DOUBLE_EQ(milestones(2), 0.5);
  EXPECT_DOUBLE_EQ(milestones(5), 0.125);
  EXPECT_DOUBLE_EQ(multistep_schedule(1.0, {})(100), 1.0);
}

TEST(ScheduleTest, OneCycleRisesToItsPeakAndFallsFarBelowItsStart) {
  for (const bool cosine : {true, false}) {
    for (const bool three_phase : {true, false}) {
      const auto schedule = one_cycle_schedule(
          {.max_lr = 1.0, .total_steps = 100, .cosine = cosine, .three_phase = three_phase});
      EXPECT_NEAR(schedule(0), 1.0 / 25.0, 1e-15);
      EXPECT_DOUBLE_EQ(schedule(29), 1.0);
      if (three_phase) EXPECT_NEAR(schedule(58), 1.0 / 25.0, 1e-15);
      EXPECT_NEAR(schedule(99), 1.0 / 25e4, 1e-15);
      EXPECT_NEAR(schedule(1000), 1.0 / 25e4, 1e-15);
    }
  }
  // Cycles too short for their phases end at the peak and at the floor, not at NaN.
  EXPECT_TRUE(std::isfinite(one_cycle_schedule({.total_steps = 1})(0)));
  EXPECT_DOUBLE_EQ(one_cycle_schedule({.max_lr = 1.0, .total_steps = 2, .warmup_share = 0.5})(0),
                   1.0);
}

TEST(ScheduleTest, NewSchedulesRefuseOptionsOutOfRangeAndNegativeSteps) {
  EXPECT_THROW(with_warmup(-1, constant_schedule(1.0)), UserError);
  EXPECT_THROW(with_warmup(1, nullptr), UserError);
  EXPECT_THROW(sequential_schedule({constant_schedule(1.0)}, {1}), UserError);
  EXPECT_THROW(sequential_schedule({constant_schedule(1.0), nullptr}, {1}), UserError);
  EXPECT_THROW(cosine_schedule({.min_lr = -1.0}), UserError);
  EXPECT_THROW(cosine_schedule({.total_steps = 0}), UserError);
  EXPECT_THROW(linear_schedule({.start_factor = -1.0}), UserError);
  EXPECT_THROW(inverse_square_root_schedule({.warmup_steps = 0}), UserError);
  EXPECT_THROW(step_schedule(1.0, 0), UserError);
  EXPECT_THROW(step_schedule(1.0, 1, -0.5), UserError);
  EXPECT_THROW(multistep_schedule(1.0, {3, 2}), UserError);
  EXPECT_THROW(multistep_schedule(1.0, {-1}), UserError);
  EXPECT_THROW(polynomial_schedule(1.0, 0), UserError);
  EXPECT_THROW(one_cycle_schedule({.warmup_share = 1.5}), UserError);
  EXPECT_THROW(one_cycle_schedule({.warmup_share = 0.6, .three_phase = true}), UserError);
  EXPECT_THROW(one_cycle_schedule({.div_factor = 0.0}), UserError);
  for (const auto& schedule :
       {with_warmup(1, constant_schedule(1.0)), cosine_schedule({}), linear_schedule({}),
        inverse_square_root_schedule({}), step_schedule(1.0, 1), multistep_schedule(1.0, {1}),
        polynomial_schedule(1.0, 1), one_cycle_schedule({}),
        sequential_schedule({constant_schedule(1.0)}, {})}) {
    EXPECT_THROW(schedule(-1), UserError);
  }
}

}  // namespace
}  // namespace gradus::optim
