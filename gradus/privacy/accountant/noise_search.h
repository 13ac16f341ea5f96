#pragma once

#include <cstdint>
#include <functional>

#include <gradus/privacy/accountant/accountant.h>

namespace gradus::privacy {

struct PrivacyBudget {
  double epsilon = 0.0;  ///< Finite, > 0.
  double delta = 0.0;    ///< In (0, 1).
};

struct NoiseSearchOptions {
  AccountantOptions accountant = {};
  History spent = {};                 ///< Counts against the budget.
  double relative_tolerance = 1e-4;   ///< Of the noise, in (0, 1).
  double max_noise_multiplier = 1e4;  ///< > 0.
};

/// A noise multiplier and its epsilon.
struct NoiseFound {
  double noise_multiplier = 0.0;
  double epsilon = 0.0;
};

/// The least noise multiplier, to relative_tolerance, with which @p steps keep the budget.
///
/// The epsilon returned is the accountant's own at exactly this multiplier and never exceeds
/// budget.epsilon: the search brackets, and gives back its upper end. (GDP's is an approximation
/// all the same.)
/// @param steps  Its noise_multiplier is not read.
/// @throws UserError if what was spent, or no noise up to max_noise_multiplier, keeps the budget;
/// on
///   options outside their ranges.
NoiseFound find_noise_multiplier(const PrivacyBudget& budget, const GaussianSteps& steps,
                                 const NoiseSearchOptions& options = {});

/// The same for a schedule: @p history_of gives all that a scale releases, less noise and so more
/// epsilon for smaller scales.
NoiseFound find_noise_multiplier(const PrivacyBudget& budget,
                                 const std::function<History(double scale)>& history_of,
                                 const NoiseSearchOptions& options = {});

/// The most steps that still keep the budget after options.spent; 0 if none. At most 2^40.
/// @param step  Its count of steps is not read.
std::int64_t find_steps(const PrivacyBudget& budget, const GaussianSteps& step,
                        const NoiseSearchOptions& options = {});

}  // namespace gradus::privacy
