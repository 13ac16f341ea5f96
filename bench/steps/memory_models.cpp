#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory_models.h"
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <gradus/base/error.h>
#include <gradus/models/gpt.h>
#include <gradus/models/lstm_language_model.h>
#include <gradus/models/resnet.h>
#include <gradus/models/transformer.h>
#include <gradus/models/unet.h>

namespace gradus::bench {

namespace {

// Vectors are norms' weights and biases, one and zero; everything else N(0, 1 / fan-in).
void draw_weights(torch::nn::Module& module, at::Generator& generator) {
  const at::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> by_name;
  for (const auto& entry : module.named_parameters()) by_name.emplace(entry.key(), entry.value());
  for (auto& [name, parameter] : by_name) {
    if (parameter.dim() >= 2) {
      const double fan_in = static_cast<double>(parameter.numel() / parameter.size(0));
      parameter.normal_(0.0, 1.0 / std::sqrt(fan_in), generator);
    } else {
      parameter.fill_(name.ends_with("weight") ? 1.0 : 0.0);
    }
  }
}

at::Tensor ids(std::int64_t vocabulary, at::IntArrayRef sizes, at::Generator& generator) {
  return at::randint(0, vocabulary, sizes, generator, at::kLong);
}

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), targets.reshape({-1}));
}

MemoryModel mlp(at::Generator& generator) {
  constexpr std::int64_t kWidth = 256, kLayers = 24, kBatch = 4096;
  torch::nn::Sequential model;
  for (std::int64_t i = 0; i < kLayers; ++i) {
    if (i > 0) model->push_back(torch::nn::GELU());
    model->push_back(torch::nn::Linear(kWidth, kWidth));
  }
  draw_weights(*model, generator);
  const at::Tensor x = at::randn({kBatch, kWidth}, generator);
  const at::Tensor y = ids(kWidth, {kBatch}, generator);
  return {model.ptr(), {x, y}, [=] { return cross_entropy(model.ptr()->forward(x), y); }, 0.5};
}

MemoryModel gpt(at::Generator& generator) {
  constexpr models::GptOptions kModel{
      .vocabulary = 1024, .context = 256, .layers = 12, .heads = 8, .width = 256};
  constexpr std::int64_t kBatch = 2;
  models::Gpt model{kModel};
  draw_weights(*model, generator);
  const at::Tensor x = ids(kModel.vocabulary, {kBatch, kModel.context}, generator);
  const at::Tensor y = ids(kModel.vocabulary, {kBatch, kModel.context}, generator);
  return {model.ptr(), {x, y}, [=] { return cross_entropy(model.ptr()->forward(x), y); }};
}

MemoryModel resnet(at::Generator& generator) {
  constexpr std::int64_t kBatch = 8, kSide = 64, kClasses = 10;
  models::ResNet model{models::ResNetOptions{.classes = kClasses}};
  draw_weights(*model, generator);
  const at::Tensor x = at::randn({kBatch, 3, kSide, kSide}, generator);
  const at::Tensor y = ids(kClasses, {kBatch}, generator);
  return {model.ptr(), {x, y}, [=] { return cross_entropy(model.ptr()->forward(x), y); }};
}

MemoryModel unet(at::Generator& generator) {
  constexpr std::int64_t kBatch = 4, kSide = 128, kClasses = 4;
  models::UNet model{
      models::UNetOptions{.in_channels = 3, .out_channels = kClasses, .width = 16, .levels = 4}};
  draw_weights(*model, generator);
  const at::Tensor x = at::randn({kBatch, 3, kSide, kSide}, generator);
  const at::Tensor y = ids(kClasses, {kBatch, kSide, kSide}, generator);
  return {model.ptr(), {x, y}, [=] { return at::cross_entropy_loss(model.ptr()->forward(x), y); }};
}

MemoryModel lstm(at::Generator& generator) {
  constexpr std::int64_t kVocabulary = 1024, kBatch = 32, kLength = 64;
  models::LstmLanguageModel model{models::LstmLanguageModelOptions{
      .vocabulary = kVocabulary, .embedding = 256, .width = 256, .layers = 4}};
  draw_weights(*model, generator);
  const at::Tensor x = ids(kVocabulary, {kBatch, kLength}, generator);
  const at::Tensor y = ids(kVocabulary, {kBatch, kLength}, generator);
  return {model.ptr(), {x, y}, [=] { return cross_entropy(model.ptr()->forward(x), y); }, 0.5};
}

MemoryModel transformer(at::Generator& generator) {
  constexpr std::int64_t kVocabulary = 1024, kBatch = 4, kLength = 128;
  models::Transformer model{models::TransformerOptions{.source_vocabulary = kVocabulary,
                                                       .target_vocabulary = kVocabulary,
                                                       .context = kLength,
                                                       .encoder_layers = 4,
                                                       .decoder_layers = 4,
                                                       .heads = 8,
                                                       .width = 256,
                                                       .hidden = 1024}};
  draw_weights(*model, generator);
  const at::Tensor source = ids(kVocabulary, {kBatch, kLength}, generator);
  const at::Tensor target = ids(kVocabulary, {kBatch, kLength}, generator);
  const at::Tensor y = ids(kVocabulary, {kBatch, kLength}, generator);
  at::Tensor padding = at::zeros({kBatch, kLength}, at::kBool);
  for (std::int64_t i = 0; i < kBatch; ++i)
    padding[i].narrow(0, kLength - 8 * i, 8 * i).fill_(true);
  return {model.ptr(), {source, target, y, padding}, [=] {
            return cross_entropy(model.ptr()->forward(source, target, padding), y);
          }};
}

// A GPT without positions and without a final norm, as the Python code that published
// measurements of torch.utils.checkpoint use: models::Gpt has both.
struct BareBlock : torch::nn::Module {
  static constexpr std::int64_t kWidth = 256, kHeads = 4;
  torch::nn::LayerNorm n1{torch::nn::LayerNormOptions({kWidth})};
  torch::nn::LayerNorm n2{torch::nn::LayerNormOptions({kWidth})};
  torch::nn::Linear qkv{kWidth, 3 * kWidth}, o{kWidth, kWidth};
  torch::nn::Linear u{kWidth, 4 * kWidth}, v{4 * kWidth, kWidth};

  BareBlock() {
    register_module("n1", n1);
    register_module("qkv", qkv);
    register_module("o", o);
    register_module("n2", n2);
    register_module("u", u);
    register_module("v", v);
  }

  at::Tensor attention(const at::Tensor& x_BTC) {
    const std::int64_t B = x_BTC.size(0), T = x_BTC.size(1);
    const std::vector<at::Tensor> parts = at::linear(x_BTC, qkv->weight, qkv->bias)
                                              .view({B, T, 3, kHeads, kWidth / kHeads})
                                              .permute({2, 0, 3, 1, 4})
                                              .unbind();
    const at::Tensor y_BHTD = at::scaled_dot_product_attention(
        parts[0], parts[1], parts[2], /*attn_mask=*/std::nullopt, /*dropout_p=*/0.0,
        /*is_causal=*/true);
    return at::linear(y_BHTD.transpose(1, 2).reshape({B, T, kWidth}), o->weight, o->bias);
  }

  at::Tensor forward(const at::Tensor& x_BTC) {
    const at::Tensor middle = x_BTC + attention(n1->forward(x_BTC));
    const at::Tensor up = at::linear(n2->forward(middle), u->weight, u->bias);
    return middle + at::linear(at::gelu(up), v->weight, v->bias);
  }
};

struct BareGpt : torch::nn::Module {
  static constexpr std::int64_t kVocabulary = 1024, kLayers = 16;
  torch::nn::Embedding e{kVocabulary, BareBlock::kWidth};
  std::vector<std::shared_ptr<BareBlock>> blocks;
  torch::nn::Linear h{torch::nn::LinearOptions(BareBlock::kWidth, kVocabulary).bias(false)};

  BareGpt() {
    register_module("e", e);
    torch::nn::ModuleList list;
    for (std::int64_t i = 0; i < kLayers; ++i) {
      blocks.push_back(std::make_shared<BareBlock>());
      list->push_back(blocks.back());
    }
    register_module("b", list);
    register_module("h", h);
  }

  at::Tensor forward(const at::Tensor& ids_BT) {
    at::Tensor x_BTC = e->forward(ids_BT);
    for (const auto& block : blocks) x_BTC = block->forward(x_BTC);
    return at::linear(x_BTC, h->weight);
  }
};

MemoryModel gpt16(at::Generator& generator) {
  constexpr std::int64_t kBatch = 8, kLength = 256;
  const auto model = std::make_shared<BareGpt>();
  draw_weights(*model, generator);
  const at::Tensor x = ids(BareGpt::kVocabulary, {kBatch, kLength}, generator);
  const at::Tensor y = ids(BareGpt::kVocabulary, {kBatch, kLength}, generator);
  return {model, {x, y}, [=] { return cross_entropy(model->forward(x), y); }};
}

using Make = MemoryModel (*)(at::Generator&);

const std::vector<std::pair<std::string, Make>>& makers() {
  static const std::vector<std::pair<std::string, Make>> all{
      {"mlp", mlp},   {"resnet", resnet},           {"unet", unet},  {"gpt", gpt},
      {"lstm", lstm}, {"transformer", transformer}, {"gpt16", gpt16}};
  return all;
}

}  // namespace

const std::vector<std::string>& memory_model_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> result;
    for (const auto& [name, make] : makers()) result.push_back(name);
    return result;
  }();
  return names;
}

MemoryModel make_memory_model(const std::string& name, at::Generator generator) {
  const auto found =
      std::ranges::find(makers(), name, [](const auto& entry) { return entry.first; });
  std::string known;
  for (const std::string& each : memory_model_names()) known += (known.empty() ? "" : ", ") + each;
  GRADUS_CHECK("bench", found != makers().end(), "model must be one of ", known, "; got '", name,
               "'");
  return found->second(generator);
}

}  // namespace gradus::bench
