#include <gradus/privacy/accountant/gaussian.h>

#include <algorithm>
#include <array>
#include <cmath>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/history.h>
#include <gradus/privacy/accountant/internal/log_space.h>

namespace gradus::privacy {
namespace {

using internal::kInfinity;

constexpr const char* kComponent = "privacy_accountant";

// Gauss-Legendre with 8 points: positive half.
constexpr std::array<double, 4> kNodes = {0.18343464249564980494, 0.52553240991632898582,
                                          0.79666647741362673959, 0.96028985649753623168};
constexpr std::array<double, 4> kWeights = {0.36268378337836198297, 0.31370664587788728734,
                                            0.22238103445337447054, 0.10122853629037625915};

// mills_ratio(a) - mills_ratio(a + mu), for small mu as the integral of its slope.
double mills_drop(double a, double mu) {
  if (mu >= 0.5) return internal::mills_ratio(a) - internal::mills_ratio(a + mu);
  double sum = 0.0;
  for (std::size_t i = 0; i < kNodes.size(); ++i)
    for (const double sign : {-1.0, 1.0})
      sum += kWeights[i] * internal::mills_slope(a + 0.5 * mu * (1.0 + sign * kNodes[i]));
  return 0.5 * mu * sum;
}

}  // namespace

double gaussian_log_delta(double epsilon, double mu) {
  GRADUS_CHECK(kComponent, epsilon >= 0.0, "epsilon must be >= 0; got ", epsilon);
  GRADUS_CHECK(kComponent, mu >= 0.0, "mu must be >= 0; got ", mu);
  if (mu == 0.0 || epsilon == kInfinity) return -kInfinity;
  if (mu == kInfinity) return 0.0;
  // delta = Phi(-a) - e^epsilon Phi(-b) with a and b below; e^epsilon phi(b) = phi(a).
  const double a = epsilon / mu - 0.5 * mu;
  const double b = epsilon / mu + 0.5 * mu;
  const double log_density = -0.5 * a * a - internal::kLogSqrtTwoPi;
  if (a < -6.0) {
    const double rest = 0.5 * std::erfc(-a * std::sqrt(0.5));  // Phi(a)
    return std::log1p(-rest - std::exp(log_density) * internal::mills_ratio(b));
  }
  return std::min(0.0, log_density + std::log(mills_drop(a, mu)));
}

double gaussian_epsilon(double delta, double mu) {
  GRADUS_CHECK(kComponent, delta > 0.0 && delta < 1.0, "delta must be in (0, 1); got ", delta);
  GRADUS_CHECK(kComponent, mu >= 0.0, "mu must be >= 0; got ", mu);
  if (mu == 0.0) return 0.0;
  const double log_delta = std::log(delta);
  // Phi(-a) <= exp(-a^2 / 2), so that this epsilon is large enough.
  const double high = 0.5 * mu * mu + mu * std::sqrt(-2.0 * log_delta);
  if (!std::isfinite(high)) return kInfinity;
  return internal::least_true(
      0.0, high * (1.0 + 1e-12) + std::numeric_limits<double>::min(),
      [&](double epsilon) { return gaussian_log_delta(epsilon, mu) <= log_delta; });
}

double exact_mu(const History& history) {
  double squared = 0.0;
  for (const GaussianSteps& entry : history.entries()) {
    if (entry.sample_rate == 0.0) continue;
    GRADUS_CHECK(kComponent, entry.sample_rate == 1.0,
                 "the exact Gaussian accountant needs sample_rate 1 (full batches); got ",
                 entry.sample_rate, ". Use the PLD, PRV or RDP accountant");
    squared += static_cast<double>(entry.steps) / entry.noise_multiplier / entry.noise_multiplier;
  }
  return std::sqrt(squared);
}

double approximate_mu(const History& history) {
  double squared = 0.0;
  for (const GaussianSteps& entry : history.entries()) {
    if (entry.sample_rate == 0.0) continue;
    const double inverse = 1.0 / entry.noise_multiplier / entry.noise_multiplier;
    squared +=
        static_cast<double>(entry.steps) *
        (entry.sample_rate == 1.0 ? inverse
                                  : entry.sample_rate * entry.sample_rate * std::expm1(inverse));
  }
  return std::sqrt(squared);
}

}  // namespace gradus::privacy
