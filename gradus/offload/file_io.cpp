#include <gradus/offload/file_io.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include <unistd.h>

#include <gradus/base/error.h>
#include <gradus/offload/internal/worker_pool.h>

namespace gradus::offload {
namespace {

class ThreadIo final : public FileIo {
 public:
  explicit ThreadIo(int threads) : pool_(threads) {}
  void start(Transfer transfer) override {
    pool_.run([t = std::move(transfer)] { t.done(transfer_now(t)); });
  }
  std::string_view name() const override { return "threads"; }

 private:
  internal::WorkerPool pool_;
};

}  // namespace

int transfer_now(const Transfer& t) {
  std::size_t moved = 0;
  while (moved < t.bytes) {
    char* const data = static_cast<char*>(t.data) + moved;
    const off_t offset = t.offset + static_cast<std::int64_t>(moved);
    const ssize_t count = t.write ? ::pwrite(t.file, data, t.bytes - moved, offset)
                                  : ::pread(t.file, data, t.bytes - moved, offset);
    if (count < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    // A write that moves nothing and gives no reason would repeat for ever.
    if (count == 0) return t.write ? ENOSPC : kFileEnded;
    moved += static_cast<std::size_t>(count);
  }
  return 0;
}

std::shared_ptr<FileIo> make_thread_io(int threads) {
  GRADUS_CHECK("offload", threads >= 1, "file transfers need at least 1 thread; got ", threads);
  return std::make_shared<ThreadIo>(threads);
}

}  // namespace gradus::offload
