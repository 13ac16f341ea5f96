// Forward, forward and backward, and whole training step of the GPT of bench/compare.py's gpt-step,
// by threads.

#include <gradus/models/gpt.h>

#include <cstdint>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <benchmark/benchmark.h>
#include <torch/utils.h>

#include <gradus/optim/adamw.h>

namespace {

constexpr gradus::models::GptOptions kModel{
    .vocabulary = 1024, .context = 128, .layers = 6, .heads = 8, .width = 256};
constexpr std::int64_t kBatch = 8;

class Training {
 public:
  explicit Training(const benchmark::State& state) {
    at::set_num_threads(static_cast<int>(state.range(0)));
    torch::manual_seed(0);
    model_ = gradus::models::Gpt(kModel);
    ids_ = at::randint(0, kModel.vocabulary, {kBatch, kModel.context}, at::kLong);
  }

  at::Tensor loss() {
    return at::cross_entropy_loss(model_->forward(ids_).view({-1, kModel.vocabulary}),
                                  ids_.view({-1}));
  }
  gradus::models::Gpt& model() { return model_; }

 private:
  gradus::models::Gpt model_{nullptr};
  at::Tensor ids_;
};

void count_tokens(benchmark::State& state) {
  state.SetItemsProcessed(state.iterations() * kBatch * kModel.context);
}

void gpt_forward(benchmark::State& state) {
  Training training(state);
  const at::NoGradGuard no_grad;
  for (auto _ : state) benchmark::DoNotOptimize(training.loss());
  count_tokens(state);
}

void gpt_forward_backward(benchmark::State& state) {
  Training training(state);
  for (auto _ : state) {
    training.model()->zero_grad();
    training.loss().backward();
  }
  count_tokens(state);
}

void gpt_step(benchmark::State& state) {
  Training training(state);
  gradus::optim::AdamW optimizer(training.model()->parameters(), {.fused = true});
  for (auto _ : state) {
    optimizer.zero_grad();
    training.loss().backward();
    optimizer.step();
  }
  count_tokens(state);
}

BENCHMARK(gpt_forward)
    ->ArgName("threads")
    ->Arg(1)
    ->Arg(2)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK(gpt_forward_backward)
    ->ArgName("threads")
    ->Arg(1)
    ->Arg(2)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK(gpt_step)
    ->ArgName("threads")
    ->Arg(1)
    ->Arg(2)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace

BENCHMARK_MAIN();
