#include <gradus/models/unet.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/relu.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/normalization.h>

#include <gradus/models/internal/layers.h>

namespace gradus::models {

using internal::make_convolution;
using internal::make_group_norm;

namespace {

constexpr std::int64_t kMostLevels = 16;

std::int64_t stage_count(std::int64_t in, std::int64_t out) {
  return 9 * out * (in + out) + 4 * out;
}

void draw(at::Tensor& weight, std::int64_t inputs, const std::optional<at::Generator>& generator) {
  weight.normal_(0.0, std::sqrt(2.0 / static_cast<double>(inputs)), generator);
}

void draw(UNetStageImpl& stage, const std::optional<at::Generator>& generator) {
  draw(stage.conv1->weight, stage.conv1->weight[0].numel(), generator);
  internal::restart(*stage.norm1);
  draw(stage.conv2->weight, stage.conv2->weight[0].numel(), generator);
  internal::restart(*stage.norm2);
}

template <typename Module>
std::vector<std::shared_ptr<Module>> items(const torch::nn::ModuleListImpl& list) {
  std::vector<std::shared_ptr<Module>> result;
  result.reserve(list.size());
  for (const auto& item : list) result.push_back(std::dynamic_pointer_cast<Module>(item));
  return result;
}

}  // namespace

std::string defect(const UNetOptions& options) {
  std::string problem = internal::count_defect({{"in_channels", options.in_channels},
                                                {"out_channels", options.out_channels},
                                                {"width", options.width},
                                                {"groups", options.groups}});
  if (!problem.empty()) return problem;
  if (options.levels < 1 || options.levels > kMostLevels) {
    return "levels must be between 1 and 16; got " + std::to_string(options.levels);
  }
  return "";
}

std::int64_t parameter_count(const UNetOptions& options) {
  std::int64_t count = 0, in = options.in_channels;
  for (std::int64_t level = 0; level <= options.levels; ++level) {
    const std::int64_t out = options.width << level;
    count += stage_count(in, out);
    // The way up, at each level but the bottom.
    if (level < options.levels) count += 4 * (2 * out) * out + out + stage_count(2 * out, out);
    in = out;
  }
  return count + options.out_channels * (options.width + 1);
}

UNetStageImpl::UNetStageImpl(std::int64_t in, std::int64_t out, std::int64_t groups)
    : in_(in), out_(out), groups_(groups) {
  const std::string problem = internal::count_defect(
      {{"input channels", in}, {"output channels", out}, {"groups", groups}});
  TORCH_CHECK_VALUE(problem.empty(), "[unet] ", problem);
  UNetStageImpl::reset();
}

void UNetStageImpl::reset() {
  conv1 = register_module("conv1", make_convolution(in_, out_, 3));
  norm1 = register_module("norm1", make_group_norm(groups_, out_));
  conv2 = register_module("conv2", make_convolution(out_, out_, 3));
  norm2 = register_module("norm2", make_group_norm(groups_, out_));
}

at::Tensor UNetStageImpl::forward(const at::Tensor& x_BCHW) {
  const at::Tensor middle = at::relu(norm1->forward(conv1->forward(x_BCHW)));
  return at::relu(norm2->forward(conv2->forward(middle)));
}

UNetUpImpl::UNetUpImpl(std::int64_t out, std::int64_t groups) : out_(out), groups_(groups) {
  const std::string problem =
      internal::count_defect({{"output channels", out}, {"groups", groups}});
  TORCH_CHECK_VALUE(problem.empty(), "[unet] ", problem);
  UNetUpImpl::reset();
}

void UNetUpImpl::reset() {
  up = register_module("up", std::make_shared<torch::nn::ConvTranspose2dImpl>(
                                 torch::nn::ConvTranspose2dOptions(2 * out_, out_, 2).stride(2)));
  stage = register_module("stage", UNetStage(2 * out_, out_, groups_));
}

at::Tensor UNetUpImpl::forward(const at::Tensor& x_BCHW, const at::Tensor& skip_BCHW) {
  return stage->forward(at::cat({skip_BCHW, up->forward(x_BCHW)}, 1));
}

UNetImpl::UNetImpl(UNetOptions options) : options_(options) {
  internal::check("unet", options_);
  UNetImpl::reset();
}

void UNetImpl::reset() {
  const std::int64_t L = options_.levels;
  down_ = register_module("down", std::make_shared<torch::nn::ModuleListImpl>());
  std::int64_t in = options_.in_channels;
  for (std::int64_t level = 0; level < L; ++level) {
    const std::int64_t out = options_.width << level;
    down_->push_back(UNetStage(in, out, options_.groups));
    in = out;
  }
  bottom = register_module("bottom", UNetStage(in, options_.width << L, options_.groups));
  up_ = register_module("up", std::make_shared<torch::nn::ModuleListImpl>());
  for (std::int64_t level = L - 1; level >= 0; --level) {
    up_->push_back(UNetUp(options_.width << level, options_.groups));
  }
  out = register_module("out", make_convolution(options_.width, options_.out_channels, 1,
                                                /*stride=*/1, /*bias=*/true));
  reset_parameters();
}

void UNetImpl::reset_parameters(const std::optional<at::Generator>& generator) {
  const at::NoGradGuard no_grad;
  for (const auto& stage : down()) draw(*stage, generator);
  draw(*bottom, generator);
  for (const auto& level : up()) {
    draw(level->up->weight, level->up->weight.size(0), generator);
    level->up->bias.zero_();
    draw(*level->stage, generator);
  }
  draw(out->weight, options_.width, generator);
  out->bias.zero_();
}

at::Tensor UNetImpl::forward(const at::Tensor& x_BCHW) {
  internal::check_image("unet", x_BCHW, options_.in_channels);
  const std::int64_t unit = std::int64_t{1} << options_.levels;
  TORCH_CHECK_VALUE(x_BCHW.size(2) % unit == 0 && x_BCHW.size(3) % unit == 0,
                    "[unet] height and width must be multiples of 2^levels = ", unit, "; got ",
                    x_BCHW.sizes(), ". Pad the images or build the model with fewer levels.");
  at::Tensor x = x_BCHW;
  std::vector<at::Tensor> skips;
  for (const auto& stage : *down_) {
    skips.push_back(stage->as<UNetStageImpl>()->forward(x));
    x = at::max_pool2d(skips.back(), {2, 2});
  }
  x = bottom->forward(x);
  for (const auto& level : *up_) {
    x = level->as<UNetUpImpl>()->forward(x, skips.back());
    skips.pop_back();
  }
  return out->forward(x);
}

std::vector<std::shared_ptr<UNetStageImpl>> UNetImpl::down() const {
  return items<UNetStageImpl>(*down_);
}

std::vector<std::shared_ptr<UNetUpImpl>> UNetImpl::up() const { return items<UNetUpImpl>(*up_); }

}  // namespace gradus::models
