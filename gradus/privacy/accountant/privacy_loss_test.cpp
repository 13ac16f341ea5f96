#include <gradus/privacy/accountant/privacy_loss.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/gaussian.h>
#include <gradus/privacy/accountant/history.h>
#include <gradus/privacy/accountant/rdp.h>

namespace gradus::privacy {
namespace {

History history_of(double sigma, double q, std::int64_t steps) {
  return History({{.noise_multiplier = sigma, .sample_rate = q, .steps = steps}});
}

double rdp_of(const History& history, double delta) {
  const std::vector<double>& orders = default_rdp_orders();
  return rdp_epsilon(orders, history_rdp(history, orders), delta).epsilon;
}

struct Step {
  double sigma = 1.0;
  double q = 0.5;
};

// The mixture against the plain normal, or the reverse: density of the first, and the loss.
double ratio_at(const Step& step, double x) {
  return 1.0 - step.q + step.q * std::exp((2.0 * x - 1.0) / (2.0 * step.sigma * step.sigma));
}
double normal_at(const Step& step, double x) {
  return std::exp(-0.5 * x * x / (step.sigma * step.sigma)) /
         (step.sigma * std::sqrt(2.0 * std::acos(-1.0)));
}

// delta(epsilon), epsilon of either sign, of steps[from...] by closed form for the last one and
// Simpson's rule over the outcomes of those before: nothing is shared with the library.
double exact_delta(const std::vector<Step>& steps, bool remove, double epsilon,
                   std::size_t from = 0, int pieces = 1000) {
  const Step& step = steps[from];
  if (from + 1 == steps.size()) {
    // The set where the loss exceeds epsilon is a half line.
    const auto above = [&](double mean, double x) {
      return 0.5 * std::erfc((x - mean) / (step.sigma * std::sqrt(2.0)));
    };
    const double level = std::exp(remove ? epsilon : -epsilon);
    const double odds = (level - 1.0 + step.q) / step.q;
    const double x = odds > 0.0 ? step.sigma * step.sigma * std::log(odds) + 0.5
                                : -std::numeric_limits<double>::infinity();
    const double plain = above(0.0, x), mixed = (1.0 - step.q) * plain + step.q * above(1.0, x);
    return remove ? mixed - std::exp(epsilon) * plain
                  : (1.0 - plain) - std::exp(epsilon) * (1.0 - mixed);
  }
  const double low = -11.0 * step.sigma, high = 1.0 + 11.0 * step.sigma;
  double sum = 0.0;
  for (int i = 0; i <= pieces; ++i) {
    const double x = low + (high - low) / pieces * i;
    const double ratio = ratio_at(step, x), plain = normal_at(step, x);
    const double loss = remove ? std::log(ratio) : -std::log(ratio);
    const double value = (remove ? ratio * plain : plain) *
                         exact_delta(steps, remove, epsilon - loss, from + 1, pieces);
    sum += value * (i == 0 || i == pieces ? 1.0 : (i % 2 == 1 ? 4.0 : 2.0));
  }
  return sum * (high - low) / pieces / 3.0;
}

double exact_epsilon(const std::vector<Step>& steps, double delta, int pieces = 1000) {
  double low = 0.0, high = 100.0;
  const auto at = [&](double epsilon) {
    return std::max(exact_delta(steps, true, epsilon, 0, pieces),
                    exact_delta(steps, false, epsilon, 0, pieces));
  };
  if (at(0.0) <= delta) return 0.0;
  while (high - low > 1e-9) {
    const double middle = 0.5 * (low + high);
    (at(middle) <= delta ? high : low) = middle;
  }
  return high;
}

TEST(PrivacyLossTest, PrvGivesOpacussUpperBounds) {
  struct Row {
    double sigma = 0.0, q = 0.0;
    std::int64_t steps = 0;
    double delta = 0.0, epsilon = 0.0;
  };
  for (const Row& row :
       {Row{1.5, 0.04, 2249, 1e-5, 6.777395712}, Row{0.8, 0.001, 100, 1e-6, 0.270403364},
        Row{1.5, 0.05, 100, 1e-6, 1.953853136}, Row{2.0, 0.2, 100, 1e-6, 5.672055609},
        Row{1.5, 0.001, 1000, 1e-6, 0.099820660}, Row{0.8, 0.05, 1000, 1e-6, 19.52584281},
        Row{3.0, 0.001, 50000, 1e-6, 0.309694161}}) {
    SCOPED_TRACE(row.epsilon);
    const History history = history_of(row.sigma, row.q, row.steps);
    const EpsilonBounds bounds = prv_epsilon(history, row.delta);
    EXPECT_NEAR(bounds.upper, row.epsilon, 2e-5);
    EXPECT_NEAR(bounds.epsilon_error, 0.01, 1e-9);
    const double pld = pld_epsilon(history, row.delta);
    EXPECT_GE(pld, bounds.lower);
    EXPECT_NEAR(pld, bounds.estimate, 2e-4);
    EXPECT_NEAR(pld, row.epsilon, 0.0115);  // and what delta_error adds
  }
}

TEST(PrivacyLossTest, PldGivesTensorFlowPrivacysValue) {
  EXPECT_NEAR(pld_epsilon(history_of(0.7, 0.01, 120), 1e-5), 2.4612381, 1e-6);
}

TEST(PrivacyLossTest, HoldsAgainstClosedFormAndQuadratureForFewSteps) {
  const std::vector<std::vector<Step>> cases = {{{1.0, 0.3}},
                                                {{0.5, 0.01}},
                                                {{3.0, 0.9}},
                                                {{1.0, 1.0}},
                                                {{0.8, 0.2}, {0.8, 0.2}},
                                                {{2.0, 0.5}, {0.7, 0.05}},
                                                {{1.5, 0.1}, {1.0, 1.0}}};
  for (std::size_t i = 0; i < cases.size(); ++i)
    for (const double delta : {1e-7, 1e-3}) {
      SCOPED_TRACE(::testing::Message() << "case " << i << " delta " << delta);
      History history;
      for (const Step& step : cases[i])
        history.add({.noise_multiplier = step.sigma, .sample_rate = step.q});
      const double exact = exact_epsilon(cases[i], delta);
      const double pld = pld_epsilon(history, delta);
      EXPECT_GE(pld, exact - 2e-9);
      EXPECT_LE(pld, exact + 1e-5);
      const EpsilonBounds prv = prv_epsilon(history, delta);
      EXPECT_LE(prv.lower, exact + 2e-9);
      EXPECT_GE(prv.upper, exact - 2e-9);
      EXPECT_GE(rdp_of(history, delta), exact);
      const double log_delta = pld_log_delta(history, exact);
      EXPECT_GE(log_delta, std::log(delta) - 1e-6);
      EXPECT_LE(log_delta, std::log(delta) + 1e-3);
    }
}

TEST(PrivacyLossTest, HoldsAgainstQuadratureForThreeSteps) {
  const std::vector<Step> steps = {{0.9, 0.1}, {0.9, 0.1}, {1.4, 0.6}};
  History history;
  for (const Step& step : steps)
    history.add({.noise_multiplier = step.sigma, .sample_rate = step.q});
  const double exact = exact_epsilon(steps, 1e-4, 160);
  EXPECT_GE(pld_epsilon(history, 1e-4), exact - 1e-7);
  EXPECT_LE(pld_epsilon(history, 1e-4), exact + 1e-5);
  const EpsilonBounds prv = prv_epsilon(history, 1e-4);
  EXPECT_LE(prv.lower, exact);
  EXPECT_GE(prv.upper, exact);
}

TEST(PrivacyLossTest, BracketsTheExactEpsilonOfFullBatches) {
  for (const double sigma : {0.7, 40.0})
    for (const std::int64_t steps : {1, 10, 1000})
      for (const double delta : {1e-10, 0.05}) {
        SCOPED_TRACE(::testing::Message() << sigma << " " << steps << " " << delta);
        const History history = history_of(sigma, 1.0, steps);
        const double exact = gaussian_epsilon(delta, exact_mu(history));
        const double pld = pld_epsilon(history, delta);
        EXPECT_GE(pld, exact * (1.0 - 1e-12));
        EXPECT_LE(pld, exact * (1.0 + 1e-4) + 1e-5);
        const EpsilonBounds prv = prv_epsilon(history, delta);
        EXPECT_LE(prv.lower, exact);
        EXPECT_GE(prv.upper, exact);
        EXPECT_NEAR(prv.estimate, exact, prv.epsilon_error);
      }
}

TEST(PrivacyLossTest, KeepsItsDigitsAtTinyDeltas) {
  // Untilted, a transform knows nothing below 1e-16.
  const History full = history_of(2.0, 1.0, 50);
  for (const double delta : {1e-30, 1e-250}) {
    const double exact = gaussian_epsilon(delta, exact_mu(full));
    EXPECT_GE(pld_epsilon(full, delta), exact);
    EXPECT_LE(pld_epsilon(full, delta), exact * (1.0 + 1e-5));
    EXPECT_NEAR(pld_log_delta(full, exact), std::log(delta), 1e-2);
  }
  const History sampled = history_of(1.0, 0.01, 100);
  double previous = 0.0;
  for (const double delta : {1e-5, 1e-30, 1e-120}) {
    const double epsilon = pld_epsilon(sampled, delta);
    EXPECT_GT(epsilon, previous);
    EXPECT_LE(epsilon, rdp_of(sampled, delta));
    previous = epsilon;
  }
}

TEST(PrivacyLossTest, OrdersTheAccountantsOn200RandomConfigurations) {
  std::mt19937_64 random(11);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int i = 0; i < 200; ++i) {
    const double sigma = 0.7 * std::pow(9.0, uniform(random));
    const double q = std::pow(10.0, -4.0 * uniform(random));
    const auto steps = static_cast<std::int64_t>(std::pow(10.0, 3.0 * uniform(random)));
    const double delta = std::pow(10.0, -2.0 - 8.0 * uniform(random));
    SCOPED_TRACE(::testing::Message()
                 << "sigma " << sigma << " q " << q << " steps " << steps << " delta " << delta);
    const History history = history_of(sigma, q, steps);
    // Coarse grids: quick, and bounds all the same.
    const double pld = pld_epsilon(history, delta, {.max_interval = 1e-3});
    const EpsilonBounds prv =
        prv_epsilon(history, delta, {.epsilon_error = 0.3, .delta_error_ratio = 1e-2});
    EXPECT_GE(pld, 0.0);
    EXPECT_GE(rdp_of(history, delta), pld);
    EXPECT_GE(pld, prv.lower);
    EXPECT_LE(prv.lower, prv.estimate);
    EXPECT_LE(prv.estimate, prv.upper);
    EXPECT_LE(pld, prv.upper + 1e-3 * (1.0 + pld));
  }
}

TEST(PrivacyLossTest, GrowsWithStepsAndSampleRateAndFallsWithNoiseAndDelta) {
  std::mt19937_64 random(13);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int i = 0; i < 8; ++i) {
    const double sigma = 0.6 * std::pow(5.0, uniform(random));
    const double q = std::pow(10.0, -3.0 * uniform(random));
    const auto steps = static_cast<std::int64_t>(2.0 + std::pow(10.0, 3.0 * uniform(random)));
    SCOPED_TRACE(::testing::Message() << "sigma " << sigma << " q " << q << " steps " << steps);
    const auto epsilon = [&](double s, double rate, std::int64_t n, double delta) {
      return pld_epsilon(history_of(s, rate, n), delta, {.max_interval = 3e-4});
    };
    const double base = epsilon(sigma, q, steps, 1e-5);
    if (base < 0.01) continue;
    EXPECT_LT(base, epsilon(sigma, q, steps + 1 + steps / 4, 1e-5));
    EXPECT_LT(base, epsilon(sigma, std::min(1.0, 1.2 * q), steps, 1e-5) + (q == 1.0 ? 1.0 : 0.0));
    EXPECT_LT(base, epsilon(0.9 * sigma, q, steps, 1e-5));
    EXPECT_LT(base, epsilon(sigma, q, steps, 1e-6));
  }
}

TEST(PrivacyLossTest, DeltaOfItsEpsilonIsWithinDelta) {
  for (const History& history :
       {history_of(0.7, 0.01, 120), history_of(0.8, 0.001, 100), history_of(2.0, 0.2, 100)})
    for (const double delta : {1e-8, 1e-2}) {
      const double epsilon = pld_epsilon(history, delta);
      if (epsilon == 0.0) continue;
      EXPECT_NEAR(pld_log_delta(history, epsilon), std::log(delta), 1e-4) << delta;
    }
}

TEST(PrivacyLossTest, HeterogeneousStepsCostWhatTheirOrderlessUnionCosts) {
  const History a({{.noise_multiplier = 1.0, .sample_rate = 0.01, .steps = 100},
                   {.noise_multiplier = 1.5, .sample_rate = 0.02, .steps = 50}});
  const History b({{.noise_multiplier = 1.5, .sample_rate = 0.02, .steps = 50},
                   {.noise_multiplier = 1.0, .sample_rate = 0.01, .steps = 100}});
  const double epsilon = pld_epsilon(a, 1e-5);
  EXPECT_NEAR(epsilon, pld_epsilon(b, 1e-5), 1e-9);
  EXPECT_GT(epsilon, pld_epsilon(history_of(1.0, 0.01, 100), 1e-5));
  EXPECT_LT(epsilon, pld_epsilon(history_of(1.0, 0.02, 150), 1e-5));
  // Entries whose parameters differ in the last bit only equal one entry.
  const History split(
      {{.noise_multiplier = 1.0, .sample_rate = 0.01, .steps = 60},
       {.noise_multiplier = std::nextafter(1.0, 2.0), .sample_rate = 0.01, .steps = 40}});
  EXPECT_NEAR(pld_epsilon(split, 1e-5), pld_epsilon(history_of(1.0, 0.01, 100), 1e-5), 1e-8);
  EXPECT_NEAR(prv_epsilon(split, 1e-5).upper, prv_epsilon(history_of(1.0, 0.01, 100), 1e-5).upper,
              1e-6);
}

TEST(PrivacyLossTest, IsANumberOrInfinityAtExtremes) {
  for (const double sigma : {0.0, 1e-9, 0.05, 1.0, 1e100})
    for (const double q : {1e-300, 1e-3, 1.0})
      for (const std::int64_t steps : {std::int64_t{30'000}, std::int64_t{1} << 60})
        for (const double delta : {1e-300, 0.999}) {
          SCOPED_TRACE(::testing::Message() << "sigma " << sigma << " q " << q << " steps " << steps
                                            << " delta " << delta);
          const History history = history_of(sigma, q, steps);
          const double pld = pld_epsilon(history, delta, {.max_interval = 1e-2});
          EXPECT_FALSE(std::isnan(pld));
          EXPECT_GE(pld, 0.0);
          EXPECT_LE(pld, rdp_of(history, delta));
        }
}

TEST(PrivacyLossTest, RefusesValuesOutsideTheirRanges) {
  const History history = history_of(1.0, 0.1, 1);
  for (const double delta : {0.0, 1.0, -1.0, std::nan("")}) {
    EXPECT_THROW(pld_epsilon(history, delta), UserError);
    EXPECT_THROW(prv_epsilon(history, delta), UserError);
  }
  EXPECT_THROW(pld_log_delta(history, -1.0), UserError);
  EXPECT_THROW(pld_epsilon(history, 1e-5, {.max_interval = 0.0}), UserError);
  EXPECT_THROW(prv_epsilon(history, 1e-5, {.epsilon_error = 0.0}), UserError);
  EXPECT_THROW(prv_epsilon(history, 1e-5, {.delta_error_ratio = 1.0}), UserError);
}

}  // namespace
}  // namespace gradus::privacy
