#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace gradus::offload::internal {

/// Blocks all signals on the calling thread: a write past RLIMIT_FSIZE then fails with EFBIG, where
/// SIGXFSZ would end the process, and the program's own handlers run on its own threads.
void block_signals();

/// Threads that run jobs in turn. The destructor runs what is queued and ends them.
class WorkerPool {
 public:
  explicit WorkerPool(int threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  /// @p job must not throw.
  void run(std::function<void()> job);

 private:
  void work();
  void end() noexcept;

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> jobs_;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace gradus::offload::internal
