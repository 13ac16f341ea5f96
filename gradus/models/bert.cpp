#include <gradus/models/bert.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/tanh.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <gradus/models/internal/layers.h>

namespace gradus::models {

namespace {

constexpr double kInitialDeviation = 0.02;

std::shared_ptr<torch::nn::LayerNormImpl> make_norm(const BertOptions& options) {
  return std::make_shared<torch::nn::LayerNormImpl>(
      torch::nn::LayerNormOptions({options.width}).eps(options.norm_epsilon));
}

void check_shape(const char* name, const at::Tensor& tensor, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(!tensor.defined() || tensor.sizes() == sizes, "[bert] ", name,
                    " must have the shape of the ids, ", sizes, "; got ", tensor.sizes());
}

BertOptions with_pooler(BertOptions options, BertPooling pooling) {
  options.pooler = pooling == BertPooling::first;
  return options;
}

// Of @p available, the first of the names that BERT's files give to parameter `name`; "" if none is
// there.
std::string name_in(const std::set<std::string>& available, const std::string& name) {
  constexpr std::pair<const char*, const char*> kOldSuffixes[] = {
      {"LayerNorm.weight", "LayerNorm.gamma"}, {"LayerNorm.bias", "LayerNorm.beta"}};
  std::string old = name;
  for (const auto& [suffix, replacement] : kOldSuffixes) {
    if (name.ends_with(suffix))
      old = name.substr(0, name.size() - std::string_view(suffix).size()) + replacement;
  }
  for (const std::string& candidate : {name, "bert." + name, old, "bert." + old}) {
    if (available.contains(candidate)) return candidate;
  }
  return "";
}

}  // namespace

std::string defect(const BertOptions& options) {
  const std::string problem = internal::count_defect({{"vocabulary", options.vocabulary},
                                                      {"context", options.context},
                                                      {"token_types", options.token_types},
                                                      {"layers", options.layers},
                                                      {"heads", options.heads},
                                                      {"width", options.width},
                                                      {"intermediate", options.intermediate}});
  if (!problem.empty()) return problem;
  if (options.width % options.heads != 0) {
    return "width must be a multiple of heads; got width " + std::to_string(options.width) +
           " and " + std::to_string(options.heads) + " heads";
  }
  if (!(options.norm_epsilon > 0.0))
    return "norm_epsilon must be > 0; got " + std::to_string(options.norm_epsilon);
  return internal::dropout_defect(options.dropout);
}

std::int64_t parameter_count(const BertOptions& options) {
  const std::int64_t C = options.width, M = options.intermediate;
  const std::int64_t embeddings =
      (options.vocabulary + options.context + options.token_types + 2) * C;
  const std::int64_t layer = 4 * C * (C + 1) + M * (C + 1) + C * (M + 1) + 4 * C;
  return embeddings + options.layers * layer + (options.pooler ? C * (C + 1) : 0);
}

BertEmbeddingsImpl::BertEmbeddingsImpl(const BertOptions& options) : options_(options) {
  internal::check("bert", options_);
  BertEmbeddingsImpl::reset();
}

void BertEmbeddingsImpl::reset() {
  const auto embedding = [&](const char* name, std::int64_t count) {
    return register_module(name, internal::make_embedding(count, options_.width));
  };
  word_embeddings = embedding("word_embeddings", options_.vocabulary);
  position_embeddings = embedding("position_embeddings", options_.context);
  token_type_embeddings = embedding("token_type_embeddings", options_.token_types);
  norm = register_module("LayerNorm", make_norm(options_));
}

at::Tensor BertEmbeddingsImpl::forward(const at::Tensor& ids_BT, const at::Tensor& types_BT) {
  const std::int64_t T = ids_BT.size(1);
  // The one row of type 0 is added to all tokens without looking it up for each.
  const at::Tensor types = types_BT.defined() ? token_type_embeddings->forward(types_BT)
                                              : token_type_embeddings->weight.narrow(0, 0, 1);
  const at::Tensor x_BTC =
      word_embeddings->forward(ids_BT) + types + position_embeddings->weight.narrow(0, 0, T);
  return at::dropout(internal::call(*norm, x_BTC), options_.dropout, is_training());
}

BertSelfAttentionImpl::BertSelfAttentionImpl(const BertOptions& options) : options_(options) {
  internal::check("bert", options_);
  BertSelfAttentionImpl::reset();
}

void BertSelfAttentionImpl::reset() {
  query = register_module("query", internal::make_linear(options_.width, options_.width));
  key = register_module("key", internal::make_linear(options_.width, options_.width));
  value = register_module("value", internal::make_linear(options_.width, options_.width));
}

at::Tensor BertSelfAttentionImpl::forward(const at::Tensor& x_BTC, const at::Tensor& attend) {
  const std::int64_t B = x_BTC.size(0), T = x_BTC.size(1), H = options_.heads,
                     D = options_.width / options_.heads;
  const auto heads = [&](const torch::nn::LinearImpl& layer) {
    return internal::call(layer, x_BTC).view({B, T, H, D}).transpose(1, 2);
  };
  const at::Tensor y_BHTD = at::scaled_dot_product_attention(
      heads(*query), heads(*key), heads(*value),
      attend.defined() ? std::optional<at::Tensor>(attend) : std::nullopt,
      is_training() ? options_.dropout : 0.0);
  return y_BHTD.transpose(1, 2).reshape({B, T, H * D});
}

BertResidualImpl::BertResidualImpl(const BertOptions& options, std::int64_t in)
    : options_(options), in_(in) {
  internal::check("bert", options_);
  BertResidualImpl::reset();
}

void BertResidualImpl::reset() {
  dense = register_module("dense", internal::make_linear(in_, options_.width));
  norm = register_module("LayerNorm", make_norm(options_));
}

at::Tensor BertResidualImpl::forward(const at::Tensor& x, const at::Tensor& residual_BTC) {
  const at::Tensor y_BTC =
      at::dropout(internal::call(*dense, x), options_.dropout, is_training()) + residual_BTC;
  return internal::call(*norm, y_BTC);
}

BertAttentionImpl::BertAttentionImpl(const BertOptions& options) : options_(options) {
  BertAttentionImpl::reset();
}

void BertAttentionImpl::reset() {
  self = register_module("self", BertSelfAttention(options_));
  output = register_module("output", BertResidual(options_, options_.width));
}

at::Tensor BertAttentionImpl::forward(const at::Tensor& x_BTC, const at::Tensor& attend) {
  return output->forward(self->forward(x_BTC, attend), x_BTC);
}

BertDenseImpl::BertDenseImpl(std::int64_t in, std::int64_t out) : in_(in), out_(out) {
  BertDenseImpl::reset();
}

void BertDenseImpl::reset() { dense = register_module("dense", internal::make_linear(in_, out_)); }

at::Tensor BertDenseImpl::forward(const at::Tensor& x) { return internal::call(*dense, x); }

BertLayerImpl::BertLayerImpl(const BertOptions& options) : options_(options) {
  BertLayerImpl::reset();
}

void BertLayerImpl::reset() {
  attention = register_module("attention", BertAttention(options_));
  intermediate = register_module("intermediate", BertDense(options_.width, options_.intermediate));
  output = register_module("output", BertResidual(options_, options_.intermediate));
}

at::Tensor BertLayerImpl::forward(const at::Tensor& x_BTC, const at::Tensor& attend) {
  const at::Tensor middle_BTC = attention->forward(x_BTC, attend);
  return output->forward(at::gelu(intermediate->forward(middle_BTC)), middle_BTC);
}

BertEncoderImpl::BertEncoderImpl(const BertOptions& options) : options_(options) {
  BertEncoderImpl::reset();
}

void BertEncoderImpl::reset() {
  layer_ = register_module("layer", std::make_shared<torch::nn::ModuleListImpl>());
  for (std::int64_t i = 0; i < options_.layers; ++i) layer_->push_back(BertLayer(options_));
}

at::Tensor BertEncoderImpl::forward(const at::Tensor& x_BTC, const at::Tensor& attend) {
  at::Tensor y_BTC = x_BTC;
  for (const auto& layer : *layer_) y_BTC = layer->as<BertLayerImpl>()->forward(y_BTC, attend);
  return y_BTC;
}

std::vector<std::shared_ptr<BertLayerImpl>> BertEncoderImpl::layers() const {
  std::vector<std::shared_ptr<BertLayerImpl>> result;
  result.reserve(layer_->size());
  for (const auto& layer : *layer_)
    result.push_back(std::dynamic_pointer_cast<BertLayerImpl>(layer));
  return result;
}

BertImpl::BertImpl(const BertOptions& options) : options_(options) {
  internal::check("bert", options_);
  BertImpl::reset();
}

void BertImpl::reset() {
  embeddings = register_module("embeddings", BertEmbeddings(options_));
  encoder = register_module("encoder", BertEncoder(options_));
  if (options_.pooler)
    pooler = register_module("pooler", BertDense(options_.width, options_.width));
  reset_parameters();
}

void BertImpl::reset_parameters(const std::optional<at::Generator>& generator) {
  const at::NoGradGuard no_grad;
  for (auto& item : named_parameters()) {
    if (item.value().dim() >= 2) {
      item.value().normal_(0.0, kInitialDeviation, generator);
    } else {
      item.value().fill_(item.key().ends_with("LayerNorm.weight") ? 1.0 : 0.0);
    }
  }
}

at::Tensor BertImpl::forward(const at::Tensor& ids_BT, const at::Tensor& padding_BT,
                             const at::Tensor& types_BT) {
  internal::check_ids("bert", "ids", ids_BT);
  const std::int64_t B = ids_BT.size(0), T = ids_BT.size(1);
  TORCH_CHECK_VALUE(T <= options_.context, "[bert] positions must be at most the context of ",
                    options_.context, "; got ", T, ". Cut the texts.");
  TORCH_CHECK_VALUE(!padding_BT.defined() || (padding_BT.scalar_type() == at::kBool &&
                                              padding_BT.sizes() == ids_BT.sizes()),
                    "[bert] padding must be bool of the ids' shape ", ids_BT.sizes(), "; got ",
                    padding_BT.scalar_type(), " ", padding_BT.sizes());
  check_shape("token types", types_BT, ids_BT.sizes());
  const at::Tensor attend =
      padding_BT.defined() ? padding_BT.logical_not().view({B, 1, 1, T}) : at::Tensor();
  return encoder->forward(embeddings->forward(ids_BT, types_BT), attend);
}

at::Tensor BertImpl::pool(const at::Tensor& hidden_BTC) {
  TORCH_CHECK_VALUE(!pooler.is_empty(), "[bert] pool() needs options.pooler; got a model without");
  return at::tanh(pooler->forward(hidden_BTC.select(1, 0)));
}

at::Tensor mean_pool(const at::Tensor& hidden_BTC, const at::Tensor& padding_BT) {
  if (!padding_BT.defined()) return hidden_BTC.mean(1);
  const at::Tensor kept_BT1 = padding_BT.logical_not().unsqueeze(2);
  // Filled, not multiplied: padding has no meaning and may be no number.
  const at::Tensor sum_BC = hidden_BTC.masked_fill(kept_BT1.logical_not(), 0.0).sum(1);
  return sum_BC / kept_BT1.sum(1).clamp_min(1);
}

std::string defect(const BertClassifierOptions& options) {
  std::string problem = defect(options.bert);
  if (problem.empty()) problem = internal::count_defect({{"classes", options.classes}});
  return problem.empty() ? internal::dropout_defect(options.dropout) : problem;
}

BertClassifierImpl::BertClassifierImpl(const BertClassifierOptions& options) : options_(options) {
  internal::check("bert_classifier", options_);
  BertClassifierImpl::reset();
}

void BertClassifierImpl::reset() {
  bert = register_module("bert", Bert(with_pooler(options_.bert, options_.pooling)));
  classifier =
      register_module("classifier", internal::make_linear(options_.bert.width, options_.classes));
  reset_head();
}

void BertClassifierImpl::reset_head(const std::optional<at::Generator>& generator) {
  const at::NoGradGuard no_grad;
  classifier->weight.normal_(0.0, kInitialDeviation, generator);
  classifier->bias.zero_();
}

at::Tensor BertClassifierImpl::forward(const at::Tensor& ids_BT, const at::Tensor& padding_BT,
                                       const at::Tensor& types_BT) {
  const at::Tensor hidden_BTC = bert->forward(ids_BT, padding_BT, types_BT);
  const at::Tensor pooled_BC = options_.pooling == BertPooling::first
                                   ? bert->pool(hidden_BTC)
                                   : mean_pool(hidden_BTC, padding_BT);
  return internal::call(*classifier, at::dropout(pooled_BC, options_.dropout, is_training()));
}

std::map<std::string, std::string> huggingface_names(const BertImpl& bert,
                                                     const std::vector<std::string>& available) {
  const std::set<std::string> names(available.begin(), available.end());
  std::map<std::string, std::string> result;
  std::string missing;
  for (const auto& item : bert.named_parameters()) {
    const std::string name = name_in(names, item.key());
    if (name.empty()) missing += (missing.empty() ? "" : ", ") + item.key();
    result[item.key()] = name;
  }
  TORCH_CHECK_VALUE(missing.empty(), "[bert] a file must hold every parameter; missing are ",
                    missing, ". Is it a BERT of as many layers, and does it have a pooler?");
  return result;
}

std::int64_t freeze_lower_layers(BertImpl& bert, std::int64_t count) {
  const auto layers = bert.layers();
  TORCH_CHECK_VALUE(count >= 0 && count <= static_cast<std::int64_t>(layers.size()),
                    "[bert] count of frozen layers must be in [0, ", layers.size(), "]; got ",
                    count);
  std::int64_t frozen = 0;
  const auto set = [&](const torch::nn::Module& module, bool trained) {
    for (auto& parameter : module.parameters()) {
      parameter.set_requires_grad(trained);
      if (!trained) frozen += parameter.numel();
    }
  };
  set(*bert.embeddings, false);
  for (std::size_t i = 0; i < layers.size(); ++i)
    set(*layers[i], static_cast<std::int64_t>(i) >= count);
  if (bert.pooler) set(*bert.pooler, true);
  return frozen;
}

}  // namespace gradus::models
