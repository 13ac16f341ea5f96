#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/base/clock.h>
#include <gradus/plane/op/op_plane.h>
#include <gradus/plane/saved/saved_plane.h>

namespace gradus::base {
class PressureGuard;
}

namespace gradus::offload {

class FileIo;

/// Where tensors go.
enum class Target : std::uint8_t {
  host,    ///< Host memory: the host arena on a CPU, pinned memory beside an accelerator.
  disk,    ///< A temporary file.
  device,  ///< Another device, OffloadOptions::device.
};

/// How files are read and written.
enum class FileAccess : std::uint8_t {
  automatic,  ///< io_uring where the kernel allows it, threads elsewhere.
  io_uring,   ///< UserError where it is not allowed.
  threads,    ///< pread and pwrite on a pool of threads.
};

struct DiskOptions {
  /// An existing directory with room for what is offloaded; "" is an error.
  std::string directory;
  FileAccess access = FileAccess::automatic;
  /// Threads of FileAccess::threads, >= 1.
  int threads = 2;
  /// Gives the file a name while it lives. It is removed when the guard and the last graph end;
  /// what a killed process leaves is removed by the next start in the directory. Without, the file
  /// has no name and vanishes with the process.
  bool named_file = false;
  /// Replaces the means of access: a program's own, or one that fails on purpose.
  std::shared_ptr<FileIo> io;
};

struct OffloadOptions {
  Target target = Target::host;
  DiskOptions disk;                         ///< For Target::disk.
  c10::Device device = c10::Device("cpu");  ///< For Target::device; not the CPU.

  /// Smaller tensors stay: their transfer costs more than they weigh.
  std::int64_t min_bytes = 64 << 10;
  /// Only what these operators save ("aten::gelu"); empty is all.
  std::vector<std::string> operators;
  /// Nothing that these operators save.
  std::vector<std::string> except_operators;
  /// The last word: true to offload. Called on the thread that saves, for values that passed all
  /// else.
  std::function<bool(const plane::saved::Value&)> policy;
  /// Also tensors with a name (base::NamedTensors): parameters and buffers, which live anyway.
  bool named_tensors = false;
  /// Tensors that are never offloaded, nor views of them: parameters without a name, the batch.
  std::vector<at::Tensor> resident;

  /// Bytes on the device that wait to be written, at most; a larger tensor is written before the
  /// next operator runs. > 0.
  std::int64_t staging_bytes = 64 << 20;
  /// Bytes on the device that are read ahead of backward, at most; 0 reads nothing ahead.
  std::int64_t window_bytes = 64 << 20;
  base::Clock clock = base::monotonic_clock();  ///< Times the waits.
};

/// What an OffloadGuard did since it was made.
struct OffloadStatistics {
  std::int64_t tensors_out = 0;    ///< Written; a tensor saved several times counts once.
  std::int64_t bytes_out = 0;      ///< Written.
  std::int64_t tensors_in = 0;     ///< Read back.
  std::int64_t bytes_in = 0;       ///< Read back.
  std::int64_t shared_saves = 0;   ///< Saves of a storage that was stored already.
  std::int64_t kept_saves = 0;     ///< Saves left to autograd: policy, size, names, layout.
  std::int64_t cancelled = 0;      ///< Writes that were dropped unmade, their graph being gone.
  std::int64_t stored_bytes = 0;   ///< In the target now, or on the way there.
  std::int64_t waiting_bytes = 0;  ///< On the device now only because their write has not ended.

  std::int64_t uses = 0;             ///< Tensors that backward asked for.
  std::int64_t resident_hits = 0;    ///< Of these: were still on the device, so nothing was read.
  std::int64_t prefetch_hits = 0;    ///< Of these: read ahead, and ready.
  std::int64_t prefetch_late = 0;    ///< Of these: being read ahead, and waited for.
  std::int64_t prefetch_misses = 0;  ///< Of these: read on demand.

  double write_wait_s = 0.0;  ///< Forward stood still for room in the staging buffer.
  double read_wait_s = 0.0;   ///< Backward stood still for bytes.
  std::string access;         ///< "memory", "io_uring", "threads", "device".
};

namespace internal {
class Session;
}

/// While it lives, what autograd saves on this thread is kept elsewhere, and comes back in backward
/// with the same bytes, sizes and strides (Rhu et al. 2016, "vDNN"; Rajbhandari et al. 2021,
/// "ZeRO-Infinity").
///
/// A storage is moved as a whole, once, however many saved tensors view it, and only if no operator
/// changed it in between. Writes run beside forward. In backward, what was saved before the tensor
/// asked for is read ahead, in reverse order of saving, up to window_bytes. Let the guard live
/// until backward has ended: without it what was saved still comes back, but nothing is read ahead.
/// Its destructor waits for writes and ends all its threads; file space is freed with the graphs.
/// Under a base::MemoryLimit, what was read ahead gives way to what the program computes.
///
/// A transfer that fails is a UserError that names the place and the cause: from the next operator
/// that saves, from flush(), or from backward. The program may go on after it.
///
///     const gradus::offload::OffloadGuard guard({.target = gradus::offload::Target::host});
///     auto loss = model->forward(x);
///     loss.backward();
class [[nodiscard]] OffloadGuard {
 public:
  /// @throws UserError on options outside their ranges, on a directory that cannot be written to,
  /// and on FileAccess::io_uring where there is none.
  explicit OffloadGuard(OffloadOptions options = {});
  ~OffloadGuard();
  OffloadGuard(OffloadGuard&&) noexcept = default;
  OffloadGuard& operator=(OffloadGuard&&) = delete;
  OffloadGuard(const OffloadGuard&) = delete;

  /// Waits until all transfers have ended. @throws UserError if a write failed.
  void flush();
  OffloadStatistics statistics() const;

 private:
  std::shared_ptr<internal::Session> session_;
  std::shared_ptr<base::PressureGuard> relieving_;
  plane::op::Guard watching_;
  plane::saved::Guard saving_;
};

/// Cost of a transfer of n bytes: latency_s + n / bytes_per_s.
struct Bandwidth {
  double write_bytes_per_s = 0.0;
  double write_latency_s = 0.0;
  double read_bytes_per_s = 0.0;
  double read_latency_s = 0.0;

  double write_s(std::int64_t bytes) const;  ///< Predicted seconds.
  double read_s(std::int64_t bytes) const;   ///< Predicted seconds.
};

struct BandwidthOptions {
  std::int64_t bytes = 16 << 20;            ///< Of one large transfer, >= 1 MiB.
  int repeats = 5;                          ///< The median counts; >= 1.
  c10::Device device = c10::Device("cpu");  ///< Where the tensors live.
};

/// Measures the target of @p options by the way that OffloadGuard uses: large transfers and small
/// ones in turn. A file's reads come from the page cache unless the file outgrows it, as they do in
/// a training step. @throws UserError as OffloadGuard does, and if a transfer fails.
Bandwidth measure_bandwidth(const OffloadOptions& options, const BandwidthOptions& how = {});

}  // namespace gradus::offload
