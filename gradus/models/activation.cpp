#include <gradus/models/activation.h>

#include <cmath>
#include <utility>

#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>

namespace gradus::models {

std::string defect(const ActivationOptions& options) {
  if (options.kind != Activation::tempered_sigmoid) return "";
  const std::pair<const char*, double> factors[] = {
      {"scale", options.scale}, {"inverse_temperature", options.inverse_temperature}};
  for (const auto& [name, value] : factors) {
    if (!(std::isfinite(value) && value > 0.0))
      return std::string(name) + " must be finite and > 0; got " + std::to_string(value);
  }
  if (!std::isfinite(options.offset))
    return "offset must be finite; got " + std::to_string(options.offset);
  return "";
}

at::Tensor activate(const at::Tensor& x, const ActivationOptions& options) {
  switch (options.kind) {
    case Activation::relu:
      return at::relu(x);
    case Activation::tanh:
      return at::tanh(x);
    case Activation::tempered_sigmoid:
      break;
  }
  return at::sigmoid(x.mul(options.inverse_temperature)).mul(options.scale).sub(options.offset);
}

}  // namespace gradus::models
