#include <gradus/plan/store_stash.h>

#include <gradus/offload/stash.h>

namespace gradus::plan {
namespace {

class StoreStash final : public recompute::Stash {
 public:
  explicit StoreStash(const offload::OffloadOptions& options) : store_(options) {}
  std::shared_ptr<void> put(const c10::Storage& storage) override { return store_.put(storage); }
  c10::Storage get(const std::shared_ptr<void>& handle) override { return store_.get(handle); }

 private:
  offload::StorageStore store_;
};

}  // namespace

std::shared_ptr<recompute::Stash> make_stash(const offload::OffloadOptions& options) {
  return std::make_shared<StoreStash>(options);
}

}  // namespace gradus::plan
