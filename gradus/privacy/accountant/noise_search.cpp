#include <gradus/privacy/accountant/noise_search.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/internal/privacy_curve.h>

namespace gradus::privacy {
namespace {

constexpr const char* kComponent = "privacy_accountant";
constexpr double kLeastNoise = 1e-3;
constexpr double kMargin = 1e-8;  // of delta, as epsilon_of leaves
constexpr double kOpen = 1e300;

void check(const PrivacyBudget& budget, const NoiseSearchOptions& options) {
  GRADUS_CHECK(kComponent, budget.epsilon > 0.0 && std::isfinite(budget.epsilon),
               "the epsilon of a budget must be finite and > 0; got ", budget.epsilon);
  GRADUS_CHECK(kComponent, budget.delta > 0.0 && budget.delta < 1.0,
               "the delta of a budget must be in (0, 1); got ", budget.delta);
  GRADUS_CHECK(kComponent, options.relative_tolerance > 0.0 && options.relative_tolerance < 1.0,
               "relative_tolerance must be in (0, 1); got ", options.relative_tolerance);
  GRADUS_CHECK(kComponent,
               options.max_noise_multiplier > 0.0 && std::isfinite(options.max_noise_multiplier),
               "max_noise_multiplier must be finite and > 0; got ", options.max_noise_multiplier);
}

// How far a history is from the budget: about log(delta / budget.delta) at the budget's epsilon,
// which is smooth where epsilon goes to 0 or to infinity. Sure in its sign, and near 0 in its size.
struct Probe {
  double excess = 0.0;
  double epsilon = 0.0;

  bool keeps() const { return excess <= 0.0; }
};

Probe probe_of(const History& history, const PrivacyBudget& budget,
               const AccountantOptions& accountant, bool rough) {
  const auto curve = rough ? internal::rough_curve_of(history, accountant)
                           : internal::curve_of(history, accountant);
  const double delta = budget.delta * (1.0 - kMargin);  // as epsilon_of
  Probe probe{.epsilon = curve->epsilon(delta)};
  const double excess = curve->log_delta_near(budget.epsilon, delta) - std::log(delta);
  // Where batches are cut, a smaller epsilon than the budget's may be the one that is kept.
  probe.excess = probe.epsilon <= budget.epsilon ? std::min(excess, 0.0) : std::max(excess, 1e-12);
  return probe;
}

using ProbeAt = std::function<Probe(double)>;

struct Place {
  double x = 0.0;
  Probe probe{};
};

// The ends between which the budget is just kept; a side that is not known yet is open.
struct Bracket {
  std::optional<Place> bad = std::nullopt;   // below
  std::optional<Place> good = std::nullopt;  // above

  void take(double x, const Probe& probe) { (probe.keeps() ? good : bad) = Place{x, probe}; }
  bool within(double width) const { return bad && good && good->x - bad->x <= width; }
};

// Closes in on where excess, falling in x, goes through 0: by secants from @p start, aimed a share
// of @p width to alternate sides, so that both ends follow; halved where that does not shrink fast.
// @p slope  A guess; better on return.
Bracket close_in(const ProbeAt& at, double start, double& slope, double longest, double width,
                 double least, double most) {
  Bracket bracket;
  Place last{start, at(start)};
  bracket.take(last.x, last.probe);
  double stride = longest, shortest = 0.4 * width;
  double previous = kOpen, before_last = kOpen;  // widths of the bracket
  for (int round = 0; round < 400 && !bracket.within(width); ++round) {
    if (bracket.good && bracket.good->x <= least) break;  // even that keeps the budget
    if (bracket.bad && bracket.bad->x >= most) break;     // nothing does
    double x = last.x - last.probe.excess / slope;
    if (bracket.bad && bracket.good) {
      const double low = bracket.bad->x, high = bracket.good->x;
      // Twice in a row less than halved: epsilon may have a step here, where secants are lost.
      if (high - low > 0.25 * before_last) x = 0.5 * (low + high);
      before_last = std::exchange(previous, high - low);
      // Beyond the root as last seen, on the side that is farther from it.
      x += (x - low > high - x ? -0.4 : 0.4) * width;
      const double edge = std::min(0.3 * width, 0.25 * (high - low));
      x = std::clamp(x, low + edge, high - edge);
    } else {
      // A wider stride each time, and past the root rather than short of it.
      const double reach = std::abs(x - last.x) + shortest;
      shortest *= 4.0;
      x = last.x + (last.probe.keeps() ? -1.0 : 1.0) * std::min(reach, stride);
      stride *= 2.0;
      x = std::clamp(x, least, most);
    }
    const Place next{x, at(x)};
    const double steep = (next.probe.excess - last.probe.excess) / (next.x - last.x);
    if (std::isfinite(steep) && steep < 0.0) slope = std::clamp(steep, 8.0 * slope, slope / 8.0);
    bracket.take(next.x, next.probe);
    last = next;
  }
  return bracket;
}

bool is_slow(AccountantKind kind) {
  return kind == AccountantKind::kPld || kind == AccountantKind::kPrv;
}

}  // namespace

NoiseFound find_noise_multiplier(const PrivacyBudget& budget,
                                 const std::function<History(double scale)>& history_of,
                                 const NoiseSearchOptions& options) {
  check(budget, options);
  if (options.spent.steps() > 0) {
    const double spent = epsilon_of(options.spent, budget.delta, options.accountant);
    GRADUS_CHECK(kComponent, spent <= budget.epsilon,
                 "the steps already taken must keep epsilon <= ", budget.epsilon, " at delta ",
                 budget.delta, "; got ", spent, ". Raise the budget");
  }
  // Over the logarithm of the noise.
  const auto noise_at = [&](double x) {
    return std::min(std::exp(x), options.max_noise_multiplier);
  };
  const auto search = [&](bool rough) {
    return [&, rough](double x) {
      History history = options.spent;
      history.add(history_of(noise_at(x)));
      return probe_of(history, budget, options.accountant, rough);
    };
  };
  const double least = std::log(std::min(kLeastNoise, options.max_noise_multiplier));
  const double most = std::log(options.max_noise_multiplier);
  const double width = std::log1p(options.relative_tolerance);
  const NoiseFound none{.noise_multiplier = noise_at(least)};
  History lightest = options.spent;
  lightest.add(history_of(none.noise_multiplier));
  // That an example is in any batch may be as rare as delta: then any noise will do.
  if (is_upper_bound(options.accountant.kind) &&
      internal::log_touched(lightest) <= std::log(budget.delta * (1.0 - kMargin)) &&
      epsilon_of(lightest, budget.delta, options.accountant) == 0.0)
    return none;
  double start = std::min(0.0, most), slope = -3.0, stride = 1.0;
  if (is_slow(options.accountant.kind)) {
    // Quick curves tell where to look.
    const Bracket rough =
        close_in(search(true), start, slope, stride, std::max(3e-3, width), least, most);
    start = rough.good ? rough.good->x : most;
    stride = 0.02;
  }
  const Bracket found = close_in(search(false), start, slope, stride, width, least, most);
  GRADUS_CHECK(
      kComponent, found.good, "noise must be able to keep epsilon <= ", budget.epsilon,
      " at delta ", budget.delta, "; got epsilon ", found.bad->probe.epsilon,
      " at the largest noise_multiplier, ", options.max_noise_multiplier,
      ". Raise epsilon, delta, max_batch_size or max_noise_multiplier, or take fewer steps");
  return {.noise_multiplier = noise_at(found.good->x), .epsilon = found.good->probe.epsilon};
}

NoiseFound find_noise_multiplier(const PrivacyBudget& budget, const GaussianSteps& steps,
                                 const NoiseSearchOptions& options) {
  return find_noise_multiplier(
      budget,
      [&](double scale) {
        GaussianSteps scaled = steps;
        scaled.noise_multiplier = scale;
        return History({scaled});
      },
      options);
}

std::int64_t find_steps(const PrivacyBudget& budget, const GaussianSteps& step,
                        const NoiseSearchOptions& options) {
  check(budget, options);
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  const auto at = [&](std::int64_t steps, bool rough) {
    History history = options.spent;
    GaussianSteps more = step;
    more.steps = steps;
    history.add(more);
    return probe_of(history, budget, options.accountant, rough);
  };
  if (!at(1, false).keeps()) return 0;
  if (at(kMost, false).keeps()) return kMost;
  std::int64_t good = 1, bad = kMost;
  // Over minus the logarithm of the steps, along which less and less is lost.
  const double first = 0.0, last = -std::log(static_cast<double>(kMost));
  if (is_slow(options.accountant.kind)) {
    const auto steps_at = [&](double x) {
      return std::clamp<std::int64_t>(std::llround(std::exp(-x)), 1, kMost);
    };
    double slope = -2.0;
    const Bracket rough = close_in([&](double x) { return at(steps_at(x), true); },
                                   -std::log(100.0), slope, 3.0, 1e-4, last, first);
    // Around what the quick curve says, in strides that grow.
    const std::int64_t guess = rough.good ? steps_at(rough.good->x) : 1;
    for (std::int64_t stride = std::max<std::int64_t>(1, guess / 2000); bad - good > 1;
         stride *= 8) {
      const bool known_good = good > 1 && bad == kMost, known_bad = good == 1 && bad < kMost;
      const std::int64_t next = std::clamp(
          known_good ? good + stride : (known_bad ? bad - stride : guess), good + 1, bad - 1);
      (at(next, false).keeps() ? good : bad) = next;
      if (good > 1 && bad < kMost) break;
    }
  }
  while (bad - good > 1) {
    // The mean of logarithms while both ends are far apart.
    const double middle = bad / 2 > good
                              ? std::sqrt(static_cast<double>(good) * static_cast<double>(bad))
                              : 0.5 * (static_cast<double>(good) + static_cast<double>(bad));
    const std::int64_t next = std::clamp(static_cast<std::int64_t>(middle), good + 1, bad - 1);
    (at(next, false).keeps() ? good : bad) = next;
  }
  return good;
}

}  // namespace gradus::privacy
