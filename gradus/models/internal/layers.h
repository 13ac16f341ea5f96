#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

// What several models build from: layers with the options used here, their call and their
// initialisation, and the sentences about impossible options.
namespace gradus::models::internal {

inline std::shared_ptr<torch::nn::EmbeddingImpl> make_embedding(std::int64_t vocabulary,
                                                                std::int64_t width) {
  return std::make_shared<torch::nn::EmbeddingImpl>(torch::nn::EmbeddingOptions(vocabulary, width));
}

inline std::shared_ptr<torch::nn::LinearImpl> make_linear(std::int64_t in, std::int64_t out,
                                                          bool bias = true) {
  return std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(in, out).bias(bias));
}

inline std::shared_ptr<torch::nn::LayerNormImpl> make_layer_norm(std::int64_t width) {
  return std::make_shared<torch::nn::LayerNormImpl>(torch::nn::LayerNormOptions({width}));
}

inline std::shared_ptr<torch::nn::GroupNormImpl> make_group_norm(std::int64_t groups,
                                                                 std::int64_t channels) {
  return std::make_shared<torch::nn::GroupNormImpl>(
      torch::nn::GroupNormOptions(std::gcd(groups, channels), channels));
}

// Square window; the padding keeps an image's size at stride 1.
inline std::shared_ptr<torch::nn::Conv2dImpl> make_convolution(std::int64_t in, std::int64_t out,
                                                               std::int64_t window,
                                                               std::int64_t stride = 1,
                                                               bool bias = false) {
  return std::make_shared<torch::nn::Conv2dImpl>(
      torch::nn::Conv2dOptions(in, out, window).stride(stride).padding(window / 2).bias(bias));
}

// LinearImpl::forward computes 3-D input as matmul and a broadcast add; at::linear as one addmm.
inline at::Tensor call(const torch::nn::LinearImpl& layer, const at::Tensor& x) {
  return at::linear(x, layer.weight, layer.bias);
}

inline at::Tensor call(const torch::nn::LayerNormImpl& layer, const at::Tensor& x) {
  return at::layer_norm(x, layer.options.normalized_shape(), layer.weight, layer.bias,
                        layer.options.eps());
}

template <typename Norm>
void restart(Norm& norm, double weight = 1.0) {
  norm.weight.fill_(weight);
  norm.bias.zero_();
}

inline double root_of_inverse(std::int64_t n) { return 1.0 / std::sqrt(static_cast<double>(n)); }

// Weight, then bias, from U(-1/sqrt(inputs), 1/sqrt(inputs)); a convolution's inputs are its
// channels times its window.
template <typename Layer>
void draw_uniform(Layer& layer, const std::optional<at::Generator>& generator) {
  const at::NoGradGuard no_grad;
  const double bound = root_of_inverse(layer.weight.numel() / layer.weight.size(0));
  layer.weight.uniform_(-bound, bound, generator);
  if (layer.bias.defined()) layer.bias.uniform_(-bound, bound, generator);
}

// The first count below 1 as a sentence, or "".
inline std::string count_defect(
    std::initializer_list<std::pair<const char*, std::int64_t>> counts) {
  for (const auto& [name, value] : counts) {
    if (value < 1) return std::string(name) + " must be at least 1; got " + std::to_string(value);
  }
  return "";
}

inline std::string dropout_defect(double dropout) {
  if (dropout >= 0.0 && dropout < 1.0) return "";
  return "dropout must be in [0, 1); got " + std::to_string(dropout);
}

template <typename Options>
void check(const char* component, const Options& options) {
  const std::string problem = defect(options);
  TORCH_CHECK_VALUE(problem.empty(), "[", component, "] ", problem);
}

inline void check_image(const char* component, const at::Tensor& x_BCHW, std::int64_t channels) {
  TORCH_CHECK_VALUE(x_BCHW.dim() == 4 && x_BCHW.size(1) == channels, "[", component,
                    "] images must have shape [batch, ", channels, ", height, width]; got ",
                    x_BCHW.sizes());
}

inline void check_ids(const char* component, const char* name, const at::Tensor& ids_BT) {
  TORCH_CHECK_VALUE(ids_BT.dim() == 2 && ids_BT.size(1) >= 1, "[", component, "] ", name,
                    " must have shape [batch, positions] with at least one position; got ",
                    ids_BT.sizes());
}

// Of a translator's forward().
inline void check_batches(const char* component, const at::Tensor& source_BS,
                          const at::Tensor& target_BT) {
  TORCH_CHECK_VALUE(source_BS.size(0) == target_BT.size(0), "[", component,
                    "] source and target must have the same batch; got ", source_BS.sizes(),
                    " and ", target_BT.sizes());
}

// Of a translator's decode().
inline void check_memory(const char* component, const at::Tensor& memory_BSC,
                         const at::Tensor& target_BT, std::int64_t width) {
  TORCH_CHECK_VALUE(memory_BSC.dim() == 3 && memory_BSC.size(2) == width &&
                        memory_BSC.size(0) == target_BT.size(0),
                    "[", component, "] memory must have shape [", target_BT.size(0),
                    ", source positions, ", width, "], the target's batch and the width; got ",
                    memory_BSC.sizes());
}

inline void check_padding(const char* component, const at::Tensor& padding_BS,
                          at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(!padding_BS.defined() ||
                        (padding_BS.scalar_type() == at::kBool && padding_BS.sizes() == sizes),
                    "[", component, "] source padding must be bool of the source's shape ", sizes,
                    "; got ", padding_BS.scalar_type(), " ", padding_BS.sizes());
}

}  // namespace gradus::models::internal
