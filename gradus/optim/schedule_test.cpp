#include <gradus/optim/schedule.h>

#include <cmath>

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

}  // namespace
}  // namespace gradus::optim
