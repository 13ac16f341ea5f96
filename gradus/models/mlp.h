#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

namespace torch::nn {
class LinearImpl;
}  // namespace torch::nn

namespace gradus::models {

/// What an MLP is made of.
struct MlpOptions {
  std::vector<std::int64_t> widths;  ///< Input, hidden..., output. At least two, each >= 1.
};

/// Linear layers with ReLU between them: [..., widths.front()] -> [..., widths.back()].
///
/// An ordinary torch::nn module; its state names are N.weight and N.bias, N = 0, 2, 4, ...: those
/// of the Python model Sequential(Linear, ReLU, Linear, ReLU, Linear).
class MlpImpl : public torch::nn::Cloneable<MlpImpl> {
 public:
  /// Builds the layers and draws their weights from the default generator, twice (see
  /// reset_parameters()).
  /// @throws c10::ValueError if @p options have fewer than two widths, or one below 1.
  explicit MlpImpl(MlpOptions options);
  void reset() override;

  /// Draws each layer's weight, then its bias, from U(-1/sqrt(inputs), 1/sqrt(inputs)), first layer
  /// first.
  /// @param generator  Where the numbers come from; the default generator if not given.
  void reset_parameters(std::optional<at::Generator> generator = std::nullopt);

  at::Tensor forward(const at::Tensor& x);

  const MlpOptions& options() const { return options_; }

 private:
  MlpOptions options_;
  std::vector<std::shared_ptr<torch::nn::LinearImpl>> layers_;
};
TORCH_MODULE(Mlp);

}  // namespace gradus::models
