// A plain training step of a GPT: zero_grad, forward, cross entropy, backward, fused AdamW.
// bench/steps/peer.py has the same sizes, data and weights.

#include <cstddef>
#include <memory>
#include <vector>

#include "protocol.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>

#include <gradus/models/gpt.h>
#include <gradus/optim/adamw.h>

namespace gradus::bench {

namespace {

constexpr models::GptOptions kModel{
    .vocabulary = 1024, .context = 128, .layers = 6, .heads = 8, .width = 256};
constexpr std::int64_t kBatch = 8;
constexpr std::size_t kBatches = 8;

struct Training {
  models::Gpt model{kModel};
  optim::AdamW optimizer{model->parameters(), {.lr = 1e-3, .weight_decay = 0.01, .fused = true}};
  std::vector<at::Tensor> batches;  // [B, T + 1]
  std::size_t step = 0;

  explicit Training(const StepOptions& options) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
    model->reset_parameters(generator);
    for (std::size_t i = 0; i < kBatches; ++i) {
      batches.push_back(
          at::randint(0, kModel.vocabulary, {kBatch, kModel.context + 1}, generator, at::kLong));
    }
  }

  double run() {
    const at::Tensor& batch = batches[step++ % kBatches];
    optimizer.zero_grad();
    const at::Tensor logits = model->forward(batch.narrow(1, 0, kModel.context));
    const at::Tensor targets = batch.narrow(1, 1, kModel.context).reshape({-1});
    const at::Tensor loss = at::cross_entropy_loss(logits.view({-1, kModel.vocabulary}), targets);
    loss.backward();
    optimizer.step();
    return loss.item<double>();
  }
};

}  // namespace

Program make_gpt_step(const StepOptions& options) {
  return {.step = [training = std::make_shared<Training>(options)] { return training->run(); }};
}

}  // namespace gradus::bench
