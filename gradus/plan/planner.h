#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <gradus/base/clock.h>
#include <gradus/offload/offload.h>
#include <gradus/plan/simulate.h>
#include <gradus/recompute/eviction_plan.h>
#include <gradus/recompute/step_trace.h>

namespace gradus::plan {

/// What a plan may use, and how long it may take to make.
struct PlanOptions {
  std::int64_t limit_bytes = 0;                 ///< Of all live device memory, > 0.
  bool recompute = true;                        ///< Results may be dropped and made again.
  std::optional<offload::Bandwidth> offload{};  ///< Results may be moved, at this speed.
  /// Results may be left to compression: one entry a call of the trace, bytes of 0 where it may
  /// not. Empty: none may.
  std::vector<CompressedResult> compressed{};
  double time_limit_s = 2.0;  ///< For the search, > 0; what must be done may pass it by a little.
  base::Clock clock = base::monotonic_clock();
};

/// Results of calls, by what becomes of them in a pass.
struct ResultCount {
  std::int64_t calls = 0;
  std::int64_t bytes = 0;
};

/// One plan that was tried, as simulated under the limit.
struct PlanCandidate {
  std::string name;
  bool feasible = false;
  std::int64_t peak_bytes = 0;  ///< Of all live device memory; if not feasible, up to its failure.
  double seconds = 0.0;         ///< Of a pass: the trace's, replays and moves.
  double replay_seconds = 0.0;
  double move_seconds = 0.0;
  std::int64_t runs_again = 0;  ///< Calls run again.
  // Of what autograd saves; a result that is both moved and made again counts as recomputed.
  ResultCount kept;        ///< Never dropped.
  ResultCount recomputed;  ///< Made again at least once.
  ResultCount offloaded;   ///< Moved at least once.
  ResultCount compressed;  ///< Left to compression; bytes in full.
};

/// The fastest plan found that fits, by simulation.
struct MemoryPlan {
  std::int64_t limit_bytes = 0;
  std::vector<recompute::Disposition> dispositions;  ///< Empty if online eviction is the plan.
  recompute::EvictionPlan eviction;                  ///< The same, for MemoryBudget::set_plan().
  Simulation simulation;
  std::int64_t predicted_peak_bytes = 0;
  double predicted_seconds = 0.0;     ///< Of a pass, forward and backward, recording included.
  double predicted_ratio = 1.0;       ///< Over a plain pass, which records nothing.
  std::int64_t plain_peak_bytes = 0;  ///< Of a pass that drops nothing.
  double plain_seconds = 0.0;         ///< Of a pass that records nothing.
  std::int64_t least_bytes = 0;       ///< Least limit at which a plan is known to fit.
  std::string method;                 ///< Name of the candidate that it came from.
  /// No way to drop and make again takes less time than this, says `bound_name`: "knapsack at the
  /// fullest moment" (what must be dropped there costs at least its own calls; holds for every
  /// plan), or a relaxation of the keep-or-drop program on the contracted trace (holds in the model
  /// of solve::evaluate). Empty name: nothing is known but 0.
  double bound_seconds = 0.0;
  std::string bound_name;
  double gap = 0.0;  ///< (replays and moves - bound) / (replays and moves); at least 0.
  std::int64_t graph_values = 0;          ///< Of the contracted trace.
  std::int64_t simulations = 0;           ///< Plans tried.
  std::vector<PlanCandidate> candidates;  ///< Fastest first, those that do not fit last.
  double planning_seconds = 0.0;
};

/// Chooses what a traced pass keeps, makes again, moves or leaves to compression so that it fits
/// @p options.limit_bytes and takes least time.
///
/// The trace is contracted to the results that backward wants; keep-or-drop choices of it (linear
/// relaxation and integer program after Checkmate, Jain et al. 2020; greedy; even segments; on a
/// chain the program of Beaumont et al. 2019) are made for several internal budgets and simulated
/// under the real limit, beside online eviction and lookahead eviction; the fastest that fits is
/// improved by local search on the simulator. Deterministic unless the time runs out.
/// @throws UserError if no plan fits, naming the least limit that one is known to fit, and on
///   options outside their ranges.
MemoryPlan make_plan(const recompute::StepTrace& trace, const PlanOptions& options);

/// Least limit of all live device memory under which a plan of this trace is known to fit, found by
/// bisection on the simulator, to a thousandth.
std::int64_t least_bytes(const recompute::StepTrace& trace, const PlanOptions& options);

}  // namespace gradus::plan
