#include <gradus/amp/levels/internal/align.h>

#include <optional>
#include <unordered_set>
#include <utility>

#include <ATen/core/List.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/_to_copy.h>
#include <c10/core/InferenceMode.h>

namespace gradus::amp::internal {
namespace {

using plane::op::Call;

// Calls visit on each tensor argument, in lists too.
template <typename Visit>
void visit_tensors_of(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor) visit(*tensor);
    }
  }
}

class Align final : public plane::op::Handler {
 public:
  Align(std::vector<at::Tensor> parameters, at::ScalarType dtype)
      : parameters_(std::move(parameters)), dtype_(dtype) {
    for (const auto& parameter : parameters_) known_.insert(parameter.unsafeGetTensorImpl());
  }

  void call(Call& call) override {
    // What a kernel calls has its types already. (In inference mode nothing is above autograd.)
    const bool inner =
        call.frame() == plane::op::Frame::below_autograd && !c10::InferenceMode::is_enabled();
    if (!inner && needs_alignment(call)) align(call);
    call.proceed();
  }

 private:
  bool is_parameter(const at::Tensor& tensor) const {
    if (!tensor.defined() || tensor.scalar_type() != dtype_) return false;
    if (known_.contains(tensor.unsafeGetTensorImpl())) return true;
    return tensor.is_view() && known_.contains(tensor._base().unsafeGetTensorImpl());
  }

  // Numbers in tensors have no say in result types, so they stay.
  bool is_other(const at::Tensor& tensor) const {
    return tensor.defined() && at::isFloatingType(tensor.scalar_type()) &&
           tensor.scalar_type() != dtype_ && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
  }

  bool needs_alignment(const Call& call) const {
    bool parameter = false, other = false;
    for (const auto& argument : call.arguments()) {
      visit_tensors_of(argument, [&](const at::Tensor& tensor) {
        other = other || is_other(tensor);
        parameter = parameter || is_parameter(tensor);
      });
    }
    return parameter && other;
  }

  void align(Call& call) const {
    const Call::InnerOperators visible(call);  // Recordings see the casts.
    const auto cast = [this](const at::Tensor& tensor) {
      return is_other(tensor) ? at::_to_copy(tensor, tensor.options().dtype(dtype_)) : tensor;
    };
    for (std::size_t i = 0; i < call.arguments().size(); ++i) {
      // What the operator writes keeps its type.
      const auto* const alias = call.schema().arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite()) continue;
      const c10::IValue& value = call.arguments()[i];
      if (value.isTensor()) {
        if (is_other(value.toTensor())) call.set_argument(i, cast(value.toTensor()));
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> tensors = value.toTensorVector();
        for (at::Tensor& tensor : tensors) tensor = cast(tensor);
        call.set_argument(i, c10::List<at::Tensor>(std::move(tensors)));
      }
    }
  }

  const std::vector<at::Tensor> parameters_;  // Keeps the addresses taken.
  std::unordered_set<const c10::TensorImpl*> known_;
  const at::ScalarType dtype_;
};

}  // namespace

std::shared_ptr<plane::op::Handler> align_with(std::vector<at::Tensor> parameters,
                                               at::ScalarType dtype) {
  return std::make_shared<Align>(std::move(parameters), dtype);
}

}  // namespace gradus::amp::internal
