// A hundred plain SGD steps of an MLP 64-32-32-10 on a batch of 32, some 50 us each.
// bench/steps/peer.py has the same.

#include <memory>

#include "protocol.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>

#include <gradus/models/mlp.h>
#include <gradus/optim/sgd.h>

namespace gradus::bench {

namespace {

constexpr int kStepsPerRequest = 100;

struct Training {
  models::Mlp model{models::MlpOptions{{64, 32, 32, 10}}};
  optim::SGD optimizer{model->parameters(), {.lr = 1e-2}};
  at::Tensor inputs, targets;

  explicit Training(const StepOptions& options) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
    model->reset_parameters(generator);
    inputs = at::randn({32, 64}, generator);
    targets = at::randint(0, 10, {32}, generator, at::kLong);
  }

  double run() {
    at::Tensor loss;
    for (int i = 0; i < kStepsPerRequest; ++i) {
      optimizer.zero_grad();
      loss = at::cross_entropy_loss(model->forward(inputs), targets);
      loss.backward();
      optimizer.step();
    }
    return loss.item<double>();
  }
};

}  // namespace

Program make_mlp_step(const StepOptions& options) {
  return {.step = [training = std::make_shared<Training>(options)] { return training->run(); }};
}

}  // namespace gradus::bench
