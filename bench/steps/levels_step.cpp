// A convolutional net with BatchNorm and a GPT at each opt level:
// `levels --model cnn|gpt --mode O0|O1|O2|O3|O3-keep-batchnorm|bf16|bf16-stochastic`.

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "protocol.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

#include <gradus/amp/levels/levels.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/models/gpt.h>
#include <gradus/optim/sgd.h>

namespace gradus::bench {

namespace {

namespace nn = torch::nn;

constexpr std::int64_t kBatch = 32, kSide = 32, kClasses = 10;
constexpr models::GptOptions kGpt{
    .vocabulary = 1024, .context = 128, .layers = 4, .heads = 4, .width = 256};
constexpr std::int64_t kSequences = 4;
constexpr std::size_t kBatches = 4;

nn::Sequential make_cnn() {
  nn::Sequential net;
  std::int64_t in = 3;
  for (const std::int64_t out : {64, 128, 256}) {
    for (const std::int64_t stride : {1, 2}) {
      net->push_back(nn::Conv2d(
          nn::Conv2dOptions(in, out, /*kernel_size=*/3).stride(stride).padding(1).bias(false)));
      net->push_back(nn::BatchNorm2d(out));
      net->push_back(nn::ReLU());
      in = out;
    }
  }
  net->push_back(nn::AdaptiveAvgPool2d(1));
  net->push_back(nn::Flatten());
  net->push_back(nn::Linear(in, kClasses));
  return net;
}

amp::LevelOptions level_options(const std::string& mode) {
  amp::LevelOptions options;
  const bool keep = mode == "O3-keep-batchnorm";
  options.opt_level = amp::parse_opt_level(keep ? "O3" : mode);
  if (keep) options.keep_batchnorm_fp32 = true;
  return options;
}

struct Training {
  std::shared_ptr<nn::Module> module;
  std::function<at::Tensor(const amp::Amp&, const at::Tensor&)> logits;
  std::vector<std::pair<at::Tensor, at::Tensor>> batches;
  std::unique_ptr<amp::Amp> levels;
  std::unique_ptr<optim::SGD> optimizer;
  std::size_t count = 0;

  explicit Training(const StepOptions& options) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
    if (options.model == "gpt") {
      make_gpt(generator);
    } else {
      GRADUS_CHECK("bench", options.model == "cnn", "--model is cnn or gpt; got '", options.model,
                   "'");
      make_images(generator);
    }
    levels = std::make_unique<amp::Amp>(amp::initialize(*module, level_options(options.mode)));
    // Not Adam: in float16, as O3 has its state, squares of gradients and eps are 0.
    optimizer = std::make_unique<optim::SGD>(levels->parameters(*module),
                                             optim::SGDOptions{.lr = 0.02, .momentum = 0.9});
  }

  void make_images(at::Generator& generator) {
    nn::Sequential net = make_cnn();  // drawn from the default generator, which main() seeds
    module = net.ptr();
    logits = [net](const amp::Amp& levels, const at::Tensor& x) mutable {
      return levels.forward(net, x);
    };
    for (std::size_t i = 0; i < kBatches; ++i) {
      const auto images = at::randn({kBatch, 3, kSide, kSide}, generator);
      batches.emplace_back(images, at::randint(0, kClasses, {kBatch}, generator, at::kLong));
    }
  }

  void make_gpt(at::Generator& generator) {
    models::Gpt gpt(kGpt);
    gpt->reset_parameters(generator);
    module = gpt.ptr();
    logits = [gpt](const amp::Amp& levels, const at::Tensor& x) mutable {
      return levels.forward(gpt, x).view({-1, kGpt.vocabulary});
    };
    for (std::size_t i = 0; i < kBatches; ++i) {
      const auto ids =
          at::randint(0, kGpt.vocabulary, {kSequences, kGpt.context + 1}, generator, at::kLong);
      batches.emplace_back(ids.narrow(1, 0, kGpt.context).contiguous(),
                           ids.narrow(1, 1, kGpt.context).reshape({-1}));
    }
  }

  double step() {
    const auto& [input, target] = batches[count++ % batches.size()];
    levels->zero_grad(*optimizer);
    // O1 gives logits in float16; the loss is float32 at every level.
    const auto loss = at::cross_entropy_loss(logits(*levels, input).to(at::kFloat), target);
    {
      amp::ScaledLoss scaled(*levels, loss, {optimizer.get()});
      scaled.backward();
      scaled.finish();
    }
    levels->step(*optimizer);
    return loss.item<double>();
  }

  // Of the next step: bytes of all tensors at one time, and of those that stay.
  std::string peak() {
    auto& tracker = *base::MemoryTracker::installed();
    optimizer->zero_grad();
    const auto resting = tracker.live().total();
    tracker.reset_peak();
    step();
    const auto counts = levels->counts(*optimizer);
    std::ostringstream answer;
    answer << "{\"peak\": " << tracker.peak().total() << ", \"resting\": " << resting
           << ", \"skipped\": " << counts.skipped << ", \"scale\": " << levels->loss_scale() << "}";
    return answer.str();
  }
};

}  // namespace

Program make_levels_step(const StepOptions& options) {
  base::MemoryTracker::install();
  const auto training = std::make_shared<Training>(options);
  return {.step = [training] { return training->step(); },
          .requests = {{"peak", [training] { return training->peak(); }}}};
}

}  // namespace gradus::bench
