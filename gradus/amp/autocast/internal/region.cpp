#include <gradus/amp/autocast/internal/region.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <c10/core/InferenceMode.h>

#include <gradus/amp/autocast/internal/hints.h>
#include <gradus/amp/autocast/internal/rounded.h>
#include <gradus/base/error.h>

namespace gradus::amp::internal {
namespace {

using plane::op::Call;
using plane::op::Frame;
using plane::op::Order;

// Of this thread: an operator returns on the thread it was called on.
thread_local int listed_depth = 0;
thread_local int casting_depth = 0;

class Depth {
 public:
  explicit Depth(int& depth) : depth_(depth) { ++depth_; }
  ~Depth() { --depth_; }
  Depth(const Depth&) = delete;
  Depth& operator=(const Depth&) = delete;

 private:
  int& depth_;
};

// Lets the handlers behind see what autocast itself calls, and the region know that it is itself.
class OwnOperators {
 public:
  explicit OwnOperators(const Call& call) : casting_(casting_depth), visible_(call) {}

 private:
  Depth casting_;
  Call::InnerOperators visible_;
};

bool is_lower(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// What autocast may cast: float64 is a choice of the program.
bool eligible(const at::Tensor& tensor, c10::DeviceType device) {
  return tensor.defined() && tensor.device().type() == device &&
         (tensor.scalar_type() == at::kFloat || is_lower(tensor.scalar_type()));
}

bool is_tensor_list(const c10::IValue& value) { return value.isTensorList(); }

// Calls visit on each tensor argument, in lists too.
template <typename Visit>
void for_each_tensor(c10::ArrayRef<c10::IValue> arguments, Visit&& visit) {
  for (const c10::IValue& value : arguments) {
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (is_tensor_list(value)) {
      for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
    }
  }
}

// Replaces tensors for which @p change gives a defined one, but not those of the bits in @p kept.
template <typename Change>
void change_arguments(Call& call, std::uint32_t kept, Change&& change) {
  for (std::size_t i = 0; i < call.arguments().size(); ++i) {
    if (i < 32 && (kept >> i & 1u) != 0) continue;
    const c10::IValue& value = call.arguments()[i];
    if (value.isTensor()) {
      at::Tensor changed = change(value.toTensor());
      if (changed.defined()) call.set_argument(i, std::move(changed));
    } else if (is_tensor_list(value)) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      bool any = false;
      for (at::Tensor& tensor : tensors) {
        at::Tensor changed = change(tensor);
        any = any || changed.defined();
        if (changed.defined()) tensor = std::move(changed);
      }
      if (any) call.set_argument(i, c10::List<at::Tensor>(std::move(tensors)));
    }
  }
}

at::Tensor to(const at::Tensor& tensor, at::ScalarType dtype) {
  return at::_to_copy(tensor, tensor.options().dtype(dtype));
}

// Casts by @p make what autocast may cast and is not in @p dtype already.
template <typename Make>
void cast_arguments(Call& call, const DeviceSetting& setting, const OperatorRule& rule,
                    at::ScalarType dtype, Make&& make) {
  std::optional<OwnOperators> own;
  change_arguments(call, rule.kept_arguments, [&](const at::Tensor& tensor) {
    if (!eligible(tensor, setting.device) || tensor.scalar_type() == dtype) return at::Tensor();
    if (!own) own.emplace(call);
    return make(tensor);
  });
}

// Arguments that are not cast (running statistics), for an operator that computes in float32: those
// in a lower precision become float32, and what the operator writes into them is written back.
class KeptArguments {
 public:
  KeptArguments(Call& call, std::uint32_t kept) {
    for (std::size_t i = 0; kept >> i != 0; ++i) {
      const c10::IValue& value = call.arguments()[i];
      if ((kept >> i & 1u) == 0 || !value.isTensor()) continue;
      const at::Tensor given = value.toTensor();
      if (!given.defined() || !is_lower(given.scalar_type())) continue;
      if (!own_) own_.emplace(call);
      const at::Tensor wide = to(given, at::kFloat);
      if (!given.requires_grad()) pairs_.emplace_back(given, wide);
      call.set_argument(i, wide);
    }
    own_.reset();
  }
  void write_back(const Call& call) const {
    if (pairs_.empty()) return;
    const OwnOperators own(call);
    const at::NoGradGuard no_grad;
    for (const auto& [given, wide] : pairs_) {
      if (!at::equal(to(given, at::kFloat), wide)) given.copy_(wide);
    }
  }

 private:
  std::optional<OwnOperators> own_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

void refuse(const Call& call, const DeviceSetting& setting) {
  const bool cross_entropy = call.name() == "aten::binary_cross_entropy";
  throw UserError(base::join(
      "[autocast] ", call.name(), " is banned under ", setting.dtype, " autocast: its result or ",
      "gradient leaves the range of the type. ",
      cross_entropy
          ? "Use binary_cross_entropy_with_logits on the values before the sigmoid, "
            "or call it in an AutocastGuard({.enabled = false})."
          : "Call it in an AutocastGuard({.enabled = false}), or give it another policy."));
}

// Whether what @p call makes, or writes, is float16: all its tensors of floating point are, those
// that only hold a number (@p numbers) aside.
bool makes_half(const Call& call, std::uint32_t numbers) {
  bool any = false;
  for (std::size_t i = 0; i < call.arguments().size(); ++i) {
    const c10::IValue& value = call.arguments()[i];
    if ((numbers >> i & 1u) != 0 || !value.isTensor() || !value.toTensor().defined()) continue;
    const at::ScalarType type = value.toTensor().scalar_type();
    if (type == at::kHalf) {
      any = true;
    } else if (at::isFloatingType(type) || at::isComplexType(type)) {
      return false;
    }
  }
  if (!any) return false;
  const auto dtype = call.schema().argumentIndexWithName("dtype");
  if (!dtype || !call.arguments()[*dtype].isInt()) return true;
  return call.arguments()[*dtype].toInt() == static_cast<std::int64_t>(at::kHalf);
}

// A finite number that does not fit a tensor of its type becomes the largest that does. Infinities
// stay.
void saturate(Call& call, const OperatorRule& rule) {
  if (!makes_half(call, rule.saturated_arguments)) return;
  constexpr double kLargest = 65504.0;
  for (std::size_t i = 0; i < call.arguments().size(); ++i) {
    if ((rule.saturated_arguments >> i & 1u) == 0) continue;
    const c10::IValue& number = call.arguments()[i];
    at::Tensor held;
    if (number.isTensor()) {
      held = number.toTensor();
      if (!held.defined() || held.dim() != 0 || !held.is_cpu() || held.requires_grad() ||
          !at::isFloatingType(held.scalar_type())) {
        continue;
      }
    } else if (!number.isScalar()) {
      continue;
    }
    const at::Scalar scalar = held.defined() ? held.item() : number.toScalar();
    if (scalar.isComplex()) continue;
    const double value = scalar.toDouble();
    if (!std::isfinite(value) || std::abs(value) <= kLargest) continue;
    const at::Scalar largest(value > 0 ? kLargest : -kLargest);
    if (held.defined()) {
      call.set_argument(i, at::full({}, largest, held.options()));
    } else {
      call.set_argument(i, largest);
    }
  }
}

}  // namespace

Region::Region(std::shared_ptr<const Settings> settings, std::shared_ptr<CastCache> cache)
    : settings_(std::move(settings)),
      cache_(std::move(cache)),
      pass_(plane::saved::current_backward()) {
  for (const DeviceSetting& setting : settings_->devices)
    if (setting.enabled) enabled_.push_back(&setting);
  // An accelerator's arguments decide before the CPU's (numbers in tensors).
  std::stable_sort(enabled_.begin(), enabled_.end(), [](const auto* a, const auto* b) {
    return (a->device != c10::DeviceType::CPU) > (b->device != c10::DeviceType::CPU);
  });
}

std::shared_ptr<Region> Region::current() {
  auto region = std::dynamic_pointer_cast<Region>(plane::op::newest(Order::autocast));
  if (region != nullptr && region->pass_ != plane::saved::current_backward()) return nullptr;
  return region;
}

void Region::call(Call& call) {
  if (listed_depth + casting_depth > 0 || !decide(call)) call.proceed_past_order();
}

// False if there is nothing to do.
bool Region::decide(Call& call) {
  const int pass = plane::saved::current_backward();
  if (pass != pass_) {
    // What this pass computes no longer needs the casts, and their weights are about to change.
    if (pass >= 0 && cache_->size() > 0) cache_->clear();
    return false;
  }
  if (cache_->size() > 0 && call.schema().is_mutable()) forget_written(call);
  for (const DeviceSetting* const setting : enabled_) {
    const OperatorRule* const rule = setting->table->find(call.schema());
    if (rule == nullptr) continue;
    const Frame frame = call.frame();
    // LibTorch's autocast, switched on inside this region, decides.
    if (frame == Frame::autocast) {
      proceed_nested(call);
      return true;
    }
    // What kernels call is theirs. In inference mode nothing is above autograd.
    if (frame == Frame::below_autograd && !c10::InferenceMode::is_enabled()) return false;
    if (rule->saturated_arguments != 0) {
      saturate(call, *rule);
      return false;
    }
    bool any = false;
    for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) {
      any = any || eligible(tensor, setting->device);
    });
    if (!any) continue;
    switch (rule->policy) {
      case Policy::none:
        return false;
      case Policy::lower_precision:
        if (settings_->hint_shapes) note_shape(call, setting->dtype);
        if (setting->rounded ||
            (setting->rounded_recurrent && call.name() == "aten::mkldnn_rnn_layer")) {
          compute_rounded(call, *setting, *rule);
        } else {
          lower(call, *setting, *rule);
        }
        return true;
      case Policy::fp32:
        raise(call, *setting, *rule);
        return true;
      case Policy::fp32_result:
        raise_result(call, *setting, rule->dtype_argument);
        return true;
      case Policy::widest:
        widen(call, *setting, *rule);
        return true;
      case Policy::banned:
        refuse(call, *setting);
    }
  }
  return false;
}

// Not every write leaves a version in the weight: through weight.data(), or a flat buffer, it
// leaves none.
void Region::forget_written(const Call& call) {
  const auto& schema = call.schema().arguments();
  const auto arguments = call.arguments();
  for (std::size_t i = 0; i < arguments.size() && i < schema.size(); ++i) {
    if (schema[i].alias_info() == nullptr || !schema[i].alias_info()->isWrite()) continue;
    for_each_tensor(arguments.slice(i, 1),
                    [&](const at::Tensor& tensor) { cache_->forget(tensor); });
  }
}

// What a listed operator calls runs in the types it is given.
void Region::proceed_nested(Call& call) {
  const Depth nested(listed_depth);
  call.proceed_past_order();
}

Cast Region::cast(const at::Tensor& tensor, at::ScalarType dtype, bool rounded) {
  const auto make = [&](const at::Tensor& whole) -> Cast {
    at::Tensor lower = whole.scalar_type() == dtype ? whole : to(whole, dtype);
    return {lower, rounded ? to(lower, at::kFloat) : at::Tensor()};
  };
  // A weight that is in the dtype already is cast only for its float32 values.
  if (settings_->cache && (rounded || tensor.scalar_type() == at::kFloat) &&
      CastCache::takes(tensor)) {
    return cache_->get(tensor, dtype, rounded, make);
  }
  return make(tensor);
}

void Region::lower(Call& call, const DeviceSetting& setting, const OperatorRule& rule) {
  cast_arguments(call, setting, rule, setting.dtype, [&](const at::Tensor& tensor) {
    return cast(tensor, setting.dtype, /*rounded=*/false).lower;
  });
  proceed_nested(call);
}

void Region::compute_rounded(Call& call, const DeviceSetting& setting, const OperatorRule& rule) {
  RoundedOperator operation(setting.dtype);
  {
    const OwnOperators own(call);
    change_arguments(call, rule.kept_arguments, [&](const at::Tensor& tensor) {
      if (!eligible(tensor, setting.device)) return at::Tensor();
      Cast values = cast(tensor, setting.dtype, /*rounded=*/true);
      operation.add(values.rounded, values.lower);
      return values.rounded;
    });
  }
  const KeptArguments kept(call, rule.kept_arguments);
  proceed_nested(call);
  kept.write_back(call);
  const OwnOperators own(call);
  for (std::size_t i = 0; i < call.results().size(); ++i) {
    const c10::IValue& result = call.results()[i];
    if (is_tensor_list(result)) {
      std::vector<at::Tensor> tensors = result.toTensorVector();
      for (at::Tensor& tensor : tensors)
        if (eligible(tensor, setting.device)) tensor = to(tensor, setting.dtype);
      call.set_result(i, c10::List<at::Tensor>(std::move(tensors)));
      continue;
    }
    if (!result.isTensor() || !eligible(result.toTensor(), setting.device)) continue;
    call.set_result(i, to(result.toTensor(), setting.dtype));
  }
}

void Region::raise(Call& call, const DeviceSetting& setting, const OperatorRule& rule) {
  cast_arguments(call, setting, rule, at::kFloat,
                 [](const at::Tensor& tensor) { return to(tensor, at::kFloat); });
  const KeptArguments kept(call, rule.kept_arguments);
  proceed_nested(call);
  kept.write_back(call);
}

void Region::raise_result(Call& call, const DeviceSetting& setting, int dtype_argument) {
  const auto index = static_cast<std::size_t>(dtype_argument);
  const c10::IValue& first = call.arguments()[0];
  if (call.arguments()[index].isNone() && first.isTensor() &&
      eligible(first.toTensor(), setting.device)) {
    call.set_argument(index, static_cast<std::int64_t>(at::kFloat));
  }
  proceed_nested(call);
}

void Region::widen(Call& call, const DeviceSetting& setting, const OperatorRule& rule) {
  at::ScalarType widest = setting.dtype;
  for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) {
    // float16 and bfloat16 have no common type below float32.
    if (eligible(tensor, setting.device) && tensor.scalar_type() != setting.dtype) {
      widest = at::kFloat;
    }
  });
  cast_arguments(call, setting, rule, widest,
                 [widest](const at::Tensor& tensor) { return to(tensor, widest); });
  proceed_nested(call);
}

ActiveRegion::ActiveRegion(std::shared_ptr<const Settings> settings) {
  std::shared_ptr<CastCache> cache;
  if (const auto outer = Region::current()) {
    cache = outer->cache();
  } else {
    cache = own_cache_ = std::make_shared<CastCache>();
  }
  const bool rounded =
      std::any_of(settings->devices.begin(), settings->devices.end(),
                  [](const DeviceSetting& setting) { return setting.enabled && setting.rounded; });
  calls_ = plane::op::push(Order::autocast,
                           std::make_shared<Region>(std::move(settings), std::move(cache)));
  if (rounded) {
    static const auto hooks = std::make_shared<KeepLowerPrecision>();
    saved_ = plane::saved::push(plane::saved::Order::round, hooks);
  }
}

ActiveRegion::~ActiveRegion() {
  saved_ = plane::saved::Guard();
  calls_ = plane::op::Guard();
  if (own_cache_ != nullptr) own_cache_->close();
}

bool casting_now() { return casting_depth > 0; }

}  // namespace gradus::amp::internal
