#include <gradus/models/gpt.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

namespace gradus::models {

namespace {

constexpr double kInitialDeviation = 0.02;
constexpr std::int64_t kMlpRatio = 4;

std::shared_ptr<torch::nn::LinearImpl> make_linear(std::int64_t in, std::int64_t out, bool bias) {
  return std::make_shared<torch::nn::LinearImpl>(torch::nn::LinearOptions(in, out).bias(bias));
}

std::shared_ptr<torch::nn::LayerNormImpl> make_norm(std::int64_t width) {
  return std::make_shared<torch::nn::LayerNormImpl>(torch::nn::LayerNormOptions({width}));
}

// LinearImpl::forward computes 3-D input as matmul and a broadcast add; at::linear as one addmm.
at::Tensor call(const torch::nn::LinearImpl& layer, const at::Tensor& x) {
  return at::linear(x, layer.weight, layer.bias);
}

at::Tensor call(const torch::nn::LayerNormImpl& layer, const at::Tensor& x) {
  return at::layer_norm(x, layer.options.normalized_shape(), layer.weight, layer.bias,
                        layer.options.eps());
}

void draw(torch::nn::LinearImpl& layer, double deviation,
          const std::optional<at::Generator>& generator) {
  layer.weight.normal_(0.0, deviation, generator);
  if (layer.bias.defined()) layer.bias.zero_();
}

void restart(torch::nn::LayerNormImpl& layer) {
  layer.weight.fill_(1.0);
  layer.bias.zero_();
}

void check(const GptOptions& options) {
  const std::string problem = defect(options);
  TORCH_CHECK_VALUE(problem.empty(), "[gpt] ", problem);
}

}  // namespace

std::string defect(const GptOptions& options) {
  const std::pair<const char*, std::int64_t> counts[] = {{"vocabulary", options.vocabulary},
                                                         {"context", options.context},
                                                         {"layers", options.layers},
                                                         {"heads", options.heads},
                                                         {"width", options.width}};
  for (const auto& [name, value] : counts) {
    if (value < 1) return std::string(name) + " must be at least 1; got " + std::to_string(value);
  }
  if (options.width % options.heads != 0) {
    return "width must be a multiple of heads; got width " + std::to_string(options.width) +
           " and " + std::to_string(options.heads) + " heads";
  }
  if (!(options.dropout >= 0.0 && options.dropout < 1.0)) {
    return "dropout must be in [0, 1); got " + std::to_string(options.dropout);
  }
  return "";
}

std::int64_t parameter_count(const GptOptions& options) {
  const std::int64_t C = options.width;
  const std::int64_t matrices = (3 + 1 + 2 * kMlpRatio) * C * C;
  const std::int64_t biases = options.bias ? (3 + 1 + kMlpRatio + 1) * C : 0;
  const std::int64_t norms = 4 * C;
  return (options.vocabulary + options.context) * C + options.layers * (matrices + biases + norms) +
         2 * C;
}

GptAttentionImpl::GptAttentionImpl(const GptOptions& options) : options_(options) {
  check(options_);
  GptAttentionImpl::reset();
}

void GptAttentionImpl::reset() {
  const std::int64_t C = options_.width;
  qkv = register_module("qkv", make_linear(C, 3 * C, options_.bias));
  proj = register_module("proj", make_linear(C, C, options_.bias));
}

at::Tensor GptAttentionImpl::forward(const at::Tensor& x_BTC) {
  const std::int64_t B = x_BTC.size(0), T = x_BTC.size(1), H = options_.heads,
                     D = options_.width / options_.heads;
  // One split and one transpose for all three: each is then [B, H, T, D] without a copy.
  const std::vector<at::Tensor> parts =
      call(*qkv, x_BTC).view({B, T, 3, H, D}).transpose(1, 3).unbind(2);
  const at::Tensor y_BHTD =
      at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/std::nullopt,
                                       is_training() ? options_.dropout : 0.0,
                                       /*is_causal=*/true);
  return call(*proj, y_BHTD.transpose(1, 2).reshape({B, T, H * D}));
}

GptMlpImpl::GptMlpImpl(const GptOptions& options) : options_(options) {
  check(options_);
  GptMlpImpl::reset();
}

void GptMlpImpl::reset() {
  const std::int64_t C = options_.width;
  up = register_module("up", make_linear(C, kMlpRatio * C, options_.bias));
  down = register_module("down", make_linear(kMlpRatio * C, C, options_.bias));
}

at::Tensor GptMlpImpl::forward(const at::Tensor& x_BTC) {
  return call(*down, at::gelu(call(*up, x_BTC), "tanh"));
}

GptBlockImpl::GptBlockImpl(const GptOptions& options) : options_(options) {
  check(options_);
  GptBlockImpl::reset();
}

void GptBlockImpl::reset() {
  ln_1 = register_module("ln_1", make_norm(options_.width));
  attn = register_module("attn", GptAttention(options_));
  ln_2 = register_module("ln_2", make_norm(options_.width));
  mlp = register_module("mlp", GptMlp(options_));
}

at::Tensor GptBlockImpl::forward(const at::Tensor& x_BTC) {
  const at::Tensor middle =
      x_BTC + at::dropout(attn->forward(call(*ln_1, x_BTC)), options_.dropout, is_training());
  return middle + at::dropout(mlp->forward(call(*ln_2, middle)), options_.dropout, is_training());
}

GptImpl::GptImpl(GptOptions options) : options_(options) {
  check(options_);
  GptImpl::reset();
}

void GptImpl::reset() {
  const std::int64_t C = options_.width;
  wte = register_module("wte", std::make_shared<torch::nn::EmbeddingImpl>(
                                   torch::nn::EmbeddingOptions(options_.vocabulary, C)));
  wpe = register_module("wpe", std::make_shared<torch::nn::EmbeddingImpl>(
                                   torch::nn::EmbeddingOptions(options_.context, C)));
  blocks_ = register_module("blocks", std::make_shared<torch::nn::ModuleListImpl>());
  for (std::int64_t i = 0; i < options_.layers; ++i) blocks_->push_back(GptBlock(options_));
  ln_f = register_module("ln_f", make_norm(C));
  reset_parameters();
}

void GptImpl::reset_parameters(std::optional<at::Generator> generator) {
  const at::NoGradGuard no_grad;
  // Each block adds two terms to the residual stream; the scale keeps its variance independent of
  // depth.
  const double residual_deviation =
      kInitialDeviation / std::sqrt(2.0 * static_cast<double>(options_.layers));
  wte->weight.normal_(0.0, kInitialDeviation, generator);
  wpe->weight.normal_(0.0, kInitialDeviation, generator);
  for (const auto& block : blocks()) {
    restart(*block->ln_1);
    draw(*block->attn->qkv, kInitialDeviation, generator);
    draw(*block->attn->proj, residual_deviation, generator);
    restart(*block->ln_2);
    draw(*block->mlp->up, kInitialDeviation, generator);
    draw(*block->mlp->down, residual_deviation, generator);
  }
  restart(*ln_f);
}

at::Tensor GptImpl::forward(const at::Tensor& ids_BT) { return head(hidden(ids_BT)); }

at::Tensor GptImpl::embed(const at::Tensor& ids_BT) {
  TORCH_CHECK_VALUE(ids_BT.dim() == 2, "[gpt] ids must have shape [batch, positions]; got ",
                    ids_BT.sizes());
  const std::int64_t T = ids_BT.size(1);
  TORCH_CHECK_VALUE(T >= 1 && T <= options_.context,
                    "[gpt] positions must be between 1 and the context of ", options_.context,
                    "; got ", T, ". Shorten the input or build the model with a larger context.");
  const at::Tensor x_BTC = at::embedding(wte->weight, ids_BT) + wpe->weight.narrow(0, 0, T);
  return at::dropout(x_BTC, options_.dropout, is_training());
}

at::Tensor GptImpl::hidden(const at::Tensor& ids_BT) {
  at::Tensor x_BTC = embed(ids_BT);
  for (const auto& block : *blocks_) x_BTC = block->as<GptBlockImpl>()->forward(x_BTC);
  return x_BTC;
}

at::Tensor GptImpl::head(const at::Tensor& x_BTC) {
  return at::linear(call(*ln_f, x_BTC), wte->weight);
}

std::vector<std::shared_ptr<GptBlockImpl>> GptImpl::blocks() const {
  std::vector<std::shared_ptr<GptBlockImpl>> result;
  result.reserve(blocks_->size());
  for (const auto& block : *blocks_)
    result.push_back(std::dynamic_pointer_cast<GptBlockImpl>(block));
  return result;
}

}  // namespace gradus::models
