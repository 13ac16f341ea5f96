#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <gradus/plan/planner.h>
#include <gradus/recompute/step_trace.h>

namespace gradus::plan {

/// What a plan does with the results of one operator's calls, of what autograd saves.
struct OperatorSummary {
  std::string op;
  std::int64_t calls = 0;
  std::int64_t bytes = 0;
  std::int64_t dropped_calls = 0;  ///< Made again, moved, or left to compression.
  std::int64_t dropped_bytes = 0;
  std::int64_t runs_again = 0;  ///< Also on the way to other results.
  double again_seconds = 0.0;
  std::int64_t fixed_calls = 0;  ///< Cannot be made again, and so are kept.
  std::int64_t fixed_bytes = 0;
};

/// By operator, the one with most dropped bytes first.
std::vector<OperatorSummary> summarise(const recompute::StepTrace& trace, const MemoryPlan& plan);

/// Text for people: the plan and why it was chosen, a table of the plans tried (milliseconds and
/// bytes; the fastest @p max_candidates that fit, and the rest as a count), what each operator's
/// results become, and what cannot be made again and is kept.
std::string describe(const recompute::StepTrace& trace, const MemoryPlan& plan,
                     std::size_t max_candidates = 12);

/// The same for programs: a JSON object with "limit_bytes", "predicted", "plain", "least_bytes",
/// "method", "bound", "candidates", "operators", "calls" (disposition and moments of each result)
/// and "timeline" (bytes of each moment: planned, and measured in the trace).
std::string to_json(const recompute::StepTrace& trace, const MemoryPlan& plan);

}  // namespace gradus::plan
