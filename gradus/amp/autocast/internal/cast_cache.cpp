#include <gradus/amp/autocast/internal/cast_cache.h>

#include <algorithm>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>

namespace gradus::amp::internal {
namespace {

const void* memory_of(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides();
}

// The view of @p cast that @p view is of @p base. A transposition is by far the most frequent
// (torch::nn::Linear passes weight.t()); its backward is cheaper than as_strided's.
at::Tensor same_view(const at::Tensor& cast, const at::Tensor& base, const at::Tensor& view) {
  if (!cast.defined()) return cast;
  const bool at_start = view.storage_offset() == base.storage_offset();
  if (at_start && same_layout(view, base)) return cast;
  if (at_start && base.dim() == 2 && view.dim() == 2 && view.size(0) == base.size(1) &&
      view.size(1) == base.size(0) && view.stride(0) == base.stride(1) &&
      view.stride(1) == base.stride(0)) {
    return cast.t();
  }
  if (at_start && view.is_contiguous() && base.is_contiguous() && view.numel() == base.numel()) {
    return cast.view(view.sizes());
  }
  return cast.as_strided(view.sizes(), view.strides(),
                         view.storage_offset() - base.storage_offset() + cast.storage_offset());
}

}  // namespace

bool CastCache::takes(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.is_inference() || tensor.layout() != at::kStrided) {
    return false;
  }
  if (!tensor.is_view()) return tensor.is_leaf() && tensor.requires_grad();
  // A view made while nothing was recorded leads no gradient to its base.
  if (at::GradMode::is_enabled() && tensor.is_leaf()) return false;
  const at::TensorBase& base = tensor._base();
  // Of another type (view_as_real) or another memory (swapped data), it is no view to be repeated.
  return base.is_leaf() && base.requires_grad() && base.has_storage() &&
         base.scalar_type() == tensor.scalar_type() && base.is_alias_of(tensor) &&
         base.is_non_overlapping_and_dense();  // then a cast has its strides
}

CastCache::Entry* CastCache::find(const at::Tensor& weight, at::ScalarType dtype, bool recorded,
                                  bool rounded) {
  const c10::TensorImpl* const key = weight.unsafeGetTensorImpl();
  auto& bucket = buckets_[(reinterpret_cast<std::uintptr_t>(key) >> 6) % buckets_.size()];
  const void* const memory = memory_of(weight);
  const std::uint32_t version = key->version_counter().current_version();
  // An entry whose weight changed or is gone serves nobody any more.
  size_ -= std::erase_if(bucket, [&](const Entry& entry) {
    return (entry.weight._unsafe_get_target() == key &&
            (entry.version != version || entry.storage != memory)) ||
           entry.weight.use_count() == 0;
  });
  const auto found = std::find_if(bucket.begin(), bucket.end(), [&](const Entry& entry) {
    return entry.weight._unsafe_get_target() == key && entry.dtype == dtype &&
           entry.recorded == recorded && entry.rounded == rounded;
  });
  return found == bucket.end() ? nullptr : &*found;
}

Cast CastCache::get(const at::Tensor& tensor, at::ScalarType dtype, bool rounded,
                    c10::function_ref<Cast(const at::Tensor&)> make) {
  const at::Tensor weight = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  const bool recorded = at::GradMode::is_enabled() && tensor.requires_grad();
  std::optional<at::NoGradGuard> no_grad;
  if (!recorded) no_grad.emplace();
  Cast cast;
  {
    const std::lock_guard lock(mutex_);
    if (const Entry* const entry = find(weight, dtype, recorded, rounded)) cast = entry->cast;
  }
  if (!cast.lower.defined()) {
    cast = make(weight);  // two threads may both make it; the first to finish keeps its own
    const std::lock_guard lock(mutex_);
    if (Entry* const entry = find(weight, dtype, recorded, rounded)) {
      cast = entry->cast;
    } else if (!closed_) {
      const c10::TensorImpl* const key = weight.unsafeGetTensorImpl();
      buckets_[(reinterpret_cast<std::uintptr_t>(key) >> 6) % buckets_.size()].push_back(
          {c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
               weight.getIntrusivePtr()),
           memory_of(weight), key->version_counter().current_version(), dtype, recorded, rounded,
           cast});
      ++size_;
    }
  }
  if (weight.is_same(tensor)) return cast;
  return {same_view(cast.lower, weight, tensor), same_view(cast.rounded, weight, tensor)};
}

void CastCache::clear() {
  std::vector<std::vector<Entry>> dropped(buckets_.size());  // graphs die outside the lock
  const std::lock_guard lock(mutex_);
  dropped.swap(buckets_);
  size_ = 0;
}

void CastCache::close() {
  clear();
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

}  // namespace gradus::amp::internal
