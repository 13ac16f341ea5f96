#include <gradus/privacy/accountant/truncated_sampling.h>

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/history.h>

namespace gradus::privacy {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double binomial_tail_above(int n, double q, int limit) {
  long double sum = 0.0L, term = std::pow(1.0L - q, n);
  for (int k = 0; k <= n; ++k) {
    if (k > limit) sum += term;
    term *= static_cast<long double>(n - k) / (k + 1) * q / (1.0L - q);
  }
  return static_cast<double>(sum);
}

TEST(TruncatedSamplingTest, BoundsTheBinomialTailFromAboveAndClosely) {
  for (const int n : {1, 2, 10, 100, 1000})
    for (const double q : {0.003, 0.05, 0.3, 0.9})
      for (int limit = 0; limit < n; limit += 1 + n / 37) {
        const double exact = binomial_tail_above(n, q, limit);
        const double bound = std::exp(log_overflow_probability(n, q, limit));
        EXPECT_GE(bound, exact * (1.0 - 1e-9)) << n << " " << q << " " << limit;
        if (exact < 1e-3 && exact > 1e-300)
          EXPECT_LE(bound, exact * 1.25) << n << " " << q << " " << limit;
      }
}

TEST(TruncatedSamplingTest, HasLimits) {
  EXPECT_EQ(log_overflow_probability(100, 0.5, 100), -kInfinity);
  EXPECT_EQ(log_overflow_probability(100, 0.0, 0), -kInfinity);
  EXPECT_EQ(log_overflow_probability(100, 1.0, 99), 0.0);
  EXPECT_EQ(log_overflow_probability(100, 0.5, 20), 0.0);
  EXPECT_EQ(log_truncation_probability(History({{.sample_rate = 0.5, .steps = 9}})), -kInfinity);
  const double large = log_overflow_probability(1'000'000'000'000, 1e-6, 1'010'000);
  EXPECT_NEAR(large, -53.9, 1.0);  // ten standard deviations
}

TEST(TruncatedSamplingTest, AddsUpOverStepsForTheLargerDataSet) {
  const History history(
      {{.sample_rate = 0.1, .steps = 30, .dataset_size = 100, .max_batch_size = 40},
       {.sample_rate = 0.2, .steps = 5, .dataset_size = 100, .max_batch_size = 50},
       {.sample_rate = 0.2, .steps = 5}});
  const double expected = 30.0 * std::exp(log_overflow_probability(101, 0.1, 40)) +
                          5.0 * std::exp(log_overflow_probability(101, 0.2, 50));
  EXPECT_NEAR(std::exp(log_truncation_probability(history)), expected, 1e-12 * expected);
}

TEST(TruncatedSamplingTest, RefusesValuesOutsideTheirRanges) {
  EXPECT_THROW(log_overflow_probability(0, 0.5, 1), UserError);
  EXPECT_THROW(log_overflow_probability(10, 1.5, 1), UserError);
  EXPECT_THROW(log_overflow_probability(10, 0.5, -1), UserError);
}

}  // namespace
}  // namespace gradus::privacy
