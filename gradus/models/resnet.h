#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

namespace torch::nn {
class Conv2dImpl;
class GroupNormImpl;
class LinearImpl;
class SequentialImpl;
}  // namespace torch::nn

namespace gradus::models {

// Shapes: B batch, C channels, H height, W width, K classes.

/// How a ResNet begins.
enum class ResNetStem {
  kSmall,  ///< 3x3 convolution, stride 1: images of about 32 x 32 (He et al. 2016, section 4.2).
  kLarge,  ///< 7x7 convolution, stride 2, then 3x3 max pool, stride 2: about 224 x 224.
};

/// What a ResNet is made of. The defaults are ResNet-18 for small images.
struct ResNetOptions {
  std::int64_t in_channels = 3;                     ///< Of the image. >= 1.
  std::int64_t classes = 10;                        ///< K, number of logits. >= 1.
  std::vector<std::int64_t> blocks = {2, 2, 2, 2};  ///< Blocks of each stage, at least one of each.
  std::int64_t width =
      64;  ///< Channels of the first stage; each next stage has twice as many. >= 1.
  /// Groups of each GroupNorm. >= 1. A layer of C channels has gcd(groups, C) of them.
  std::int64_t groups = 32;
  ResNetStem stem = ResNetStem::kSmall;  ///< First layers.
};

/// Says what makes @p options impossible ("width must be at least 1; got 0"), or "" if nothing
/// does.
std::string defect(const ResNetOptions& options);

/// Number of values in all parameters.
std::int64_t parameter_count(const ResNetOptions& options);

/// Basic block: relu(x + bn2(conv2(relu(bn1(conv1(x)))))), two 3x3 convolutions without bias. Where
/// the shape changes x goes through a 1x1 convolution and a norm, "downsample", first.
class ResNetBlockImpl : public torch::nn::Cloneable<ResNetBlockImpl> {
 public:
  /// @param in, out  Channels, >= 1.
  /// @param stride  1 or more; divides height and width.
  /// @param groups  Of each GroupNorm; gcd with @p out is taken.
  ResNetBlockImpl(std::int64_t in, std::int64_t out, std::int64_t stride, std::int64_t groups);
  void reset() override;

  /// [B, in, H, W] -> [B, out, ceil(H / stride), ceil(W / stride)]. Does not modify @p x_BCHW.
  at::Tensor forward(const at::Tensor& x_BCHW);

  std::shared_ptr<torch::nn::Conv2dImpl> conv1, conv2;
  std::shared_ptr<torch::nn::GroupNormImpl> bn1, bn2;
  std::shared_ptr<torch::nn::SequentialImpl> downsample;  ///< Null where the shape stays.

 private:
  std::int64_t in_, out_, stride_, groups_;
};
TORCH_MODULE(ResNetBlock);

/// ResNet of basic blocks (He et al. 2016) with GroupNorm (Wu & He 2018) in place of batch
/// normalisation: no example depends on the others of its batch, so that a batch in parts gives the
/// same gradients.
///
/// An ordinary torch::nn module. Its state names are those of torchvision's resnet18 (the norms
/// are called bn1 and bn2 there; GroupNorm has no running statistics): conv1.weight, bn1.{weight,
/// bias}, layerN.M.conv1.weight, layerN.M.bn1.{weight, bias}, layerN.M.conv2..., layerN.M.bn2...,
/// layerN.0.downsample.0.weight, layerN.0.downsample.1.{weight, bias}, fc.{weight, bias}, N from 1.
/// A program that runs the pieces itself computes the same function as forward():
///
///     at::Tensor x = resnet->stem(images);
///     for (const auto& block : resnet->blocks()) x = block->forward(x);
///     at::Tensor logits = resnet->head(x);
class ResNetImpl : public torch::nn::Cloneable<ResNetImpl> {
 public:
  /// Builds the modules, then draws the weights from the default generator as reset_parameters()
  /// says (the modules' own initialisation draws from it before that).
  /// @throws c10::ValueError with the text of defect() if @p options are impossible.
  explicit ResNetImpl(ResNetOptions options);
  void reset() override;

  /// Draws all weights anew, in the order of named_parameters(): a convolution's from N(0, 2 / (k k
  /// Cout)) (He et al. 2015), fc's weight and bias from U(-1/sqrt(C), 1/sqrt(C)). Norms are 1 and
  /// 0; the last one of each block is 0 and 0, so that a block begins as the identity and depth
  /// does not hurt (Wu & He 2018, section 4.1).
  /// @param generator  Where the numbers come from; the default generator if not given.
  void reset_parameters(const std::optional<at::Generator>& generator = std::nullopt);

  /// Images [B, Cin, H, W] -> logits [B, K].
  /// @throws c10::ValueError unless images have four dimensions and in_channels channels.
  at::Tensor forward(const at::Tensor& x_BCHW);

  /// First convolution, norm and ReLU (and pool): [B, Cin, H, W] -> [B, width, H', W'].
  at::Tensor stem(const at::Tensor& x_BCHW);
  /// Mean over the image and linear layer: [B, C, H, W] -> [B, K].
  at::Tensor head(const at::Tensor& x_BCHW);
  /// The blocks of all stages in order.
  std::vector<std::shared_ptr<ResNetBlockImpl>> blocks() const;

  const ResNetOptions& options() const { return options_; }

  std::shared_ptr<torch::nn::Conv2dImpl> conv1;
  std::shared_ptr<torch::nn::GroupNormImpl> bn1;
  std::shared_ptr<torch::nn::LinearImpl> fc;

 private:
  ResNetOptions options_;
  std::vector<std::shared_ptr<torch::nn::SequentialImpl>> stages_;
};
TORCH_MODULE(ResNet);

}  // namespace gradus::models
