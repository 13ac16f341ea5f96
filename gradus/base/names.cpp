#include <gradus/base/names.h>

#include <mutex>
#include <unordered_map>

#include <gradus/base/error.h>

namespace gradus::base {
namespace {

struct Entry {
  std::uint64_t id;
  std::string name;
};

struct Registry {
  std::mutex mutex;
  std::uint64_t next_id = 1;
  // The weak handles in NamedTensors keep a StorageImpl's address from being reused while it is a
  // key.
  std::unordered_map<const c10::StorageImpl*, std::vector<Entry>> entries;
};

Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

}  // namespace

NamedTensors::NamedTensors(std::vector<std::pair<std::string, at::Tensor>> tensors) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  for (auto& [name, tensor] : tensors) {
    if (!tensor.defined() || !tensor.has_storage()) continue;
    c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
    keys_.emplace_back(c10::weak_intrusive_ptr<c10::StorageImpl>(
                           c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)),
                       r.next_id);
    r.entries[storage].push_back({r.next_id++, std::move(name)});
  }
}

NamedTensors::NamedTensors(NamedTensors&&) noexcept = default;

NamedTensors& NamedTensors::operator=(NamedTensors&& other) noexcept {
  std::swap(keys_, other.keys_);
  return *this;
}

NamedTensors::~NamedTensors() {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  for (const auto& [storage, id] : keys_) {
    const auto found = r.entries.find(storage._unsafe_get_target());
    if (found == r.entries.end()) continue;
    std::erase_if(found->second, [id = id](const Entry& entry) { return entry.id == id; });
    if (found->second.empty()) r.entries.erase(found);
  }
}

std::string tensor_name(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return "";
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  const auto found = r.entries.find(tensor.storage().unsafeGetStorageImpl());
  return found == r.entries.end() ? "" : found->second.front().name;
}

std::string describe_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  const std::string name = tensor_name(tensor);
  return join(name.empty() ? "an unnamed tensor" : name, " (", tensor.scalar_type(), " ",
              tensor.sizes(), ")");
}

}  // namespace gradus::base
