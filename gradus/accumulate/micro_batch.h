#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace gradus::accumulate {

struct MicroBatchOptions {
  std::int64_t largest = 0;  ///< Sizes beyond are not tried: the effective batch. >= 1.
  /// Of all live tensors of the process (base::Arena::device), > 0. Unset: whatever
  /// base::MemoryLimit is in force.
  std::optional<std::int64_t> limit_bytes = std::nullopt;
  /// Kept free for what training will need and the search does not make: optimizer state above all.
  std::int64_t reserve_bytes = 0;
};

/// One micro-batch size that was run.
struct MicroBatchTry {
  std::int64_t size = 0;
  bool fits = false;
  std::int64_t peak_bytes = 0;  ///< Highest total, with reserve_bytes; of a refused one: the total
                                ///< that the refused allocation would have made.
};

struct MicroBatchSearch {
  std::int64_t size = 0;        ///< The largest that fits.
  std::int64_t peak_bytes = 0;  ///< Its measured peak, reserve_bytes included.
  std::vector<MicroBatchTry> tries{};
  /// Bytes live after the search that were not before: caches of the model, made at first use.
  std::int64_t retained_bytes = 0;
};

/// "micro-batch 6: peak 590.1 MiB; tried 1, 2, 4, 8 refused, 6, 7 refused".
std::string describe(const MicroBatchSearch& search);

/// Finds the largest micro-batch that fits, by running it: sizes double until one is refused, then
/// the gap is halved.
///
/// Each try runs forward and backward twice, as a window does: the second time gradients exist and
/// the new ones come on top. Memory is released after each. Gradients of @p module, its buffers and
/// all random generators are afterwards as before; gradients that exist when it is called count as
/// live memory, so clear them first. Assumes that a larger micro-batch never takes less. Resets the
/// tracker's peak. For the CPU's arena, which stands for a small card; not thread-safe.
///
/// @param loss_of  The loss (a scalar) of a micro-batch of the given size. It must make its inputs
///                 itself, as training does, and keep nothing.
/// @throws UserError if not even one example fits, naming the bytes that it needs (measured by a
/// run
///         without limit); on a bad option and on a model that
///         is not on the CPU; what @p loss_of throws passes, with all restored.
MicroBatchSearch find_micro_batch(torch::nn::Module& module,
                                  const std::function<at::Tensor(std::int64_t size)>& loss_of,
                                  const MicroBatchOptions& options);

}  // namespace gradus::accumulate
