#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

namespace gradus::offload {

/// A transfer's error: the file ended before all bytes were read.
inline constexpr int kFileEnded = -1;

/// Moves bytes between memory and a file. The memory must stay as it is until done() was called.
struct Transfer {
  bool write = false;       ///< To the file; else from it.
  int file = -1;            ///< An open file descriptor.
  void* data = nullptr;     ///< Not changed by a write.
  std::size_t bytes = 0;    ///< All of them are moved, in as many calls as the kernel wants.
  std::int64_t offset = 0;  ///< In the file.
  /// Called once, from any thread, with 0, an errno value or kFileEnded. Must not throw.
  std::function<void(int error)> done;
};

/// Makes transfers while the program computes. Thread-safe. Its destructor finishes what was
/// started, and ends its threads.
class FileIo {
 public:
  virtual ~FileIo() = default;
  virtual void start(Transfer transfer) = 0;
  /// "io_uring", "threads".
  virtual std::string_view name() const = 0;
};

/// pread and pwrite on @p threads threads of its own. @throws UserError unless threads >= 1.
std::shared_ptr<FileIo> make_thread_io(int threads = 2);

/// One io_uring, driven by a thread of its own (Axboe 2019, "Efficient IO with io_uring"). Null
/// where the kernel has none or forbids it (old kernels, seccomp, kernel.io_uring_disabled), and in
/// builds without liburing.
std::shared_ptr<FileIo> make_uring_io();

/// Makes the transfer on the calling thread and returns its error.
int transfer_now(const Transfer& transfer);

}  // namespace gradus::offload
