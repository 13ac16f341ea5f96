#include <gradus/privacy/accountant/accountant.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/gaussian.h>
#include <gradus/privacy/accountant/internal/log_space.h>
#include <gradus/privacy/accountant/internal/privacy_curve.h>
#include <gradus/privacy/accountant/rdp.h>
#include <gradus/privacy/accountant/truncated_sampling.h>

namespace gradus::privacy {
namespace {

using internal::kInfinity;
using internal::PrivacyCurve;

constexpr const char* kComponent = "privacy_accountant";
constexpr double kLeastDelta = std::numeric_limits<double>::denorm_min();
// Part of delta left, so that rounding does not bring the way back above it.
constexpr double kMargin = 1e-8;
constexpr double kRough = 12.0;  // coarseness to look around with

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

// RDP, and the exact and the approximate Gaussian: formulas.
class FormulaCurve final : public PrivacyCurve {
 public:
  FormulaCurve(const History& history, const AccountantOptions& options)
      : orders_(options.kind == AccountantKind::kRdp ? orders_of(options) : std::vector<double>{}),
        rdp_(history_rdp(history, orders_)),
        mu_(options.kind == AccountantKind::kRdp                ? 0.0
            : options.kind == AccountantKind::kGdpApproximation ? approximate_mu(history)
                                                                : exact_mu(history)),
        // No bound is made of an approximation.
        touched_(options.kind == AccountantKind::kGdpApproximation
                     ? 0.0
                     : internal::log_touched(history)) {}

  double epsilon(double delta) override {
    if (touched_ <= std::log(delta)) return 0.0;
    return orders_.empty() ? gaussian_epsilon(delta, mu_)
                           : rdp_epsilon(orders_, rdp_, delta).epsilon;
  }
  double log_delta(double epsilon) override {
    return std::min(touched_, orders_.empty() ? gaussian_log_delta(epsilon, mu_)
                                              : rdp_log_delta(orders_, rdp_, epsilon));
  }
  double log_delta_near(double epsilon, double /*near*/) override { return log_delta(epsilon); }

 private:
  std::vector<double> orders_;  // empty: a Gaussian
  std::vector<double> rdp_;
  double mu_;
  double touched_;
};

class NoNoiseCurve final : public PrivacyCurve {
 public:
  double epsilon(double /*delta*/) override { return kInfinity; }
  double log_delta(double epsilon) override { return epsilon == kInfinity ? -kInfinity : 0.0; }
  double log_delta_near(double epsilon, double /*near*/) override { return log_delta(epsilon); }
};

// delta + (1 + e^epsilon) eta, where eta bounds the chance that a batch was cut.
class TruncatedCurve final : public PrivacyCurve {
 public:
  TruncatedCurve(std::unique_ptr<PrivacyCurve> whole, double log_cut)
      : whole_(std::move(whole)), log_cut_(log_cut) {}

  // Seen over t = eta e^epsilon, what the uncut curve needs with delta - eta - t left is convex and
  // grows: the least fixed point is approached from below by secants, that never pass it.
  double epsilon(double delta) override {
    const double most = delta - std::exp(log_cut_);
    double t = std::exp(log_cut_), previous_t = 0.0, previous_gap = 0.0;  // epsilon 0
    for (int round = 0; round < kRounds; ++round) {
      const double left = most - t;
      if (!(left > 0.0)) return kInfinity;
      const double epsilon = std::max(0.0, std::log(t) - log_cut_);
      const double next = whole_->epsilon(left);
      if (next <= epsilon) return epsilon;
      const double next_t = std::exp(log_cut_ + next), gap = next_t - t;
      if (!(gap > 0.0)) return next;  // truncation is below the last bit of delta
      double aim = next_t;
      if (round > 0) {
        const double slope = (gap - previous_gap) / (t - previous_t);
        if (slope >= 0.0) return kInfinity;  // convex: it only grows from here
        aim = t - gap / slope;
      }
      previous_t = t, previous_gap = gap;
      // A little more, so that rounds end.
      t = std::max(aim, next_t) * (1.0 + 1e-9);
    }
    return kInfinity;
  }

  double log_delta(double epsilon) override {
    return with_cut(whole_->log_delta(epsilon), epsilon);
  }
  double log_delta_near(double epsilon, double near) override {
    return with_cut(whole_->log_delta_near(epsilon, near), epsilon);
  }

 private:
  static constexpr int kRounds = 60;

  double with_cut(double log_delta, double epsilon) const {
    internal::LogSum sum;
    sum.add(log_delta);
    sum.add(log_cut_);
    sum.add(log_cut_ + epsilon);
    return std::min(0.0, sum.log());
  }

  std::unique_ptr<PrivacyCurve> whole_;
  double log_cut_;
};

std::unique_ptr<PrivacyCurve> with_truncation(const History& history,
                                              std::unique_ptr<PrivacyCurve> curve) {
  const double log_cut = log_truncation_probability(history);
  if (log_cut == -kInfinity) return curve;
  return std::make_unique<TruncatedCurve>(std::move(curve), log_cut);
}

// As if no batch was ever cut.
std::unique_ptr<PrivacyCurve> poisson_curve(const History& history,
                                            const AccountantOptions& options, bool rough) {
  if (without_noise(history)) return std::make_unique<NoNoiseCurve>();
  const bool pld = options.kind == AccountantKind::kPld;
  if (rough && !full_batches(history)) return internal::pld_curve(history, options.pld, kRough);
  if (pld && !full_batches(history)) return internal::pld_curve(history, options.pld);
  if (options.kind == AccountantKind::kPrv)
    return internal::prv_curve(history, options.prv, options.pld);
  return std::make_unique<FormulaCurve>(history, options);
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

std::unique_ptr<PrivacyCurve> internal::curve_of(const History& history,
                                                 const AccountantOptions& options) {
  return with_truncation(history, poisson_curve(history, options, /*rough=*/false));
}

std::unique_ptr<PrivacyCurve> internal::rough_curve_of(const History& history,
                                                       const AccountantOptions& options) {
  const bool slow = options.kind == AccountantKind::kPld || options.kind == AccountantKind::kPrv;
  return with_truncation(history, poisson_curve(history, options, slow));
}

double epsilon_of(const History& history, double delta, const AccountantOptions& options) {
  GRADUS_CHECK(kComponent, delta > 0.0 && delta < 1.0, "delta must be in (0, 1); got ", delta);
  return internal::curve_of(history, options)
      ->epsilon(std::max(delta * (1.0 - kMargin), kLeastDelta));
}

double delta_of(const History& history, double epsilon, const AccountantOptions& options) {
  GRADUS_CHECK(kComponent, epsilon >= 0.0, "epsilon must be >= 0; got ", epsilon);
  if (epsilon == kInfinity) return 0.0;
  const double log_delta = internal::curve_of(history, options)->log_delta(epsilon);
  if (log_delta == -kInfinity) return 0.0;
  return std::clamp(std::exp(log_delta), kLeastDelta, 1.0);
}

Accountant::Accountant(AccountantOptions options, History history)
    : options_(std::move(options)), ledger_(std::move(history)) {
  for (const double order : options_.rdp_orders)
    GRADUS_CHECK(kComponent, order > 1.0 && std::isfinite(order),
                 "rdp_orders must be finite and > 1; got ", order);
}

}  // namespace gradus::privacy
