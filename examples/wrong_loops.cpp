// Wrong loops of gradient accumulation beside the right one: the numbers of docs/wrong_loops.md.

#include <cmath>
#include <cstdio>
#include <vector>

#include <torch/torch.h>

#include <gradus/gradus.h>

namespace {

using gradus::accumulate::GradientWindow;
using Tokens = std::vector<double>;

// One weight; the gradient of a micro-batch is the mean of its tokens.
struct Model {
  at::Tensor w = torch::ones({}, at::kDouble).requires_grad_();
  at::Tensor mean_loss(const Tokens& tokens) const {
    return (w * torch::tensor(tokens, at::kDouble)).mean();
  }
  double take_gradient() const {
    const double gradient = w.grad().item<double>();
    w.mutable_grad().reset();
    return gradient;
  }
};

bool failed = false;

void show(const char* loop, double got, double expected) {
  std::printf("%-62s %8.4f\n", loop, got);
  failed = failed || std::abs(got - expected) > 1e-12;
}

}  // namespace

int main() {
  const Model model;
  const std::vector<Tokens> equal{{1, 3}, {5, 7}, {2, 4}, {8, 10}};
  for (const Tokens& tokens : equal) model.mean_loss(tokens).backward();
  show("wrong: loss not divided", model.take_gradient(), 20.0);
  at::Tensor total = torch::zeros({}, at::kDouble);
  for (const Tokens& tokens : equal) {
    total = total + model.mean_loss(tokens) / 4.0;
    total.backward({}, true);
  }
  show("wrong: backward on the running total", model.take_gradient(), 10.25);
  GradientWindow four({model.w}, {.micro_batches = 4});
  for (const Tokens& tokens : equal) four.backward(model.mean_loss(tokens), 2);
  four.finish();
  show("right: a window of four", model.take_gradient(), 5.0);

  const std::vector<Tokens> unequal{{1, 1, 1, 1}, {5}};
  for (const Tokens& tokens : unequal) (model.mean_loss(tokens) / 2.0).backward();
  show("wrong: mean of unequal micro-batches' means", model.take_gradient(), 3.0);
  GradientWindow two({model.w}, {.micro_batches = 2});
  for (const Tokens& tokens : unequal)
    two.backward(model.mean_loss(tokens), static_cast<double>(tokens.size()));
  two.finish();
  show("right: weighted by tokens", model.take_gradient(), 1.8);

  (model.mean_loss({5}) / 2.0).backward();  // the fifth of five micro-batches
  (model.mean_loss({1}) / 2.0).backward();  // the next epoch's first two
  (model.mean_loss({3}) / 2.0).backward();
  show("wrong: a partial window leaks into the next epoch", model.take_gradient(), 4.5);
  two.backward(model.mean_loss({5}), 1, {.last = true});
  two.finish();
  show("right: the partial window steps with what it holds", model.take_gradient(), 5.0);
  for (const double token : {1.0, 3.0}) two.backward(model.mean_loss({token}), 1);
  two.finish();
  show("right: and the next epoch begins clean", model.take_gradient(), 2.0);
  return failed ? 1 : 0;
}
