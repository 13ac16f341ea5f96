#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <gradus/models/activation.h>

namespace torch::nn {
class Conv2dImpl;
class LinearImpl;
}  // namespace torch::nn

namespace gradus::models {

// Shapes: B batch, Cin channels, N height and width of an image, K classes.

/// What a small convolutional classifier is made of.
struct ImageClassifierOptions {
  std::int64_t in_channels = 1;       ///< Cin. >= 1.
  std::int64_t image_size = 28;       ///< N. >= 14, so that something is left to classify.
  std::int64_t classes = 10;          ///< K. >= 1.
  std::int64_t first_channels = 16;   ///< Of the first convolution. >= 1.
  std::int64_t second_channels = 32;  ///< Of the second convolution. >= 1.
  std::int64_t hidden = 32;           ///< Width before the last layer. >= 1.
  ActivationOptions activation = {};  ///< After both convolutions and the hidden layer.
};

/// Says what makes @p options impossible ("classes must be at least 1; got 0"), or "" if nothing
/// does.
std::string defect(const ImageClassifierOptions& options);

/// Number of values in all parameters.
std::int64_t parameter_count(const ImageClassifierOptions& options);

/// The convolutional network that differentially private training on MNIST and Fashion-MNIST is
/// measured with (Papernot et al. 2021): convolution 8x8 with stride 2 and
/// padding 3, activation, max pooling 2x2 with stride 1, convolution 4x4 with stride 2, activation,
/// the same pooling, linear, activation, linear. 26,010 values with the default options.
///
/// An ordinary torch::nn module without a layer that mixes examples. Its state names are conv1,
/// conv2, hidden and head, each with .weight and .bias.
class ImageClassifierImpl : public torch::nn::Cloneable<ImageClassifierImpl> {
 public:
  /// Builds the modules, then draws the weights from the default generator as reset_parameters()
  /// says (the modules' own initialisation draws from it before that).
  /// @throws c10::ValueError with the text of defect() if @p options are impossible.
  explicit ImageClassifierImpl(const ImageClassifierOptions& options);
  void reset() override;

  /// Draws each layer's weight, then its bias, from U(-1/sqrt(inputs), 1/sqrt(inputs)), first layer
  /// first; inputs counts a convolution's channels times its window.
  /// @param generator  Where the numbers come from; the default generator if not given.
  void reset_parameters(const std::optional<at::Generator>& generator = std::nullopt);

  /// Logits: [B, Cin, N, N] -> [B, K]. B may be 0.
  /// @throws c10::ValueError for images of another shape.
  at::Tensor forward(const at::Tensor& x_BCNN);

  const ImageClassifierOptions& options() const { return options_; }

  std::shared_ptr<torch::nn::Conv2dImpl> conv1, conv2;
  std::shared_ptr<torch::nn::LinearImpl> hidden, head;

 private:
  ImageClassifierOptions options_;
};
TORCH_MODULE(ImageClassifier);

}  // namespace gradus::models
