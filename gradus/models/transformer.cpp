#include <gradus/models/transformer.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/stack.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <gradus/models/internal/layers.h>

namespace gradus::models {

using internal::call;
using internal::make_layer_norm;
using internal::make_linear;
using internal::restart;

namespace {

constexpr const char* kComponent = "transformer";

// @p parts matrices lie below each other in the weight, each with a fan-out of its own.
void draw(torch::nn::LinearImpl& layer, const std::optional<at::Generator>& generator,
          std::int64_t parts = 1) {
  const std::int64_t fans = layer.weight.size(0) / parts + layer.weight.size(1);
  const double bound = std::sqrt(6.0 / static_cast<double>(fans));
  layer.weight.uniform_(-bound, bound, generator);
  layer.bias.zero_();
}

void draw(TransformerAttentionImpl& attention, const std::optional<at::Generator>& generator) {
  draw(*attention.query, generator);
  draw(*attention.key_value, generator, /*parts=*/2);
  draw(*attention.output, generator);
}

// Vaswani et al. 2017, section 3.5: [T, C], sine in even columns, cosine in odd ones, of t /
// 10000^(2i / C). In double, so that every dtype gets its nearest values.
at::Tensor position_table(std::int64_t T, std::int64_t C) {
  const at::Tensor frequencies =
      (at::arange(0, C, 2, at::kDouble) * (-std::log(10000.0) / static_cast<double>(C))).exp();
  const at::Tensor angles = at::arange(T, at::kDouble).unsqueeze(1) * frequencies;
  return at::stack({angles.sin(), angles.cos()}, 2).flatten(1);
}

// What scaled_dot_product_attention takes: true where a key may be seen.
at::Tensor visible_keys(const at::Tensor& padding_BS) {
  if (!padding_BS.defined()) return {};
  return padding_BS.logical_not().unsqueeze(1).unsqueeze(1);
}

template <typename Module>
std::vector<std::shared_ptr<Module>> items(const torch::nn::ModuleListImpl& list) {
  std::vector<std::shared_ptr<Module>> result;
  result.reserve(list.size());
  for (const auto& item : list) result.push_back(std::dynamic_pointer_cast<Module>(item));
  return result;
}

}  // namespace

std::string defect(const TransformerOptions& options) {
  std::string problem = internal::count_defect({
      {"source_vocabulary", options.source_vocabulary},
      {"target_vocabulary", options.target_vocabulary},
      {"context", options.context},
      {"encoder_layers", options.encoder_layers},
      {"decoder_layers", options.decoder_layers},
      {"heads", options.heads},
      {"width", options.width},
      {"hidden", options.hidden},
  });
  if (!problem.empty()) return problem;
  if (options.width % options.heads != 0) {
    return "width must be a multiple of heads; got width " + std::to_string(options.width) +
           " and " + std::to_string(options.heads) + " heads";
  }
  // Positions are pairs of a sine and a cosine.
  if (options.width % 2 != 0) return "width must be even; got " + std::to_string(options.width);
  return internal::dropout_defect(options.dropout);
}

std::int64_t parameter_count(const TransformerOptions& options) {
  const std::int64_t C = options.width, F = options.hidden;
  const std::int64_t attention = 4 * C * C + 4 * C, feed_forward = 2 * C * F + F + C, norm = 2 * C;
  const std::int64_t tables =
      options.source_vocabulary + (options.tied_output ? 1 : 2) * options.target_vocabulary;
  return tables * C + options.encoder_layers * (attention + feed_forward + 2 * norm) +
         options.decoder_layers * (2 * attention + feed_forward + 3 * norm) + 2 * norm;
}

TransformerAttentionImpl::TransformerAttentionImpl(const TransformerOptions& options)
    : options_(options) {
  internal::check(kComponent, options_);
  TransformerAttentionImpl::reset();
}

void TransformerAttentionImpl::reset() {
  const std::int64_t C = options_.width;
  query = register_module("query", make_linear(C, C));
  key_value = register_module("key_value", make_linear(C, 2 * C));
  output = register_module("output", make_linear(C, C));
}

at::Tensor TransformerAttentionImpl::forward(const at::Tensor& x_BTC, const at::Tensor& memory_BSC,
                                             const at::Tensor& visible, bool causal) {
  const std::int64_t B = x_BTC.size(0), T = x_BTC.size(1), S = memory_BSC.size(1),
                     H = options_.heads, D = options_.width / options_.heads;
  const at::Tensor q_BHTD = call(*query, x_BTC).view({B, T, H, D}).transpose(1, 2);
  const std::vector<at::Tensor> kv_BHSD =
      call(*key_value, memory_BSC).view({B, S, 2, H, D}).transpose(1, 3).unbind(2);
  const std::optional<at::Tensor> mask =
      visible.defined() ? std::optional<at::Tensor>(visible) : std::nullopt;
  const at::Tensor y_BHTD = at::scaled_dot_product_attention(
      q_BHTD, kv_BHSD[0], kv_BHSD[1], mask, is_training() ? options_.dropout : 0.0, causal);
  return call(*output, y_BHTD.transpose(1, 2).reshape({B, T, H * D}));
}

TransformerEncoderLayerImpl::TransformerEncoderLayerImpl(const TransformerOptions& options)
    : options_(options) {
  internal::check(kComponent, options_);
  TransformerEncoderLayerImpl::reset();
}

void TransformerEncoderLayerImpl::reset() {
  norm_1 = register_module("norm_1", make_layer_norm(options_.width));
  attention = register_module("attention", TransformerAttention(options_));
  norm_2 = register_module("norm_2", make_layer_norm(options_.width));
  up = register_module("up", make_linear(options_.width, options_.hidden));
  down = register_module("down", make_linear(options_.hidden, options_.width));
}

at::Tensor TransformerEncoderLayerImpl::forward(const at::Tensor& x_BSC,
                                                const at::Tensor& visible) {
  const auto drop = [&](const at::Tensor& term) {
    return at::dropout(term, options_.dropout, is_training());
  };
  const at::Tensor asks = call(*norm_1, x_BSC);
  const at::Tensor attended =
      x_BSC + drop(attention->forward(asks, asks, visible, /*causal=*/false));
  return attended + drop(call(*down, at::relu(call(*up, call(*norm_2, attended)))));
}

TransformerDecoderLayerImpl::TransformerDecoderLayerImpl(const TransformerOptions& options)
    : options_(options) {
  internal::check(kComponent, options_);
  TransformerDecoderLayerImpl::reset();
}

void TransformerDecoderLayerImpl::reset() {
  norm_1 = register_module("norm_1", make_layer_norm(options_.width));
  attention = register_module("attention", TransformerAttention(options_));
  norm_2 = register_module("norm_2", make_layer_norm(options_.width));
  cross = register_module("cross", TransformerAttention(options_));
  norm_3 = register_module("norm_3", make_layer_norm(options_.width));
  up = register_module("up", make_linear(options_.width, options_.hidden));
  down = register_module("down", make_linear(options_.hidden, options_.width));
}

at::Tensor TransformerDecoderLayerImpl::forward(const at::Tensor& x_BTC,
                                                const at::Tensor& memory_BSC,
                                                const at::Tensor& visible) {
  const auto drop = [&](const at::Tensor& term) {
    return at::dropout(term, options_.dropout, is_training());
  };
  const at::Tensor asks = call(*norm_1, x_BTC);
  const at::Tensor attended = x_BTC + drop(attention->forward(asks, asks, {}, /*causal=*/true));
  const at::Tensor crossed = attended + drop(cross->forward(call(*norm_2, attended), memory_BSC,
                                                            visible, /*causal=*/false));
  return crossed + drop(call(*down, at::relu(call(*up, call(*norm_3, crossed)))));
}

TransformerImpl::TransformerImpl(TransformerOptions options) : options_(options) {
  internal::check(kComponent, options_);
  TransformerImpl::reset();
}

void TransformerImpl::reset() {
  const std::int64_t C = options_.width;
  source_embedding =
      register_module("source_embedding", internal::make_embedding(options_.source_vocabulary, C));
  target_embedding =
      register_module("target_embedding", internal::make_embedding(options_.target_vocabulary, C));
  encoder_ = register_module("encoder", std::make_shared<torch::nn::ModuleListImpl>());
  for (std::int64_t i = 0; i < options_.encoder_layers; ++i) {
    encoder_->push_back(TransformerEncoderLayer(options_));
  }
  encoder_norm = register_module("encoder_norm", make_layer_norm(C));
  decoder_ = register_module("decoder", std::make_shared<torch::nn::ModuleListImpl>());
  for (std::int64_t i = 0; i < options_.decoder_layers; ++i) {
    decoder_->push_back(TransformerDecoderLayer(options_));
  }
  decoder_norm = register_module("decoder_norm", make_layer_norm(C));
  if (!options_.tied_output) {
    output = register_module("output", make_linear(C, options_.target_vocabulary, /*bias=*/false));
  }
  positions_ = position_table(options_.context, C);
  reset_parameters();
}

void TransformerImpl::reset_parameters(const std::optional<at::Generator>& generator) {
  const at::NoGradGuard no_grad;
  // Embeddings are scaled by sqrt(C) on the way in, so that they are as large as the positions;
  // 1 / C is then the variance that gives a tied output logits of about 1.
  const double deviation = internal::root_of_inverse(options_.width);
  source_embedding->weight.normal_(0.0, deviation, generator);
  target_embedding->weight.normal_(0.0, deviation, generator);
  for (const auto& layer : encoder()) {
    restart(*layer->norm_1);
    draw(*layer->attention, generator);
    restart(*layer->norm_2);
    draw(*layer->up, generator);
    draw(*layer->down, generator);
  }
  restart(*encoder_norm);
  for (const auto& layer : decoder()) {
    restart(*layer->norm_1);
    draw(*layer->attention, generator);
    restart(*layer->norm_2);
    draw(*layer->cross, generator);
    restart(*layer->norm_3);
    draw(*layer->up, generator);
    draw(*layer->down, generator);
  }
  restart(*decoder_norm);
  if (output) output->weight.normal_(0.0, deviation, generator);
}

at::Tensor TransformerImpl::forward(const at::Tensor& source_BS, const at::Tensor& target_BT,
                                    const at::Tensor& source_padding_BS) {
  internal::check_ids(kComponent, "source ids", source_BS);
  internal::check_ids(kComponent, "target ids", target_BT);
  internal::check_batches(kComponent, source_BS, target_BT);
  return decode(target_BT, encode(source_BS, source_padding_BS), source_padding_BS);
}

at::Tensor TransformerImpl::encode(const at::Tensor& source_BS,
                                   const at::Tensor& source_padding_BS) {
  at::Tensor x_BSC = embed(*source_embedding, source_BS, "source ids");
  internal::check_padding(kComponent, source_padding_BS, source_BS.sizes());
  const at::Tensor visible = visible_keys(source_padding_BS);
  for (const auto& layer : *encoder_) {
    x_BSC = layer->as<TransformerEncoderLayerImpl>()->forward(x_BSC, visible);
  }
  return call(*encoder_norm, x_BSC);
}

at::Tensor TransformerImpl::decode(const at::Tensor& target_BT, const at::Tensor& memory_BSC,
                                   const at::Tensor& source_padding_BS) {
  at::Tensor x_BTC = embed(*target_embedding, target_BT, "target ids");
  internal::check_memory(kComponent, memory_BSC, target_BT, options_.width);
  internal::check_padding(kComponent, source_padding_BS, memory_BSC.sizes().slice(0, 2));
  const at::Tensor visible = visible_keys(source_padding_BS);
  for (const auto& layer : *decoder_) {
    x_BTC = layer->as<TransformerDecoderLayerImpl>()->forward(x_BTC, memory_BSC, visible);
  }
  return at::linear(call(*decoder_norm, x_BTC), output ? output->weight : target_embedding->weight);
}

at::Tensor TransformerImpl::embed(const torch::nn::EmbeddingImpl& table, const at::Tensor& ids_BT,
                                  const char* name) const {
  internal::check_ids(kComponent, name, ids_BT);
  const std::int64_t T = ids_BT.size(1);
  TORCH_CHECK_VALUE(T <= options_.context, "[", kComponent, "] ", name, " must have at most ",
                    options_.context, " positions, the context; got ", T,
                    ". Shorten the input or build the model with a larger context.");
  const at::Tensor x_BTC =
      at::embedding(table.weight, ids_BT) * std::sqrt(static_cast<double>(options_.width));
  return at::dropout(x_BTC + positions_.narrow(0, 0, T).to(x_BTC.options()), options_.dropout,
                     is_training());
}

std::vector<std::shared_ptr<TransformerEncoderLayerImpl>> TransformerImpl::encoder() const {
  return items<TransformerEncoderLayerImpl>(*encoder_);
}

std::vector<std::shared_ptr<TransformerDecoderLayerImpl>> TransformerImpl::decoder() const {
  return items<TransformerDecoderLayerImpl>(*decoder_);
}

}  // namespace gradus::models
