#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/base/clock.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_breakdown.h>

namespace gradus {

/// An allocation would pass a memory limit. Nothing was allocated; the program may go on.
class MemoryLimitError : public UserError {
 public:
  MemoryLimitError(const std::string& message, std::int64_t requested_bytes,
                   std::int64_t live_bytes, std::int64_t limit_bytes)
      : UserError(message),
        requested_bytes(requested_bytes),
        live_bytes(live_bytes),
        limit_bytes(limit_bytes) {}

  std::int64_t requested_bytes;  ///< Size of the refused allocation.
  std::int64_t live_bytes;       ///< Live in the arena when it was refused.
  std::int64_t limit_bytes;      ///< The arena's limit.
};

namespace base {

/// Where CPU memory is counted. On a CPU-only machine the device arena stands for the small card,
/// the host arena for the memory beside it.
enum class Arena : std::uint8_t { device, host };

struct MemoryTrackerOptions {
  Clock clock = monotonic_clock();  ///< Times the timeline's points.
};

/// One live allocation.
struct LiveBlock {
  std::int64_t bytes = 0;
  MemoryCategory category = MemoryCategory::workspace;
  const char* operator_name = nullptr;  ///< Static; nullptr if operators were not named.
};

/// Counts the bytes of all CPU tensors of the process, by arena and category, from any thread.
///
/// Sizes are those that tensors ask for: no allocator overhead. Memory that kernels take elsewhere
/// (oneDNN scratch pads, std::vector) and tensors over foreign memory (from_blob) are not seen, nor
/// are tensors older than install(). A new block counts as workspace, or as what the thread's
/// MemoryCategoryScope says, until attribute() or a SavedMark says otherwise.
/// Thread-safe. Costs about 0.1 microseconds an allocation.
class MemoryTracker {
 public:
  /// Replaces LibTorch's CPU allocator for the rest of the process; later calls return the same
  /// tracker. Call it before other threads allocate.
  static MemoryTracker& install(MemoryTrackerOptions options = {});
  /// The tracker, or nullptr before install().
  static MemoryTracker* installed();

  MemoryBreakdown live(Arena arena = Arena::device) const;
  /// The breakdown at the moment of the highest total since the last reset_peak().
  MemoryBreakdown peak(Arena arena = Arena::device) const;
  void reset_peak(Arena arena = Arena::device);
  /// The highest total of the device arena since the last call, for one observer that follows a
  /// program closely; leaves peak() alone.
  std::int64_t lap_peak();
  /// The same, with all totals on the way that were the highest so far, ascending; the last is the
  /// peak. Recorded from the first call on, until lap_peak() is called.
  std::vector<std::int64_t> lap_levels();

  /// Says what the storage of @p tensor holds. Returns false if the tracker does not own that
  /// storage.
  bool attribute(const at::Tensor& tensor, MemoryCategory category);

  /// The @p count largest live blocks, largest first.
  std::vector<LiveBlock> largest(std::size_t count, Arena arena = Arena::device) const;

  /// Records the device arena at every change, until stop_timeline(). At most @p max_points are
  /// kept: neighbours are merged, the higher of two survives.
  void start_timeline(std::size_t max_points = 4096);
  MemoryTimeline stop_timeline();

  MemoryTracker(const MemoryTracker&) = delete;
  MemoryTracker& operator=(const MemoryTracker&) = delete;

 private:
  explicit MemoryTracker(MemoryTrackerOptions options);
  ~MemoryTracker() = delete;
};

/// What allocations of this thread hold while the scope lives.
class [[nodiscard]] MemoryCategoryScope {
 public:
  explicit MemoryCategoryScope(MemoryCategory category);
  ~MemoryCategoryScope();
  MemoryCategoryScope(const MemoryCategoryScope&) = delete;
  MemoryCategoryScope& operator=(const MemoryCategoryScope&) = delete;

 private:
  MemoryCategory previous_;
};

/// Where allocations of this thread are counted while the scope lives (the device arena by
/// default).
class [[nodiscard]] ArenaScope {
 public:
  explicit ArenaScope(Arena arena);
  ~ArenaScope();
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena previous_;
};

/// Counts a workspace tensor as an activation for as long as at least one mark on its storage
/// lives. Parameters, gradients, optimizer state and inputs stay what they are. Keeps the storage
/// alive.
class SavedMark {
 public:
  SavedMark() = default;
  explicit SavedMark(const at::Tensor& tensor);
  SavedMark(SavedMark&& other) noexcept;
  SavedMark& operator=(SavedMark&& other) noexcept;
  ~SavedMark();

 private:
  void release();
  c10::Storage storage_;
  std::uint64_t number_ = 0;  // of the marked allocation; 0: none
};

/// Records which operator made each block, while it lives: for LiveBlock::operator_name.
class [[nodiscard]] OperatorNaming {
 public:
  OperatorNaming();
  ~OperatorNaming();
  OperatorNaming(const OperatorNaming&) = delete;
  OperatorNaming& operator=(const OperatorNaming&) = delete;
};

struct MemoryLimitOptions {
  std::int64_t device_bytes = 0;  ///< Limit of the device arena; 0 is none.
  std::int64_t host_bytes = 0;    ///< Limit of the host arena; 0 is none.
};

/// A hard limit: while it lives, an allocation past it throws MemoryLimitError, which names the
/// operator, the limit and the largest live tensors. Installs the tracker. A nested limit replaces
/// the outer one until it ends. While any limit lives, each operator is named at a cost of about
/// 0.1 microseconds.
/// @throws UserError on a negative limit.
class [[nodiscard]] MemoryLimit {
 public:
  explicit MemoryLimit(MemoryLimitOptions options);
  ~MemoryLimit();
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;

 private:
  OperatorNaming naming_;
  MemoryLimitOptions previous_;
};

/// Frees device memory so that an allocation of @p needed_bytes more than fits can go on; returns
/// whether it freed anything. Called on the thread that allocates, which may be in the middle of an
/// operator: it may drop references to tensors, and must not allocate device memory itself.
using PressureHandler = std::function<bool(std::int64_t needed_bytes)>;

/// Has @p handler asked before the device arena's limit refuses an allocation, while it lives. A
/// nested one is asked first.
class [[nodiscard]] PressureGuard {
 public:
  explicit PressureGuard(PressureHandler handler);
  ~PressureGuard();
  PressureGuard(const PressureGuard&) = delete;
  PressureGuard& operator=(const PressureGuard&) = delete;

 private:
  std::shared_ptr<PressureHandler> handler_;
};

/// Bytes of one device.
struct DeviceMemory {
  std::int64_t live_bytes = 0;
  std::int64_t peak_bytes = 0;
};

/// Live and peak tensor bytes of any device: the tracker's device arena for the CPU, the caching
/// allocator's own statistics for an accelerator.
/// @throws UserError if the tracker is not installed (CPU) or the device keeps no statistics.
DeviceMemory device_memory(c10::Device device);

}  // namespace base
}  // namespace gradus
