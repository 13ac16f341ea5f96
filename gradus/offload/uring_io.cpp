#include <gradus/offload/file_io.h>

#ifdef GRADUS_HAS_LIBURING

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include <liburing.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <gradus/offload/internal/worker_pool.h>

namespace gradus::offload {
namespace {

constexpr unsigned kDepth = 32;
// Short enough that a large tensor does not hold up a small one, long enough to hide the call.
constexpr std::size_t kPieceBytes = 8 << 20;

// One transfer and how far it got.
struct Progress {
  Transfer transfer;
  std::size_t moved = 0;
};

// The ring belongs to its thread; other threads queue transfers and wake it through an eventfd
// whose read is always pending in the ring.
class UringIo final : public FileIo {
 public:
  static std::shared_ptr<FileIo> make() {
    auto io = std::shared_ptr<UringIo>(new UringIo);
    if (!io->open()) return nullptr;
    io->thread_ = std::thread([raw = io.get()] { raw->work(); });
    return io;
  }

  ~UringIo() override {
    if (thread_.joinable()) {
      {
        const std::lock_guard lock(mutex_);
        ending_ = true;
      }
      wake();
      thread_.join();
    }
    if (ring_open_) io_uring_queue_exit(&ring_);
    if (event_ >= 0) ::close(event_);
  }

  void start(Transfer transfer) override {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back({std::move(transfer), 0});
    }
    wake();
  }

  std::string_view name() const override { return "io_uring"; }

 private:
  UringIo() = default;

  bool open() {
    if (io_uring_queue_init(kDepth + 1, &ring_, 0) != 0) return false;
    ring_open_ = true;
    // READ and WRITE came with Linux 5.6, later than the ring itself.
    io_uring_probe* const probe = io_uring_get_probe_ring(&ring_);
    if (probe == nullptr) return false;
    const bool able = io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                      io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
    io_uring_free_probe(probe);
    event_ = able ? ::eventfd(0, EFD_CLOEXEC) : -1;
    return event_ >= 0;
  }

  void wake() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t count = ::write(event_, &one, sizeof one);
  }

  void work() {
    internal::block_signals();
    bool listening = false;
    unsigned running = 0;
    for (;;) {
      std::deque<Progress> fresh;
      {
        const std::lock_guard lock(mutex_);
        while (!waiting_.empty() && running + fresh.size() < kDepth) {
          fresh.push_back(std::move(waiting_.front()));
          waiting_.pop_front();
        }
        if (ending_ && fresh.empty() && running == 0) return;
      }
      for (Progress& progress : fresh) {
        queue(new Progress(std::move(progress)));
        ++running;
      }
      if (!listening) {
        io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
        io_uring_prep_read(entry, event_, &ticks_, sizeof ticks_, 0);
        io_uring_sqe_set_data(entry, nullptr);
        listening = true;
      }
      io_uring_submit_and_wait(&ring_, 1);
      io_uring_cqe* completion = nullptr;
      while (io_uring_peek_cqe(&ring_, &completion) == 0) {
        auto* const progress = static_cast<Progress*>(io_uring_cqe_get_data(completion));
        const int result = completion->res;
        io_uring_cqe_seen(&ring_, completion);
        if (progress == nullptr) {
          listening = false;
        } else if (!advance(*progress, result)) {
          delete progress;
          --running;
        }
      }
    }
  }

  void queue(Progress* progress) {
    const Transfer& t = progress->transfer;
    // Never null: at most kDepth transfers and the eventfd are in a ring of more entries.
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
    char* const data = static_cast<char*>(t.data) + progress->moved;
    const auto bytes = static_cast<unsigned>(std::min(kPieceBytes, t.bytes - progress->moved));
    const auto offset = static_cast<std::uint64_t>(t.offset) + progress->moved;
    if (t.write) {
      io_uring_prep_write(entry, t.file, data, bytes, offset);
    } else {
      io_uring_prep_read(entry, t.file, data, bytes, offset);
    }
    io_uring_sqe_set_data(entry, progress);
  }

  // Goes on with a transfer after a piece of it; false once it has ended.
  bool advance(Progress& progress, int result) {
    const Transfer& t = progress.transfer;
    if (result > 0) progress.moved += static_cast<std::size_t>(result);
    const bool again = result == -EINTR || result == -EAGAIN || result > 0;
    if (again && progress.moved < t.bytes) {
      queue(&progress);
      return true;
    }
    int error = result < 0 ? -result : 0;
    if (result == 0 && t.bytes > 0) error = t.write ? ENOSPC : kFileEnded;
    t.done(error);
    return false;
  }

  io_uring ring_{};
  bool ring_open_ = false;
  int event_ = -1;
  std::uint64_t ticks_ = 0;
  std::mutex mutex_;
  std::deque<Progress> waiting_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace

std::shared_ptr<FileIo> make_uring_io() { return UringIo::make(); }

}  // namespace gradus::offload

#else

namespace gradus::offload {
std::shared_ptr<FileIo> make_uring_io() { return nullptr; }
}  // namespace gradus::offload

#endif
