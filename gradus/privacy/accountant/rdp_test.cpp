#include <gradus/privacy/accountant/rdp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/history.h>

namespace gradus::privacy {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

RdpEpsilon epsilon_at(double sigma, double q, std::int64_t steps, double delta,
                      FractionalMoment fractional = FractionalMoment::kExact) {
  const History history({{.noise_multiplier = sigma, .sample_rate = q, .steps = steps}});
  const std::vector<double>& orders = default_rdp_orders();
  return rdp_epsilon(orders, history_rdp(history, orders, fractional), delta);
}

// The integral of p^alpha q^(1 - alpha) for the mixture p, by Simpson's rule in long double.
double brute_force_rdp(double rate, double sigma, double alpha) {
  using Real = long double;
  const Real low = -14.0L * sigma, high = alpha + 14.0L * sigma;
  const int pieces = 20'000;
  const Real step = (high - low) / pieces;
  Real sum = 0.0L;
  for (int i = 0; i <= pieces; ++i) {
    const Real x = low + step * i;
    const Real ratio = 1.0L - rate + rate * std::exp((2.0L * x - 1.0L) / (2.0L * sigma * sigma));
    const Real value = std::exp(-x * x / (2.0L * sigma * sigma)) *
                       (std::pow(ratio, Real(alpha)) - alpha * (ratio - 1.0L) - 1.0L);
    sum += value * (i == 0 || i == pieces ? 1.0L : (i % 2 == 1 ? 4.0L : 2.0L));
  }
  const Real excess = sum * step / 3.0L / (sigma * std::sqrt(2.0L * std::acos(-1.0L)));
  return static_cast<double>(std::log1p(excess) / (alpha - 1.0L));
}

// Mironov, Talwar and Zhang 2019, Section 3.3, with the signs of the binomials.
double series_rdp(double q, double sigma, double alpha) {
  const double split = sigma * sigma * std::log(1.0 / q - 1.0) + 0.5;
  double sum = 0.0, binomial = 1.0;
  for (int k = 0; k < 3000; ++k) {
    const double j = alpha - k;
    const auto term = [&](double power, double other, double distance) {
      const double x = distance / (std::sqrt(2.0) * sigma);
      const double log_tail = x < 20.0 ? std::log(0.5 * std::erfc(x))
                                       : -x * x - std::log(2.0 * x * std::sqrt(std::acos(-1.0))) +
                                             std::log1p(-0.5 / (x * x));
      return std::exp(power * std::log(q) + other * std::log1p(-q) +
                      power * (power - 1.0) / (2.0 * sigma * sigma) + log_tail);
    };
    sum += binomial * (term(k, j, k - split) + term(j, k, split - j));
    binomial *= j / (k + 1.0);
  }
  return std::log(sum) / (alpha - 1.0);
}

TEST(RdpTest, GivesTheValuesOfOpacusAndTensorFlowPrivacy) {
  EXPECT_NEAR(epsilon_at(1.5, 0.04, 2250, 1e-5).epsilon, 7.32911117143, 1e-10);
  const RdpEpsilon epochs = epsilon_at(1.3, 150.0 / 60000.0, 6000, 1e-5);
  EXPECT_NEAR(epochs.epsilon, 0.7242234026, 5e-11);
  EXPECT_EQ(epochs.order, 19.0);
  const RdpEpsilon small = epsilon_at(1.0, 1e-3, 30000, 1e-7);
  EXPECT_NEAR(small.epsilon, 1.4154988495, 5e-11);
  EXPECT_EQ(small.order, 13.0);
  EXPECT_NEAR(epsilon_at(4.530877117, 1.0, 1, 1e-6).epsilon, 1.0, 1e-6);
}

TEST(RdpTest, GivesTheValuesOfDpAccountingWithItsSeriesAndNoMoreWithTheIntegral) {
  const std::vector<double> orders = {1.5, 2.5, 5.0, 50.0, 100.0};
  const std::vector<double> printed = {6.70579741e-4, 1.08548710e-3, 2.18075656e-3, 2.38460375e-2,
                                       167.416308};
  const History history({{.noise_multiplier = 2.5, .sample_rate = 0.01, .steps = 50}});
  const auto series = history_rdp(history, orders, FractionalMoment::kAbsoluteSeries);
  const auto exact = history_rdp(history, orders);
  for (std::size_t i = 0; i < orders.size(); ++i) {
    EXPECT_NEAR(series[i], printed[i], 5e-9 * printed[i]) << orders[i];
    EXPECT_LE(exact[i], series[i]) << orders[i];
  }
  EXPECT_NEAR(exact[0], 6.5007e-4, 1e-8);  // what dp_accounting printed before
  EXPECT_NEAR(epsilon_at(0.7, 0.01, 120, 1e-5, FractionalMoment::kAbsoluteSeries).epsilon,
              3.2392676, 5e-8);
  EXPECT_LE(epsilon_at(0.7, 0.01, 120, 1e-5).epsilon, 3.2392676);
}

TEST(RdpTest, EqualsTheIntegralByBruteForce) {
  for (const double sigma : {0.6, 1.0, 2.5})
    for (const double q : {1e-3, 0.04, 0.7})
      for (const double order : {1.1, 1.5, 2.0, 3.7, 10.9}) {
        const double expected = brute_force_rdp(q, sigma, order);
        EXPECT_NEAR(sampled_gaussian_rdp(q, sigma, order), expected, 1e-9 * expected)
            << q << " " << sigma << " " << order;
      }
}

TEST(RdpTest, EqualsThePapersSeries) {
  for (const double sigma : {0.8, 1.5, 4.0})
    for (const double order : {1.3, 2.6, 5.5, 8.9}) {
      const double expected = series_rdp(0.02, sigma, order);
      EXPECT_NEAR(sampled_gaussian_rdp(0.02, sigma, order), expected, 1e-12 + 1e-9 * expected)
          << sigma << " " << order;
    }
}

TEST(RdpTest, KeepsAllDigitsAtTinySampleRates) {
  // Of leading order: alpha q^2 (exp(1 / sigma^2) - 1) / 2.
  for (const double order : {1.5, 2.0, 7.3, 12.0}) {
    const double expected = 0.5 * order * 1e-18 * std::expm1(1.0);
    EXPECT_NEAR(sampled_gaussian_rdp(1e-9, 1.0, order), expected, 1e-6 * expected) << order;
  }
}

TEST(RdpTest, GrowsWithTheOrderAndTheSampleRateAndFallsWithNoise) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  const std::vector<double>& orders = default_rdp_orders();
  for (int i = 0; i < 200; ++i) {
    const double sigma = 0.02 * std::pow(500.0, uniform(random));
    const double q = std::pow(10.0, -6.0 * uniform(random));
    SCOPED_TRACE(::testing::Message() << "sigma " << sigma << " q " << q);
    double previous = 0.0;
    for (const double order : orders) {
      if (order > 64.0) break;
      const double value = sampled_gaussian_rdp(q, sigma, order);
      ASSERT_GE(value, previous * (1.0 - 1e-9)) << order;
      previous = value;
    }
    const double order = orders[static_cast<std::size_t>(uniform(random) * 150.0)];
    const double value = sampled_gaussian_rdp(q, sigma, order);
    EXPECT_LE(sampled_gaussian_rdp(0.9 * q, sigma, order), value) << order;
    EXPECT_LE(sampled_gaussian_rdp(q, 1.05 * sigma, order), value * (1.0 + 1e-12)) << order;
  }
}

TEST(RdpTest, IsFiniteAndOrderedAtExtremes) {
  EXPECT_EQ(sampled_gaussian_rdp(0.0, 1.0, 2.0), 0.0);
  EXPECT_EQ(sampled_gaussian_rdp(0.5, 0.0, 2.0), kInfinity);
  EXPECT_EQ(sampled_gaussian_rdp(1.0, 2.0, 3.0), 3.0 / 8.0);
  for (const double sigma : {1e-160, 1e-5, 0.03, 1.0, 1e5, 1e160})
    for (const double q : {1e-300, 1e-9, 0.5, 0.999999})
      for (const double order : {1.0001, 1.5, 2.0, 63.0, 1024.0, 1024.5, 1e7}) {
        const double value = sampled_gaussian_rdp(q, sigma, order);
        EXPECT_FALSE(std::isnan(value)) << q << " " << sigma << " " << order;
        EXPECT_GE(value, 0.0) << q << " " << sigma << " " << order;
      }
}

TEST(RdpTest, EpsilonIsZeroWhereTheDivergenceIsSmallAndNeverNegative) {
  EXPECT_EQ(epsilon_at(20.0, 0.01, 10, 0.01).epsilon, 0.0);
  EXPECT_EQ(epsilon_at(1.0, 0.01, 0, 1e-5).epsilon, 0.0);
  EXPECT_EQ(epsilon_at(1e5, 1e-6, 1, 0.999).epsilon, 0.0);
}

TEST(RdpTest, DeltaIsTheInverseOfEpsilon) {
  const std::vector<double>& orders = default_rdp_orders();
  const History history({{.noise_multiplier = 1.1, .sample_rate = 0.02, .steps = 500}});
  const auto rdp = history_rdp(history, orders);
  for (const double delta : {1e-100, 1e-12, 1e-5, 1e-2}) {
    const double epsilon = rdp_epsilon(orders, rdp, delta).epsilon;
    EXPECT_NEAR(rdp_log_delta(orders, rdp, epsilon), std::log(delta),
                1e-9 * std::abs(std::log(delta)));
  }
  EXPECT_LE(rdp_log_delta(orders, rdp, 0.0), 0.0);
  EXPECT_EQ(rdp_log_delta(orders, rdp, kInfinity), -kInfinity);
}

TEST(RdpTest, RefusesValuesOutsideTheirRanges) {
  EXPECT_THROW(sampled_gaussian_rdp(1.5, 1.0, 2.0), UserError);
  EXPECT_THROW(sampled_gaussian_rdp(0.5, -1.0, 2.0), UserError);
  EXPECT_THROW(sampled_gaussian_rdp(0.5, 1.0, 1.0), UserError);
  EXPECT_THROW(rdp_epsilon({}, {}, 0.1), UserError);
  EXPECT_THROW(rdp_epsilon({2.0}, {1.0, 2.0}, 0.1), UserError);
  EXPECT_THROW(rdp_epsilon({2.0}, {1.0}, 0.0), UserError);
  EXPECT_THROW(rdp_epsilon({2.0}, {1.0}, 1.0), UserError);
  EXPECT_THROW(rdp_epsilon({2.0}, {-1.0}, 0.1), UserError);
  EXPECT_THROW(rdp_log_delta({2.0}, {1.0}, -0.1), UserError);
}

}  // namespace
}  // namespace gradus::privacy
