#include <gradus/offload/offload.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_breakdown.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/offload/internal/session.h>
#include <gradus/offload/internal/store.h>

namespace gradus::offload {
namespace {

class SavingHooks final : public plane::saved::Hooks {
 public:
  explicit SavingHooks(std::shared_ptr<internal::Session> session) : session_(std::move(session)) {}
  std::optional<plane::saved::Packed> pack(const plane::saved::Value& value) override {
    return session_->pack(value);
  }

 private:
  std::shared_ptr<internal::Session> session_;
};

// A stored storage that an operator is about to change: versions do not tell, because views made by
// unsafe_chunk (in LSTM cells) have counters of their own.
class WriteWatcher final : public plane::op::Handler {
 public:
  explicit WriteWatcher(std::shared_ptr<internal::Session> session)
      : session_(std::move(session)) {}

  void call(plane::op::Call& call) override {
    const c10::FunctionSchema& schema = call.schema();
    if (schema.is_mutable()) {
      for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
        const c10::AliasInfo* const alias = schema.arguments()[i].alias_info();
        if (alias != nullptr && alias->isWrite()) note(call.arguments()[i]);
      }
    }
    call.proceed();
  }

 private:
  void note(const c10::IValue& value) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (tensor.defined() && tensor.has_storage()) session_->before_write(tensor.storage());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) note(tensor);
    }
  }

  std::shared_ptr<internal::Session> session_;
};

void check(const OffloadOptions& options) {
  GRADUS_CHECK("offload", options.staging_bytes > 0, "staging_bytes must be positive; got ",
               options.staging_bytes);
  GRADUS_CHECK("offload", options.window_bytes >= 0,
               "window_bytes must be >= 0 (0 reads nothing ahead); got ", options.window_bytes);
  GRADUS_CHECK("offload", options.min_bytes >= 0, "min_bytes must be >= 0; got ",
               options.min_bytes);
  GRADUS_CHECK("offload", options.clock != nullptr, "a clock is required; got none");
}

}  // namespace

OffloadGuard::OffloadGuard(OffloadOptions options) {
  check(options);
  session_ = std::make_shared<internal::Session>(std::move(options));
  relieving_ = std::make_shared<base::PressureGuard>(
      [session = session_](std::int64_t bytes) { return session->relieve(bytes); });
  watching_ = plane::op::push(plane::op::Order::gather, std::make_shared<WriteWatcher>(session_));
  saving_ =
      plane::saved::push(plane::saved::Order::offload, std::make_shared<SavingHooks>(session_));
}

OffloadGuard::~OffloadGuard() {
  if (session_ == nullptr) return;  // moved from
  saving_ = plane::saved::Guard();
  watching_ = plane::op::Guard();
  relieving_ = nullptr;
  session_->stop();
}

void OffloadGuard::flush() { session_->flush(/*report=*/true); }

OffloadStatistics OffloadGuard::statistics() const { return session_->statistics(); }

// --- Bandwidth ---------------------------------------------------------------------------------

double Bandwidth::write_s(std::int64_t bytes) const {
  return write_latency_s + static_cast<double>(bytes) / write_bytes_per_s;
}

double Bandwidth::read_s(std::int64_t bytes) const {
  return read_latency_s + static_cast<double>(bytes) / read_bytes_per_s;
}

namespace {

// Waits for one transfer and throws its error.
class Ending {
 public:
  internal::Store::Done done() {
    return [this](std::exception_ptr error) {
      const std::lock_guard lock(mutex_);
      error_ = std::move(error);
      ended_ = true;
      changed_.notify_all();
    };
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_; });
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::exception_ptr error_;
};

struct Times {
  double write_s = 0.0;
  double read_s = 0.0;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

Times time_transfers(internal::Store& store, const OffloadOptions& options, std::int64_t bytes,
                     const BandwidthOptions& how) {
  const c10::Storage storage = internal::make_storage(static_cast<std::size_t>(bytes), how.device,
                                                      base::MemoryCategory::workspace);
  if (how.device.is_cpu()) std::memset(storage.mutable_data(), 1, storage.nbytes());
  std::vector<double> writes;
  std::vector<double> reads;
  // The first round touches memory and file blocks for the first time; training steps do not.
  for (int round = -1; round < how.repeats; ++round) {
    const std::shared_ptr<internal::Place> place = store.reserve(storage.nbytes());
    const double start = options.clock();
    Ending written;
    store.write(place, storage, written.done());
    written.wait();
    const double middle = options.clock();
    Ending read;
    store.read(place, storage, read.done());
    read.wait();
    const double end = options.clock();
    if (round < 0) continue;
    writes.push_back(middle - start);
    reads.push_back(end - middle);
  }
  return {median(std::move(writes)), median(std::move(reads))};
}

}  // namespace

Bandwidth measure_bandwidth(const OffloadOptions& options, const BandwidthOptions& how) {
  constexpr std::int64_t kSmallBytes = 64 << 10;
  check(options);
  GRADUS_CHECK("offload", how.bytes >= 1 << 20, "a bandwidth is measured on at least 1 MiB; got ",
               how.bytes, " bytes");
  GRADUS_CHECK("offload", how.repeats >= 1, "at least 1 repeat is needed; got ", how.repeats);
  const std::shared_ptr<internal::Store> store = internal::make_store(options);
  const Times small = time_transfers(*store, options, kSmallBytes, how);
  const Times large = time_transfers(*store, options, how.bytes, how);
  store->stop();
  const auto line = [&](double small_s, double large_s, double& bytes_per_s, double& latency_s) {
    const auto more = static_cast<double>(how.bytes - kSmallBytes);
    // A clock too coarse to tell the two apart gives a finite rate all the same.
    bytes_per_s = more / std::max(large_s - small_s, 1e-9);
    latency_s = std::max(0.0, small_s - static_cast<double>(kSmallBytes) / bytes_per_s);
  };
  Bandwidth result;
  line(small.write_s, large.write_s, result.write_bytes_per_s, result.write_latency_s);
  line(small.read_s, large.read_s, result.read_bytes_per_s, result.read_latency_s);
  return result;
}

}  // namespace gradus::offload
