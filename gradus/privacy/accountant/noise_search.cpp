#include <gradus/privacy/accountant/noise_search.h>

#include <algorithm>
#include <cmath>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/internal/log_space.h>

namespace gradus::privacy {
namespace {

constexpr const char* kComponent = "privacy_accountant";
constexpr double kLeastNoise = 1e-3;

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

// A scale that keeps the budget and one that does not, with their epsilons.
struct Bracket {
  NoiseFound good;
  NoiseFound bad;
};

class Search {
 public:
  Search(const PrivacyBudget& budget, const std::function<History(double)>& history_of,
         const NoiseSearchOptions& options)
      : budget_(budget), history_of_(history_of), options_(options) {}

  NoiseFound run() const {
    // RDP is quick and mostly close: it tells where to look.
    NoiseFound start{.noise_multiplier = std::min(1.0, options_.max_noise_multiplier)};
    if (options_.accountant.kind == AccountantKind::kPld ||
        options_.accountant.kind == AccountantKind::kPrv) {
      NoiseSearchOptions rough = options_;
      rough.accountant = {.kind = AccountantKind::kRdp};
      rough.relative_tolerance = std::max(0.01, options_.relative_tolerance);
      start = Search(budget_, history_of_, rough).refine_from(start.noise_multiplier, 2.0, false);
      return refine_from(start.noise_multiplier, 1.1, true);
    }
    return refine_from(start.noise_multiplier, 2.0, true);
  }

 private:
  NoiseFound at(double scale) const {
    History history = options_.spent;
    history.add(history_of_(scale));
    return {.noise_multiplier = scale,
            .epsilon = epsilon_of(history, budget_.delta, options_.accountant)};
  }
  bool keeps(const NoiseFound& found) const { return found.epsilon <= budget_.epsilon; }

  // Brackets by growing factors from start, and narrows. Unless required, the best known will do.
  NoiseFound refine_from(double start, double factor, bool required) const {
    Bracket bracket;
    NoiseFound here = at(start);
    const bool up = !keeps(here);
    while (keeps(here) != up) {
      (up ? bracket.bad : bracket.good) = here;
      if (up && here.noise_multiplier >= options_.max_noise_multiplier) {
        GRADUS_CHECK(
            kComponent, !required, "noise must be able to keep epsilon <= ", budget_.epsilon,
            " at delta ", budget_.delta, "; got epsilon ", here.epsilon,
            " at the largest noise_multiplier, ", here.noise_multiplier,
            ". Raise epsilon, delta, max_batch_size or max_noise_multiplier, or take fewer steps");
        return here;
      }
      if (!up && here.noise_multiplier <= kLeastNoise) return here;
      here = at(std::clamp(up ? here.noise_multiplier * factor : here.noise_multiplier / factor,
                           kLeastNoise, options_.max_noise_multiplier));
      factor *= factor;
    }
    (up ? bracket.good : bracket.bad) = here;
    return narrow(bracket);
  }

  // Regula falsi on logarithms, kept off the ends; every third step halves.
  NoiseFound narrow(Bracket bracket) const {
    const double target = std::log(budget_.epsilon);
    for (int i = 0; i < 200; ++i) {
      const double low = std::log(bracket.bad.noise_multiplier);
      const double high = std::log(bracket.good.noise_multiplier);
      if (high - low <= std::log1p(options_.relative_tolerance)) break;
      const double rise = std::log(bracket.bad.epsilon) - target;
      const double fall = target - std::log(std::max(bracket.good.epsilon, 1e-300));
      double share = i % 3 == 2 || !std::isfinite(rise) ? 0.5 : rise / (rise + fall);
      // Aim past the root, on alternate sides, so that both ends close in on it.
      const double nudge = 0.4 * options_.relative_tolerance / (high - low);
      share = std::clamp(share + (i % 2 == 0 ? nudge : -nudge), 0.02 * (high - low > 0.05) + nudge,
                         1.0 - 0.02 * (high - low > 0.05) - nudge);
      const NoiseFound middle = at(std::exp(low + share * (high - low)));
      (keeps(middle) ? bracket.good : bracket.bad) = middle;
    }
    return bracket.good;
  }

  const PrivacyBudget& budget_;
  const std::function<History(double)>& history_of_;
  const NoiseSearchOptions& options_;
};

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
  return Search(budget, history_of, options).run();
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
  const auto keeps = [&](std::int64_t steps) {
    History history = options.spent;
    GaussianSteps more = step;
    more.steps = steps;
    history.add(more);
    return epsilon_of(history, budget.delta, options.accountant) <= budget.epsilon;
  };
  if (!keeps(1)) return 0;
  std::int64_t good = 1, bad = 2;
  while (keeps(bad)) {
    good = bad;
    if (good >= kMost) return kMost;
    bad *= 2;
  }
  while (bad - good > 1) {
    const std::int64_t middle = good + (bad - good) / 2;
    (keeps(middle) ? good : bad) = middle;
  }
  return good;
}

}  // namespace gradus::privacy
