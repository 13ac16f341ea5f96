// Trains an unmodified model in half of the activation memory it needs: one guard around the step.

#include <cstdio>

#include <torch/torch.h>

#include <gradus/gradus.h>

int main() {
  using gradus::base::MemoryTracker;
  MemoryTracker& tracker = MemoryTracker::install();
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < 12; ++i) {
    model->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({128})));
    model->push_back(torch::nn::Linear(128, 512));
    model->push_back(torch::nn::GELU());
    model->push_back(torch::nn::Dropout(0.1));
    model->push_back(torch::nn::Linear(512, 128));
  }
  gradus::optim::AdamW optimizer(model->parameters(), {.lr = 1e-3});
  const at::Tensor x = torch::randn({256, 128});
  const auto step = [&] {
    optimizer.zero_grad();
    const at::Tensor loss = (model->forward(x) - x).pow(2).mean();
    loss.backward();
    optimizer.step();
    return loss.item<double>();
  };

  step();  // makes the optimizer's state
  tracker.reset_peak();
  const std::int64_t held = tracker.live().total();
  step();
  const std::int64_t plain = tracker.peak().total();
  const std::int64_t limit = held + (plain - held) / 2;

  const gradus::MemoryBudget budget({.limit_bytes = limit});
  tracker.reset_peak();
  double loss = 0.0;
  for (int i = 0; i < 5; ++i) loss = step();
  const std::int64_t peak = tracker.peak().total();
  std::printf("plain peak %s, limit %s, peak %s, loss %.4f, %lld operators run again\n",
              gradus::base::format_bytes(plain).c_str(), gradus::base::format_bytes(limit).c_str(),
              gradus::base::format_bytes(peak).c_str(), loss,
              static_cast<long long>(budget.statistics().replayed));
  return peak <= limit && budget.statistics().replayed > 0 ? 0 : 1;
}
