#include <gradus/offload/stash.h>

#include <exception>
#include <future>
#include <mutex>
#include <utility>

#include <gradus/base/error.h>
#include <gradus/offload/internal/store.h>

namespace gradus::offload {

using internal::Place;
using internal::Store;

struct StorageStore::State {
  explicit State(const OffloadOptions& options) : store(internal::make_store(options)) {}
  ~State() { store->stop(); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  std::shared_ptr<Store> store;
  mutable std::mutex mutex;
  std::int64_t stored_bytes = 0;
  std::string last_error;
};

namespace {

// What a handle points to.
struct Stored {
  std::shared_ptr<Place> place;
  std::size_t bytes = 0;
  c10::Device device = c10::kCPU;
};

template <typename Start>
std::exception_ptr wait_for(Start&& start) {
  auto done = std::make_shared<std::promise<std::exception_ptr>>();
  std::future<std::exception_ptr> result = done->get_future();
  start([done](std::exception_ptr error) { done->set_value(std::move(error)); });
  return result.get();
}

}  // namespace

StorageStore::StorageStore(const OffloadOptions& options)
    : state_(std::make_shared<State>(options)) {}
StorageStore::~StorageStore() = default;

std::shared_ptr<void> StorageStore::put(const c10::Storage& storage) {
  std::exception_ptr error;
  std::unique_ptr<Stored> stored;
  try {
    stored = std::make_unique<Stored>(Stored{.place = state_->store->reserve(storage.nbytes()),
                                             .bytes = storage.nbytes(),
                                             .device = storage.device()});
    error = wait_for(
        [&](Store::Done done) { state_->store->write(stored->place, storage, std::move(done)); });
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(state_->mutex);
  if (error != nullptr) {
    // The caller keeps the bytes, or makes them again: no reason to fail here.
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& problem) {
      state_->last_error = problem.what();
    } catch (...) {
      state_->last_error = "unknown error";
    }
    return nullptr;
  }
  state_->stored_bytes += static_cast<std::int64_t>(stored->bytes);
  return {stored.release(), [state = state_](Stored* gone) {
            {
              const std::lock_guard count_lock(state->mutex);
              state->stored_bytes -= static_cast<std::int64_t>(gone->bytes);
            }
            delete gone;
          }};
}

c10::Storage StorageStore::get(const std::shared_ptr<void>& handle) const {
  const auto& stored = *static_cast<const Stored*>(handle.get());
  c10::Storage target =
      internal::make_storage(stored.bytes, stored.device, base::MemoryCategory::activations);
  const std::exception_ptr error = wait_for(
      [&](Store::Done done) { state_->store->read(stored.place, target, std::move(done)); });
  if (error != nullptr) std::rethrow_exception(error);
  return target;
}

std::int64_t StorageStore::stored_bytes() const {
  const std::lock_guard lock(state_->mutex);
  return state_->stored_bytes;
}

std::string StorageStore::last_error() const {
  const std::lock_guard lock(state_->mutex);
  return state_->last_error;
}

}  // namespace gradus::offload
