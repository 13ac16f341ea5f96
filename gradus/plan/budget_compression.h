#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <gradus/compress/policy.h>
#include <gradus/plan/simulate.h>
#include <gradus/plane/saved/saved_plane.h>
#include <gradus/recompute/memory_budget.h>
#include <gradus/recompute/step_trace.h>

namespace gradus::plan {

/// Compression as a choice of the plans that a recompute::MemoryBudget follows: what they leave is
/// kept in a smaller form, and traced passes say what the smaller form of each value would take.
///
///     BudgetCompression compression({});
///     MemoryBudget budget({.limit_bytes = limit, .encoder = compression.encoder()});
///     compression.begin_pass(1.0);
///     budget.trace([&](const StepTrace& pass) { options.compressed = compression.results(pass); },
///                  [&](const auto& value, auto call) { compression.saved(value, call); });
///
/// Make it before the budget and end it on the thread that made it; what was encoded is given back
/// whether or not it still lives.
class [[nodiscard]] BudgetCompression {
 public:
  /// @param options  Their `on_save` does not count: nothing is encoded but for the budget.
  /// @throws UserError as compress::CompressGuard.
  explicit BudgetCompression(const compress::CompressOptions& options);
  ~BudgetCompression();
  BudgetCompression(const BudgetCompression&) = delete;
  BudgetCompression& operator=(const BudgetCompression&) = delete;

  /// For recompute::MemoryBudgetOptions.
  std::shared_ptr<recompute::Encoder> encoder() const;

  /// Forgets what was measured. Of the next pass, values are measured until @p seconds are spent
  /// on it, > 0.
  void begin_pass(double seconds);
  /// Measures a value that autograd saves, as MemoryBudget::trace() tells of it.
  void saved(const plane::saved::Value& value, std::int64_t call);
  /// What each call of @p pass, just traced, would take in smaller form: PlanOptions::compressed.
  std::vector<CompressedResult> results(const recompute::StepTrace& pass) const;

  compress::CompressStatistics statistics() const;
  compress::RoundingState rounding() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradus::plan
