#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace gradus::solve {

inline constexpr std::int64_t kNotSaved = -1;

/// A value that a forward pass makes. Positions count operators: those of forward first, those of
/// backward behind them.
struct GraphValue {
  std::int64_t bytes = 0;
  double recompute_ms = 0.0;           ///< Of the operator that makes it.
  std::vector<std::int64_t> inputs{};  ///< Values it is made from, all before it. Leave out what is
                                       ///< always in memory, as parameters.
  std::int64_t made = 0;               ///< Forward position.
  std::int64_t last_forward_use = 0;   ///< Forward position, >= made.
  std::int64_t first_backward_use = kNotSaved;  ///< Backward position; kNotSaved if backward does
                                                ///< not want it.
  std::int64_t last_backward_use = kNotSaved;   ///< >= first_backward_use.
  bool must_keep = false;                       ///< Cannot be made again: a side effect, say.
};

/// The values of one training step, in the order in which they are made.
struct ValueGraph {
  std::vector<GraphValue> values;
  std::int64_t forward_positions = 0;
  /// Bytes of all else that is alive at each position, forward and backward: parameters, gradients,
  /// transients. Its size is the number of positions.
  std::vector<std::int64_t> base_bytes;
};

/// One flag a value: kept from forward to its last use in backward.
using KeepSet = std::vector<bool>;

/// What a choice costs in the model below.
struct KeepCost {
  bool possible = false;  ///< No value that cannot be made again has to be.
  std::int64_t peak_bytes = 0;
  double recompute_ms = 0.0;
  std::vector<std::int64_t> position_bytes;
};

/// Runs one step on sizes and times alone.
///
/// The model: a value is alive from where it is made to its last use in forward. A kept one stays
/// until backward, and replays that read it, are done with it. Another one that is wanted in
/// backward is made again where it is first wanted, from its inputs, which are made again too where
/// they are not kept; it stays alive from there to its last use by backward or a replay. Nothing is
/// thus made more than twice. All that is alive at any moment of a position counts there at once.
/// @throws UserError on an invalid graph or a set of another size.
KeepCost evaluate(const ValueGraph& graph, const KeepSet& keep);

enum class KeepBound : std::uint8_t {
  none,               ///< Nothing is known but 0.
  kept_values,        ///< Linear relaxation that counts kept values and no replayed ones.
  linear_relaxation,  ///< Linear relaxation of the exact program.
  integer_program,    ///< Best bound of branch and cut on the exact program.
};
std::string_view to_string(KeepBound bound);

struct KeepOptions {
  std::int64_t budget_bytes = 0;  ///< Peak allowed, base_bytes included.
  double time_limit_s = 5.0;      ///< For everything, > 0; presolve may pass it by a little.
  double relative_gap = 0.0;      ///< Stop once gap() is no larger; 0 goes on to a proof.
  std::int64_t max_program_terms = 150'000;  ///< The exact program is not built beyond this size; 0
                                             ///< leaves it out.
};

struct KeepPlan {
  bool feasible = false;         ///< A choice within the budget was found.
  bool proven = false;           ///< Optimal, or infeasible, beyond doubt.
  KeepSet keep;                  ///< If not feasible: the choice of least peak found.
  double recompute_ms = 0.0;     ///< Of `keep`, by evaluate(); as the next.
  std::int64_t peak_bytes = 0;   ///< If not feasible: the least budget known to be enough.
  double bound_ms = 0.0;         ///< No choice within the budget costs less, says `bound_name`.
  std::int64_t bound_bytes = 0;  ///< least_peak() only: no choice has a lower peak, says
                                 ///< `bound_name`.
  KeepBound bound_name = KeepBound::none;

  /// (recompute_ms - bound_ms) / recompute_ms; 0 if nothing is recomputed.
  double gap() const;
};

/// Chooses which values to keep so that the peak stays within the budget and the least time goes
/// into making values again.
///
/// Rounds the linear relaxation that counts kept values only, starts from even segments and the
/// greedy choice too, and searches locally. Up to max_program_terms it then solves the exact mixed
/// integer program, in the manner of Checkmate (Jain et al. 2020) but with each value made again
/// once at most, by Cbc. The result never exceeds the budget in evaluate(). Deterministic unless
/// the time runs out.
/// @throws UserError on an invalid graph or option.
KeepPlan choose_kept(const ValueGraph& graph, const KeepOptions& options);

/// Least peak of any choice, by the same means: what a budget must not be below.
/// The budget is not read; `feasible` is true, bound_ms 0. `proven` says that no choice has a lower
/// peak; else bound_bytes says how much lower one might be.
KeepPlan least_peak(const ValueGraph& graph, const KeepOptions& options = {});

/// The baseline: keeps everything, then drops, while over the budget, the value alive and idle at
/// the peak with the least cost / (bytes * staleness), where cost includes the dropped values that
/// it would be made from (Kirisame et al. 2021, "Dynamic Tensor Rematerialization", h_DTR).
/// Milliseconds for thousands of values; no bound.
KeepPlan drop_greedily(const ValueGraph& graph, std::int64_t budget_bytes);

}  // namespace gradus::solve
