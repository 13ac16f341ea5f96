#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradus::train {

/// How one optimizer step is computed: in how many micro-batches, and how each of them fits. Either
/// a number of the model's segments is recomputed in backward (the first ones; they hold their
/// activations longest), or the passes run under a recompute::MemoryBudget.
struct Plan {
  std::int64_t micro_batches = 1;
  std::int64_t recomputed = 0;
  bool budget = false;  ///< What autograd saved is dropped when memory is short, and made again.
  bool operator==(const Plan&) const = default;

  /// Sequences of the largest micro-batch: ceil(batch / micro_batches).
  std::int64_t largest(std::int64_t batch) const {
    return (batch + micro_batches - 1) / micro_batches;
  }
  /// Sizes of the micro-batches of a batch of @p batch sequences: equal but for one, the larger
  /// ones first.
  std::vector<std::int64_t> sizes(std::int64_t batch) const;
};

/// What the configuration asks for.
struct PlanRequest {
  bool automatic = false;
  Plan plan;  ///< If not automatic.
};

/// Reads "auto", "none" (one micro-batch, nothing recomputed) or "micro-batch=N,recompute=N".
/// @throws UserError on anything else, or numbers outside the batch and the segments.
PlanRequest parse_plan_request(const std::string& text, std::int64_t batch, std::int64_t segments);

/// "micro-batch 4 (8 a step), 3 of 6 blocks recomputed".
std::string describe_plan(const Plan& plan, std::int64_t batch, std::int64_t segments);

}  // namespace gradus::train
