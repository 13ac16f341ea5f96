#include <gradus/privacy/accountant/gaussian.h>

#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/history.h>

namespace gradus::privacy {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// E of (1 - e^(epsilon - loss))+ for losses N(mu^2 / 2, mu^2), by Simpson's rule.
double brute_force_delta(double epsilon, double mu) {
  const long double low = (epsilon - 0.5L * mu * mu) / mu, high = std::max(low, 0.0L) + 14.0L;
  const int pieces = 60'000;
  long double sum = 0.0L;
  for (int i = 0; i <= pieces; ++i) {
    const long double z = low + (high - low) / pieces * i;
    const long double loss = 0.5L * mu * mu + mu * z;
    const long double value = -std::expm1(epsilon - loss) * std::exp(-0.5L * z * z);
    sum += value * (i == 0 || i == pieces ? 1.0L : (i % 2 == 1 ? 4.0L : 2.0L));
  }
  return static_cast<double>(sum * (high - low) / pieces / 3.0L /
                             std::sqrt(2.0L * std::acos(-1.0L)));
}

TEST(GaussianTest, GivesThePublishedEpsilons) {
  EXPECT_NEAR(gaussian_epsilon(1e-6, 1.0 / 4.530877117), 0.9273923, 5e-8);
  const History history({{.noise_multiplier = 10.0, .sample_rate = 1.0, .steps = 100}});
  EXPECT_NEAR(gaussian_epsilon(1e-5, exact_mu(history)), 4.3771781, 5e-8);
}

TEST(GaussianTest, DeltaEqualsTheIntegralByBruteForce) {
  for (const double mu : {1e-4, 0.03, 0.4, 0.6, 1.0, 3.0, 12.0})
    for (const double epsilon : {0.0, 1e-4, 0.01, 0.5, 2.0, 10.0}) {
      const double expected = brute_force_delta(epsilon, mu);
      if (expected < 1e-250) continue;
      EXPECT_NEAR(std::exp(gaussian_log_delta(epsilon, mu)), expected, 1e-9 * expected)
          << mu << " " << epsilon;
    }
}

TEST(GaussianTest, EpsilonIsTheInverseOfDelta) {
  for (const double mu : {1e-6, 0.01, 0.3, 1.0, 7.0, 300.0})
    for (const double delta : {1e-300, 1e-20, 1e-5, 0.1, 0.9}) {
      const double epsilon = gaussian_epsilon(delta, mu);
      EXPECT_LE(gaussian_log_delta(epsilon, mu), std::log(delta)) << mu << " " << delta;
      if (epsilon == 0.0) continue;
      EXPECT_GE(gaussian_log_delta(epsilon * (1.0 - 1e-8), mu), std::log(delta) * (1.0 + 1e-9))
          << mu << " " << delta;
    }
}

TEST(GaussianTest, DeltaFallsWithEpsilonAndGrowsWithMuAtAllScales) {
  for (double mu = 1e-9; mu < 1e9; mu *= 7.0) {
    double previous = 0.0;
    for (double epsilon = 0.0; epsilon < 1e6; epsilon = epsilon * 1.7 + 1e-6) {
      const double log_delta = gaussian_log_delta(epsilon, mu);
      ASSERT_FALSE(std::isnan(log_delta)) << mu << " " << epsilon;
      ASSERT_LE(log_delta, previous + 1e-9 * std::abs(previous)) << mu << " " << epsilon;
      ASSERT_LE(log_delta, gaussian_log_delta(epsilon, 1.5 * mu) * (1.0 - 1e-9) + 1e-9)
          << mu << " " << epsilon;
      previous = log_delta;
    }
  }
}

TEST(GaussianTest, HasLimits) {
  EXPECT_EQ(gaussian_epsilon(1e-5, 0.0), 0.0);
  EXPECT_EQ(gaussian_epsilon(1e-5, kInfinity), kInfinity);
  EXPECT_EQ(gaussian_log_delta(1.0, 0.0), -kInfinity);
  EXPECT_EQ(gaussian_log_delta(1.0, kInfinity), 0.0);
  EXPECT_EQ(exact_mu(History()), 0.0);
  EXPECT_EQ(exact_mu(History({{.noise_multiplier = 0.0, .sample_rate = 1.0}})), kInfinity);
  EXPECT_EQ(exact_mu(History({{.noise_multiplier = 0.0, .sample_rate = 0.0}})), 0.0);
}

TEST(GaussianTest, ApproximationGivesOpacussValueAndIsExactForFullBatches) {
  const History history({{.noise_multiplier = 1.5, .sample_rate = 0.04, .steps = 2249}});
  const double epsilon = gaussian_epsilon(1e-5, approximate_mu(history));
  EXPECT_GE(epsilon, 6.59);
  EXPECT_LE(epsilon, 6.60);
  const History full({{.noise_multiplier = 3.0, .sample_rate = 1.0, .steps = 5},
                      {.noise_multiplier = 2.0, .sample_rate = 1.0}});
  EXPECT_DOUBLE_EQ(approximate_mu(full), std::sqrt(5.0 / 9.0 + 1.0 / 4.0));
  EXPECT_DOUBLE_EQ(approximate_mu(full), exact_mu(full));
}

TEST(GaussianTest, RefusesSubsamplingWhereItIsExactAndValuesOutsideTheirRanges) {
  EXPECT_THROW(exact_mu(History({{.sample_rate = 0.5}})), UserError);
  EXPECT_THROW(gaussian_epsilon(0.0, 1.0), UserError);
  EXPECT_THROW(gaussian_epsilon(1.0, 1.0), UserError);
  EXPECT_THROW(gaussian_epsilon(0.5, -1.0), UserError);
  EXPECT_THROW(gaussian_log_delta(-1.0, 1.0), UserError);
  EXPECT_THROW(gaussian_log_delta(1.0, std::nan("")), UserError);
}

}  // namespace
}  // namespace gradus::privacy
