#include <gradus/offload/state_offload.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <unordered_set>
#include <utility>

#include <c10/core/Storage.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_breakdown.h>
#include <gradus/offload/internal/store.h>

namespace gradus::offload {
namespace {

enum class Where : std::uint8_t { here, leaving, away, coming };

struct Item {
  c10::Storage storage;
  std::size_t bytes = 0;
  c10::Device device = c10::Device("cpu");
  Where where = Where::here;
  std::shared_ptr<internal::Place> place;
  c10::Storage incoming;     // the bytes read back, until they are put in place
  std::exception_ptr error;  // of the last transfer
};

}  // namespace

// Item states change under the mutex; done callbacks touch nothing else, and the calling thread
// moves the memory.
class StateOffload::Items {
 public:
  Items(const std::vector<at::Tensor>& tensors, OffloadOptions options)
      : options_(std::move(options)), store_(internal::make_store(options_)) {
    options_.disk.io = nullptr;  // the store's alone
    std::unordered_set<const c10::StorageImpl*> seen;
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined() || !tensor.has_storage()) continue;
      const c10::Storage& storage = tensor.storage();
      const auto bytes = static_cast<std::int64_t>(storage.nbytes());
      if (bytes < std::max<std::int64_t>(options_.min_bytes, 1) || !storage.resizable() ||
          !seen.insert(storage.unsafeGetStorageImpl()).second) {
        ++statistics_.kept_saves;
        continue;
      }
      Item& item = items_.emplace_back();
      item.storage = storage;
      item.bytes = storage.nbytes();
      item.device = storage.device();
    }
    statistics_.access = store_->access();
  }

  ~Items() {
    wait_for_transfers();
    store_->stop();
  }

  void offload() {
    const double start = options_.clock();
    wait_for_transfers();
    settle_arrivals();
    std::size_t finished = 0;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      if (where(items_[i]) != Where::here) continue;
      // Released as they end, in order, while later ones still move.
      while (running_bytes() > options_.staging_bytes) release(finished, i);
      depart(items_[i]);
    }
    wait_for_transfers();
    release(finished, items_.size());
    statistics_.write_wait_s += options_.clock() - start;
    throw_first_error();
  }

  void prefetch(std::int64_t bytes) {
    for (Item& item : items_) {
      if (where(item) != Where::away) continue;
      if (static_cast<std::int64_t>(item.bytes) > bytes) return;
      bytes -= static_cast<std::int64_t>(item.bytes);
      arrive(item);
    }
  }

  void fetch() {
    const double start = options_.clock();
    std::exception_ptr refused;  // memory for one; what came before it is put in place all the same
    for (Item& item : items_) {
      const Where now = where(item);
      if (now == Where::here) continue;
      if (now == Where::away) {
        try {
          arrive(item);
        } catch (...) {
          refused = std::current_exception();
          break;
        }
      }
      ++statistics_.uses;
      ++(now == Where::coming ? statistics_.prefetch_hits : statistics_.prefetch_misses);
    }
    wait_for_transfers();
    settle_arrivals();
    statistics_.read_wait_s += options_.clock() - start;
    throw_first_error();
    if (refused != nullptr) std::rethrow_exception(refused);
  }

  bool away() const {
    const std::lock_guard lock(mutex_);
    return std::any_of(items_.begin(), items_.end(),
                       [](const Item& item) { return item.where != Where::here; });
  }

  OffloadStatistics statistics() const {
    const std::lock_guard lock(mutex_);
    return statistics_;
  }

 private:
  Where where(const Item& item) const {
    const std::lock_guard lock(mutex_);
    return item.where;
  }

  std::int64_t running_bytes() const {
    const std::lock_guard lock(mutex_);
    return running_bytes_;
  }

  void wait_for_transfers() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return running_ == 0; });
  }

  void depart(Item& item) {
    item.place = store_->reserve(item.bytes);
    item.error = nullptr;
    started(item, Where::leaving);
    store_->write(item.place, item.storage, [this, &item](std::exception_ptr error) {
      ended(item, std::move(error), /*leaving=*/true);
    });
  }

  void arrive(Item& item) {
    item.incoming =
        internal::make_storage(item.bytes, item.device, base::MemoryCategory::optimizer_state);
    item.error = nullptr;
    started(item, Where::coming);
    store_->read(item.place, item.incoming, [this, &item](std::exception_ptr error) {
      ended(item, std::move(error), /*leaving=*/false);
    });
  }

  void started(Item& item, Where where) {
    const std::lock_guard lock(mutex_);
    item.where = where;
    ++running_;
    running_bytes_ += static_cast<std::int64_t>(item.bytes);
  }

  void ended(Item& item, std::exception_ptr error, bool leaving) {
    const std::lock_guard lock(mutex_);
    const auto bytes = static_cast<std::int64_t>(item.bytes);
    item.error = std::move(error);
    if (item.error == nullptr) {
      ++(leaving ? statistics_.tensors_out : statistics_.tensors_in);
      (leaving ? statistics_.bytes_out : statistics_.bytes_in) += bytes;
    }
    if (leaving) item.where = item.error == nullptr ? Where::away : Where::here;
    --running_;
    running_bytes_ -= bytes;
    changed_.notify_all();
  }

  // Frees the memory of tensors that have left, in order, from items_[first] up to items_[end];
  // waits for one transfer at least to end.
  void release(std::size_t& first, std::size_t end) {
    {
      std::unique_lock lock(mutex_);
      const std::int64_t before = running_;
      changed_.wait(lock, [&] { return running_ == 0 || running_ < before; });
    }
    for (; first < end; ++first) {
      Item& item = items_[first];
      const Where now = where(item);
      if (now == Where::leaving) return;
      if (now != Where::away || item.storage.nbytes() == 0) continue;
      c10::StorageImpl* const impl = item.storage.unsafeGetStorageImpl();
      impl->set_data_ptr_noswap(c10::DataPtr(nullptr, item.device));
      impl->set_nbytes(0);
      statistics_.stored_bytes += static_cast<std::int64_t>(item.bytes);
    }
  }

  // Puts the bytes that came back behind their tensors. No transfer runs.
  void settle_arrivals() {
    for (Item& item : items_) {
      if (item.where != Where::coming) continue;
      if (item.error != nullptr) {
        item.incoming = c10::Storage();
        item.where = Where::away;
        continue;
      }
      c10::StorageImpl* const impl = item.storage.unsafeGetStorageImpl();
      impl->set_data_ptr_noswap(item.incoming.set_data_ptr(c10::DataPtr(nullptr, item.device)));
      impl->set_nbytes(item.bytes);
      item.incoming = c10::Storage();
      item.place = nullptr;
      item.where = Where::here;
      statistics_.stored_bytes -= static_cast<std::int64_t>(item.bytes);
    }
  }

  void throw_first_error() {
    for (Item& item : items_) {
      if (item.error != nullptr) std::rethrow_exception(std::exchange(item.error, nullptr));
    }
  }

  OffloadOptions options_;
  const std::shared_ptr<internal::Store> store_;
  std::vector<Item> items_;  // as many as the constructor made: callbacks hold references
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t running_ = 0;
  std::int64_t running_bytes_ = 0;
  OffloadStatistics statistics_;
};

StateOffload::StateOffload(std::vector<at::Tensor> tensors, OffloadOptions options) {
  GRADUS_CHECK("offload", options.staging_bytes > 0, "staging_bytes must be positive; got ",
               options.staging_bytes);
  items_ = std::make_shared<Items>(tensors, std::move(options));
}

StateOffload::~StateOffload() {
  try {
    items_->fetch();
  } catch (...) {
    // Told to those who call fetch() themselves; a destructor cannot.
  }
}

void StateOffload::offload() { items_->offload(); }
void StateOffload::prefetch(std::int64_t bytes) { items_->prefetch(bytes); }
void StateOffload::fetch() { items_->fetch(); }
bool StateOffload::away() const { return items_->away(); }
OffloadStatistics StateOffload::statistics() const { return items_->statistics(); }

}  // namespace gradus::offload
