#include <gradus/privacy/accountant/privacy_loss.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/history.h>
#include <gradus/privacy/accountant/internal/log_space.h>
#include <gradus/privacy/accountant/internal/loss_composition.h>
#include <gradus/privacy/accountant/internal/loss_grid.h>
#include <gradus/privacy/accountant/internal/privacy_curve.h>
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
using internal::PrivacyCurve;

constexpr const char* kComponent = "privacy_accountant";
constexpr double kMaxPoints = 1 << 20;
constexpr double kRoughPoints = 1 << 15;
// Part of delta that truncated losses may take.
constexpr double kTruncated = 1e-6;
// Below this log delta, which PLD's tails do not reach, RDP's bound is the answer.
constexpr double kLeastLogDelta = -600.0;

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
double least_interval(const std::vector<Steps>& all, double log_tail, double max_points) {
  double range = 0.0;
  for (const Steps& steps : all)
    range = std::max(range, steps.curve.loss(steps.curve.high(log_tail)) -
                                steps.curve.loss(steps.curve.low(log_tail)));
  return range / max_points;
}

using Discretise = LossGrid (*)(const LossCurve&, double interval, double log_tail);

// A composition with the interval asked for or, where its window would be too large, a longer one.
struct Composed {
  ComposedLoss loss;
  double interval = 0.0;
};
Composed compose(const std::vector<Steps>& all, double interval, double log_tail,
                 Discretise discretise, double log_delta, double max_points) {
  interval = std::max(interval, least_interval(all, log_tail, max_points));
  for (;;) {
    std::vector<LossPart> parts;
    for (const Steps& steps : all)
      parts.push_back({discretise(steps.curve, interval, log_tail), steps.count});
    const LossComposition composition(std::move(parts));
    const internal::LossWindow window = composition.window(composition.tilt_for_delta(log_delta));
    const double points = (window.high - window.low) / interval + 3.0;
    if (points <= max_points) return {composition.compose(window), interval};
    interval *= 1.05 * points / max_points;
  }
}

void check(const PldOptions& options) {
  GRADUS_CHECK(kComponent, options.max_interval > 0.0 && std::isfinite(options.max_interval),
               "max_interval must be finite and > 0; got ", options.max_interval);
}

void check(const PrvOptions& options) {
  GRADUS_CHECK(kComponent, options.epsilon_error > 0.0 && std::isfinite(options.epsilon_error),
               "epsilon_error must be finite and > 0; got ", options.epsilon_error);
  GRADUS_CHECK(kComponent, options.delta_error_ratio > 0.0 && options.delta_error_ratio < 1.0,
               "delta_error_ratio must be in (0, 1); got ", options.delta_error_ratio);
}

double log_tail_of(double log_budget, const std::vector<Steps>& all) {
  return std::max(log_budget - std::log(count_of(all)), -690.0);
}

// RDP's bound: the answer where a grid has none, and a first guess where it has.
class SimpleBound {
 public:
  SimpleBound(const History& history, bool rough)
      : orders_(rough ? rough_orders() : default_rdp_orders()),
        rdp_(history_rdp(history, orders_)),
        touched_(internal::log_touched(history)),
        alone_(is_alone(history)) {}

  /// Whether this is all that there is.
  bool alone() const { return alone_; }
  double epsilon(double delta) const {
    return touched_ <= std::log(delta) ? 0.0 : rdp_epsilon(orders_, rdp_, delta).epsilon;
  }
  double log_delta(double epsilon) const {
    return std::min(touched_, rdp_log_delta(orders_, rdp_, epsilon));
  }
  double order(double delta) const { return rdp_epsilon(orders_, rdp_, delta).order; }

 private:
  static const std::vector<double>& rough_orders() {
    static const std::vector<double> orders = {2.0,  3.0,  4.0,  6.0,  8.0,   12.0,
                                               16.0, 24.0, 32.0, 64.0, 128.0, 256.0};
    return orders;
  }
  bool is_alone(const History& history) const {
    if (!(rdp_.front() > 0.0) || !(rdp_.front() <= 1e5) || history.steps() > 10'000'000'000)
      return true;
    return std::any_of(history.entries().begin(), history.entries().end(), [](const auto& entry) {
      return entry.sample_rate > 0.0 && entry.noise_multiplier < 1e-3;
    });
  }

  const std::vector<double>& orders_;
  std::vector<double> rdp_;
  double touched_;
  bool alone_;
};

// Grids are made for a level, a power of two, and serve all deltas from there to the next: so the
// answers to epsilon(delta) and, at that epsilon, to log_delta are of one grid.
int level_of(double log_delta) {
  return static_cast<int>(std::clamp(std::floor(log_delta / std::log(2.0)), -1074.0, -1.0));
}
double log_of_level(int level) { return level * std::log(2.0); }

// The least bound on log delta over levels. @p at gives the bound by a level's grid, and the same
// without what stands for tails, which tells where to look next.
struct LevelBound {
  double bound = 0.0;
  double estimate = 0.0;
};
template <typename At>
double least_over_levels(double guess, const At& at) {
  double best = std::min(guess, 0.0);
  bool tight = true;
  std::set<int> seen;
  const auto look = [&](int level) {
    level = std::max(level, level_of(kLeastLogDelta) + 1);
    if (!seen.insert(level).second) return LevelBound{.bound = best, .estimate = best};
    const LevelBound here = at(level);
    if (here.bound <= best) {
      best = here.bound;
      tight = here.bound - here.estimate < 1e-3;
    }
    return here;
  };
  // Tails are a part of a level: far above the answer they are all that is seen.
  for (int round = 0; round < 12 && !seen.contains(level_of(best)); ++round) {
    const int level = level_of(best);
    const LevelBound here = look(level);
    if (here.bound < log_of_level(level) - 5.0) look(level_of(here.estimate));
  }
  // The grids of neighbours may be a little better, by chance.
  for (int below = 1; below <= 6; ++below) {
    const double before = best;
    look(level_of(best) - below);
    look(level_of(best - 0.02));
    if (tight && best > before - 1e-9) break;
  }
  return best;
}

class PldCurve final : public PrivacyCurve {
 public:
  PldCurve(const History& history, const PldOptions& options, double coarseness)
      : history_(history),
        options_(options),
        coarseness_(coarseness),
        simple_(history, coarseness > 1.0) {
    check(options);
    if (simple_.alone()) return;
    for (const Adjacency adjacency : adjacencies(history))
      sides_.push_back({.steps = curves_of(history, adjacency)});
    for (Side& side : sides_) side.deviation = deviation_per_step(side.steps);
  }

  double epsilon(double delta) override {
    const double simple = simple_.epsilon(delta), log_delta = std::log(delta);
    if (simple == 0.0 || simple_.alone() || log_delta < kLeastLogDelta) return simple;
    double epsilon = 0.0;
    for (Side& side : sides_) {
      epsilon = std::max(epsilon, composed(side, level_of(log_delta)).epsilon(log_delta));
      if (epsilon >= simple) return simple;
    }
    return epsilon;
  }

  double log_delta(double epsilon) override {
    const double simple = simple_.log_delta(epsilon);
    if (epsilon == kInfinity || simple_.alone() || simple < kLeastLogDelta) return simple;
    // RDP may be off by orders of magnitude: a coarse grid tells where to begin.
    double guess = simple;
    if (coarseness_ == 1.0)
      guess = std::min(guess, PldCurve(history_, options_, kRough).log_delta(epsilon));
    double log_delta = -kInfinity;
    for (Side& side : sides_) {
      const auto at = [&](int level) {
        const ComposedLoss& loss = composed(side, level);
        return LevelBound{.bound = loss.log_delta(epsilon), .estimate = loss.log_estimate(epsilon)};
      };
      log_delta = std::max(log_delta, std::min(simple, least_over_levels(guess, at)));
    }
    return std::min(log_delta, simple);
  }

  double log_delta_near(double epsilon, double near) override {
    const double simple = simple_.log_delta(epsilon), log_near = std::log(near);
    if (epsilon == kInfinity || simple_.alone() || log_near < kLeastLogDelta) return simple;
    double log_delta = -kInfinity;
    for (Side& side : sides_)
      log_delta = std::max(log_delta, composed(side, level_of(log_near)).log_delta(epsilon));
    return std::min(log_delta, simple);
  }

  static constexpr double kRough = 12.0;

 private:
  struct Side {
    std::vector<Steps> steps = {};
    double deviation = 0.0;
    std::map<int, ComposedLoss> levels = {};
  };

  // Connecting the dots adds at most interval^2 / 4 to the variance of a step. That is 3e-4 of it
  // at a thirtieth of its deviation. It moves epsilon by about (lambda + 1) / 2 times the variance
  // added in all steps, lambda + 1 being RDP's best order: where that is below 1e-7 of epsilon, as
  // for few steps with little noise, a longer interval will do.
  double interval(const Side& side, int level) const {
    const double longest = options_.max_interval;
    const double usual = std::clamp(side.deviation / 30.0, 1e-6 * longest, longest);
    const double delta = std::max(std::exp2(level), 1e-300);
    const double harmless =
        std::sqrt(8e-7 * simple_.epsilon(delta) / (simple_.order(delta) * count_of(side.steps))) *
        (longest / 1e-4);
    return coarseness_ * std::max(usual, std::min(harmless, 20.0 * longest));
  }

  // Rounding alone spreads the sum over some times the root of the steps.
  double max_points(const Side& side) const {
    if (coarseness_ == 1.0) return kMaxPoints;
    return std::clamp(32.0 * std::sqrt(count_of(side.steps)), kRoughPoints, kMaxPoints);
  }

  const ComposedLoss& composed(Side& side, int level) {
    const auto found = side.levels.find(level);
    if (found != side.levels.end()) return found->second;
    const double log_delta = log_of_level(level);
    const double log_tail = log_tail_of(log_delta + std::log(kTruncated), side.steps);
    return side.levels
        .emplace(level, compose(side.steps, interval(side, level), log_tail, internal::connect_dots,
                                log_delta, max_points(side))
                            .loss)
        .first->second;
  }

  const History history_;
  const PldOptions options_;
  const double coarseness_;
  const SimpleBound simple_;
  std::vector<Side> sides_;
};

class PrvCurve final : public PrivacyCurve {
 public:
  PrvCurve(const History& history, const PrvOptions& options, const PldOptions& pld)
      : history_(history), options_(options), pld_(pld), simple_(history, false) {
    check(options);
    if (simple_.alone()) return;
    for (const Adjacency adjacency : adjacencies(history))
      sides_.push_back({.steps = curves_of(history, adjacency)});
  }

  EpsilonBounds bounds(double delta) {
    const double simple = simple_.epsilon(delta), log_delta = std::log(delta);
    if (simple == 0.0 || simple_.alone() || log_delta < kLeastLogDelta)
      return {.lower = std::isinf(simple) ? simple : 0.0, .estimate = simple, .upper = simple};
    const int level = level_of(log_delta);
    // At least the grid's.
    EpsilonBounds bounds{.delta_error = delta * options_.delta_error_ratio};
    for (Side& side : sides_) {
      const Level& here = composed(side, level);
      const auto at = [&](double at_delta) { return here.loss.epsilon(std::log(at_delta)); };
      bounds.epsilon_error = std::max(bounds.epsilon_error, here.epsilon_error);
      bounds.estimate = std::max(bounds.estimate, at(delta));
      bounds.upper = std::max(bounds.upper, at(delta - bounds.delta_error) + here.epsilon_error);
      if (delta + bounds.delta_error < 1.0)
        bounds.lower = std::max(bounds.lower, at(delta + bounds.delta_error) - here.epsilon_error);
    }
    return bounds;
  }

  double epsilon(double delta) override { return bounds(delta).upper; }

  double log_delta(double epsilon) override {
    const double simple = simple_.log_delta(epsilon);
    const double pld = PldCurve(history_, pld_, 1.0).log_delta(epsilon);
    if (epsilon == kInfinity || simple_.alone() || simple < kLeastLogDelta)
      return std::min(simple, pld);
    double log_delta = -kInfinity;
    for (Side& side : sides_) {
      const auto at = [&](int level) {
        const double log_delta = bound(side, level, epsilon);  // an estimate, with the error it has
        return LevelBound{.bound = log_delta, .estimate = log_delta};
      };
      log_delta = std::max(log_delta, least_over_levels(pld, at));
    }
    return std::min(log_delta, pld);
  }

  double log_delta_near(double epsilon, double near) override {
    const double log_near = std::log(near);
    if (epsilon == kInfinity || simple_.alone() || log_near < kLeastLogDelta ||
        simple_.epsilon(near) == 0.0)
      return simple_.log_delta(epsilon);
    double log_delta = -kInfinity;
    for (Side& side : sides_)
      log_delta = std::max(log_delta, bound(side, level_of(log_near), epsilon));
    return log_delta;
  }

 private:
  struct Level {
    ComposedLoss loss = {};
    double epsilon_error = 0.0;
  };
  struct Side {
    std::vector<Steps> steps = {};
    std::map<int, Level> levels = {};
  };

  double delta_error(int level) const { return std::exp2(level) * options_.delta_error_ratio; }

  // delta(epsilon) <= that of the rounded losses at epsilon - epsilon_error, and delta_error.
  double bound(Side& side, int level, double epsilon) {
    const Level& here = composed(side, level);
    if (epsilon < here.epsilon_error) return 0.0;
    internal::LogSum sum;
    sum.add(here.loss.log_delta(epsilon - here.epsilon_error));
    sum.add(std::log(delta_error(level)));
    return std::min(0.0, sum.log());
  }

  const Level& composed(Side& side, int level) {
    const auto found = side.levels.find(level);
    if (found != side.levels.end()) return found->second;
    // Epsilon error of a grid of interval 1: Hoeffding's bound with probability delta_error / 2.
    const double log_error = log_of_level(level) + std::log(options_.delta_error_ratio);
    const double error = std::sqrt(0.5 * count_of(side.steps) * (std::log(4.0) - log_error));
    // Two tails a step, delta_error / 4 in all.
    const double log_tail = log_tail_of(log_error - std::log(8.0), side.steps);
    Composed made = compose(side.steps, options_.epsilon_error / error, log_tail,
                            internal::round_to_nearest, log_of_level(level), kMaxPoints);
    return side.levels
        .emplace(level, Level{.loss = std::move(made.loss), .epsilon_error = made.interval * error})
        .first->second;
  }

  const History history_;
  const PrvOptions options_;
  const PldOptions pld_;
  const SimpleBound simple_;
  std::vector<Side> sides_;
};

void check_delta(double delta) {
  GRADUS_CHECK(kComponent, delta > 0.0 && delta < 1.0, "delta must be in (0, 1); got ", delta);
}

}  // namespace

std::unique_ptr<PrivacyCurve> internal::pld_curve(const History& history, const PldOptions& options,
                                                  double coarseness) {
  return std::make_unique<PldCurve>(history, options, coarseness);
}

std::unique_ptr<PrivacyCurve> internal::prv_curve(const History& history, const PrvOptions& options,
                                                  const PldOptions& pld) {
  return std::make_unique<PrvCurve>(history, options, pld);
}

double internal::log_touched(const History& history) {
  double log_never = 0.0;
  for (const GaussianSteps& entry : history.entries())
    if (entry.sample_rate > 0.0)
      log_never += static_cast<double>(entry.steps) * std::log1p(-entry.sample_rate);
  return std::log(-std::expm1(log_never));
}

double pld_epsilon(const History& history, double delta, const PldOptions& options) {
  check_delta(delta);
  return PldCurve(history, options, 1.0).epsilon(delta);
}

double pld_log_delta(const History& history, double epsilon, const PldOptions& options) {
  GRADUS_CHECK(kComponent, epsilon >= 0.0, "epsilon must be >= 0; got ", epsilon);
  return PldCurve(history, options, 1.0).log_delta(epsilon);
}

EpsilonBounds prv_epsilon(const History& history, double delta, const PrvOptions& options) {
  check_delta(delta);
  return PrvCurve(history, options, {}).bounds(delta);
}

}  // namespace gradus::privacy
