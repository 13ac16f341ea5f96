#pragma once

#include <vector>

#include <gradus/privacy/accountant/history.h>
#include <gradus/privacy/accountant/ledger.h>
#include <gradus/privacy/accountant/privacy_loss.h>

namespace gradus::privacy {

/// How epsilon is found. docs/privacy_accountant.md compares cost and tightness.
enum class AccountantKind {
  kPld,               ///< Privacy loss distribution: an upper bound, the tightest.
  kPrv,               ///< Privacy random variables: an upper bound, about epsilon_error above.
  kRdp,               ///< Renyi divergences (moments accountant): an upper bound, loose and fast.
  kGaussian,          ///< Exact; full batches only (sample rate 1).
  kGdpApproximation,  ///< Central limit: NOT a bound. The true epsilon may be larger.
};

/// "pld", "prv", "rdp", "gaussian" or "gdp-approximation".
const char* name(AccountantKind kind);

/// Whether the kind's epsilon is never below the true one. Only kGdpApproximation's may be.
bool is_upper_bound(AccountantKind kind);

struct AccountantOptions {
  AccountantKind kind = AccountantKind::kPld;
  std::vector<double> rdp_orders = {};  ///< Each finite and > 1; empty is default_rdp_orders().
  PldOptions pld = {};
  PrvOptions prv = {};
};

/// Epsilon of @p history at @p delta, add or remove one example; in [0, infinity].
///
/// Where an entry limits its batches, the least epsilon at which delta plus the cost of truncation
/// (truncated_sampling.h) is within @p delta; infinity if the truncation alone costs more.
/// @param delta  In (0, 1). @throws UserError on other values, or kGaussian on a sample rate in (0,
/// 1).
double epsilon_of(const History& history, double delta, const AccountantOptions& options = {});

/// Delta of @p history at @p epsilon >= 0; in [0, 1]. Values below the least double give that.
/// delta_of(epsilon_of(delta)) <= delta for each kind. For kPrv it is the smaller of its own and
/// PLD's.
double delta_of(const History& history, double epsilon, const AccountantOptions& options = {});

/// Keeps the history of a training run and answers what it has spent.
///
///     Accountant accountant({.kind = AccountantKind::kRdp});
///     accountant.add({.noise_multiplier = 1.1, .sample_rate = 256.0 / 60000.0});  // at each step
///     double spent = accountant.epsilon(1e-5);
///     saved = accountant.ledger().records();
///
///     Accountant resumed({.kind = AccountantKind::kRdp});
///     resumed.merge(saved);
///
/// What was counted stays counted. Copies go on by themselves: merged again, what both had when the
/// copy was made counts once, and what each counted since adds up (Ledger). Several threads may ask
/// at once, while none adds.
class Accountant {
 public:
  /// @param history  Released about the same data before: it counts.
  explicit Accountant(AccountantOptions options = {}, History history = {});

  /// @throws UserError as History::add.
  void add(const GaussianSteps& steps) { ledger_.add(steps); }
  /// Counts what @p others tell of and this does not know: Ledger::merge.
  void merge(const std::vector<Releases>& others) { ledger_.merge(others); }
  /// Ledger::rename_run.
  void rename_run(const RunId& run) { ledger_.rename_run(run); }

  /// @throws UserError as epsilon_of.
  double epsilon(double delta) const { return epsilon_of(history(), delta, options_); }
  double delta(double epsilon) const { return delta_of(history(), epsilon, options_); }

  const History& history() const { return ledger_.total(); }
  const Ledger& ledger() const { return ledger_; }
  const AccountantOptions& options() const { return options_; }

 private:
  AccountantOptions options_;
  Ledger ledger_;
};

}  // namespace gradus::privacy
