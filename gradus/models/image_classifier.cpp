#include <gradus/models/image_classifier.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/max_pool2d.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <gradus/models/internal/layers.h>

namespace gradus::models {

namespace {

constexpr std::int64_t kFirstWindow = 8, kFirstPadding = 3, kSecondWindow = 4, kStride = 2,
                       kPool = 2;

// Height and width behind both convolutions and poolings; below 1 for images that are too small.
std::int64_t final_side(std::int64_t side) {
  const auto step = [](std::int64_t n, std::int64_t padding, std::int64_t window) {
    return n + 2 * padding < window ? 0 : (n + 2 * padding - window) / kStride + 1 - (kPool - 1);
  };
  return step(step(side, kFirstPadding, kFirstWindow), 0, kSecondWindow);
}

std::int64_t flat_width(const ImageClassifierOptions& options) {
  const std::int64_t side = final_side(options.image_size);
  return options.second_channels * side * side;
}

at::Tensor pool(const at::Tensor& x) { return at::max_pool2d(x, {kPool, kPool}, {1, 1}); }

}  // namespace

std::string defect(const ImageClassifierOptions& options) {
  std::string problem = internal::count_defect({{"in_channels", options.in_channels},
                                                {"classes", options.classes},
                                                {"first_channels", options.first_channels},
                                                {"second_channels", options.second_channels},
                                                {"hidden", options.hidden}});
  if (!problem.empty()) return problem;
  if (final_side(options.image_size) < 1) {
    return "image_size must leave something to classify, which takes 14; got " +
           std::to_string(options.image_size);
  }
  return defect(options.activation);
}

std::int64_t parameter_count(const ImageClassifierOptions& options) {
  return options.first_channels * (options.in_channels * kFirstWindow * kFirstWindow + 1) +
         options.second_channels * (options.first_channels * kSecondWindow * kSecondWindow + 1) +
         options.hidden * (flat_width(options) + 1) + options.classes * (options.hidden + 1);
}

ImageClassifierImpl::ImageClassifierImpl(const ImageClassifierOptions& options)
    : options_(options) {
  internal::check("image_classifier", options_);
  ImageClassifierImpl::reset();
}

void ImageClassifierImpl::reset() {
  conv1 = register_module(
      "conv1",
      std::make_shared<torch::nn::Conv2dImpl>(
          torch::nn::Conv2dOptions(options_.in_channels, options_.first_channels, kFirstWindow)
              .stride(kStride)
              .padding(kFirstPadding)));
  conv2 = register_module(
      "conv2",
      std::make_shared<torch::nn::Conv2dImpl>(
          torch::nn::Conv2dOptions(options_.first_channels, options_.second_channels, kSecondWindow)
              .stride(kStride)));
  hidden = register_module("hidden", internal::make_linear(flat_width(options_), options_.hidden));
  head = register_module("head", internal::make_linear(options_.hidden, options_.classes));
  reset_parameters();
}

void ImageClassifierImpl::reset_parameters(const std::optional<at::Generator>& generator) {
  internal::draw_uniform(*conv1, generator);
  internal::draw_uniform(*conv2, generator);
  internal::draw_uniform(*hidden, generator);
  internal::draw_uniform(*head, generator);
}

at::Tensor ImageClassifierImpl::forward(const at::Tensor& x_BCNN) {
  internal::check_image("image_classifier", x_BCNN, options_.in_channels);
  TORCH_CHECK_VALUE(x_BCNN.size(2) == options_.image_size && x_BCNN.size(3) == options_.image_size,
                    "[image_classifier] images must be ", options_.image_size, " x ",
                    options_.image_size, "; got ", x_BCNN.sizes());
  at::Tensor x = pool(activate(conv1->forward(x_BCNN), options_.activation));
  x = pool(activate(conv2->forward(x), options_.activation));
  return head->forward(activate(hidden->forward(x.flatten(1)), options_.activation));
}

}  // namespace gradus::models
