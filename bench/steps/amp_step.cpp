// A GPT and a convolutional net under autocast: `amp --model gpt|cnn --mode fp32|bf16|fp16`.
// bench/steps/amp_peer.py has the same in Python.

#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gpt_block.h"
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

struct GptImpl : nn::Module {
  nn::Embedding e{nullptr};
  nn::ModuleList b;
  nn::Linear h{nullptr};
  GptImpl() {
    e = register_module("e", nn::Embedding(kVocabulary, kWidth));
    b = register_module("b", nn::ModuleList());
    for (int i = 0; i < kLayers; ++i) b->push_back(Block(kWidth, kHeads));
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
