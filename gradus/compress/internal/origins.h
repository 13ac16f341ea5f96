#pragma once

#include <cstddef>
#include <mutex>
#include <unordered_map>

#include <ATen/core/Tensor.h>

#include <gradus/plane/op/op_plane.h>

namespace gradus::compress::internal {

/// Tells what the program brought along (parameters, buffers, the batch) from what its operators
/// made: the former stay in memory anyway, so that keeping another form of them saves nothing, and
/// a rounded weight would be a wrong weight. Sees each operator: an argument without a history that
/// no operator made before comes from outside; so do casts and copies of it (autocast keeps those
/// of weights). Thread-safe.
class Origins final : public plane::op::Handler {
 public:
  void call(plane::op::Call& call) override;

  /// True if the memory of @p tensor came from outside.
  bool outside(const at::Tensor& tensor) const;

 private:
  enum class Origin : bool { made, outside };
  // Weak: an entry neither keeps memory alive nor can be mistaken for later memory at its address.
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    Origin origin = Origin::made;
  };

  void note(const at::Tensor& tensor, Origin origin);
  void prune();

  mutable std::mutex mutex_;
  std::unordered_map<const c10::StorageImpl*, Known> known_;
  std::size_t prune_at_ = 1024;
};

}  // namespace gradus::compress::internal
