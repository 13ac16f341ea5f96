#pragma once

// Where bytes go and come back from. A Store moves whole storages.

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include <c10/core/Storage.h>

#include <gradus/base/memory_breakdown.h>
#include <gradus/offload/offload.h>

namespace gradus::offload::internal {

/// Room for the bytes of one storage; its destructor frees it.
class Place {
 public:
  virtual ~Place() = default;
};

/// Thread-safe. Transfers end in done(error): null, or an exception to throw where the bytes are
/// wanted. done() may be called before write() or read() returns.
class Store {
 public:
  using Done = std::function<void(std::exception_ptr)>;
  virtual ~Store() = default;

  virtual std::shared_ptr<Place> reserve(std::size_t bytes) = 0;
  /// @p source lives, unchanged, until done().
  virtual void write(const std::shared_ptr<Place>& place, const c10::Storage& source,
                     Done done) = 0;
  virtual void read(const std::shared_ptr<Place>& place, const c10::Storage& target, Done done) = 0;
  /// Ends its threads, all transfers having ended; later ones run on the calling thread.
  virtual void stop() = 0;
  virtual std::string access() const = 0;
};

/// @throws UserError as OffloadGuard's constructor.
std::shared_ptr<Store> make_store(const OffloadOptions& options);

/// An uninitialised storage of @p bytes on @p device, counted as @p category.
c10::Storage make_storage(std::size_t bytes, c10::Device device, base::MemoryCategory category);

}  // namespace gradus::offload::internal
