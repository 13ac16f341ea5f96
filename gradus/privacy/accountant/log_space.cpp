#include <gradus/privacy/accountant/internal/log_space.h>

namespace gradus::privacy::internal {
namespace {

constexpr double kSqrtHalf = 0.70710678118654752440;
// From here on the asymptotic series is exact to a double: its least term is about exp(-x^2 / 2).
constexpr double kAsymptotic = 12.0;

// The series 1/x^2 - 3/x^4 + 15/x^6 - ..., that is 1 - x * mills_ratio(x).
double asymptotic_slope(double x) {
  const double inverse = 1.0 / (x * x);
  double term = inverse, sum = 0.0;
  for (int odd = 3; odd < 80 && std::abs(term) > 1e-18 * inverse; odd += 2) {
    sum += term;
    const double next = -term * odd * inverse;
    if (std::abs(next) >= std::abs(term)) break;
    term = next;
  }
  return sum;
}

}  // namespace

double mills_ratio(double x) {
  if (x >= kAsymptotic) return (1.0 - asymptotic_slope(x)) / x;
  return 0.5 * std::erfc(x * kSqrtHalf) * std::exp(0.5 * x * x + kLogSqrtTwoPi);
}

double mills_slope(double x) {
  return x >= kAsymptotic ? asymptotic_slope(x) : 1.0 - x * mills_ratio(x);
}

double log_normal_tail(double x) {
  if (x < 0.0) return std::log1p(-0.5 * std::erfc(-x * kSqrtHalf));
  if (x < kAsymptotic) return std::log(0.5 * std::erfc(x * kSqrtHalf));
  return -0.5 * x * x - kLogSqrtTwoPi + std::log(mills_ratio(x));
}

}  // namespace gradus::privacy::internal
