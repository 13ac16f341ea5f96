#include <gradus/privacy/accountant/privacy_loss.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/history.h>
#include <gradus/privacy/accountant/internal/log_space.h>
#include <gradus/privacy/accountant/internal/loss_composition.h>
#include <gradus/privacy/accountant/internal/loss_grid.h>
#include <gradus/privacy/accountant/rdp.h>

namespace gradus::privacy {
namespace {

using internal::Adjacency;
using internal::ComposedLoss;
using internal::kInfinity;
using internal::LossComposition;
using internal::LossCurve;
using internal::LossGrid;
using internal::LossPart;

constexpr const char* kComponent = "privacy_accountant";
constexpr double kMaxPoints = 1 << 20;
// Part of delta that truncated losses may take.
constexpr double kTruncated = 1e-6;

struct Steps {
  LossCurve curve;
  std::int64_t count = 0;
};

// The entries that lose privacy, seen from one side.
std::vector<Steps> curves_of(const History& history, Adjacency adjacency) {
  std::vector<Steps> all;
  for (const GaussianSteps& entry : history.entries())
    if (entry.sample_rate > 0.0)
      all.push_back({LossCurve(entry.sample_rate, entry.noise_multiplier, adjacency), entry.steps});
  return all;
}

std::vector<Adjacency> adjacencies(const History& history) {
  // Without subsampling the two sides are mirror images.
  const bool symmetric = std::all_of(
      history.entries().begin(), history.entries().end(),
      [](const auto& entry) { return entry.sample_rate == 0.0 || entry.sample_rate == 1.0; });
  if (symmetric) return {Adjacency::kRemove};
  return {Adjacency::kRemove, Adjacency::kAdd};
}

double count_of(const std::vector<Steps>& all) {
  double count = 0.0;
  for (const Steps& steps : all) count += static_cast<double>(steps.count);
  return count;
}

// The standard deviation of the loss of a step, over all steps.
double deviation_per_step(const std::vector<Steps>& all) {
  double square = 0.0;
  for (const Steps& steps : all) {
    const double deviation = steps.curve.deviation();
    square += static_cast<double>(steps.count) * deviation * deviation;
  }
  return std::sqrt(square / count_of(all));
}

// The least interval at which the losses of each step fit the grid.
double least_interval(const std::vector<Steps>& all, double log_tail) {
  double range = 0.0;
  for (const Steps& steps : all)
    range = std::max(range, steps.curve.loss(steps.curve.high(log_tail)) -
                                steps.curve.loss(steps.curve.low(log_tail)));
  return range / kMaxPoints;
}

using Discretise = LossGrid (*)(const LossCurve&, double interval, double log_tail);

// A composition with the interval asked for or, where its window would be too large, a longer one.
struct Composed {
  ComposedLoss loss;
  double interval = 0.0;
};
template <typename Tilt>
Composed compose(const std::vector<Steps>& all, double interval, double log_tail,
                 Discretise discretise, const Tilt& tilt) {
  interval = std::max(interval, least_interval(all, log_tail));
  for (;;) {
    std::vector<LossPart> parts;
    for (const Steps& steps : all)
      parts.push_back({discretise(steps.curve, interval, log_tail), steps.count});
    const LossComposition composition(std::move(parts));
    const internal::LossWindow window = composition.window(tilt(composition));
    const double points = (window.high - window.low) / interval + 3.0;
    if (points <= kMaxPoints) return {composition.compose(window), interval};
    interval *= 1.05 * points / kMaxPoints;
  }
}

double pld_interval(const std::vector<Steps>& all, const PldOptions& options) {
  // Connecting the dots adds at most interval^2 / 4 to the variance of a step, or 3e-4 of it here.
  // Losses that do not vary at all (little noise, on the side without the example) need no finer
  // grid.
  return std::clamp(deviation_per_step(all) / 30.0, 1e-6 * options.max_interval,
                    options.max_interval);
}

void check(const PldOptions& options) {
  GRADUS_CHECK(kComponent, options.max_interval > 0.0 && std::isfinite(options.max_interval),
               "max_interval must be finite and > 0; got ", options.max_interval);
}

bool wants_rdp(const History& history, double rdp_epsilon) {
  if (!(rdp_epsilon <= 1e5) || history.steps() > 10'000'000'000) return true;
  return std::any_of(history.entries().begin(), history.entries().end(), [](const auto& entry) {
    return entry.sample_rate > 0.0 && entry.noise_multiplier < 1e-3;
  });
}

double log_tail_of(double log_budget, const std::vector<Steps>& all) {
  return std::max(log_budget - std::log(count_of(all)), -690.0);
}

}  // namespace

double pld_epsilon(const History& history, double delta, const PldOptions& options) {
  check(options);
  const std::vector<double>& orders = default_rdp_orders();
  const double simple = rdp_epsilon(orders, history_rdp(history, orders), delta).epsilon;
  if (simple == 0.0 || wants_rdp(history, simple)) return simple;
  const double log_delta = std::log(delta);
  double epsilon = 0.0;
  for (const Adjacency adjacency : adjacencies(history)) {
    const std::vector<Steps> all = curves_of(history, adjacency);
    const double log_tail = log_tail_of(log_delta + std::log(kTruncated), all);
    const Composed composed =
        compose(all, pld_interval(all, options), log_tail, internal::connect_dots,
                [&](const LossComposition& sum) { return sum.tilt_for_delta(log_delta); });
    epsilon = std::max(epsilon, composed.loss.epsilon(log_delta));
  }
  return std::min(epsilon, simple);
}

double pld_log_delta(const History& history, double epsilon, const PldOptions& options) {
  check(options);
  const std::vector<double>& orders = default_rdp_orders();
  const std::vector<double> rdp = history_rdp(history, orders);
  const double simple = rdp_log_delta(orders, rdp, epsilon);
  const double size = *std::max_element(rdp.begin(), rdp.end());
  if (size == 0.0 || epsilon == kInfinity || wants_rdp(history, rdp.front()) || simple < -600.0)
    return simple;
  double log_delta = -kInfinity;
  for (const Adjacency adjacency : adjacencies(history)) {
    const std::vector<Steps> all = curves_of(history, adjacency);
    // RDP's delta is above the true one by a factor of a few hundred at most where it matters.
    const double log_tail = log_tail_of(simple + 2.0 * std::log(kTruncated), all);
    const Composed composed =
        compose(all, pld_interval(all, options), log_tail, internal::connect_dots,
                [&](const LossComposition& sum) { return sum.tilt_for_epsilon(epsilon); });
    log_delta = std::max(log_delta, composed.loss.log_delta(epsilon));
  }
  return std::min(log_delta, simple);
}

EpsilonBounds prv_epsilon(const History& history, double delta, const PrvOptions& options) {
  GRADUS_CHECK(kComponent, options.epsilon_error > 0.0 && std::isfinite(options.epsilon_error),
               "epsilon_error must be finite and > 0; got ", options.epsilon_error);
  GRADUS_CHECK(kComponent, options.delta_error_ratio > 0.0 && options.delta_error_ratio < 1.0,
               "delta_error_ratio must be in (0, 1); got ", options.delta_error_ratio);
  const std::vector<double>& orders = default_rdp_orders();
  const double simple = rdp_epsilon(orders, history_rdp(history, orders), delta).epsilon;
  if (simple == 0.0 || wants_rdp(history, simple))
    return {.lower = std::isinf(simple) ? simple : 0.0, .estimate = simple, .upper = simple};

  EpsilonBounds bounds{.delta_error = delta * options.delta_error_ratio};
  const double log_delta = std::log(delta);
  for (const Adjacency adjacency : adjacencies(history)) {
    const std::vector<Steps> all = curves_of(history, adjacency);
    // Epsilon error of a grid of interval 1: Hoeffding's bound with probability delta_error / 2.
    const double error = std::sqrt(0.5 * count_of(all) * std::log(4.0 / bounds.delta_error));
    // Two tails a step, delta_error / 4 in all.
    const double log_tail = log_tail_of(std::log(bounds.delta_error / 8.0), all);
    const Composed composed =
        compose(all, options.epsilon_error / error, log_tail, internal::round_to_nearest,
                [&](const LossComposition& sum) { return sum.tilt_for_delta(log_delta); });
    const double epsilon_error = composed.interval * error;
    const auto at = [&](double at_delta) { return composed.loss.epsilon(std::log(at_delta)); };
    bounds.epsilon_error = std::max(bounds.epsilon_error, epsilon_error);
    bounds.estimate = std::max(bounds.estimate, at(delta));
    bounds.upper = std::max(bounds.upper, at(delta - bounds.delta_error) + epsilon_error);
    if (delta + bounds.delta_error < 1.0)
      bounds.lower = std::max(bounds.lower, at(delta + bounds.delta_error) - epsilon_error);
  }
  return bounds;
}

}  // namespace gradus::privacy
