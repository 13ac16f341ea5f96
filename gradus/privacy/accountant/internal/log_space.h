#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

namespace gradus::privacy::internal {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kLogSqrtTwoPi = 0.91893853320467274178;

/// Sums numbers given by their logarithms; empty is log 0.
class LogSum {
 public:
  void add(double log_value) {
    if (log_value == -kInfinity) return;
    if (log_value <= top_) {
      rest_ += std::exp(log_value - top_);
    } else {
      rest_ = rest_ * std::exp(top_ - log_value) + 1.0;
      top_ = log_value;
    }
  }
  double log() const { return top_ == -kInfinity ? top_ : top_ + std::log(rest_); }

 private:
  double top_ = -kInfinity;
  double rest_ = 0.0;  // of the sum over exp(top_)
};

/// log(1 + exp(x)).
inline double log1p_exp(double x) {
  return x > 0.0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}

/// log(exp(x) - 1) for x > 0.
inline double log_expm1(double x) { return x > 37.0 ? x : std::log(std::expm1(x)); }

/// Mills' ratio of the standard normal: its upper tail at x over its density at x, for x >= -30.
double mills_ratio(double x);

/// log of the upper tail of the standard normal at x; -x^2 / 2 and less far out, never -infinity.
double log_normal_tail(double x);

/// 1 - x * mills_ratio(x), minus the derivative of Mills' ratio, without cancellation for large x.
double mills_slope(double x);

/// The least x in [low, high], to the last bit, with holds(x); holds is false, then true, and
/// holds(high).
template <typename Predicate>
double least_true(double low, double high, const Predicate& holds) {
  if (holds(low)) return low;
  for (int i = 0; i < 2200; ++i) {
    const double middle = low + 0.5 * (high - low);
    if (middle <= low || middle >= high) break;
    (holds(middle) ? high : low) = middle;
  }
  return high;
}

/// Where f, that falls and then rises on [low, high], is about least: golden section.
template <typename Function>
double least_argument(double low, double high, int evaluations, const Function& f) {
  constexpr double kGolden = 0.61803398874989484820;
  double a = high - kGolden * (high - low), b = low + kGolden * (high - low);
  double at_a = f(a), at_b = f(b);
  for (int i = 2; i < evaluations; ++i) {
    if (at_a <= at_b) {
      high = b, b = a, at_b = at_a;
      a = high - kGolden * (high - low), at_a = f(a);
    } else {
      low = a, a = b, at_a = at_b;
      b = low + kGolden * (high - low), at_b = f(b);
    }
  }
  return at_a <= at_b ? a : b;
}

}  // namespace gradus::privacy::internal
