#pragma once

// One OffloadGuard's state, shared with the graphs that hold what it stored.
//
// A Record is one storage at one moment; a Save is one saved tensor, a view of a record's bytes.
// Saves are numbered in the order of saving, and backward asks for them in about the reverse: after
// each use the saves before it are read ahead. Records are owned by their saves, hence by the
// graph.
//
// One mutex guards all state. It is never held while memory is allocated or while the last handle
// to a record goes: both may come back here.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <c10/core/TensorImpl.h>

#include <gradus/offload/internal/store.h>
#include <gradus/offload/offload.h>

namespace gradus::offload::internal {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

inline WeakStorage no_storage() { return WeakStorage(c10::intrusive_ptr<c10::StorageImpl>()); }

struct Record {
  enum class State : std::uint8_t { queued, writing, stored, failed };

  explicit Record(std::shared_ptr<Session> session) : session(std::move(session)) {}
  ~Record();

  std::shared_ptr<Session> session;
  std::size_t bytes = 0;
  c10::Device device = c10::Device("cpu");
  State state = State::queued;
  std::exception_ptr error;  // of the write, or of the last read
  std::shared_ptr<Place> place;

  c10::Storage source;  // while it waits to be written
  WeakStorage original =
      no_storage();  // what was saved; gives the bytes back for nothing while it lives
  const void* original_data = nullptr;
  bool original_changed = false;
  c10::VariableVersion counter;  // of the tensor that was saved first
  bool versioned = false;
  std::uint32_t version = 0;

  bool reading = false;
  WeakStorage copy = no_storage();  // the bytes read back, while anyone uses them
  c10::Storage held;                // the same, kept for a save that backward is about to want
  bool held_by_read = false;
  std::uint64_t held_at = 0;  // Session::use_ when it was held
  std::int64_t held_for = 0;  // the save that it is held for
};

struct Save {
  ~Save();
  std::shared_ptr<Record> record;
  std::int64_t number = 0;
  int last_pass = -1;  // the backward pass that asked for it last

  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  std::int64_t offset = 0;
  caffe2::TypeMeta dtype;
  c10::DispatchKeySet keys;
};

class Session final : public std::enable_shared_from_this<Session> {
 public:
  explicit Session(OffloadOptions options);

  std::optional<plane::saved::Packed> pack(const plane::saved::Value& value);
  at::Tensor give(Save& save);
  /// An operator is about to write to @p storage.
  void before_write(const c10::Storage& storage);
  /// Frees device memory for an allocation: what was read ahead, else what waits to be written.
  bool relieve(std::int64_t needed_bytes);
  /// Waits for all transfers; throws what failed if @p report.
  void flush(bool report);
  /// Ends the threads.
  void stop();
  OffloadStatistics statistics() const;

 private:
  friend struct Record;
  friend struct Save;
  using Lock = std::unique_lock<std::mutex>;
  using Graveyard = std::vector<std::shared_ptr<void>>;

  bool wanted(const plane::saved::Value& value) const;
  std::shared_ptr<Record> record_of(Lock& lock, const at::Tensor& tensor, Graveyard& graveyard);
  void make_room(Lock& lock, std::int64_t bytes);
  void pump(Lock& lock);
  void written(std::shared_ptr<Record> record, std::exception_ptr error);
  void throw_failure(Lock& lock);
  void forget_storages(Record& record);

  c10::Storage obtain(Lock& lock, const std::shared_ptr<Record>& record, Graveyard& graveyard);
  c10::Storage original_of(const Record& record) const;
  c10::Storage start_read(Lock& lock, const std::shared_ptr<Record>& record);
  void read_ahead(Lock& lock, std::int64_t used, int pass, Graveyard& graveyard);
  bool hold(Lock& lock, const std::shared_ptr<Record>& record, std::int64_t number,
            Graveyard& graveyard);
  void let_go(Record& record, Graveyard& graveyard);
  void drop_passed_over(std::int64_t used, Graveyard& graveyard);
  void drop_copy(Record& record);
  void end_pass(int pass);
  void watch_pass(int pass);

  OffloadOptions options_;
  const std::unordered_set<std::string> operators_;
  const std::unordered_set<std::string> except_operators_;
  std::unordered_set<const c10::StorageImpl*> resident_;
  std::vector<WeakStorage> resident_handles_;  // keep the addresses above from being used again
  const std::shared_ptr<Store> store_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<Record>> by_storage_;
  std::map<std::int64_t, Save*> saves_;
  std::set<Record*> held_;
  std::set<int> passes_;
  std::int64_t next_number_ = 0;
  std::uint64_t use_ = 0;
  std::int64_t held_bytes_ = 0;
  std::int64_t window_bytes_;  // options_.window_bytes, less once the device ran full in this pass
  std::deque<std::weak_ptr<Record>> queue_;
  std::int64_t transfers_ = 0;  // running writes and reads
  std::int64_t writes_ = 0;     // running writes
  bool stopped_ = false;
  std::exception_ptr failure_;  // of a write, until someone was told
  OffloadStatistics statistics_;
};

}  // namespace gradus::offload::internal
