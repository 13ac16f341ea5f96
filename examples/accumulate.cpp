// Accumulates micro-batches of unequal numbers of tokens: the gradient is that of the whole batch.

#include <cstdio>

#include <torch/torch.h>

#include <gradus/accumulate/micro_batch.h>
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
  std::printf("%s; gradients differ by %.1e\n", gradus::accumulate::describe(result).c_str(),
              difference);
  model->zero_grad();

  // The same step, cut as memory wants it: the largest micro-batch that fits, and as many of them
  // as the effective batch takes.
  const auto found = gradus::accumulate::find_micro_batch(
      *model, [&](std::int64_t size) { return mean_loss(0, size); },
      {.largest = 12, .limit_bytes = 420});
  gradus::accumulate::GradientWindow again(
      model->parameters(),
      {.normalisation = gradus::accumulate::Normalisation::examples, .effective_batch = 12});
  std::int64_t begin = 0;
  for (const std::int64_t size : gradus::accumulate::split_batch(12, found.size)) {
    again.backward(mean_loss(begin, size), static_cast<double>(size));
    begin += size;
  }
  const auto step = again.finish();
  const double again_difference = (model->weight.grad() - whole).abs().max().item<double>();
  std::printf("%s\n%s; gradients differ by %.1e\n", gradus::accumulate::describe(found).c_str(),
              gradus::accumulate::describe(step).c_str(), again_difference);
  return difference < 1e-6 && again_difference < 1e-6 && step.examples == 12 ? 0 : 1;
}
