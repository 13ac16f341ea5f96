#include <gradus/models/resnet.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/relu.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <gradus/models/internal/layers.h>

namespace gradus::models {

using internal::make_convolution;
using internal::make_group_norm;

namespace {

constexpr std::int64_t kMostStages = 32;

std::int64_t stem_window(const ResNetOptions& options) {
  return options.stem == ResNetStem::kLarge ? 7 : 3;
}

bool reshapes(std::int64_t in, std::int64_t out, std::int64_t stride) {
  return in != out || stride != 1;
}

// Of block @p b of stage @p s: input channels, output channels, stride.
struct BlockShape {
  std::int64_t in = 0, out = 0, stride = 1;
};

BlockShape block_shape(const ResNetOptions& options, std::size_t s, std::int64_t b) {
  const std::int64_t out = options.width << s;
  const bool first_of_later_stage = b == 0 && s > 0;
  return {first_of_later_stage ? out / 2 : out, out, first_of_later_stage ? 2 : 1};
}

void draw(torch::nn::Conv2dImpl& layer, const std::optional<at::Generator>& generator) {
  const std::int64_t fan_out = layer.weight.numel() / layer.weight.size(1);
  layer.weight.normal_(0.0, std::sqrt(2.0 / static_cast<double>(fan_out)), generator);
}

}  // namespace

std::string defect(const ResNetOptions& options) {
  std::string problem = internal::count_defect({{"in_channels", options.in_channels},
                                                {"classes", options.classes},
                                                {"width", options.width},
                                                {"groups", options.groups}});
  if (!problem.empty()) return problem;
  if (options.blocks.empty() || options.blocks.size() > kMostStages) {
    return "blocks must name 1 to 32 stages; got " + std::to_string(options.blocks.size());
  }
  for (const std::int64_t count : options.blocks) {
    problem = internal::count_defect({{"blocks of each stage", count}});
    if (!problem.empty()) return problem;
  }
  return "";
}

std::int64_t parameter_count(const ResNetOptions& options) {
  const std::int64_t window = stem_window(options);
  std::int64_t count = window * window * options.in_channels * options.width + 2 * options.width;
  for (std::size_t s = 0; s < options.blocks.size(); ++s) {
    for (std::int64_t b = 0; b < options.blocks[s]; ++b) {
      const auto [in, out, stride] = block_shape(options, s, b);
      count += 9 * out * (in + out) + 4 * out;
      if (reshapes(in, out, stride)) count += in * out + 2 * out;
    }
  }
  const std::int64_t last = options.width << (options.blocks.size() - 1);
  return count + options.classes * (last + 1);
}

ResNetBlockImpl::ResNetBlockImpl(std::int64_t in, std::int64_t out, std::int64_t stride,
                                 std::int64_t groups)
    : in_(in), out_(out), stride_(stride), groups_(groups) {
  const std::string problem = internal::count_defect(
      {{"input channels", in}, {"output channels", out}, {"stride", stride}, {"groups", groups}});
  TORCH_CHECK_VALUE(problem.empty(), "[resnet] ", problem);
  ResNetBlockImpl::reset();
}

void ResNetBlockImpl::reset() {
  conv1 = register_module("conv1", make_convolution(in_, out_, 3, stride_));
  bn1 = register_module("bn1", make_group_norm(groups_, out_));
  conv2 = register_module("conv2", make_convolution(out_, out_, 3));
  bn2 = register_module("bn2", make_group_norm(groups_, out_));
  if (reshapes(in_, out_, stride_)) {
    downsample = register_module(
        "downsample", std::make_shared<torch::nn::SequentialImpl>(
                          make_convolution(in_, out_, 1, stride_), make_group_norm(groups_, out_)));
  }
}

at::Tensor ResNetBlockImpl::forward(const at::Tensor& x_BCHW) {
  const at::Tensor middle = at::relu(bn1->forward(conv1->forward(x_BCHW)));
  const at::Tensor branch = bn2->forward(conv2->forward(middle));
  return at::relu(branch + (downsample ? downsample->forward(x_BCHW) : x_BCHW));
}

ResNetImpl::ResNetImpl(ResNetOptions options) : options_(std::move(options)) {
  internal::check("resnet", options_);
  ResNetImpl::reset();
}

void ResNetImpl::reset() {
  const bool large = options_.stem == ResNetStem::kLarge;
  conv1 = register_module("conv1", make_convolution(options_.in_channels, options_.width,
                                                    stem_window(options_), large ? 2 : 1));
  bn1 = register_module("bn1", make_group_norm(options_.groups, options_.width));
  stages_.clear();
  for (std::size_t s = 0; s < options_.blocks.size(); ++s) {
    auto stage = std::make_shared<torch::nn::SequentialImpl>();
    for (std::int64_t b = 0; b < options_.blocks[s]; ++b) {
      const auto [in, out, stride] = block_shape(options_, s, b);
      stage->push_back(ResNetBlock(in, out, stride, options_.groups));
    }
    stages_.push_back(register_module("layer" + std::to_string(s + 1), std::move(stage)));
  }
  fc = register_module("fc", internal::make_linear(options_.width << (options_.blocks.size() - 1),
                                                   options_.classes));
  reset_parameters();
}

void ResNetImpl::reset_parameters(const std::optional<at::Generator>& generator) {
  const at::NoGradGuard no_grad;
  draw(*conv1, generator);
  internal::restart(*bn1);
  for (const auto& block : blocks()) {
    draw(*block->conv1, generator);
    internal::restart(*block->bn1);
    draw(*block->conv2, generator);
    internal::restart(*block->bn2, 0.0);
    if (block->downsample) {
      draw(block->downsample->at<torch::nn::Conv2dImpl>(0), generator);
      internal::restart(block->downsample->at<torch::nn::GroupNormImpl>(1));
    }
  }
  const double bound = internal::root_of_inverse(fc->weight.size(1));
  fc->weight.uniform_(-bound, bound, generator);
  fc->bias.uniform_(-bound, bound, generator);
}

at::Tensor ResNetImpl::forward(const at::Tensor& x_BCHW) {
  at::Tensor x = stem(x_BCHW);
  for (const auto& stage : stages_) {
    for (auto& block : *stage) x = block.get<ResNetBlockImpl>().forward(x);
  }
  return head(x);
}

at::Tensor ResNetImpl::stem(const at::Tensor& x_BCHW) {
  internal::check_image("resnet", x_BCHW, options_.in_channels);
  at::Tensor x = at::relu(bn1->forward(conv1->forward(x_BCHW)));
  if (options_.stem == ResNetStem::kSmall) return x;
  return at::max_pool2d(x, {3, 3}, {2, 2}, {1, 1});
}

at::Tensor ResNetImpl::head(const at::Tensor& x_BCHW) {
  return internal::call(*fc, x_BCHW.mean({2, 3}));
}

std::vector<std::shared_ptr<ResNetBlockImpl>> ResNetImpl::blocks() const {
  std::vector<std::shared_ptr<ResNetBlockImpl>> result;
  for (const auto& stage : stages_) {
    for (std::size_t b = 0; b < stage->size(); ++b)
      result.push_back(stage->ptr<ResNetBlockImpl>(b));
  }
  return result;
}

}  // namespace gradus::models
