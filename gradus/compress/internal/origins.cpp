#include <gradus/compress/internal/origins.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>

namespace gradus::compress::internal {
namespace {

template <typename Fn>
void for_each_tensor(const c10::IValue& value, Fn& fn) {
  if (value.isTensor()) {
    fn(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) fn(tensor);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) for_each_tensor(item, fn);
  }
}

bool without_history(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.is_leaf();
}

}  // namespace

void Origins::call(plane::op::Call& call) {
  // Where nothing is recorded nothing is saved; what is made there counts as coming from outside.
  if (call.frame() != plane::op::Frame::autograd || !at::GradMode::is_enabled()) {
    call.proceed();
    return;
  }
  bool takes_outside = false;
  const auto see_argument = [&](const at::Tensor& tensor) {
    if (!without_history(tensor)) return;
    note(tensor, Origin::outside);
    takes_outside = takes_outside || outside(tensor);
  };
  for (const c10::IValue& argument : call.arguments()) for_each_tensor(argument, see_argument);
  const bool copies = call.name() == "aten::_to_copy" || call.name() == "aten::clone";
  call.proceed();
  const auto see_result = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    if (copies && takes_outside) {
      note(tensor, Origin::outside);
    } else if (tensor.is_leaf()) {
      note(tensor, Origin::made);
    }
  };
  for (const c10::IValue& result : call.results()) for_each_tensor(result, see_result);
}

bool Origins::outside(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return false;
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(tensor.storage().unsafeGetStorageImpl());
  return found != known_.end() && !found->second.storage.expired() &&
         found->second.origin == Origin::outside;
}

// What is known of live memory stays: a view or an in-place change makes nothing new.
void Origins::note(const at::Tensor& tensor, Origin origin) {
  c10::StorageImpl* const key = tensor.storage().unsafeGetStorageImpl();
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(key);
  if (found != known_.end() && !found->second.storage.expired()) return;
  known_.insert_or_assign(key, Known{tensor.storage().getWeakStorageImpl(), origin});
  if (known_.size() >= prune_at_) prune();
}

void Origins::prune() {
  std::erase_if(known_, [](const auto& entry) { return entry.second.storage.expired(); });
  prune_at_ = std::max<std::size_t>(1024, 2 * known_.size());
}

}  // namespace gradus::compress::internal
