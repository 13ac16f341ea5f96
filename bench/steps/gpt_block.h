#pragma once

#include <torch/torch.h>

// What several step programs build their models of.

namespace gradus::bench {

/// As one addmm; LinearImpl::forward takes 3-D input apart.
at::Tensor call(const torch::nn::Linear& layer, const at::Tensor& x);

/// A GPT block, before each half a layer norm.
struct BlockImpl : torch::nn::Module {
  torch::nn::LayerNorm n1{nullptr}, n2{nullptr};
  torch::nn::Linear qkv{nullptr}, o{nullptr}, u{nullptr}, v{nullptr};
  std::int64_t heads;
  BlockImpl(std::int64_t width, std::int64_t heads);
  at::Tensor forward(at::Tensor x);
};
TORCH_MODULE(Block);

/// Draws matrices by their fan-in, in the order of names. Vectors keep what their modules set (ones
/// and zeros), but biases are zero.
void draw(torch::nn::Module& module, at::Generator& generator);

}  // namespace gradus::bench
