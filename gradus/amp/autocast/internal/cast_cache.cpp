#include <gradus/amp/autocast/internal/cast_cache.h>

#include <algorithm>
#include <optional>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>

#include <gradus/plane/grad/grad_plane.h>

namespace gradus::amp::internal {
namespace {

c10::StorageImpl* memory_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

std::size_t hash_of(const c10::StorageImpl* storage) {
  return (reinterpret_cast<std::uintptr_t>(storage) * 0x9E3779B97F4A7C15u) >> 52;  // of 4096
}

bool has_tangent(const at::TensorBase& tensor) { return tensor._fw_grad(/*level=*/0).defined(); }

// Whether @p view is @p weight transposed. Gradients of a served view go past the view's own node.
// A custom function's (a reversed gradient) must not be passed by, nor a part of a weight, which
// torch::autograd::grad is asked for; and what hangs on a view between the two is not seen.
bool is_transposed(const at::Tensor& view, const at::TensorBase& weight) {
  if (view.retains_grad()) return false;
  const plane::grad::NodeView node = plane::grad::gradient_edge(view).node;
  const std::string name = node.name();
  if (name != "TBackward0" && name != "TransposeBackward0" && name != "PermuteBackward0") {
    return false;
  }
  const auto next = node.next();
  return next.size() == 1 && next[0].node == plane::grad::gradient_edge(at::Tensor(weight)).node;
}

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
  if (tensor.is_neg() || has_tangent(tensor)) return false;
  if (!tensor.is_view()) return tensor.is_leaf() && tensor.requires_grad();
  // A view made while nothing was recorded leads no gradient to its base.
  if (at::GradMode::is_enabled() && tensor.is_leaf()) return false;
  const at::TensorBase& base = tensor._base();
  // Of another type (view_as_real) or another memory (swapped data), it is no view to be repeated.
  return base.is_leaf() && base.requires_grad() && base.has_storage() &&
         base.scalar_type() == tensor.scalar_type() && base.is_alias_of(tensor) &&
         base.is_non_overlapping_and_dense() &&  // then a cast has its strides
         !base.is_neg() && !has_tangent(base) &&
         (!at::GradMode::is_enabled() || is_transposed(tensor, base));
}

bool CastCache::Entry::is_of(const at::Tensor& now) const {
  const auto& key = *now.unsafeGetTensorImpl();
  return version == key.version_counter().current_version() &&
         storage._unsafe_get_target() == memory_of(now) && data == now.storage().data() &&
         offset == now.storage_offset() && now.sizes() == sizes && now.strides() == strides;
}

CastCache::Entry* CastCache::find(const at::Tensor& weight, at::ScalarType dtype, bool recorded,
                                  bool rounded) {
  const c10::TensorImpl* const key = weight.unsafeGetTensorImpl();
  auto& bucket = buckets_[(reinterpret_cast<std::uintptr_t>(key) >> 6) % buckets_.size()];
  // An entry whose weight changed or is gone serves nobody any more.
  size_ -= std::erase_if(bucket, [&](const Entry& entry) {
    return (entry.weight._unsafe_get_target() == key && !entry.is_of(weight)) ||
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
           weight.storage().getWeakStorageImpl(), weight.storage().data(), weight.storage_offset(),
           c10::DimVector(weight.sizes()), c10::DimVector(weight.strides()),
           key->version_counter().current_version(), dtype, recorded, rounded, cast});
      storages_.set(hash_of(memory_of(weight)));
      ++size_;
    }
  }
  if (weight.is_same(tensor)) return cast;
  return {same_view(cast.lower, weight, tensor), same_view(cast.rounded, weight, tensor)};
}

void CastCache::forget(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const c10::StorageImpl* const storage = memory_of(tensor);
  std::vector<Cast> dropped;  // graphs die outside the lock
  const std::lock_guard lock(mutex_);
  if (!storages_.test(hash_of(storage))) return;
  for (auto& bucket : buckets_) {
    size_ -= std::erase_if(bucket, [&](Entry& entry) {
      if (entry.storage._unsafe_get_target() != storage) return false;
      dropped.push_back(std::move(entry.cast));
      return true;
    });
  }
}

void CastCache::clear() {
  std::vector<std::vector<Entry>> dropped(buckets_.size());  // graphs die outside the lock
  const std::lock_guard lock(mutex_);
  dropped.swap(buckets_);
  storages_.reset();
  size_ = 0;
}

void CastCache::close() {
  clear();
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

}  // namespace gradus::amp::internal
