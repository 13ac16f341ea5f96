#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
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
/// (held weakly), its version and its memory, so that none is served stale. Thread-safe.
class CastCache {
 public:
  /// Whether @p tensor, or what it is a view of, is a weight that the cache may keep.
  static bool takes(const at::Tensor& tensor);

  /// The cast of @p tensor, for which takes() holds: that of its base, and its view of that.
  /// @param make  Casts a whole weight.
  Cast get(const at::Tensor& tensor, at::ScalarType dtype, bool rounded,
           c10::function_ref<Cast(const at::Tensor&)> make);

  std::size_t size() const { return size_.load(std::memory_order_relaxed); }
  void clear();
  /// Empties it for good: operators that still run on other threads keep nothing.
  void close();

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weight;
    const void* storage = nullptr;
    std::uint32_t version = 0;
    at::ScalarType dtype = at::ScalarType::Undefined;
    bool recorded = false;  ///< Made while gradients were recorded.
    bool rounded = false;
    Cast cast{};
  };

  Entry* find(const at::Tensor& weight, at::ScalarType dtype, bool recorded, bool rounded);

  std::mutex mutex_;
  std::vector<std::vector<Entry>> buckets_{std::vector<std::vector<Entry>>(256)};
  std::atomic<std::size_t> size_ = 0;
  bool closed_ = false;
};

}  // namespace gradus::amp::internal
