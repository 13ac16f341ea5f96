#pragma once

// What a checkpointed region did the first time, and the handlers that watch it do it.

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <gradus/plane/op/op_plane.h>
#include <gradus/plane/saved/saved_plane.h>

namespace gradus::recompute::internal {

/// One operator call, as far as a second run must repeat it.
struct TracedCall {
  std::string_view name;    ///< Static storage.
  std::uint64_t signature;  ///< Of the tensors' shapes and dtypes and of all other arguments.
};

/// A tensor from outside the region that the region read. The weak handle keeps the key's address
/// its own.
struct OutsideTensor {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::string description;
  c10::VariableVersion counter;
  std::uint32_t version = 0;  ///< When the region ended.
};

/// A storage from outside the region that the region changed.
struct ChangedStorage {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  at::Tensor bytes_before;  ///< A copy of the whole storage, uint8.
};

struct RegionRecord {
  std::vector<TracedCall> calls;
  std::unordered_map<const c10::StorageImpl*, OutsideTensor> read;
  std::unordered_map<const c10::StorageImpl*, ChangedStorage> changed;
  std::vector<std::pair<at::Generator, at::Tensor>>
      generators;  ///< Custom ones, with the state at first use.
};

/// Watches the first run and fills a RegionRecord.
class Recorder final : public plane::op::Handler {
 public:
  explicit Recorder(RegionRecord& record) : record_(record) {}
  void call(plane::op::Call& call) override;
  /// Notes the versions that outside tensors have after the region.
  void finish();

 private:
  void note_arguments(const plane::op::Call& call);

  RegionRecord& record_;
  std::unordered_set<const c10::StorageImpl*> made_;
  const void* casting_for_ = nullptr;
};

/// @p tensor's shape over a copy of its storage's earlier bytes.
at::Tensor over_bytes(const at::Tensor& tensor, const at::Tensor& bytes);

/// Thrown through the region when all that backward wants is made; caught by the checkpoint.
struct StopRegion {
  const void* frame;
};

/// Watches the second run: compares it with the record and keeps it from changing anything outside.
class Replayer final : public plane::op::Handler {
 public:
  Replayer(const RegionRecord& record, const void* frame, bool check)
      : record_(record), frame_(frame), check_(check) {}
  void call(plane::op::Call& call) override;
  /// From now on the region ends after the operator that is running, or after the next one.
  void stop() { stop_ = true; }
  /// @throws UserError unless the whole record was repeated.
  void finish() const;

 private:
  void substitute(plane::op::Call& call);
  at::Tensor shadow_of(const at::Tensor& tensor);

  const RegionRecord& record_;
  const void* frame_;
  bool check_;
  bool stop_ = false;
  std::size_t next_ = 0;
  std::unordered_map<const c10::StorageImpl*, at::Tensor> shadows_;
  const void* casting_for_ = nullptr;
};

}  // namespace gradus::recompute::internal
