#include <gradus/amp/autocast/custom_function.h>

#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <gradus/base/error.h>

namespace gradus::amp {
namespace {

constexpr const char* kKey = "gradus_autocast_state";

struct Remembered final : torch::CustomClassHolder {
  explicit Remembered(AutocastState s) : state(std::move(s)) {}
  AutocastState state;
};

}  // namespace

CustomForward::CustomForward(torch::autograd::AutogradContext* context,
                             std::optional<at::ScalarType> cast_inputs)
    : outside_(AutocastState::capture()), dtype_(cast_inputs) {
  GRADUS_CHECK("autocast", !dtype_ || at::isFloatingType(*dtype_),
               "a custom function casts its inputs to a floating type; got ", *dtype_);
  if (dtype_) off_.emplace(AutocastState());
  context->saved_data[kKey] = c10::IValue::make_capsule(
      c10::make_intrusive<Remembered>(dtype_ ? AutocastState() : outside_));
}

at::Tensor CustomForward::cast(const at::Tensor& tensor) const {
  if (!dtype_ || !tensor.defined() || !tensor.is_floating_point() ||
      tensor.scalar_type() == at::kDouble || !outside_.enabled(tensor.device().type())) {
    return tensor;
  }
  return tensor.to(*dtype_);
}

CustomBackward::CustomBackward(torch::autograd::AutogradContext* context) {
  const auto found = context->saved_data.find(kKey);
  GRADUS_CHECK("autocast", found != context->saved_data.end(),
               "a CustomForward in forward() is required before a CustomBackward");
  const auto held = found->second.toCapsule();
  state_.emplace(static_cast<const Remembered&>(*held).state);
}

}  // namespace gradus::amp
