#include <gradus/models/mlp.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/linear.h>

namespace gradus::models {

MlpImpl::MlpImpl(MlpOptions options) : options_(std::move(options)) {
  TORCH_CHECK_VALUE(options_.widths.size() >= 2,
                    "[mlp] widths must name at least an input and an output; got ",
                    options_.widths.size(), " of them");
  for (const std::int64_t width : options_.widths) {
    TORCH_CHECK_VALUE(width >= 1, "[mlp] each width must be at least 1; got ", width);
  }
  MlpImpl::reset();
}

void MlpImpl::reset() {
  layers_.clear();
  for (std::size_t i = 0; i + 1 < options_.widths.size(); ++i) {
    // Odd places belong to the ReLUs of the Python model.
    layers_.push_back(register_module(
        std::to_string(2 * i),
        std::make_shared<torch::nn::LinearImpl>(options_.widths[i], options_.widths[i + 1])));
  }
  reset_parameters();
}

void MlpImpl::reset_parameters(std::optional<at::Generator> generator) {
  const at::NoGradGuard no_grad;
  for (const auto& layer : layers_) {
    const double bound = 1.0 / std::sqrt(static_cast<double>(layer->weight.size(1)));
    layer->weight.uniform_(-bound, bound, generator);
    layer->bias.uniform_(-bound, bound, generator);
  }
}

at::Tensor MlpImpl::forward(const at::Tensor& x) {
  at::Tensor y = at::linear(x, layers_.front()->weight, layers_.front()->bias);
  for (std::size_t i = 1; i < layers_.size(); ++i) {
    y = at::linear(at::relu(y), layers_[i]->weight, layers_[i]->bias);
  }
  return y;
}

}  // namespace gradus::models
