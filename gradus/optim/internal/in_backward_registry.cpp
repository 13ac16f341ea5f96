#include <gradus/optim/internal/in_backward_registry.h>

#include <atomic>
#include <mutex>
#include <unordered_set>

namespace gradus::optim::internal {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_set<const void*> parameters;
  std::atomic<std::size_t> size = 0;  // lets programs without one look without a lock
};

Registry& registry() {
  static auto* const kept = new Registry;  // outlives optimizers of static storage
  return *kept;
}

}  // namespace

bool steps_in_backward(const at::Tensor& parameter) {
  auto& all = registry();
  if (all.size.load(std::memory_order_acquire) == 0) return false;
  const std::lock_guard lock(all.mutex);
  return all.parameters.contains(parameter.unsafeGetTensorImpl());
}

bool register_in_backward(const at::Tensor& parameter) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  const bool added = all.parameters.insert(parameter.unsafeGetTensorImpl()).second;
  all.size.store(all.parameters.size(), std::memory_order_release);
  return added;
}

void unregister_in_backward(const at::Tensor& parameter) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  all.parameters.erase(parameter.unsafeGetTensorImpl());
  all.size.store(all.parameters.size(), std::memory_order_release);
}

}  // namespace gradus::optim::internal
