#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <c10/core/Storage.h>

#include <gradus/offload/offload.h>

namespace gradus::offload {

/// A place for single storages that come and go one at a time: copied at once, on the thread that
/// asks. For techniques that decide themselves what goes when (recompute::MemoryBudget by a plan);
/// OffloadGuard moves what autograd saves by itself, beside the computation.
///
/// Thread-safe. Handles outlive the store.
class StorageStore {
 public:
  /// Of OffloadOptions, target, disk and device count.
  /// @throws UserError as OffloadGuard's constructor.
  explicit StorageStore(const OffloadOptions& options = {});
  ~StorageStore();
  StorageStore(const StorageStore&) = delete;
  StorageStore& operator=(const StorageStore&) = delete;

  /// Copies the bytes there; returns null if there is no room or the transfer failed, see
  /// last_error(). Allocates no device memory. The handle frees the copy.
  std::shared_ptr<void> put(const c10::Storage& storage);
  /// A new storage of the device that the bytes came from.
  /// @throws UserError if the bytes cannot be read.
  c10::Storage get(const std::shared_ptr<void>& handle) const;

  std::int64_t stored_bytes() const;  ///< Now.
  std::string last_error() const;     ///< Of the last put() that returned null; "" if none did.

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace gradus::offload
