#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <gradus/compress/policy.h>
#include <gradus/offload/offload.h>
#include <gradus/plan/planner.h>
#include <gradus/recompute/memory_budget.h>
#include <gradus/recompute/step_trace.h>

namespace gradus::plan {

struct PlannedBudgetOptions {
  std::int64_t limit_bytes = 0;  ///< Of all live device memory, > 0; enforced.
  /// Also moves results, where that is cheaper than making them again. Of its options, target, disk
  /// and device count.
  std::optional<offload::OffloadOptions> offload{};
  /// Of the target of `offload`; unset: measured when the budget is made (a fraction of a second).
  std::optional<offload::Bandwidth> bandwidth{};
  /// Also leaves results to compression, where that is cheaper: losslessly, gradients stay bit for
  /// bit those of the plain program. What each takes is measured in a traced pass.
  bool compress = true;
  /// How; lossy methods only if its allow_lossy is set. Unset: losslessly, with the defaults.
  std::optional<compress::CompressOptions> compression{};
  double planning_seconds = 2.0;  ///< For each plan, > 0; the first takes a quarter.
  std::int64_t replan_after = 3;  ///< Strayed passes that make a new trace worth it, >= 1.
  std::int64_t max_programs = 4;  ///< Programs whose plans are kept, >= 1; the latest ones.
  std::int64_t max_plans = 16;    ///< Plans made in all, >= 1; then what has none has none.
  std::function<void(const MemoryPlan&)> on_plan{};  ///< Told of each plan, on the training thread.
};

/// A memory limit met by a plan, on an unmodified model:
///
///     gradus::plan::PlannedBudget budget({.limit_bytes = 600_MiB});
///     for (...) { model->forward(x).backward(); optimizer.step(); }
///
/// The first pass runs under online eviction, within the limit already, and is traced; what
/// compression makes half as large it keeps in that form. A plan is made before the second pass
/// from its bytes and times. The second pass is traced too, now with the optimizer's state and the
/// gradients in memory, and the plan made again from it. Later passes follow it.
///
/// Programs are told apart by their calls: training passes of two shapes, another loss. Each has a
/// plan of its own. After some passes that follow none, or where more is in memory before a pass
/// than there was, passes are traced again. Gradients are bit for bit those of the plain program,
/// unless lossy compression is allowed. Rules as for recompute::MemoryBudget: one a thread.
/// @throws UserError on options outside their ranges, and as the constructors of
///   offload::OffloadGuard and compress::CompressGuard.
class [[nodiscard]] PlannedBudget {
 public:
  explicit PlannedBudget(const PlannedBudgetOptions& options);
  ~PlannedBudget();
  PlannedBudget(const PlannedBudget&) = delete;
  PlannedBudget& operator=(const PlannedBudget&) = delete;

  /// The plan of the program that ran last; null before there is one, and while online eviction
  /// runs.
  std::shared_ptr<const MemoryPlan> plan() const;
  /// The trace it was made from; null as above.
  std::shared_ptr<const recompute::StepTrace> trace() const;
  /// Why there is no plan: the planner's refusal, that plans kept straying; "" otherwise.
  std::string refusal() const;
  std::int64_t plans_made() const;
  recompute::BudgetStatistics statistics() const;
  /// What compression did; of zeros where it is off.
  compress::CompressStatistics compression() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace gradus::plan
