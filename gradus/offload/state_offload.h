#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/offload/offload.h>

namespace gradus::offload {

/// Keeps tensors that a training step uses once, as an optimizer's state, elsewhere in between. The
/// tensors stay the same objects: only the memory behind their storages comes and goes, so that the
/// optimizer and all views of them notice nothing.
///
///     StateOffload state(state_tensors, {.target = Target::disk, .disk = {.directory =
///     "/scratch"}}); for (...) {
///       state.offload();    // the device holds none of it during forward and backward
///       model->forward(x).backward();
///       state.fetch();      // before the step
///       optimizer.step();
///     }
///
/// Of OffloadOptions, target, disk, device, min_bytes, staging_bytes and clock count. Not
/// thread-safe. While they are away, using the tensors in operators is undefined (there is no
/// memory behind them): check away().
class StateOffload {
 public:
  /// Takes what is on hand: make it once the state exists (after an optimizer's first step).
  /// Tensors below min_bytes, and those over memory that LibTorch does not own, stay where they
  /// are.
  /// @throws UserError as OffloadGuard's constructor.
  explicit StateOffload(std::vector<at::Tensor> tensors, OffloadOptions options = {});
  /// Brings back what is away. Tensors whose bytes cannot be read stay without memory: call fetch()
  /// before, to be told.
  ~StateOffload();
  StateOffload(const StateOffload&) = delete;
  StateOffload& operator=(const StateOffload&) = delete;

  /// Moves the tensors out, and returns when their memory is free.
  /// @throws UserError if a transfer fails; that tensor stays, and fetch() brings the others back.
  void offload();
  /// Starts to bring back at most @p bytes (all by default); does not wait. Memory for them is
  /// taken at once. @throws MemoryLimitError if there is none.
  void prefetch(std::int64_t bytes = INT64_MAX);
  /// Brings all tensors back. @throws UserError if a transfer fails; fetch() may be called again.
  void fetch();
  /// True while some of the tensors are elsewhere.
  bool away() const;
  /// Uses count tensors fetched; waits are the seconds spent in offload() and fetch().
  OffloadStatistics statistics() const;

 private:
  class Items;
  std::shared_ptr<Items> items_;
};

}  // namespace gradus::offload
