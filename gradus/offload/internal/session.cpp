#include <gradus/offload/internal/session.h>

#include <algorithm>
#include <utility>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>

namespace gradus::offload::internal {
namespace {

// Writes given to the store at once. More would only keep cancelled ones from being dropped.
constexpr std::int64_t kRunningWrites = 4;
// How far ahead of a use to look for reads: bounds the work, the window bounds the bytes.
constexpr int kLookAhead = 256;
// A tensor read ahead that so many later uses passed over is not wanted in this pass.
constexpr std::uint64_t kPassedOver = 16;

bool can_move(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.has_storage()) return false;
  if (tensor.is_quantized() || tensor.is_conj() || tensor.is_neg() || tensor.is_nested() ||
      tensor.is_inference() || tensor.is_meta()) {
    return false;
  }
  const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  return !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && storage->data() != nullptr;
}

// Memory read ahead must not be freed to make room for more of it.
thread_local bool reading_ahead = false;

class Stopwatch {
 public:
  Stopwatch(const base::Clock& clock, double& total)
      : clock_(clock), total_(total), start_(clock()) {}
  ~Stopwatch() { total_ += clock_() - start_; }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  const base::Clock& clock_;
  double& total_;
  double start_;
};

at::Tensor view_of(c10::Storage storage, const Save& save) {
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), save.keys, save.dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(save.sizes, save.strides, save.offset);
  return tensor;
}

WeakStorage weak(const c10::Storage& storage) {
  return WeakStorage(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage.unsafeGetStorageImpl()));
}

}  // namespace

// --- Lifetime ----------------------------------------------------------------------------------

Session::Session(OffloadOptions options)
    : options_(std::move(options)),
      operators_(options_.operators.begin(), options_.operators.end()),
      except_operators_(options_.except_operators.begin(), options_.except_operators.end()),
      store_(make_store(options_)),
      window_bytes_(options_.window_bytes) {
  options_.disk.io = nullptr;  // the store's alone, which lets it go when it stops
  for (const at::Tensor& tensor : options_.resident) {
    if (tensor.defined() && tensor.has_storage()) {
      resident_.insert(tensor.storage().unsafeGetStorageImpl());
      resident_handles_.push_back(weak(tensor.storage()));
    }
  }
  options_.resident.clear();
  statistics_.access = store_->access();
}

Record::~Record() {
  const std::lock_guard lock(session->mutex_);
  session->forget_storages(*this);
  if (session->held_.erase(this) > 0) session->held_bytes_ -= static_cast<std::int64_t>(bytes);
  OffloadStatistics& s = session->statistics_;
  if (state == State::queued) {
    ++s.cancelled;
    s.waiting_bytes -= static_cast<std::int64_t>(bytes);
  }
  if (state != State::failed) s.stored_bytes -= static_cast<std::int64_t>(bytes);
  session->changed_.notify_all();
}

Save::~Save() {
  if (record == nullptr) return;
  const std::lock_guard lock(record->session->mutex_);
  record->session->saves_.erase(number);
}

void Session::forget_storages(Record& record) {
  for (const WeakStorage* const weak : {&record.original, &record.copy}) {
    // Only entries of this record, which is gone: its storage may have been stored anew since.
    const auto found = by_storage_.find(weak->_unsafe_get_target());
    if (found != by_storage_.end() && found->second.expired()) by_storage_.erase(found);
  }
}

void Session::flush(bool report) {
  Lock lock(mutex_);
  changed_.wait(lock, [this] { return transfers_ == 0 && statistics_.waiting_bytes == 0; });
  if (report) throw_failure(lock);
}

void Session::stop() {
  flush(/*report=*/false);
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  store_->stop();
}

OffloadStatistics Session::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

// --- Saving ------------------------------------------------------------------------------------

bool Session::wanted(const plane::saved::Value& value) const {
  const at::Tensor& tensor = value.tensor;
  if (!can_move(tensor)) return false;
  const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  if (static_cast<std::int64_t>(storage->nbytes()) <
      std::max<std::int64_t>(options_.min_bytes, 1)) {
    return false;
  }
  if (resident_.contains(storage)) return false;
  const std::string maker(value.maker);
  if (!operators_.empty() && !operators_.contains(maker)) return false;
  if (except_operators_.contains(maker)) return false;
  if (!options_.named_tensors && !base::tensor_name(tensor).empty()) return false;
  return !options_.policy || options_.policy(value);
}

std::optional<plane::saved::Packed> Session::pack(const plane::saved::Value& value) {
  const bool take = wanted(value);
  Graveyard graveyard;
  auto save = std::make_shared<Save>();
  {
    Lock lock(mutex_);
    throw_failure(lock);
    if (!take) {
      ++statistics_.kept_saves;
      return std::nullopt;
    }
    const at::Tensor& tensor = value.tensor;
    save->sizes = tensor.sizes().vec();
    save->strides = tensor.strides().vec();
    save->offset = tensor.storage_offset();
    save->dtype = tensor.dtype();
    save->keys = tensor.unsafeGetTensorImpl()->key_set();
    std::shared_ptr<Record> record = record_of(lock, tensor, graveyard);
    save->number = next_number_++;
    save->record = std::move(record);
    saves_.emplace(save->number, save.get());
  }
  return plane::saved::Packed{
      {}, [save](const std::vector<at::Tensor>&) { return save->record->session->give(*save); }};
}

std::shared_ptr<Record> Session::record_of(Lock& lock, const at::Tensor& tensor,
                                           Graveyard& graveyard) {
  const c10::Storage& storage = tensor.storage();
  const auto found = by_storage_.find(storage.unsafeGetStorageImpl());
  if (found != by_storage_.end()) {
    std::shared_ptr<Record> known = found->second.lock();
    graveyard.push_back(known);
    // A change that no watched operator made (on another thread) shows in the version.
    if (known != nullptr && known->state != Record::State::failed &&
        known->bytes == storage.nbytes() &&
        (!known->versioned || known->counter.current_version() == known->version)) {
      ++statistics_.shared_saves;
      return known;
    }
    by_storage_.erase(storage.unsafeGetStorageImpl());
  }
  const auto bytes = static_cast<std::int64_t>(storage.nbytes());
  make_room(lock, bytes);
  lock.unlock();
  auto record = std::make_shared<Record>(shared_from_this());
  record->original = weak(storage);
  std::shared_ptr<Place> place;
  try {
    place = store_->reserve(storage.nbytes());
  } catch (...) {
    record->state = Record::State::failed;  // nothing of it is counted yet
    throw;
  }
  lock.lock();
  record->place = std::move(place);
  record->bytes = storage.nbytes();
  record->device = storage.device();
  record->source = storage;
  record->original_data = storage.data();
  record->counter = tensor.unsafeGetTensorImpl()->version_counter();
  record->version = record->counter.current_version();
  record->versioned = true;
  by_storage_[storage.unsafeGetStorageImpl()] = record;
  statistics_.stored_bytes += bytes;
  statistics_.waiting_bytes += bytes;
  queue_.push_back(record);
  pump(lock);
  if (bytes > options_.staging_bytes) make_room(lock, options_.staging_bytes);
  return record;
}

void Session::make_room(Lock& lock, std::int64_t bytes) {
  const auto fits = [&] {
    return statistics_.waiting_bytes == 0 ||
           statistics_.waiting_bytes + bytes <= options_.staging_bytes;
  };
  if (fits()) return;
  double waited = 0.0;
  {
    const Stopwatch stopwatch(options_.clock, waited);
    changed_.wait(lock, fits);
  }
  statistics_.write_wait_s += waited;
  throw_failure(lock);
}

void Session::throw_failure(Lock&) {
  if (failure_ == nullptr) return;
  std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Session::pump(Lock& lock) {
  while (writes_ < kRunningWrites && !queue_.empty()) {
    std::shared_ptr<Record> record = queue_.front().lock();
    queue_.pop_front();
    if (record == nullptr) continue;  // its graph has gone
    record->state = Record::State::writing;
    ++writes_;
    ++transfers_;
    lock.unlock();
    {
      const auto place = record->place;
      const c10::Storage source = record->source;
      store_->write(place, source, [record = std::move(record)](std::exception_ptr error) mutable {
        Session& session = *record->session;
        session.written(std::move(record), std::move(error));
      });
    }
    lock.lock();
  }
}

void Session::written(std::shared_ptr<Record> record, std::exception_ptr error) {
  c10::Storage source;
  Lock lock(mutex_);
  // Without a failing transfer's source memory would not come back before the graph goes.
  source = std::move(record->source);
  record->source = c10::Storage();
  const auto bytes = static_cast<std::int64_t>(record->bytes);
  lock.unlock();
  source = c10::Storage();  // before anyone who waits for room goes on
  lock.lock();
  if (error == nullptr) {
    record->state = Record::State::stored;
    ++statistics_.tensors_out;
    statistics_.bytes_out += bytes;
  } else {
    record->state = Record::State::failed;
    record->error = error;
    statistics_.stored_bytes -= bytes;
    if (failure_ == nullptr) failure_ = std::move(error);
  }
  statistics_.waiting_bytes -= bytes;
  changed_.notify_all();
  // Before the write counts as ended: who waits for that may have dropped the graph, and looks at
  // what is left. The guard waits too, and keeps this session.
  lock.unlock();
  record = nullptr;
  lock.lock();
  --writes_;
  --transfers_;
  pump(lock);
  changed_.notify_all();
}

void Session::before_write(const c10::Storage& storage) {
  Graveyard graveyard;
  Lock lock(mutex_);
  const auto found = by_storage_.find(storage.unsafeGetStorageImpl());
  if (found == by_storage_.end()) return;
  const std::shared_ptr<Record> record = found->second.lock();
  graveyard.push_back(record);
  if (record == nullptr) return;
  if (record->copy._unsafe_get_target() == storage.unsafeGetStorageImpl()) {
    changed_.wait(lock, [&] { return !record->reading; });
    let_go(*record, graveyard);
    drop_copy(*record);
    return;
  }
  // The bytes on their way are those of before.
  double waited = 0.0;
  {
    const Stopwatch stopwatch(options_.clock, waited);
    changed_.wait(lock, [&] {
      return record->state == Record::State::stored || record->state == Record::State::failed;
    });
  }
  statistics_.write_wait_s += waited;
  record->original_changed = true;
  by_storage_.erase(storage.unsafeGetStorageImpl());
}

// --- Giving back -------------------------------------------------------------------------------

at::Tensor Session::give(Save& save) {
  Graveyard graveyard;
  c10::Storage storage;
  const int pass = plane::saved::current_backward();
  watch_pass(pass);
  {
    Lock lock(mutex_);
    ++statistics_.uses;
    ++use_;
    save.last_pass = pass;
    storage = obtain(lock, save.record, graveyard);
    let_go(*save.record, graveyard);
    if (pass >= 0 && options_.window_bytes > 0 && !stopped_)
      read_ahead(lock, save.number, pass, graveyard);
  }
  return view_of(std::move(storage), save);
}

c10::Storage Session::original_of(const Record& record) const {
  if (record.original_changed) return {};
  c10::intrusive_ptr<c10::StorageImpl> storage = record.original.lock();
  // resize_() and swapped memory leave the handle and change what is behind it.
  if (!storage || storage->nbytes() != record.bytes || storage->data() != record.original_data) {
    return {};
  }
  return c10::Storage(std::move(storage));
}

c10::Storage Session::obtain(Lock& lock, const std::shared_ptr<Record>& record,
                             Graveyard& graveyard) {
  c10::Storage mine;
  bool counted = false;
  const auto count = [&](std::int64_t& kind) {
    if (!std::exchange(counted, true)) ++kind;
  };
  for (;;) {
    if (record->state == Record::State::failed) {
      failure_ = nullptr;  // told here
      std::rethrow_exception(record->error);
    }
    if (c10::Storage original = original_of(*record)) {
      count(statistics_.resident_hits);
      return original;
    }
    if (record->state != Record::State::stored) {
      // The memory behind the storage was exchanged while it was written.
      changed_.wait(lock, [&] {
        return record->state == Record::State::stored || record->state == Record::State::failed;
      });
      continue;
    }
    if (!record->reading) {
      if (record->error != nullptr) {
        // The next use tries again.
        let_go(*record, graveyard);
        drop_copy(*record);
        std::rethrow_exception(std::exchange(record->error, nullptr));
      }
      if (c10::intrusive_ptr<c10::StorageImpl> copy = record->copy.lock()) {
        count(record->held && record->held_by_read ? statistics_.prefetch_hits
                                                   : statistics_.resident_hits);
        return c10::Storage(std::move(copy));
      }
      count(statistics_.prefetch_misses);
      double spent = 0.0;
      {
        const Stopwatch stopwatch(options_.clock, spent);
        mine = start_read(lock, record);
      }
      statistics_.read_wait_s += spent;
      continue;
    }
    count(statistics_.prefetch_late);
    double waited = 0.0;
    {
      const Stopwatch stopwatch(options_.clock, waited);
      changed_.wait(lock, [&] { return !record->reading; });
    }
    statistics_.read_wait_s += waited;
  }
}

void Session::drop_copy(Record& record) {
  by_storage_.erase(record.copy._unsafe_get_target());
  record.copy = no_storage();
}

c10::Storage Session::start_read(Lock& lock, const std::shared_ptr<Record>& record) {
  GRADUS_INTERNAL_CHECK("offload", record->state == Record::State::stored,
                        "a read of bytes that were never written");
  record->reading = true;
  ++transfers_;
  lock.unlock();
  c10::Storage storage;
  try {
    storage = make_storage(record->bytes, record->device, base::MemoryCategory::activations);
  } catch (...) {
    lock.lock();
    record->reading = false;
    --transfers_;
    changed_.notify_all();
    throw;
  }
  lock.lock();
  drop_copy(*record);
  record->copy = weak(storage);
  by_storage_[storage.unsafeGetStorageImpl()] = record;
  lock.unlock();
  store_->read(
      record->place, storage,
      [record = std::shared_ptr<Record>(record), storage](std::exception_ptr error) mutable {
        Session& session = *record->session;
        storage = c10::Storage();  // first: relieve() lets go what nothing else holds
        Lock ending(session.mutex_);
        record->reading = false;
        if (error == nullptr) {
          ++session.statistics_.tensors_in;
          session.statistics_.bytes_in += static_cast<std::int64_t>(record->bytes);
        } else {
          record->error = std::move(error);
        }
        session.changed_.notify_all();
        // As in written(). A read on the calling thread, after stop(), has a caller that keeps all.
        ending.unlock();
        record = nullptr;
        ending.lock();
        --session.transfers_;
        session.changed_.notify_all();
      });
  lock.lock();
  return storage;
}

bool Session::relieve(std::int64_t needed_bytes) {
  if (reading_ahead) return false;
  Graveyard graveyard;
  std::int64_t freed = 0;
  Lock lock(mutex_);
  for (;;) {
    // What backward wants last goes first.
    std::vector<Record*> order(held_.begin(), held_.end());
    std::sort(order.begin(), order.end(),
              [](const Record* a, const Record* b) { return a->held_for < b->held_for; });
    for (Record* const record : order) {
      if (freed >= needed_bytes) break;
      if (record->reading || record->held.use_count() > 1) continue;
      freed += static_cast<std::int64_t>(record->bytes);
      let_go(*record, graveyard);
    }
    if (freed > 0) {
      window_bytes_ = held_bytes_;  // or the next use would read the same ahead again
      return true;
    }
    const auto reading = [&] {
      return std::count_if(held_.begin(), held_.end(), [](Record* r) { return r->reading; });
    };
    const auto before = reading();
    if (before == 0) break;
    // Memory that is being read into cannot be let go before the read ends.
    changed_.wait(lock, [&] { return reading() < before; });
  }
  if (statistics_.waiting_bytes == 0) return false;
  double waited = 0.0;
  {
    const std::int64_t before = statistics_.waiting_bytes;
    const Stopwatch stopwatch(options_.clock, waited);
    changed_.wait(lock, [&] { return statistics_.waiting_bytes < before; });
  }
  statistics_.write_wait_s += waited;
  return true;
}

// --- Reading ahead -----------------------------------------------------------------------------

void Session::read_ahead(Lock& lock, std::int64_t used, int pass, Graveyard& graveyard) {
  std::int64_t number = used;
  for (int looked = 0; looked < kLookAhead; ++looked) {
    // Found anew each time: the lock is let go while memory is allocated.
    auto next = saves_.lower_bound(number);
    if (next == saves_.begin()) return;
    const Save& save = *(--next)->second;
    number = save.number;
    if (save.last_pass == pass) continue;
    const std::shared_ptr<Record> record = save.record;
    graveyard.push_back(record);
    if (record->held || record->state != Record::State::stored || record->error != nullptr)
      continue;
    if (original_of(*record)) continue;
    if (!hold(lock, record, number, graveyard)) {
      drop_passed_over(used, graveyard);
      return;
    }
  }
}

bool Session::hold(Lock& lock, const std::shared_ptr<Record>& record, std::int64_t number,
                   Graveyard& graveyard) {
  const auto bytes = static_cast<std::int64_t>(record->bytes);
  if (held_bytes_ + bytes > window_bytes_) return false;
  c10::Storage storage;
  bool by_read = false;
  if (c10::intrusive_ptr<c10::StorageImpl> copy = record->copy.lock()) {
    storage = c10::Storage(std::move(copy));
  } else {
    if (record->reading) return true;
    held_bytes_ += bytes;  // before the lock goes
    try {
      reading_ahead = true;
      storage = start_read(lock, record);
      reading_ahead = false;
    } catch (const MemoryLimitError&) {
      // The window is a wish: what backward computes comes first.
      reading_ahead = false;
      held_bytes_ -= bytes;
      window_bytes_ = held_bytes_;
      return false;
    } catch (...) {
      reading_ahead = false;
      held_bytes_ -= bytes;
      throw;
    }
    held_bytes_ -= bytes;
    by_read = true;
    if (record->held) return true;  // another thread was here in the meantime
  }
  record->held = std::move(storage);
  record->held_by_read = by_read;
  record->held_at = use_;
  record->held_for = number;
  held_bytes_ += bytes;
  held_.insert(record.get());
  return true;
}

void Session::let_go(Record& record, Graveyard& graveyard) {
  if (held_.erase(&record) == 0) return;
  held_bytes_ -= static_cast<std::int64_t>(record.bytes);
  graveyard.push_back(std::make_shared<c10::Storage>(std::move(record.held)));
  record.held = c10::Storage();
}

void Session::drop_passed_over(std::int64_t used, Graveyard& graveyard) {
  std::vector<Record*> stale;
  for (Record* const record : held_) {
    if (record->held_for > used && use_ - record->held_at > kPassedOver) stale.push_back(record);
  }
  for (Record* const record : stale) let_go(*record, graveyard);
}

void Session::watch_pass(int pass) {
  if (pass < 0) return;
  {
    const std::lock_guard lock(mutex_);
    if (!passes_.insert(pass).second) return;
  }
  plane::saved::on_backward_end([weak = weak_from_this(), pass] {
    if (const std::shared_ptr<Session> session = weak.lock()) session->end_pass(pass);
  });
}

void Session::end_pass(int pass) {
  Graveyard graveyard;
  const std::lock_guard lock(mutex_);
  passes_.erase(pass);
  window_bytes_ = options_.window_bytes;
  const std::vector<Record*> all(held_.begin(), held_.end());
  for (Record* const record : all) let_go(*record, graveyard);
}

}  // namespace gradus::offload::internal
