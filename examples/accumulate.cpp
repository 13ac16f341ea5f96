// Accumulates micro-batches of unequal numbers of tokens: the gradient is that of the whole batch.

#include <cstdio>

#include <torch/torch.h>

#include <gradus/gradus.h>

int main() {
  torch::manual_seed(1);
  torch::nn::Linear model(8, 3);
  const at::Tensor x = torch::randn({12, 8}), y = torch::randint(3, {12});
  const auto mean_loss = [&](std::int64_t begin, std::int64_t count) {
    return at::cross_entropy_loss(model(x.narrow(0, begin, count)), y.narrow(0, begin, count));
  };
  mean_loss(0, 12).backward();
  const at::Tensor whole = model->weight.grad().clone();
  model->zero_grad();

  gradus::accumulate::GradientWindow window(model->parameters(), {.micro_batches = 3});
  window.backward(mean_loss(0, 7), 7);
  window.backward(mean_loss(7, 1), 1);
  window.backward(mean_loss(8, 4), 4);
  const auto result = window.finish();
  const double difference = (model->weight.grad() - whole).abs().max().item<double>();
  std::printf("loss %.6f over %.0f tokens; gradients differ by %.1e\n", result.loss, result.weight,
              difference);
  return difference < 1e-6 ? 0 : 1;
}
