#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <gradus/base/memory_breakdown.h>

namespace gradus::train {

/// How one optimizer step is computed: in how many micro-batches, and how many of the model's
/// segments are recomputed in backward (the first ones; they hold their activations longest).
struct Plan {
  std::int64_t micro_batches = 1;
  std::int64_t recomputed = 0;
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

/// "micro-batch 4 (8 of them), 3 of 6 blocks recomputed".
std::string describe_plan(const Plan& plan, std::int64_t batch, std::int64_t segments);

/// What one trial of a plan measured. Peaks are of all live device memory.
struct Trial {
  base::MemoryTimeline first;  ///< Forward and backward of the step's first micro-batch.
  base::MemoryTimeline
      second;  ///< Of a later one, which adds to gradients that exist; empty if there is none.
  std::int64_t optimizer_peak_bytes = 0;
  double seconds = 0.0;  ///< Of one micro-batch, forward and backward.

  std::int64_t peak_bytes() const;
};

/// Runs one trial: micro-batches of @p size sequences with @p recomputed segments, two of them if
/// @p accumulating. Returns nothing if the memory limit refused it.
using TrialRunner = std::function<std::optional<Trial>(std::int64_t size, std::int64_t recomputed,
                                                       bool accumulating)>;

/// A plan with what is known of it.
struct PlanCandidate {
  Plan plan;
  std::int64_t peak_bytes = 0;  ///< Predicted.
  double seconds = 0.0;         ///< Of one optimizer step's forwards and backwards, predicted.
};

struct PlanChoice {
  Plan plan;
  std::int64_t predicted_peak_bytes = 0;
  std::int64_t trial_peak_bytes = 0;  ///< Measured on the chosen plan, under the limit.
  std::int64_t plain_peak_bytes =
      0;  ///< Predicted for the whole batch at once, nothing recomputed; 0 if unknown.
  std::string reason;
  std::vector<PlanCandidate> candidates;  ///< Those predicted to fit, fastest first.
};

/// Predicts the peak of micro-batches of @p size sequences from trials of two smaller sizes of the
/// same program: they allocate and free in the same order, so each moment's live memory is a linear
/// function of the size, and the peak the largest of them. Falls back to the line through the two
/// peaks if the programs differ.
std::int64_t predict_peak(const Trial& small, std::int64_t small_size, const Trial& large,
                          std::int64_t large_size, std::int64_t size, bool accumulating);

/// Finds the fastest plan that fits: measures micro-batches of two and three sequences for several
/// numbers of recomputed segments, predicts memory and time of every plan from them, tries the best
/// ones under the limit, and takes the fastest that is proved to fit.
/// @throws UserError if even one sequence with everything recomputed does not fit.
PlanChoice choose_plan(std::int64_t batch, std::int64_t segments, std::int64_t limit_bytes,
                       const TrialRunner& run);

}  // namespace gradus::train
