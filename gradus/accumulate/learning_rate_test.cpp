#include <gradus/accumulate/learning_rate.h>

#include <cmath>
#include <functional>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>

namespace gradus::accumulate {
namespace {

using testing::HasSubstr;

std::string refused(const RateOptions& options) {
  try {
    scale_learning_rate(options);
  } catch (const UserError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(LearningRateTest, LinearRuleIsGoyalsWithItsWarmUp) {
  // Their case: 0.1 for 256 images, 8192 images a step, ImageNet's 1,281,167 images.
  const auto scaled = scale_learning_rate({.rate = 0.1,
                                           .base_batch = 256,
                                           .effective_batch = 8192,
                                           .rule = RateRule::linear,
                                           .epoch_examples = 1281167});
  EXPECT_DOUBLE_EQ(scaled.rate, 3.2);
  EXPECT_DOUBLE_EQ(scaled.factor, 32.0);
  EXPECT_EQ(scaled.warmup_steps, 782);
  EXPECT_EQ(scaled.explanation,
            "learning rate 0.1 -> 3.2: x 32, linear in the effective batch (256 -> 8192 examples); "
            "warm up from 0.1 over 782 steps (five epochs)");
}

TEST(LearningRateTest, SquareRootRuleKeepsTheVariance) {
  const auto scaled = scale_learning_rate(
      {.rate = 0.001, .base_batch = 32, .effective_batch = 128, .rule = RateRule::square_root});
  EXPECT_DOUBLE_EQ(scaled.rate, 0.002);
  EXPECT_THAT(scaled.explanation,
              HasSubstr("x 2, the square root of the effective batch's growth (32 -> 128"));
  EXPECT_THAT(scaled.explanation, HasSubstr("over the first five epochs"));
  EXPECT_EQ(scaled.warmup_steps, 0);
}

TEST(LearningRateTest, NoneKeepsTheRateAndSaysSo) {
  const auto scaled = scale_learning_rate(
      {.rate = 0.1, .base_batch = 32, .effective_batch = 128, .rule = RateRule::none});
  EXPECT_EQ(scaled.rate, 0.1);
  EXPECT_EQ(scaled.factor, 1.0);
  EXPECT_EQ(scaled.explanation,
            "learning rate 0.1 kept: no scaling with the effective batch (32 -> 128 examples)");
}

TEST(LearningRateTest, SmallerBatchNeedsNoWarmUpAndAHugeOneIsWarnedOf) {
  const auto smaller = scale_learning_rate(
      {.rate = 0.1, .base_batch = 256, .effective_batch = 64, .epoch_examples = 1000});
  EXPECT_DOUBLE_EQ(smaller.rate, 0.025);
  EXPECT_EQ(smaller.warmup_steps, 0);
  EXPECT_THAT(smaller.explanation, testing::Not(HasSubstr("warm up")));
  const auto huge = scale_learning_rate({.rate = 0.1, .base_batch = 256, .effective_batch = 16384});
  EXPECT_THAT(huge.explanation, HasSubstr("known to fail somewhere beyond 8192"));
}

TEST(LearningRateTest, NumbersOutOfRangeAreRefusedByName) {
  for (const double rate : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(refused({.rate = rate, .base_batch = 1, .effective_batch = 1}),
                HasSubstr("rate must be finite and > 0; got "));
  }
  EXPECT_THAT(refused({.rate = 1.0, .base_batch = 0, .effective_batch = 1}),
              HasSubstr("base_batch must be >= 1; got 0"));
  EXPECT_THAT(refused({.rate = 1.0, .base_batch = 1, .effective_batch = 0}),
              HasSubstr("effective_batch must be >= 1; got 0"));
  EXPECT_THAT(refused({.rate = 1.0, .base_batch = 1, .effective_batch = 1, .epoch_examples = -1}),
              HasSubstr("epoch_examples must be >= 0; got -1"));
}

}  // namespace
}  // namespace gradus::accumulate
