#include <gradus/recompute/internal/region.h>

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <mutex>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <gradus/base/error.h>
#include <gradus/base/names.h>

namespace gradus::recompute::internal {
namespace {

using plane::op::Call;
using plane::op::Frame;

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  return (hash ^ value) * 0x9e3779b97f4a7c15ULL + (hash >> 29);
}

std::uint64_t signature_of(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return 1;
    std::uint64_t hash = mix(2, static_cast<std::uint64_t>(tensor.scalar_type()));
    for (const std::int64_t size : tensor.sizes())
      hash = mix(hash, static_cast<std::uint64_t>(size));
    return hash;
  }
  if (value.isInt()) return mix(3, static_cast<std::uint64_t>(value.toInt()));
  if (value.isDouble()) return mix(4, std::bit_cast<std::uint64_t>(value.toDouble()));
  if (value.isBool()) return mix(5, value.toBool() ? 1 : 0);
  if (value.isString()) return mix(6, std::hash<std::string>()(value.toStringRef()));
  if (value.isDevice()) return mix(7, static_cast<std::uint64_t>(value.toDevice().type()));
  if (value.isComplexDouble()) {
    const auto z = value.toComplexDouble();
    return mix(mix(8, std::bit_cast<std::uint64_t>(z.real())),
               std::bit_cast<std::uint64_t>(z.imag()));
  }
  if (value.isList()) {
    std::uint64_t hash = 9;
    for (const c10::IValue& element : value.toListRef()) hash = mix(hash, signature_of(element));
    return hash;
  }
  return value.isNone() ? 10 : 11;
}

std::uint64_t signature_of(const Call& call) {
  std::uint64_t hash = 0;
  for (const c10::IValue& value : call.arguments()) hash = mix(hash, signature_of(value));
  return hash;
}

template <typename Visit>
void visit_tensors(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.has_storage()) visit(tensor);
  } else if (value.isTensorList() || value.isList()) {
    for (const c10::IValue& element : value.toListRef()) visit_tensors(element, visit);
  }
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

c10::weak_intrusive_ptr<c10::StorageImpl> weak_storage(const at::Tensor& tensor) {
  return c10::weak_intrusive_ptr<c10::StorageImpl>(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl()));
}

// Whether the call changes argument `index`. Batch-norm schemas claim to change nothing; they
// change the running statistics when they train.
bool changes(const Call& call, std::size_t index) {
  const c10::Argument& argument = call.schema().arguments()[index];
  if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) return true;
  if (argument.name() != "running_mean" && argument.name() != "running_var") return false;
  static constexpr std::array<std::string_view, 6> kNorms{
      "aten::batch_norm",       "aten::native_batch_norm", "aten::_batch_norm_impl_index",
      "aten::cudnn_batch_norm", "aten::miopen_batch_norm", "aten::instance_norm"};
  if (std::find(kNorms.begin(), kNorms.end(), call.name()) == kNorms.end()) return false;
  const auto& arguments = call.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "training" || arguments[i].name() == "use_input_stats") {
      return call.arguments()[i].toBool();
    }
  }
  return true;
}

// Whether a second run must repeat this call. detach() is what saving a tensor does; the casts of
// an autocast operator depend on what its cache holds.
bool is_step(const Call& call, Frame frame, const void* casting_for) {
  return frame == Frame::autograd && call.name() != "aten::detach" &&
         (casting_for == nullptr || casting_for == &call.schema());
}

// Sets, for the time of one call, which operator autocast is casting arguments for.
class CastingScope {
 public:
  CastingScope(const void*& casting_for, const Call& call, Frame frame)
      : casting_for_(casting_for), outer_(casting_for) {
    if (frame == Frame::autocast) {
      casting_for_ = &call.schema();
    } else if (casting_for_ == &call.schema()) {
      casting_for_ = nullptr;
    }
  }
  ~CastingScope() { casting_for_ = outer_; }
  CastingScope(const CastingScope&) = delete;
  CastingScope& operator=(const CastingScope&) = delete;

 private:
  const void*& casting_for_;
  const void* outer_;
};

}  // namespace

at::Tensor over_bytes(const at::Tensor& tensor, const at::Tensor& bytes) {
  at::Tensor result = at::empty({0}, tensor.options());
  result.set_(bytes.clone().storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  return result;
}

void Recorder::note_arguments(const Call& call) {
  const auto arguments = call.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = arguments[i];
    if (value.isGenerator()) {
      at::Generator generator = value.toGenerator();
      if (!generator.defined()) continue;
      const bool known = std::any_of(record_.generators.begin(), record_.generators.end(),
                                     [&](const auto& entry) { return entry.first == generator; });
      if (known) continue;
      const std::lock_guard lock(generator.mutex());
      record_.generators.emplace_back(generator, generator.get_state());
      continue;
    }
    const bool written = changes(call, i);
    visit_tensors(value, [&](const at::Tensor& tensor) {
      const c10::StorageImpl* const storage = storage_of(tensor);
      if (made_.contains(storage)) return;
      if (!tensor.is_inference() && !record_.read.contains(storage)) {
        record_.read.emplace(storage,
                             OutsideTensor{weak_storage(tensor), base::describe_tensor(tensor),
                                           tensor.unsafeGetTensorImpl()->version_counter(), 0});
      }
      if (written && !record_.changed.contains(storage)) {
        const at::NoGradGuard no_grad;
        at::Tensor bytes = at::empty({0}, tensor.options().dtype(at::kByte).requires_grad(false));
        bytes.set_(tensor.storage(), 0, {static_cast<std::int64_t>(tensor.storage().nbytes())},
                   {1});
        record_.changed.emplace(storage, ChangedStorage{weak_storage(tensor), bytes.clone()});
      }
    });
  }
}

void Recorder::call(Call& call) {
  const Frame frame = call.frame();
  if (frame == Frame::below_autograd) {
    call.proceed();
    return;
  }
  if (is_step(call, frame, casting_for_))
    record_.calls.push_back({call.name(), signature_of(call)});
  note_arguments(call);
  std::vector<const c10::StorageImpl*> aliased;
  for (const c10::IValue& value : call.arguments()) {
    visit_tensors(value, [&](const at::Tensor& tensor) { aliased.push_back(storage_of(tensor)); });
  }
  {
    const CastingScope scope(casting_for_, call, frame);
    call.proceed();
  }
  for (const c10::IValue& value : call.results()) {
    visit_tensors(value, [&](const at::Tensor& tensor) {
      const c10::StorageImpl* const storage = storage_of(tensor);
      if (std::find(aliased.begin(), aliased.end(), storage) == aliased.end())
        made_.insert(storage);
    });
  }
}

void Recorder::finish() {
  for (auto& entry : record_.read) entry.second.version = entry.second.counter.current_version();
}

at::Tensor Replayer::shadow_of(const at::Tensor& tensor) {
  const c10::StorageImpl* const storage = storage_of(tensor);
  const auto changed = record_.changed.find(storage);
  if (changed == record_.changed.end()) return {};
  const at::NoGradGuard no_grad;
  auto shadow = shadows_.find(storage);
  if (shadow == shadows_.end())
    shadow = shadows_.emplace(storage, changed->second.bytes_before.clone()).first;
  at::Tensor result = at::empty({0}, tensor.options().requires_grad(false));
  result.set_(shadow->second.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  return result;
}

void Replayer::substitute(Call& call) {
  if (record_.changed.empty()) return;
  const std::size_t count = call.arguments().size();
  for (std::size_t i = 0; i < count; ++i) {
    const c10::IValue& value = call.arguments()[i];
    bool outside = false;
    visit_tensors(value, [&](const at::Tensor& t) {
      outside = outside || record_.changed.contains(storage_of(t));
    });
    if (!outside) continue;
    if (value.isTensor()) {
      call.set_argument(i, shadow_of(value.toTensor()));
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) {
        if (const at::Tensor shadow =
                tensor.defined() && tensor.has_storage() ? shadow_of(tensor) : at::Tensor();
            shadow.defined()) {
          tensor = shadow;
        }
      }
      call.set_argument(i, c10::IValue(std::move(tensors)));
    } else {
      throw UserError(
          base::join("[checkpoint] ", call.name(),
                     " takes a tensor that the region changed in a list of "
                     "optional tensors, which cannot be run again; change a clone instead"));
    }
  }
}

void Replayer::call(Call& call) {
  const Frame frame = call.frame();
  if (frame == Frame::below_autograd) {
    call.proceed();
    return;
  }
  if (stop_) throw StopRegion{frame_};
  if (check_ && is_step(call, frame, casting_for_)) {
    const std::uint64_t signature = signature_of(call);
    if (next_ >= record_.calls.size() || record_.calls[next_].name != call.name() ||
        record_.calls[next_].signature != signature) {
      throw UserError(base::join(
          "[checkpoint] a checkpointed region must compute the same again for backward; operator ",
          next_, " was ",
          next_ < record_.calls.size() ? record_.calls[next_].name
                                       : std::string_view("the end of the region"),
          " and is now ", call.name(),
          next_ < record_.calls.size() && record_.calls[next_].name == call.name()
              ? " with other arguments"
              : "",
          ". Did the module switch between train() and eval(), or a condition outside the region "
          "change?"));
    }
    ++next_;
  }
  substitute(call);
  {
    const CastingScope scope(casting_for_, call, frame);
    call.proceed();
  }
  if (stop_) throw StopRegion{frame_};
}

void Replayer::finish() const {
  if (!check_ || next_ == record_.calls.size()) return;
  throw UserError(
      base::join("[checkpoint] a checkpointed region must compute the same again for backward; it "
                 "ended after ",
                 next_, " operators, before ", record_.calls[next_].name, ", where it ran ",
                 record_.calls.size(), " the first time"));
}

}  // namespace gradus::recompute::internal
