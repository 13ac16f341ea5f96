#include <gradus/privacy/accountant/rdp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/history.h>
#include <gradus/privacy/accountant/internal/log_space.h>

namespace gradus::privacy {
namespace {

using internal::kInfinity;
using internal::LogSum;

constexpr const char* kComponent = "privacy_accountant";
constexpr double kRounding = 0x1p-48;

// log(A - 1) for an integer order, A = E[(p / q)^order]. The binomial weights sum to 1, so that
// subtracting 1 term by term leaves only positive terms: small divergences keep all their digits.
double log_excess_integer(double q, double sigma, std::int64_t order) {
  LogSum sum;
  const double alpha = static_cast<double>(order);
  const double log_q = std::log(q), log_not_q = std::log1p(-q);
  double log_binomial = 0.0;
  for (std::int64_t i = 1; i <= order; ++i) {
    const double k = static_cast<double>(i);
    log_binomial += std::log((alpha - k + 1.0) / k);
    if (i == 1) continue;  // exp(0) - 1
    const double exponent = 0.5 * k * (k - 1.0) / sigma / sigma;
    if (exponent == kInfinity) return kInfinity;
    if (exponent < std::numeric_limits<double>::min()) continue;  // noise beyond 1e150
    sum.add(log_binomial + k * log_q + (alpha - k) * log_not_q + internal::log_expm1(exponent));
  }
  return sum.log();
}

// log((1 + u)^alpha - 1 - alpha u) for u = exp(log_plus) - 1 > -1, log_plus = log(1 + u).
double log_bernoulli_gap(double u, double log_plus, double alpha) {
  if (std::abs(u) * std::max(alpha, 4.0) < 0.1) {
    // The binomial series from its quadratic term.
    double term = 0.5 * alpha * (alpha - 1.0) * u * u, sum = 0.0;
    for (int k = 3; k < 24 && std::abs(term) > 1e-18 * std::abs(sum); ++k) {
      sum += term;
      term *= (alpha - k + 1.0) / k * u;
    }
    return sum > 0.0 ? std::log(sum) : -kInfinity;
  }
  if (alpha * log_plus > 40.0 && (alpha - 1.0) * log_plus > 40.0 + std::log(alpha))
    return alpha * log_plus;
  if (alpha * log_plus > 600.0) {  // alpha near 1: scale by the power
    const double scaled = 1.0 - alpha * std::exp((1.0 - alpha) * log_plus);
    return alpha * log_plus + std::log(std::max(scaled, std::numeric_limits<double>::min()));
  }
  return std::log(std::expm1(alpha * log_plus) - alpha * u);
}

// log(A - 1) for any order: E over N(0, sigma^2) of (1 + u)^alpha - 1 - alpha u, where 1 + u is
// the ratio of the densities and E[u] = 0. The integrand is positive by Bernoulli's inequality and
// analytic within pi sigma^2 of the real line, so that equal steps converge exponentially.
double log_excess_fractional(double q, double sigma, double alpha) {
  const double step = std::min(0.25 * sigma, 0.4 * sigma * sigma);
  const double reach = 13.0 * sigma, log_q = std::log(q);
  const std::int64_t last = static_cast<std::int64_t>(std::ceil((alpha + reach) / step));
  const std::int64_t first = -static_cast<std::int64_t>(std::ceil(reach / step));
  LogSum sum;
  for (std::int64_t i = first; i <= last; ++i) {
    const double x = step * static_cast<double>(i);
    const double t = (x - 0.5) / (sigma * sigma);
    const bool huge = t > 600.0;
    const double log_plus = huge ? internal::log1p_exp(log_q + t) : std::log1p(q * std::expm1(t));
    const double u = huge ? std::expm1(log_plus) : q * std::expm1(t);
    const double z = x / sigma;
    sum.add(log_bernoulli_gap(u, log_plus, alpha) - 0.5 * z * z);
  }
  return sum.log() + std::log(step / sigma) - internal::kLogSqrtTwoPi;
}

// log A by the series of Section 3.3, split where the two densities of the mixture weigh the same,
// with the binomials of a fractional order, which alternate, taken absolutely.
double log_moment_absolute(double q, double sigma, double alpha) {
  const double log_q = std::log(q), log_not_q = std::log1p(-q);
  const double split = sigma * sigma * (log_not_q - log_q) + 0.5;
  LogSum sum;
  double log_binomial = 0.0, previous = kInfinity;
  for (int i = 0; i < 1'000'000; ++i) {
    const double k = i, j = alpha - k;
    const auto term = [&](double power, double other, double tail) {
      return log_binomial + power * log_q + other * log_not_q +
             0.5 * power * (power - 1.0) / sigma / sigma + internal::log_normal_tail(tail / sigma);
    };
    const double below = term(k, j, k - split), above = term(j, k, split - j);
    sum.add(below);
    sum.add(above);
    const double larger = std::max(below, above);
    if (i > alpha && larger < previous && larger < sum.log() - 30.0) break;
    previous = larger;
    log_binomial += std::log(std::abs(j) / (k + 1.0));
  }
  return sum.log();
}

bool is_integer(double order) { return order == std::floor(order) && order < 1e6; }

double log_moment(double q, double sigma, double order, FractionalMoment fractional) {
  if (is_integer(order))
    return internal::log1p_exp(log_excess_integer(q, sigma, static_cast<std::int64_t>(order)));
  if (fractional == FractionalMoment::kAbsoluteSeries && order < 1e6)
    return log_moment_absolute(q, sigma, order);
  if (sigma >= 0.05 && order < 1e6)
    return internal::log1p_exp(log_excess_fractional(q, sigma, order));
  // log A is convex in the order, and 0 at order 1.
  const double below = std::floor(order), above = below + 1.0;
  if (order >= 1e6) return order * (order - 1.0) / (2.0 * sigma * sigma);  // without subsampling
  const double at_below = below == 1.0 ? 0.0 : log_moment(q, sigma, below, fractional);
  const double at_above = log_moment(q, sigma, above, fractional);
  return at_above == kInfinity ? kInfinity : at_below + (order - below) * (at_above - at_below);
}

void check_curve(const std::vector<double>& orders, const std::vector<double>& rdp) {
  GRADUS_CHECK(kComponent, !orders.empty() && orders.size() == rdp.size(),
               "orders and rdp must have one size, > 0; got ", orders.size(), " and ", rdp.size());
  for (std::size_t i = 0; i < orders.size(); ++i) {
    GRADUS_CHECK(kComponent, orders[i] > 1.0 && std::isfinite(orders[i]),
                 "orders must be finite and > 1; got ", orders[i]);
    GRADUS_CHECK(kComponent, rdp[i] >= 0.0, "rdp must be >= 0; got ", rdp[i]);
  }
}

}  // namespace

const std::vector<double>& default_rdp_orders() {
  static const std::vector<double> orders = [] {
    std::vector<double> all;
    for (int i = 1; i < 100; ++i) all.push_back(1.0 + i / 10.0);
    for (int i = 11; i < 64; ++i) all.push_back(i);
    for (const double order : {128.0, 256.0, 512.0, 1024.0}) all.push_back(order);
    return all;
  }();
  return orders;
}

double sampled_gaussian_rdp(double sample_rate, double noise_multiplier, double order,
                            FractionalMoment fractional) {
  const double q = sample_rate, sigma = noise_multiplier;
  GRADUS_CHECK(kComponent, q >= 0.0 && q <= 1.0, "sample_rate must be in [0, 1]; got ", q);
  GRADUS_CHECK(kComponent, sigma >= 0.0, "noise_multiplier must be >= 0; got ", sigma);
  GRADUS_CHECK(kComponent, order > 1.0 && std::isfinite(order),
               "order must be finite and > 1; got ", order);
  if (q == 0.0 || sigma == kInfinity) return 0.0;
  if (sigma == 0.0) return kInfinity;
  const double unsampled = 0.5 * order / sigma / sigma;
  if (q == 1.0) return unsampled;
  // Subsampling never adds divergence (joint convexity).
  return std::min(unsampled, log_moment(q, sigma, order, fractional) / (order - 1.0));
}

std::vector<double> history_rdp(const History& history, const std::vector<double>& orders,
                                FractionalMoment fractional) {
  std::vector<double> total(orders.size(), 0.0);
  for (const GaussianSteps& entry : history.entries())
    for (std::size_t i = 0; i < orders.size(); ++i)
      total[i] +=
          static_cast<double>(entry.steps) *
          sampled_gaussian_rdp(entry.sample_rate, entry.noise_multiplier, orders[i], fractional);
  return total;
}

RdpEpsilon rdp_epsilon(const std::vector<double>& orders, const std::vector<double>& rdp,
                       double delta) {
  check_curve(orders, rdp);
  GRADUS_CHECK(kComponent, delta > 0.0 && delta < 1.0, "delta must be in (0, 1); got ", delta);
  RdpEpsilon best{.epsilon = kInfinity, .order = orders.front()};
  for (std::size_t i = 0; i < orders.size(); ++i) {
    const double order = orders[i];
    const double log_delta = std::log(delta), log_order = std::log(order);
    double epsilon = rdp[i] + std::log1p(-1.0 / order) - (log_delta + log_order) / (order - 1.0);
    // Up by more than rounding takes here and in rdp_log_delta, which multiplies by order - 1.
    epsilon += kRounding * (rdp[i] + (1.0 - log_delta + log_order) * (1.0 + 1.0 / (order - 1.0)));
    if (delta * delta * (1.0 - 4.0 * kRounding) + std::expm1(-rdp[i]) >= 0.0) epsilon = 0.0;
    if (epsilon < best.epsilon) best = {.epsilon = epsilon, .order = order};
  }
  best.epsilon = std::max(best.epsilon, 0.0);
  return best;
}

double rdp_log_delta(const std::vector<double>& orders, const std::vector<double>& rdp,
                     double epsilon) {
  check_curve(orders, rdp);
  GRADUS_CHECK(kComponent, epsilon >= 0.0, "epsilon must be >= 0; got ", epsilon);
  double least = 0.0;
  for (std::size_t i = 0; i < orders.size(); ++i) {
    const double order = orders[i];
    if (rdp[i] == kInfinity) continue;
    if (epsilon == kInfinity) return -kInfinity;
    const double markov =
        (order - 1.0) * (rdp[i] - epsilon + std::log1p(-1.0 / order)) - std::log(order);
    const double variation = 0.5 * std::log(-std::expm1(-rdp[i]));
    least = std::min({least, markov, variation});
  }
  return least;
}

}  // namespace gradus::privacy
