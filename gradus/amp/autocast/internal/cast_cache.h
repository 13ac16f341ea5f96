#pragma once

#include <atomic>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/DimVector.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/intrusive_ptr.h>

namespace gradus::amp::internal {

/// A tensor in the region's dtype. Where the hardware has no kernels for it, also the same values
/// in float32.
struct Cast {
  at::Tensor lower;
  at::Tensor rounded;  ///< Undefined where the operator takes `lower`.
};

/// Casts of weights, each made once while the weight stays as it is. Knows a weight by its tensor
/// (held weakly), its version, its memory and its place in it, so that none is served stale.
/// Thread-safe.
class CastCache {
 public:
  /// Whether @p tensor is a weight that the cache may keep, or one transposed, and nothing of its
  /// own (a custom function's backward, a tangent, a kept gradient) would be lost.
  static bool takes(const at::Tensor& tensor);

  /// The cast of @p tensor, for which takes() holds: that of its base, and its view of that.
  /// @param make  Casts a whole weight.
  Cast get(const at::Tensor& tensor, at::ScalarType dtype, bool rounded,
           c10::function_ref<Cast(const at::Tensor&)> make);

  /// An operator is about to write into @p tensor, perhaps without a new version of the weights in
  /// its memory.
  void forget(const at::Tensor& tensor);

  std::size_t size() const { return size_.load(std::memory_order_relaxed); }
  void clear();
  /// Empties it for good: operators that still run on other threads keep nothing.
  void close();

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weight;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  ///< Weakly: no address is used twice.
    const void* data = nullptr;
    std::int64_t offset = 0;
    c10::DimVector sizes{};
    c10::DimVector strides{};
    std::uint32_t version = 0;
    at::ScalarType dtype = at::ScalarType::Undefined;
    bool recorded = false;  ///< Made while gradients were recorded.
    bool rounded = false;
    Cast cast{};

    bool is_of(const at::Tensor& now) const;
  };

  Entry* find(const at::Tensor& weight, at::ScalarType dtype, bool recorded, bool rounded);

  std::mutex mutex_;
  std::vector<std::vector<Entry>> buckets_{std::vector<std::vector<Entry>>(256)};
  std::bitset<4096> storages_;  // by hash: of no entry's memory where it is false
  std::atomic<std::size_t> size_ = 0;
  bool closed_ = false;
};

}  // namespace gradus::amp::internal
