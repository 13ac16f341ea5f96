#include <gradus/optim/clip.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <unordered_set>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include <gradus/base/error.h>
#include <gradus/optim/internal/in_backward_registry.h>
#include <gradus/optim/optimizer.h>

namespace gradus::optim {
namespace {

enum class Use : std::uint8_t { read, write };

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters, Use use) {
  std::vector<at::Tensor> gradients;
  std::unordered_set<const void*> seen;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    GRADUS_CHECK("clip", parameters[i].defined(), "parameter ", i, " must be a defined tensor");
    GRADUS_CHECK("clip", !internal::steps_in_backward(parameters[i]), "parameter ", i,
                 " must keep its gradient until after backward, but an OptimizerInBackward steps "
                 "it during backward: give that its clip_norm, clip_value or measure_norm");
    const auto& gradient = parameters[i].grad();
    if (!gradient.defined() || !seen.insert(gradient.unsafeGetTensorImpl()).second) continue;
    GRADUS_CHECK("clip", gradient.layout() == at::kStrided, "gradient of parameter ", i,
                 " must be dense; got layout ", gradient.layout());
    GRADUS_CHECK("clip",
                 use == Use::read || at::has_internal_overlap(gradient) != at::MemOverlap::Yes,
                 "gradient of parameter ", i,
                 " must not overlap itself in memory to be written in place; got strides ",
                 gradient.strides(), ". Set .grad to its contiguous()");
    if (gradient.numel() > 0) gradients.push_back(gradient);
  }
  return gradients;
}

at::ScalarType norm_dtype(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

void check_max_norm(double max_norm) {
  GRADUS_CHECK("clip", max_norm >= 0.0, "max_norm must be >= 0; got ", max_norm);
}

}  // namespace

double gradient_norm(const std::vector<at::Tensor>& parameters, double norm_type) {
  GRADUS_CHECK("clip", norm_type > 0.0, "norm_type must be > 0 or infinity; got ", norm_type);
  const at::NoGradGuard no_grad;
  const auto gradients = gradients_of(parameters, Use::read);
  std::vector<at::Tensor> norms;
  // _foreach_norm has one dtype for its results: runs of equal dtype and device go together.
  for (std::size_t begin = 0, end = 0; begin < gradients.size(); begin = end) {
    const auto& first = gradients[begin];
    while (end < gradients.size() && gradients[end].scalar_type() == first.scalar_type() &&
           gradients[end].device() == first.device()) {
      ++end;
    }
    const at::TensorList run(gradients.data() + begin, end - begin);
    const auto run_norms = at::_foreach_norm(run, norm_type, norm_dtype(first.scalar_type()));
    norms.push_back(at::stack(run_norms).to(at::kCPU).to(at::kDouble));
  }
  if (norms.empty()) return 0.0;
  std::vector<at::Tensor> run_totals;
  for (const auto& run : norms) run_totals.push_back(at::linalg_vector_norm(run, norm_type));
  return at::linalg_vector_norm(at::stack(run_totals), norm_type).item<double>();
}

std::vector<double> gradient_norm_by_group(const Optimizer& optimizer, double norm_type) {
  std::vector<double> norms;
  for (const auto& group : optimizer.groups()) {
    norms.push_back(gradient_norm(group.parameters, norm_type));
  }
  return norms;
}

double clip_coefficient(double norm, double max_norm) {
  check_max_norm(max_norm);
  // The 1e-6 is torch.nn.utils.clip_grad_norm_'s. Written so that a NaN norm gives NaN: hiding it
  // would step on.
  const double coefficient = max_norm / (norm + 1e-6);
  return coefficient > 1.0 ? 1.0 : coefficient;
}

void scale_gradients(const std::vector<at::Tensor>& parameters, double factor) {
  if (factor == 1.0) return;
  const at::NoGradGuard no_grad;
  const auto gradients = gradients_of(parameters, Use::write);
  if (!gradients.empty()) at::_foreach_mul_(gradients, at::Scalar(factor));
}

double clip_gradient_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                          const ClipNormOptions& options) {
  check_max_norm(max_norm);
  const double norm = gradient_norm(parameters, options.norm_type);
  GRADUS_CHECK("clip", !options.error_if_nonfinite || std::isfinite(norm),
               "the total norm of the gradients must be "
               "finite; got ",
               norm,
               ". A loss or an activation overflowed: lower the learning rate or the loss scale");
  if (!std::isinf(max_norm)) scale_gradients(parameters, clip_coefficient(norm, max_norm));
  return norm;
}

void clip_gradient_value(const std::vector<at::Tensor>& parameters, double max_value) {
  GRADUS_CHECK("clip", std::isfinite(max_value) && max_value >= 0.0,
               "max_value must be finite and >= 0; got ", max_value);
  const at::NoGradGuard no_grad;
  const auto gradients = gradients_of(parameters, Use::write);
  if (gradients.empty()) return;
  at::_foreach_clamp_min_(gradients, at::Scalar(-max_value));
  at::_foreach_clamp_max_(gradients, at::Scalar(max_value));
}

}  // namespace gradus::optim
