#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradus::recompute {

/// What becomes of a call's results when memory is short.
enum class Disposition : std::uint8_t {
  keep,       ///< Dropped last of all.
  recompute,  ///< Dropped first, and made again when backward asks for it.
  offload,    ///< Moved away by the budget's Stash, and fetched when backward asks for it.
  leave,      ///< Kept in a smaller form by the budget's Encoder; where there is none, not taken:
              ///< saved-tensor hooks of later orders get it.
};

/// One call of the pass, as in StepTrace::calls.
struct PlannedCall {
  std::string op;          ///< Must match, or the rest of the pass runs as without a plan.
  std::int64_t bytes = 0;  ///< As op.
  Disposition disposition = Disposition::keep;
  std::vector<std::int64_t> reads;  ///< Moments at which backward asks for its results, ascending.
};

/// What a MemoryBudget does at its calls and when memory is short.
///
/// Nothing is dropped before an allocation asks for room. Then go, in this order, as many results
/// as are needed: those nobody has asked for (made on the way to another), those to recompute or
/// offload, the one read last first, and those to keep, by cost / (bytes * moments until the next
/// read). A pass that differs from the plan goes on without it, by DTR's rule.
struct EvictionPlan {
  std::vector<PlannedCall> calls;
};

}  // namespace gradus::recompute
