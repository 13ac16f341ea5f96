// A training step of a VGG-like network, and how many bytes its forward pass leaves for backward:
// plain, under the lossless encodings, and with delayed precision reduction.

#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <string>

#include "protocol.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

#include <gradus/base/memory_tracker.h>
#include <gradus/compress/policy.h>
#include <gradus/optim/sgd.h>

namespace gradus::bench {

namespace {

constexpr std::int64_t kBatch = 8, kSide = 64, kClasses = 10;

// VGG-16's stages (Simonyan & Zisserman 2015, configuration D) with half of its channels.
torch::nn::Sequential make_vgg() {
  const struct {
    std::int64_t width, convolutions;
  } stages[] = {{32, 2}, {64, 2}, {128, 3}, {256, 3}, {256, 3}};
  torch::nn::Sequential net;
  std::int64_t in = 3;
  for (const auto& stage : stages) {
    for (std::int64_t i = 0; i < stage.convolutions; ++i) {
      net->push_back(torch::nn::Conv2d(
          torch::nn::Conv2dOptions(in, stage.width, /*kernel_size=*/3).padding(1)));
      net->push_back(torch::nn::ReLU(torch::nn::ReLUOptions(/*inplace=*/true)));
      in = stage.width;
    }
    net->push_back(torch::nn::MaxPool2d(2));
  }
  net->push_back(torch::nn::Flatten());
  net->push_back(torch::nn::Linear(in * (kSide / 32) * (kSide / 32), 512));
  net->push_back(torch::nn::ReLU(torch::nn::ReLUOptions(/*inplace=*/true)));
  net->push_back(torch::nn::Dropout(0.5));
  net->push_back(torch::nn::Linear(512, kClasses));
  return net;
}

struct Training {
  torch::nn::Sequential net = make_vgg();
  optim::SGD optimizer{net->parameters(), {.lr = 1e-2}};
  at::Tensor inputs, targets;

  explicit Training(const StepOptions& options) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
    inputs = at::randn({kBatch, 3, kSide, kSide}, generator);
    targets = at::randint(0, kClasses, {kBatch}, generator, at::kLong);
  }

  at::Tensor loss() { return at::cross_entropy_loss(net->forward(inputs), targets); }

  double run() {
    optimizer.zero_grad();
    const at::Tensor value = loss();
    value.backward();
    optimizer.step();
    return value.item<double>();
  }

  std::int64_t stashed(const std::optional<compress::CompressOptions>& how) {
    const base::MemoryTracker& tracker = *base::MemoryTracker::installed();
    std::optional<compress::CompressGuard> guard;
    if (how) guard.emplace(*how);
    const std::int64_t before = tracker.live().total();
    const at::Tensor value = loss();
    return tracker.live().total() - before;
  }

  std::string stash() {
    compress::CompressOptions reduced;
    reduced.allow_lossy = true;
    reduced.lossy = compress::Lossy::fp16;
    std::ostringstream answer;
    answer << "{\"plain\": " << stashed(std::nullopt)
           << ", \"lossless\": " << stashed(compress::CompressOptions{})
           << ", \"reduced\": " << stashed(reduced) << "}";
    return answer.str();
  }
};

}  // namespace

Program make_compress_step(const StepOptions& options) {
  base::MemoryTracker::install();
  const auto training = std::make_shared<Training>(options);
  return {.step = [training] { return training->run(); },
          .requests = {{"stash", [training] { return training->stash(); }}}};
}

}  // namespace gradus::bench
