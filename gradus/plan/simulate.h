#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <gradus/offload/offload.h>
#include <gradus/recompute/eviction_plan.h>
#include <gradus/recompute/step_trace.h>

namespace gradus::plan {

/// What is left of a call's results where compression takes them (Disposition::leave).
struct CompressedResult {
  std::int64_t bytes = 0;       ///< Of the smaller form; 0: not known, counts as in full.
  double encode_seconds = 0.0;  ///< Once, when autograd saves it.
  double decode_seconds = 0.0;  ///< For each read.
};

struct SimulationOptions {
  offload::Bandwidth stash{};                  ///< Of what is offloaded; bytes/s of 0: free.
  std::vector<CompressedResult> compressed{};  ///< One a call, or empty.
};

/// One pass under a limit, on sizes and times alone.
struct Simulation {
  bool feasible = false;
  std::int64_t failed_moment = -1;  ///< First moment that did not fit; the rest is up to there.
  std::int64_t peak_bytes = 0;      ///< Of all live device memory.
  double replay_seconds = 0.0;      ///< Calls run again.
  double move_seconds = 0.0;        ///< To the stash and back, and compression.
  std::int64_t moved_bytes = 0;     ///< To the stash.
  std::int64_t evictions = 0;
  std::vector<std::int32_t> runs_again;    ///< One a call.
  std::vector<std::int32_t> moves;         ///< To the stash; one a call.
  std::vector<std::int64_t> moment_bytes;  ///< Peak of each moment, replays included.
};

namespace internal {
struct TraceTables;
}

/// Runs a traced pass under a limit as recompute::MemoryBudget does: nothing is dropped before an
/// allocation does not fit; then results go in the order that EvictionPlan states, or by DTR's rule
/// (Kirisame et al. 2021) without a plan; a dropped one that is read is made again from what is in
/// memory, depth first, its inputs pinned.
///
/// The model: a result is in memory while the program holds it (to held_until) and, if autograd
/// saved it, until it is dropped or released. At a moment all results in memory and the moment's
/// other_bytes count at once; during a replay, between two calls of the program, the rest_bytes of
/// the first, with the workspace of the replayed call (its moment's other_bytes beyond its rest).
/// What was made on the way stays until it is dropped, or nothing can need it any more.
///
/// Construction takes time linear in the trace; a run of thousands of calls takes milliseconds
/// with a plan. run() is const and may be called from several threads.
class Simulator {
 public:
  /// @throws UserError on a trace whose moments, inputs or sizes contradict each other.
  explicit Simulator(const recompute::StepTrace& trace, SimulationOptions options = {});
  ~Simulator();
  Simulator(Simulator&&) noexcept;
  Simulator& operator=(Simulator&&) noexcept;

  /// @param plan  A disposition for each call; empty: online eviction.
  /// @param limit_bytes  0: no limit.
  /// @throws UserError if @p plan has another size than the trace.
  Simulation run(const std::vector<recompute::Disposition>& plan, std::int64_t limit_bytes) const;

 private:
  std::unique_ptr<const internal::TraceTables> tables_;
};

/// Simulator for one run.
Simulation simulate(const recompute::StepTrace& trace, const recompute::EvictionPlan& plan,
                    std::int64_t limit_bytes, SimulationOptions options = {});

/// The plan that gives each call of @p trace its disposition.
recompute::EvictionPlan eviction_plan(const recompute::StepTrace& trace,
                                      const std::vector<recompute::Disposition>& dispositions);

}  // namespace gradus::plan
