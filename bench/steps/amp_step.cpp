// A GPT and a convolutional net under autocast: `amp --model gpt|cnn --mode fp32|bf16|fp16`.
// bench/steps/amp_peer.py has the same in Python.

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "protocol.h"
#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/base/error.h>
#include <gradus/optim/sgd.h>

namespace gradus::bench {

namespace {

namespace nn = torch::nn;

constexpr int kBatches = 4;
constexpr std::int64_t kVocabulary = 1024, kWidth = 256, kHeads = 4, kLayers = 4;
// A fixed power of two: this measures autocast, not the scaler.
constexpr double kFloat16Scale = 1024;

// As one addmm; LinearImpl::forward takes 3-D input apart.
at::Tensor call(const nn::Linear& layer, const at::Tensor& x) {
  return at::linear(x, layer->weight, layer->bias);
}

struct BlockImpl : nn::Module {
  nn::LayerNorm n1{nullptr}, n2{nullptr};
  nn::Linear qkv{nullptr}, o{nullptr}, u{nullptr}, v{nullptr};
  BlockImpl() {
    n1 = register_module("n1", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    qkv = register_module("qkv", nn::Linear(kWidth, 3 * kWidth));
    o = register_module("o", nn::Linear(kWidth, kWidth));
    n2 = register_module("n2", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    u = register_module("u", nn::Linear(kWidth, 4 * kWidth));
    v = register_module("v", nn::Linear(4 * kWidth, kWidth));
  }
  at::Tensor forward(at::Tensor x) {
    const auto B = x.size(0), T = x.size(1);
    const auto parts =
        call(qkv, n1(x)).view({B, T, 3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4}).unbind();
    const auto mixed =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    x = x + call(o, mixed.transpose(1, 2).reshape({B, T, kWidth}));
    return x + call(v, at::gelu(call(u, n2(x))));
  }
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  nn::Embedding e{nullptr};
  nn::ModuleList b;
  nn::Linear h{nullptr};
  GptImpl() {
    e = register_module("e", nn::Embedding(kVocabulary, kWidth));
    b = register_module("b", nn::ModuleList());
    for (int i = 0; i < kLayers; ++i) b->push_back(Block());
    h = register_module("h", nn::Linear(nn::LinearOptions(kWidth, kVocabulary).bias(false)));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = e(tokens);
    for (const auto& block : *b) x = block->as<BlockImpl>()->forward(x);
    return call(h, x);
  }
};

struct CnnImpl : nn::Module {
  nn::Sequential l;
  nn::Linear f{nullptr};
  CnnImpl() {
    std::int64_t in = 3;
    for (const std::int64_t out : {64, 128, 256}) {
      l->push_back(nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1)));
      l->push_back(nn::BatchNorm2d(out));
      l->push_back(nn::ReLU());
      l->push_back(nn::Conv2d(nn::Conv2dOptions(out, out, 3).stride(2).padding(1)));
      l->push_back(nn::BatchNorm2d(out));
      l->push_back(nn::ReLU());
      in = out;
    }
    register_module("l", l);
    f = register_module("f", nn::Linear(256, 10));
  }
  at::Tensor forward(const at::Tensor& images) {
    return call(f, l->forward(images).mean(at::IntArrayRef{2, 3}));
  }
};

// Vectors keep what their modules set (ones and zeros), but biases are zero.
void draw(nn::Module& module, at::Generator& generator) {
  const at::NoGradGuard no_grad;
  auto parameters = module.named_parameters().pairs();
  std::sort(parameters.begin(), parameters.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (auto& [name, parameter] : parameters) {
    if (parameter.dim() == 1) {
      if (name.ends_with("bias")) parameter.zero_();
      continue;
    }
    const auto fan_in = static_cast<double>(parameter.numel() / parameter.size(0));
    parameter.copy_(at::randn(parameter.sizes(), generator) / std::sqrt(fan_in));
  }
}

struct Training {
  std::shared_ptr<nn::Module> module;
  std::function<at::Tensor(const at::Tensor&)> forward;
  std::vector<std::pair<at::Tensor, at::Tensor>> batches;
  std::optional<at::ScalarType> dtype;
  double scale = 1;
  std::unique_ptr<optim::SGD> optimizer;
  std::size_t count = 0;

  explicit Training(const StepOptions& options) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
    const bool gpt = options.model == "gpt";
    GRADUS_CHECK("bench", gpt || options.model == "cnn", "--model is gpt or cnn; got '",
                 options.model, "'");
    if (gpt) {
      auto model = std::make_shared<GptImpl>();
      forward = [model](const at::Tensor& x) { return model->forward(x).view({-1, kVocabulary}); };
      module = model;
    } else {
      auto model = std::make_shared<CnnImpl>();
      forward = [model](const at::Tensor& x) { return model->forward(x); };
      module = model;
    }
    draw(*module, generator);
    for (int i = 0; i < kBatches; ++i) {
      if (gpt) {
        const auto tokens = at::randint(0, kVocabulary, {4, 128}, generator, at::kLong);
        batches.emplace_back(tokens, at::randint(0, kVocabulary, {512}, generator, at::kLong));
      } else {
        const auto images = at::randn({32, 3, 32, 32}, generator);
        batches.emplace_back(images, at::randint(0, 10, {32}, generator, at::kLong));
      }
    }
    if (options.mode == "bf16") dtype = at::kBFloat16;
    if (options.mode == "fp16") dtype = at::kHalf;
    GRADUS_CHECK("bench", dtype || options.mode == "fp32", "--mode is fp32, bf16 or fp16; got '",
                 options.mode, "'");
    if (dtype == at::kHalf) scale = kFloat16Scale;
    // Of the scaled gradient: plain SGD is linear in it.
    optimizer = std::make_unique<optim::SGD>(module->parameters(),
                                             optim::SGDOptions{.lr = (gpt ? 0.01 : 0.002) / scale});
  }

  at::Tensor loss(const std::pair<at::Tensor, at::Tensor>& batch) {
    std::optional<amp::AutocastGuard> autocast;
    if (dtype) autocast.emplace(amp::AutocastOptions{.dtype = dtype});
    return at::cross_entropy_loss(forward(batch.first).to(at::kFloat), batch.second);
  }

  double step() {
    const auto& batch = batches[count++ % batches.size()];
    optimizer->zero_grad();
    const auto value = loss(batch);
    (scale == 1 ? value : value * scale).backward();
    optimizer->step();
    return value.item<double>();
  }
};

}  // namespace

Program make_amp_step(const StepOptions& options) {
  return {.step = [training = std::make_shared<Training>(options)] { return training->step(); }};
}

}  // namespace gradus::bench
