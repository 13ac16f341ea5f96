#include <gradus/metrics/accuracy.h>

#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <gradus/base/error.h>

namespace gradus::metrics {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(AccuracyTest, CountsOverBatchesOfDifferentSizes) {
  Accuracy accuracy;
  accuracy.add(torch::tensor({{0.1, 0.9}, {0.8, 0.2}, {0.3, 0.7}}), torch::tensor({1, 1, 1}));
  accuracy.add(torch::tensor({{5.0F, 1.0F}}), torch::tensor({0}));
  EXPECT_EQ(accuracy.correct(), 3);
  EXPECT_EQ(accuracy.examples(), 4);
  EXPECT_EQ(accuracy.value(), 0.75);
}

TEST(AccuracyTest, TakesARowWithNanForWrong) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Accuracy accuracy;
  accuracy.add(torch::tensor({{nan, 0.0}, {nan, nan}}), torch::tensor({0, 0}));
  EXPECT_EQ(accuracy.value(), 0.0);
}

TEST(AccuracyTest, RefusesOtherShapesAndDtypes) {
  Accuracy accuracy;
  EXPECT_THAT(([&] { accuracy.value(); }), ThrowsMessage<UserError>(HasSubstr("got none")));
  EXPECT_THAT(([&] { accuracy.add(torch::zeros({3}), torch::zeros({3}, torch::kLong)); }),
              ThrowsMessage<UserError>(HasSubstr("got [3]")));
  EXPECT_THAT(([&] { accuracy.add(torch::zeros({3, 2}), torch::zeros({2}, torch::kLong)); }),
              ThrowsMessage<UserError>(HasSubstr("int64 and [3]")));
  EXPECT_THAT(([&] { accuracy.add(torch::zeros({3, 2}), torch::zeros({3})); }),
              ThrowsMessage<UserError>(HasSubstr("of float")));
  EXPECT_EQ(accuracy.examples(), 0);
}

}  // namespace
}  // namespace gradus::metrics
