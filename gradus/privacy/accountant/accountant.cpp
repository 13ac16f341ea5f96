#include <gradus/privacy/accountant/accountant.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/gaussian.h>
#include <gradus/privacy/accountant/internal/log_space.h>
#include <gradus/privacy/accountant/rdp.h>
#include <gradus/privacy/accountant/truncated_sampling.h>

namespace gradus::privacy {
namespace {

using internal::kInfinity;

constexpr const char* kComponent = "privacy_accountant";

bool without_noise(const History& history) {
  return std::any_of(history.entries().begin(), history.entries().end(),
                     [](const GaussianSteps& entry) {
                       return entry.sample_rate > 0.0 && entry.noise_multiplier == 0.0;
                     });
}

bool full_batches(const History& history) {
  return std::all_of(history.entries().begin(), history.entries().end(),
                     [](const GaussianSteps& entry) {
                       return entry.sample_rate == 0.0 || entry.sample_rate == 1.0;
                     });
}

const std::vector<double>& orders_of(const AccountantOptions& options) {
  return options.rdp_orders.empty() ? default_rdp_orders() : options.rdp_orders;
}

// Epsilon as if no batch was ever cut.
double poisson_epsilon(const History& history, double delta, const AccountantOptions& options) {
  switch (options.kind) {
    case AccountantKind::kPld:
      return full_batches(history) ? gaussian_epsilon(delta, exact_mu(history))
                                   : pld_epsilon(history, delta, options.pld);
    case AccountantKind::kPrv:
      return prv_epsilon(history, delta, options.prv).upper;
    case AccountantKind::kRdp:
      return rdp_epsilon(orders_of(options), history_rdp(history, orders_of(options)), delta)
          .epsilon;
    case AccountantKind::kGaussian:
      return gaussian_epsilon(delta, exact_mu(history));
    case AccountantKind::kGdpApproximation:
      return gaussian_epsilon(delta, approximate_mu(history));
  }
  GRADUS_INTERNAL_CHECK(kComponent, false, "unknown kind of accountant");
}

double poisson_log_delta(const History& history, double epsilon, const AccountantOptions& options) {
  switch (options.kind) {
    case AccountantKind::kPld:
    case AccountantKind::kPrv:  // its errors are set for one delta; PLD's bound is the smaller one
      return full_batches(history) ? gaussian_log_delta(epsilon, exact_mu(history))
                                   : pld_log_delta(history, epsilon, options.pld);
    case AccountantKind::kRdp:
      return rdp_log_delta(orders_of(options), history_rdp(history, orders_of(options)), epsilon);
    case AccountantKind::kGaussian:
      return gaussian_log_delta(epsilon, exact_mu(history));
    case AccountantKind::kGdpApproximation:
      return gaussian_log_delta(epsilon, approximate_mu(history));
  }
  GRADUS_INTERNAL_CHECK(kComponent, false, "unknown kind of accountant");
}

}  // namespace

const char* name(AccountantKind kind) {
  switch (kind) {
    case AccountantKind::kPld:
      return "pld";
    case AccountantKind::kPrv:
      return "prv";
    case AccountantKind::kRdp:
      return "rdp";
    case AccountantKind::kGaussian:
      return "gaussian";
    case AccountantKind::kGdpApproximation:
      return "gdp-approximation";
  }
  GRADUS_INTERNAL_CHECK(kComponent, false, "unknown kind of accountant");
}

bool is_upper_bound(AccountantKind kind) { return kind != AccountantKind::kGdpApproximation; }

double epsilon_of(const History& history, double delta, const AccountantOptions& options) {
  GRADUS_CHECK(kComponent, delta > 0.0 && delta < 1.0, "delta must be in (0, 1); got ", delta);
  const double log_cut = log_truncation_probability(history);
  if (without_noise(history)) return kInfinity;
  if (log_cut == -kInfinity) return poisson_epsilon(history, delta, options);
  // delta(epsilon) + (1 + e^epsilon) cut falls and then rises. From below, each round leaves what
  // truncation costs at the last epsilon; the first that does not grow is valid, and every valid
  // one is larger.
  double epsilon = 0.0;
  for (int round = 0; round < 200; ++round) {
    const double left = delta - std::exp(log_cut) - std::exp(log_cut + epsilon);
    if (!(left > 0.0)) return kInfinity;
    const double next = poisson_epsilon(history, left, options);
    if (next <= epsilon) return epsilon;
    if (next == kInfinity) return next;
    // A last bit more, so that rounds end.
    epsilon = next * (1.0 + 1e-9);
  }
  return kInfinity;
}

double delta_of(const History& history, double epsilon, const AccountantOptions& options) {
  GRADUS_CHECK(kComponent, epsilon >= 0.0, "epsilon must be >= 0; got ", epsilon);
  if (epsilon == kInfinity) return 0.0;
  if (without_noise(history)) return 1.0;
  internal::LogSum sum;
  sum.add(poisson_log_delta(history, epsilon, options));
  const double log_cut = log_truncation_probability(history);
  sum.add(log_cut);
  sum.add(log_cut + epsilon);
  if (sum.log() == -kInfinity) return 0.0;
  return std::clamp(std::exp(sum.log()), std::numeric_limits<double>::denorm_min(), 1.0);
}

Accountant::Accountant(AccountantOptions options, History history)
    : options_(std::move(options)), history_(std::move(history)) {
  for (const double order : options_.rdp_orders)
    GRADUS_CHECK(kComponent, order > 1.0 && std::isfinite(order),
                 "rdp_orders must be finite and > 1; got ", order);
}

}  // namespace gradus::privacy
