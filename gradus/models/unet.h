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
class ConvTranspose2dImpl;
class GroupNormImpl;
class ModuleListImpl;
}  // namespace torch::nn

namespace gradus::models {

// Shapes: B batch, C channels, H height, W width.

/// What a U-Net is made of.
struct UNetOptions {
  std::int64_t in_channels = 1;   ///< Of the image. >= 1.
  std::int64_t out_channels = 1;  ///< Of the result. >= 1.
  std::int64_t width = 32;  ///< Channels at full size; each level below has twice as many. >= 1.
  std::int64_t levels = 4;  ///< How often the image is halved, and doubled again. 1 to 16.
  std::int64_t groups = 8;  ///< Of each GroupNorm, >= 1; gcd with the channels is taken.
};

/// Says what makes @p options impossible ("levels must be between 1 and 16; got 0"), or "" if
/// nothing does.
std::string defect(const UNetOptions& options);

/// Number of values in all parameters.
std::int64_t parameter_count(const UNetOptions& options);

/// Two times: 3x3 convolution without bias, GroupNorm, ReLU. The image keeps its size.
class UNetStageImpl : public torch::nn::Cloneable<UNetStageImpl> {
 public:
  /// @param in, out  Channels, >= 1.
  /// @param groups  Of each GroupNorm; gcd with @p out is taken.
  UNetStageImpl(std::int64_t in, std::int64_t out, std::int64_t groups);
  void reset() override;

  /// [B, in, H, W] -> [B, out, H, W]. Does not modify @p x_BCHW.
  at::Tensor forward(const at::Tensor& x_BCHW);

  std::shared_ptr<torch::nn::Conv2dImpl> conv1, conv2;
  std::shared_ptr<torch::nn::GroupNormImpl> norm1, norm2;

 private:
  std::int64_t in_, out_, groups_;
};
TORCH_MODULE(UNetStage);

/// One level of the way up: a 2x2 transposed convolution doubles the image and halves its channels,
/// the skip joins them, a stage follows.
class UNetUpImpl : public torch::nn::Cloneable<UNetUpImpl> {
 public:
  /// @param out  Channels of the skip and of the result; the input has 2 out.
  /// @param groups  Of each GroupNorm; gcd with @p out is taken.
  UNetUpImpl(std::int64_t out, std::int64_t groups);
  void reset() override;

  /// x [B, 2 out, H, W], skip [B, out, 2H, 2W] -> [B, out, 2H, 2W].
  at::Tensor forward(const at::Tensor& x_BCHW, const at::Tensor& skip_BCHW);

  std::shared_ptr<torch::nn::ConvTranspose2dImpl> up;
  UNetStage stage{nullptr};

 private:
  std::int64_t out_, groups_;
};
TORCH_MODULE(UNetUp);

/// U-Net (Ronneberger et al. 2015) with convolutions that keep the image's size and GroupNorm (Wu &
/// He 2018).
///
/// An ordinary torch::nn module. Its state names are down.N.{conv1, conv2}.weight, down.N.{norm1,
/// norm2}.{weight, bias} for N = 0 .. levels - 1 from the top, bottom.{conv1, ...} likewise,
/// up.N.up.{weight, bias}, up.N.stage.{conv1, ...} for N = 0 .. levels - 1 from the bottom, and
/// out.{weight, bias}. A program that runs the pieces itself computes the same function as
/// forward():
///
///     std::vector<at::Tensor> skips;
///     for (const auto& stage : unet->down()) {
///       skips.push_back(stage->forward(x));
///       x = at::max_pool2d(skips.back(), {2, 2});
///     }
///     x = unet->bottom->forward(x);
///     for (const auto& up : unet->up()) {
///       x = up->forward(x, skips.back());
///       skips.pop_back();
///     }
///     at::Tensor y = unet->out->forward(x);
class UNetImpl : public torch::nn::Cloneable<UNetImpl> {
 public:
  /// Builds the modules, then draws the weights from the default generator as reset_parameters()
  /// says (the modules' own initialisation draws from it before that).
  /// @throws c10::ValueError with the text of defect() if @p options are impossible.
  explicit UNetImpl(UNetOptions options);
  void reset() override;

  /// Draws all weights anew, in the order of named_parameters(): a convolution's from N(0, 2 / N),
  /// N the inputs of one output value (Ronneberger et al. 2015, section 3: 9 Cin for 3x3, Cin for
  /// 1x1 and for the transposed one, whose windows do not overlap). Norms are 1 and 0, biases 0.
  /// @param generator  Where the numbers come from; the default generator if not given.
  void reset_parameters(const std::optional<at::Generator>& generator = std::nullopt);

  /// [B, Cin, H, W] -> [B, Cout, H, W].
  /// @throws c10::ValueError unless the image has four dimensions, in_channels channels, and a
  /// height and width that are multiples of 2^levels.
  at::Tensor forward(const at::Tensor& x_BCHW);

  /// Stages of the way down, largest image first.
  std::vector<std::shared_ptr<UNetStageImpl>> down() const;
  /// Levels of the way up, smallest image first.
  std::vector<std::shared_ptr<UNetUpImpl>> up() const;

  const UNetOptions& options() const { return options_; }

  UNetStage bottom{nullptr};
  std::shared_ptr<torch::nn::Conv2dImpl> out;

 private:
  UNetOptions options_;
  std::shared_ptr<torch::nn::ModuleListImpl> down_, up_;
};
TORCH_MODULE(UNet);

}  // namespace gradus::models
