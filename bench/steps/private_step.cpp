// DP-SGD against the plain step: `private --model cnn|resnet|lstm|gpt|embedding --mode
// plain|private|noiseless`. bench/steps/private_peer.py has the same models with Opacus.

#include <cmath>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gpt_block.h"
#include "protocol.h"
#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/optim/sgd.h>
#include <gradus/privacy/training/dp_optimizer.h>

namespace gradus::bench {

namespace {

namespace nn = torch::nn;

constexpr double kLearningRate = 0.01, kMaxNorm = 1.0, kNoise = 1.0;

struct CnnImpl : nn::Module {
  nn::Conv2d c1{nullptr}, c2{nullptr};
  nn::Linear f1{nullptr}, f2{nullptr};
  CnnImpl() {
    c1 = register_module("c1", nn::Conv2d(nn::Conv2dOptions(1, 16, 8).stride(2).padding(3)));
    c2 = register_module("c2", nn::Conv2d(nn::Conv2dOptions(16, 32, 4).stride(2)));
    f1 = register_module("f1", nn::Linear(32 * 4 * 4, 32));
    f2 = register_module("f2", nn::Linear(32, 10));
  }
  at::Tensor forward(at::Tensor x) {
    x = at::max_pool2d(at::relu(c1(x)), 2, 1);
    x = at::max_pool2d(at::relu(c2(x)), 2, 1);
    return f2(at::relu(f1(x.flatten(1))));
  }
};

nn::GroupNorm group_norm(std::int64_t channels) {
  return nn::GroupNorm(nn::GroupNormOptions(std::min<std::int64_t>(32, channels), channels));
}

nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride,
                       std::int64_t padding) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).stride(stride).padding(padding).bias(false));
}

struct ResidualImpl : nn::Module {
  nn::Conv2d c1{nullptr}, c2{nullptr};
  nn::GroupNorm n1{nullptr}, n2{nullptr};
  nn::Sequential sc;
  ResidualImpl(std::int64_t in, std::int64_t out, std::int64_t stride) {
    c1 = register_module("c1", convolution(in, out, 3, stride, 1));
    n1 = register_module("n1", group_norm(out));
    c2 = register_module("c2", convolution(out, out, 3, 1, 1));
    n2 = register_module("n2", group_norm(out));
    if (in != out || stride != 1) {
      sc->push_back(convolution(in, out, 1, stride, 0));
      sc->push_back(group_norm(out));
    }
    register_module("sc", sc);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = n2(c2(at::relu(n1(c1(x)))));
    return at::relu(y + (sc->is_empty() ? x : sc->forward(x)));
  }
};
TORCH_MODULE(Residual);

struct ResNetImpl : nn::Module {
  nn::Conv2d c{nullptr};
  nn::GroupNorm n{nullptr};
  nn::ModuleList l;
  nn::Linear f{nullptr};
  ResNetImpl() {
    c = register_module("c", convolution(3, 64, 3, 1, 1));
    n = register_module("n", group_norm(64));
    std::int64_t in = 64;
    for (const std::int64_t out : {64, 128, 256, 512}) {
      l->push_back(Residual(in, out, out == 64 ? 1 : 2));
      l->push_back(Residual(out, out, 1));
      in = out;
    }
    register_module("l", l);
    f = register_module("f", nn::Linear(512, 10));
  }
  at::Tensor forward(at::Tensor x) {
    x = at::relu(n(c(x)));
    for (const auto& block : *l) x = block->as<ResidualImpl>()->forward(x);
    return f(x.mean(at::IntArrayRef{2, 3}));
  }
};

struct LstmImpl : nn::Module {
  nn::Embedding e{nullptr};
  nn::LSTM r{nullptr};
  nn::Linear f{nullptr};
  LstmImpl() {
    e = register_module("e", nn::Embedding(1000, 64));
    r = register_module("r", nn::LSTM(nn::LSTMOptions(64, 128).batch_first(true)));
    f = register_module("f", nn::Linear(128, 10));
  }
  at::Tensor forward(const at::Tensor& x) {
    return f(std::get<0>(r(e(x))).select(1, x.size(1) - 1));
  }
};

struct GptImpl : nn::Module {
  nn::Embedding e{nullptr}, p{nullptr};
  nn::ModuleList b;
  nn::LayerNorm n{nullptr};
  nn::Linear head{nullptr};
  GptImpl() {
    e = register_module("e", nn::Embedding(8192, 256));
    p = register_module("p", nn::Embedding(128, 256));
    for (int i = 0; i < 4; ++i) b->push_back(Block(256, 4));
    register_module("b", b);
    n = register_module("n", nn::LayerNorm(nn::LayerNormOptions({256})));
    head = register_module("head", nn::Linear(nn::LinearOptions(256, 8192).bias(false)));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const auto positions = at::arange(tokens.size(1)).expand(tokens.sizes()).contiguous();
    auto x = e(tokens) + p(positions);
    for (const auto& block : *b) x = block->as<BlockImpl>()->forward(x);
    return call(head, n(x));
  }
};

struct EmbeddingImpl : nn::Module {
  nn::Embedding e{nullptr};
  nn::Linear a{nullptr}, b{nullptr};
  EmbeddingImpl() {
    e = register_module("e", nn::Embedding(50000, 128));
    a = register_module("a", nn::Linear(128, 64));
    b = register_module("b", nn::Linear(64, 10));
  }
  at::Tensor forward(const at::Tensor& x) { return b(at::relu(a(e(x).mean(1)))); }
};

struct Training {
  std::shared_ptr<nn::Module> module;
  std::function<at::Tensor(const at::Tensor&)> forward;
  at::Tensor inputs, targets;
  bool is_private = false;
  std::unique_ptr<optim::SGD> optimizer;
  std::unique_ptr<privacy::DPOptimizer> dp;

  template <typename Model>
  void use() {
    auto model = std::make_shared<Model>();
    forward = [model](const at::Tensor& x) { return model->forward(x); };
    module = model;
  }

  explicit Training(const StepOptions& options) {
    at::Generator random = at::make_generator<at::CPUGeneratorImpl>(options.seed);
    std::vector<std::int64_t> sizes, label_sizes;
    std::int64_t vocabulary = 0, classes = 10;
    if (options.model == "cnn") {
      use<CnnImpl>();
      sizes = {256, 1, 28, 28};
    } else if (options.model == "resnet") {
      use<ResNetImpl>();
      sizes = {64, 3, 32, 32};
    } else if (options.model == "lstm") {
      use<LstmImpl>();
      sizes = {64, 64};
      vocabulary = 1000;
    } else if (options.model == "gpt") {
      use<GptImpl>();
      sizes = {16, 128};
      vocabulary = classes = 8192;
      label_sizes = sizes;
    } else if (options.model == "embedding") {
      use<EmbeddingImpl>();
      sizes = {64, 32};
      vocabulary = 50000;
    } else {
      GRADUS_CHECK("bench", false, "--model is cnn, resnet, lstm, gpt or embedding; got '",
                   options.model, "'");
    }
    if (label_sizes.empty()) label_sizes = {sizes[0]};
    draw(*module, random);
    inputs = vocabulary > 0 ? at::randint(0, vocabulary, sizes, random, at::kLong)
                            : at::randn(sizes, random);
    targets = at::randint(0, classes, label_sizes, random, at::kLong);
    GRADUS_CHECK(
        "bench",
        options.mode == "plain" || options.mode == "private" || options.mode == "noiseless",
        "--mode is plain, private or noiseless; got '", options.mode, "'");
    is_private = options.mode != "plain";
    optimizer =
        std::make_unique<optim::SGD>(module->parameters(), optim::SGDOptions{.lr = kLearningRate});
    if (is_private) {
      privacy::DPOptimizerOptions how;
      how.noise_multiplier = options.mode == "private" ? kNoise : 0;
      how.expected_batch_size = static_cast<double>(sizes[0]);
      how.clipping.max_norm = kMaxNorm;
      how.seed = options.seed;  // Opacus' noise is not secure by default either
      dp = std::make_unique<privacy::DPOptimizer>(*optimizer, module,
                                                  std::make_shared<privacy::Accountant>(), how);
    }
    if (options.track) base::MemoryTracker::install();
  }

  double plain_step() {
    optimizer->zero_grad();
    const auto outputs = forward(inputs);
    const auto loss =
        at::cross_entropy_loss(outputs.view({-1, outputs.size(-1)}), targets.view({-1}));
    loss.backward();
    optimizer->step();
    return loss.item<double>();
  }

  double private_step() {
    dp->zero_grad();
    const auto losses = dp->accumulate(
        [&](const persample::Batch& batch) {
          const auto outputs = forward(batch[0]);
          return at::cross_entropy_loss(outputs.view({-1, outputs.size(-1)}), batch[1].view({-1}),
                                        {}, at::Reduction::None)
              .view({batch[0].size(0), -1})
              .mean(1);
        },
        {inputs, targets});
    dp->step();
    return losses.mean().item<double>();
  }

  double step() { return is_private ? private_step() : plain_step(); }

  std::string peak() {
    auto* const tracker = base::MemoryTracker::installed();
    GRADUS_CHECK("bench", tracker != nullptr, "peak needs --track 1");
    const std::int64_t resting = tracker->live().total();
    tracker->reset_peak();
    step();
    std::ostringstream answer;
    answer << "{\"peak\": " << tracker->peak().total() << ", \"resting\": " << resting << "}";
    return answer.str();
  }
};

}  // namespace

Program make_private_step(const StepOptions& options) {
  const auto training = std::make_shared<Training>(options);
  return {.step = [training] { return training->step(); },
          .requests = {{"peak", [training] { return training->peak(); }}}};
}

}  // namespace gradus::bench
