#include <gradus/amp/scaler/internal/unscale.h>

#include <cmath>
#include <map>
#include <unordered_set>
#include <utility>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/add.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <gradus/amp/scaler/grad_scaler.h>
#include <gradus/base/error.h>

namespace gradus::amp {
namespace scaler {

void unscale_in_place(std::span<const at::Tensor> gradients, double scale,
                      std::vector<at::Tensor>& found) {
  const at::NoGradGuard no_grad;
  using Device = std::pair<c10::DeviceType, c10::DeviceIndex>;
  std::map<Device, std::map<at::ScalarType, std::vector<at::Tensor>>> buckets;
  for (const auto& gradient : gradients) {
    buckets[{gradient.device().type(), gradient.device().index()}][gradient.scalar_type()]
        .push_back(gradient);
  }
  for (auto& [device, by_dtype] : buckets) {
    const auto options =
        at::TensorOptions().dtype(at::kFloat).device(at::Device(device.first, device.second));
    const auto found_inf = at::zeros({}, options);
    // Inverse in float64, then rounded once, as torch.
    const auto inverse = at::full({}, static_cast<float>(1.0 / scale), options);
    for (auto& [dtype, tensors] : by_dtype) {
      auto found_here = found_inf;
      at::_amp_foreach_non_finite_check_and_unscale_(tensors, found_here, inverse);
    }
    found.push_back(found_inf);
  }
  if (scale == 1.0) return;
  for (const auto& gradient : gradients) {
    // The operator writes without telling autograd (measured on LibTorch 2.13): a backward that
    // still needs the scaled gradient (create_graph) would silently use the unscaled one.
    gradient.unsafeGetTensorImpl()->bump_version();
  }
}

at::Tensor sum_of_found(std::span<const at::Tensor> found) {
  if (found.empty()) return at::zeros({}, at::kFloat);
  auto sum = found.front();
  for (const auto& other : found.subspan(1)) sum = at::add(sum, other.to(sum.device(), true));
  return sum;
}

}  // namespace scaler

at::Tensor unscale_gradients(std::span<const at::Tensor> gradients, double scale) {
  constexpr const char* kComponent = "amp_scaler";
  GRADUS_CHECK(kComponent,
               scale > 0.0 && static_cast<float>(1.0 / scale) > 0.0F &&
                   std::isfinite(static_cast<float>(1.0 / scale)),
               "the scale must be > 0, with an inverse in float32; got ", scale);
  std::vector<at::Tensor> defined;
  std::unordered_set<const void*> seen;
  for (const auto& gradient : gradients) {
    if (!gradient.defined()) continue;
    GRADUS_CHECK(kComponent, gradient.layout() == at::kStrided,
                 "the gradients must be dense; got layout ", gradient.layout());
    GRADUS_CHECK(kComponent, at::isFloatingType(gradient.scalar_type()),
                 "the gradients must have a real floating dtype; got ", gradient.scalar_type());
    GRADUS_CHECK(kComponent, at::has_internal_overlap(gradient) != at::MemOverlap::Yes,
                 "the gradients must not be expanded tensors, whose elements share memory; got "
                 "sizes ",
                 gradient.sizes(), " with strides ", gradient.strides());
    // One tensor given twice is divided once.
    if (seen.insert(gradient.unsafeGetTensorImpl()).second) defined.push_back(gradient);
  }
  std::vector<at::Tensor> found;
  scaler::unscale_in_place(defined, scale, found);
  return scaler::sum_of_found(found);
}

}  // namespace gradus::amp
