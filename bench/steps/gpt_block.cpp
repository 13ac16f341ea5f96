#include <algorithm>
#include <cmath>
#include <string>

#include "gpt_block.h"

namespace gradus::bench {

namespace nn = torch::nn;

at::Tensor call(const nn::Linear& layer, const at::Tensor& x) {
  return at::linear(x, layer->weight, layer->bias);
}

BlockImpl::BlockImpl(std::int64_t width, std::int64_t heads) : heads(heads) {
  n1 = register_module("n1", nn::LayerNorm(nn::LayerNormOptions({width})));
  qkv = register_module("qkv", nn::Linear(width, 3 * width));
  o = register_module("o", nn::Linear(width, width));
  n2 = register_module("n2", nn::LayerNorm(nn::LayerNormOptions({width})));
  u = register_module("u", nn::Linear(width, 4 * width));
  v = register_module("v", nn::Linear(4 * width, width));
}

at::Tensor BlockImpl::forward(at::Tensor x) {
  const auto B = x.size(0), T = x.size(1), D = x.size(2);
  const auto parts =
      call(qkv, n1(x)).view({B, T, 3, heads, D / heads}).permute({2, 0, 3, 1, 4}).unbind();
  const auto mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
  x = x + call(o, mixed.transpose(1, 2).reshape({B, T, D}));
  return x + call(v, at::gelu(call(u, n2(x))));
}

void draw(nn::Module& module, at::Generator& generator) {
  const at::NoGradGuard no_grad;
  auto parameters = module.named_parameters().pairs();
  std::sort(parameters.begin(), parameters.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (auto& [name, parameter] : parameters) {
    if (parameter.dim() == 1) {
      if (name.find("bias") != std::string::npos) parameter.zero_();
      continue;
    }
    const auto fan_in = static_cast<double>(parameter.numel() / parameter.size(0));
    parameter.copy_(at::randn(parameter.sizes(), generator) / std::sqrt(fan_in));
  }
}

}  // namespace gradus::bench
