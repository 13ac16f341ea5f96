#pragma once

// Storages as the parts of this folder handle them: as keys, weakly, and by copy.

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

namespace gradus::recompute::internal {

/// The key of @p tensor's storage; @p tensor must have one.
inline const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

/// Does not keep the memory; keeps the key's address from being used again.
inline c10::weak_intrusive_ptr<c10::StorageImpl> weak_storage(const at::Tensor& tensor) {
  return c10::weak_intrusive_ptr<c10::StorageImpl>(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
}

/// A copy of a whole storage as bytes, on its device.
inline at::Tensor copy_of_storage(const c10::Storage& storage) {
  const at::NoGradGuard no_grad;
  at::Tensor bytes = at::empty({0}, at::TensorOptions(storage.device()).dtype(at::kByte));
  bytes.set_(storage, 0, {static_cast<std::int64_t>(storage.nbytes())}, {1});
  return bytes.clone();
}

}  // namespace gradus::recompute::internal
