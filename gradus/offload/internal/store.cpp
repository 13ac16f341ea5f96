#include <gradus/offload/internal/store.h>

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <utility>

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/offload/file_io.h>
#include <gradus/offload/internal/temporary_file.h>
#include <gradus/offload/internal/worker_pool.h>

namespace gradus::offload::internal {
namespace {

at::Tensor bytes_of(const c10::Storage& storage) {
  return at::empty({0}, at::TensorOptions().dtype(at::kByte).device(storage.device()))
      .set_(storage, 0, {static_cast<std::int64_t>(storage.nbytes())}, {1});
}

// Host memory that an accelerator reads and writes directly.
at::Tensor pinned_bytes(std::size_t bytes) {
  return at::empty({static_cast<std::int64_t>(bytes)},
                   at::TensorOptions().dtype(at::kByte).pinned_memory(true));
}

std::exception_ptr attempt(const std::function<void()>& work) noexcept {
  try {
    work();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

// A pool that runs jobs on the calling thread once it was stopped.
class Jobs {
 public:
  explicit Jobs(int threads) : pool_(std::make_unique<WorkerPool>(threads)) {}
  void run(std::function<void()> job) {
    {
      const std::lock_guard lock(mutex_);
      if (pool_ != nullptr) return pool_->run(std::move(job));
    }
    job();
  }
  void stop() {
    std::unique_ptr<WorkerPool> pool;
    const std::lock_guard lock(mutex_);
    pool = std::move(pool_);
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<WorkerPool> pool_;
};

// --- Host memory -------------------------------------------------------------------------------

class HostPlace final : public Place {
 public:
  explicit HostPlace(std::size_t bytes) : bytes(bytes) {}
  std::size_t bytes;
  c10::DataPtr data;  // taken only when the bytes come, so that queued writes hold no room
  at::Tensor pinned;  // instead of data, for storages of an accelerator
};

class HostStore final : public Store {
 public:
  std::shared_ptr<Place> reserve(std::size_t bytes) override {
    return std::make_shared<HostPlace>(bytes);
  }

  void write(const std::shared_ptr<Place>& place, const c10::Storage& source, Done done) override {
    auto& room = static_cast<HostPlace&>(*place);
    if (!source.device().is_cpu()) {
      done(attempt([&] {
        room.pinned = pinned_bytes(room.bytes);
        room.pinned.copy_(bytes_of(source));
      }));
      return;
    }
    jobs_.run([&room, from = source.data(), done = std::move(done)] {
      done(attempt([&] {
        const base::ArenaScope host(base::Arena::host);
        const base::MemoryCategoryScope category(base::MemoryCategory::activations);
        room.data = c10::GetAllocator(c10::kCPU)->allocate(room.bytes);
        std::memcpy(room.data.get(), from, room.bytes);
      }));
    });
  }

  void read(const std::shared_ptr<Place>& place, const c10::Storage& target, Done done) override {
    auto& room = static_cast<HostPlace&>(*place);
    if (!target.device().is_cpu()) {
      done(attempt([&] { bytes_of(target).copy_(room.pinned); }));
      return;
    }
    jobs_.run([&room, to = target.mutable_data(), done = std::move(done)] {
      std::memcpy(to, room.data.get(), room.bytes);
      done(nullptr);
    });
  }

  void stop() override { jobs_.stop(); }
  std::string access() const override { return "memory"; }

 private:
  Jobs jobs_{1};
};

// --- Another device ----------------------------------------------------------------------------

class DevicePlace final : public Place {
 public:
  at::Tensor data;
};

class DeviceStore final : public Store {
 public:
  explicit DeviceStore(c10::Device device) : device_(device) {
    GRADUS_CHECK("offload", !device.is_cpu() && at::getAccelerator() == device.type(),
                 "Target::device needs a device of this build's accelerator; got ", device.str(),
                 ". For memory beside the processor take Target::host");
  }
  std::shared_ptr<Place> reserve(std::size_t) override { return std::make_shared<DevicePlace>(); }
  void write(const std::shared_ptr<Place>& place, const c10::Storage& source, Done done) override {
    auto& room = static_cast<DevicePlace&>(*place);
    done(attempt([&] { room.data = bytes_of(source).to(device_); }));
  }
  void read(const std::shared_ptr<Place>& place, const c10::Storage& target, Done done) override {
    auto& room = static_cast<DevicePlace&>(*place);
    done(attempt([&] { bytes_of(target).copy_(room.data); }));
  }
  void stop() override {}
  std::string access() const override { return "device"; }

 private:
  c10::Device device_;
};

// --- Disk --------------------------------------------------------------------------------------

// Four lanes of multiply and add over 8-byte words: about as fast as memory. Finds files changed by
// others (a truncated file that grew again reads as zeros); no defence against intent.
std::uint64_t checksum(const void* data, std::size_t bytes) {
  constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15ULL;
  std::uint64_t lanes[4] = {1, 2, 3, 4};
  const char* p = static_cast<const char*>(data);
  std::size_t left = bytes;
  for (; left >= 32; left -= 32, p += 32) {
    std::uint64_t words[4];
    std::memcpy(words, p, 32);
    for (int i = 0; i < 4; ++i) lanes[i] = (lanes[i] ^ words[i]) * kFactor;
  }
  std::uint64_t sum = bytes;
  for (const std::uint64_t lane : lanes) sum = (sum ^ (lane ^ (lane >> 29))) * kFactor;
  for (; left > 0; --left, ++p) sum = (sum ^ static_cast<unsigned char>(*p)) * kFactor;
  return sum ^ (sum >> 32);
}

class DiskPlace final : public Place {
 public:
  DiskPlace(std::shared_ptr<TemporaryFile> file, std::size_t bytes)
      : file(std::move(file)),
        bytes(bytes),
        offset(this->file->take(static_cast<std::int64_t>(bytes))) {}
  ~DiskPlace() override { file->give_back(offset, static_cast<std::int64_t>(bytes)); }

  std::shared_ptr<TemporaryFile> file;
  std::size_t bytes;
  std::int64_t offset;
  std::uint64_t sum = 0;
};

std::exception_ptr failure(const DiskPlace& place, bool write, const std::string& cause,
                           const char* cure) {
  return std::make_exception_ptr(UserError(base::join(
      "[offload] ", write ? "writing " : "reading ",
      base::format_bytes(static_cast<std::int64_t>(place.bytes)), write ? " to " : " from ",
      place.file->description(), " at offset ", place.offset, " failed: ", cause, ". ", cure)));
}

std::exception_ptr failure(const DiskPlace& place, bool write, int error) {
  if (error == 0) return nullptr;
  if (error == kFileEnded) {
    return failure(place, write, "the file ends earlier",
                   "Another program has truncated it; keep others out of the directory");
  }
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  return failure(place, write, std::strerror(error),
                 full ? "Free space there, name another directory, or offload less (min_bytes, "
                        "operators, policy)"
                      : "Check the disk, or name another directory");
}

std::shared_ptr<FileIo> make_io(const DiskOptions& options) {
  if (options.io != nullptr) return options.io;
  if (options.access != FileAccess::threads) {
    if (std::shared_ptr<FileIo> io = make_uring_io()) return io;
    GRADUS_CHECK("offload", options.access != FileAccess::io_uring,
                 "FileAccess::io_uring needs a kernel (5.6 or later) that allows io_uring, and a "
                 "build with liburing; this process has none. Take FileAccess::automatic");
  }
  return make_thread_io(options.threads);
}

class DiskStore final : public Store {
 public:
  explicit DiskStore(const DiskOptions& options)
      : file_(std::make_shared<TemporaryFile>(options.directory, options.named_file)),
        io_(make_io(options)),
        access_(io_->name()) {}

  std::shared_ptr<Place> reserve(std::size_t bytes) override {
    return std::make_shared<DiskPlace>(file_, bytes);
  }

  void write(const std::shared_ptr<Place>& place, const c10::Storage& source, Done done) override {
    auto& room = static_cast<DiskPlace&>(*place);
    at::Tensor staged;
    const void* data = source.data();
    if (!source.device().is_cpu()) {
      const std::exception_ptr error = attempt([&] {
        staged = pinned_bytes(room.bytes);
        staged.copy_(bytes_of(source));
      });
      if (error != nullptr) return done(error);
      data = staged.const_data_ptr();
    }
    start({true, file_->descriptor(), const_cast<void*>(data), room.bytes, room.offset,
           [&room, data, staged, done = std::move(done)](int error) {
             if (error == 0) room.sum = checksum(data, room.bytes);
             done(failure(room, true, error));
           }});
  }

  void read(const std::shared_ptr<Place>& place, const c10::Storage& target, Done done) override {
    auto& room = static_cast<DiskPlace&>(*place);
    at::Tensor staged;
    void* data = target.mutable_data();
    if (!target.device().is_cpu()) {
      const std::exception_ptr error = attempt([&] { staged = pinned_bytes(room.bytes); });
      if (error != nullptr) return done(error);
      data = staged.mutable_data_ptr();
    }
    start({false, file_->descriptor(), data, room.bytes, room.offset,
           [&room, data, staged, target, done = std::move(done)](int error) {
             std::exception_ptr problem = failure(room, false, error);
             if (problem == nullptr && checksum(data, room.bytes) != room.sum) {
               problem = failure(room, false, "the bytes are not those that were written",
                                 "Another program has changed the file, or the disk is failing");
             }
             if (problem == nullptr && staged.defined()) {
               problem = attempt([&] { bytes_of(target).copy_(staged); });
             }
             done(problem);
           }});
  }

  void stop() override {
    std::shared_ptr<FileIo> io;
    std::unique_lock lock(mutex_);
    // A thread that still holds what a transfer held could be the last to hold this store, and with
    // it the access whose thread it is.
    returned_.wait(lock, [this] { return loans_ == 0; });
    io = std::move(io_);
  }
  std::string access() const override { return access_; }

 private:
  // Lives as long as the access holds a transfer.
  class Loan {
   public:
    explicit Loan(DiskStore& store) : store_(store) {}  // under store.mutex_
    ~Loan() {
      const std::lock_guard lock(store_.mutex_);
      --store_.loans_;
      store_.returned_.notify_all();
    }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;

   private:
    DiskStore& store_;
  };

  // Members go in reverse order: all that the transfer holds, then the loan.
  struct LentDone {
    std::shared_ptr<Loan> loan;
    std::function<void(int)> done;
    void operator()(int error) const { done(error); }
  };

  void start(Transfer transfer) {
    std::shared_ptr<FileIo> io;
    {
      const std::lock_guard lock(mutex_);
      io = io_;
      if (io != nullptr) {
        auto loan = std::make_shared<Loan>(*this);
        ++loans_;
        transfer.done = LentDone{std::move(loan), std::move(transfer.done)};
      }
    }
    if (io != nullptr) return io->start(std::move(transfer));
    transfer.done(transfer_now(transfer));
  }

  std::shared_ptr<TemporaryFile> file_;
  std::mutex mutex_;
  std::condition_variable returned_;
  int loans_ = 0;
  std::shared_ptr<FileIo> io_;  // none once stopped
  std::string access_;
};

}  // namespace

std::shared_ptr<Store> make_store(const OffloadOptions& options) {
  switch (options.target) {
    case Target::host:
      return std::make_shared<HostStore>();
    case Target::disk:
      GRADUS_CHECK("offload", options.disk.threads >= 1, "disk.threads must be at least 1; got ",
                   options.disk.threads);
      return std::make_shared<DiskStore>(options.disk);
    case Target::device:
      return std::make_shared<DeviceStore>(options.device);
  }
  GRADUS_INTERNAL_CHECK("offload", false, "no such target");
}

c10::Storage make_storage(std::size_t bytes, c10::Device device, base::MemoryCategory category) {
  const c10::OptionalDeviceGuard guard(device.is_cpu() ? c10::optional<c10::Device>() : device);
  const base::MemoryCategoryScope scope(category);
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<std::int64_t>(bytes),
      c10::GetAllocator(device.type()), /*resizable=*/true);
}

}  // namespace gradus::offload::internal
