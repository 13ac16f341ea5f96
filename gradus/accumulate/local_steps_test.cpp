#include <gradus/accumulate/local_steps.h>

#include <cmath>
#include <functional>
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/accumulate/backward_steps.h>
#include <gradus/accumulate/window.h>
#include <gradus/base/error.h>

#include <tests/support/message_of.h>

namespace gradus::accumulate {
namespace {

using testing::HasSubstr;
using tests::message_of;

at::Tensor leaf(double value) { return torch::full({}, value, at::kDouble).requires_grad_(); }

TEST(LocalStepsTest, UpdateIsTheMeanOfGradientsAlongTheLocalPath) {
  // L_i = (w - c_i)^2 / 2 from w = 1, eta = 0.5, c = 3, -1, 2:
  // g = -2 at 1; w 2, g = 3; w 0.5, g = -1.5; sum -0.5, mean -1/6.
  const auto w = leaf(1.0);
  torch::optim::SGD sgd({w}, torch::optim::SGDOptions(0.5));
  LocalSteps window({w}, {.steps = 3, .learning_rate = 0.5});
  std::vector<double> visited;
  for (const double c : {3.0, -1.0, 2.0}) {
    visited.push_back(w.item<double>());
    window.backward((w - c).pow(2) / 2.0);
  }
  EXPECT_TRUE(window.full());
  const auto result = window.finish();
  EXPECT_EQ(visited, (std::vector<double>{1.0, 2.0, 0.5}));
  EXPECT_EQ(w.item<double>(), 1.0) << "local steps are taken back";
  EXPECT_DOUBLE_EQ(w.grad().item<double>(), -0.5 / 3.0);
  EXPECT_DOUBLE_EQ(result.mean_loss, (2.0 + 4.5 + 1.125) / 3.0);
  sgd.step();
  EXPECT_DOUBLE_EQ(w.item<double>(), 1.0 + 0.5 * 0.5 / 3.0);
}

TEST(LocalStepsTest, FollowsThePapersWorkerOnAModel) {
  // Oracle: the paper's worker and parameter server, with plain tensors.
  torch::manual_seed(1);
  const auto x = torch::randn({6, 4, 3}, at::kDouble), y = torch::randn({6, 4, 1}, at::kDouble);
  auto w = torch::randn({3, 1}, at::kDouble).requires_grad_();
  auto theta = w.detach().clone();
  torch::optim::SGD sgd({w}, torch::optim::SGDOptions(0.1));
  LocalSteps window({w}, {.steps = 3, .learning_rate = 0.1});
  for (int i = 0; i < 6; ++i) {
    window.backward((x[i].matmul(w) - y[i]).tanh().pow(2).mean());
    if (!window.full()) continue;
    window.finish();
    sgd.step();
    sgd.zero_grad();
  }
  for (int push = 0; push < 2; ++push) {
    auto local = theta.clone();
    auto accumulated = torch::zeros_like(theta);
    for (int i = 3 * push; i < 3 * push + 3; ++i) {
      const auto at = local.clone().requires_grad_();
      const auto g =
          torch::autograd::grad({(x[i].matmul(at) - y[i]).tanh().pow(2).mean()}, {at})[0];
      accumulated += -0.1 * g;
      local += -0.1 * g;
    }
    theta += accumulated / 3.0;
  }
  EXPECT_LE((w.detach() - theta).abs().max().item<double>(), 1e-12);
}

TEST(LocalStepsTest, VanishingLocalStepsAreTheMeanOfAWindow) {
  const auto w = leaf(1.0), plain = leaf(1.0);
  LocalSteps steps({w}, {.steps = 2, .learning_rate = 1e-15});
  GradientWindow window({plain}, {.micro_batches = 2, .normalisation = Normalisation::mean});
  for (const double c : {3.0, -1.0}) {
    steps.backward((w - c).pow(2));
    window.backward((plain - c).pow(2));
  }
  steps.finish();
  window.finish();
  EXPECT_NEAR(w.grad().item<double>(), plain.grad().item<double>(), 1e-12);
}

TEST(LocalStepsTest, PartialWindowIsDividedByTheStepsItMade) {
  const auto w = leaf(0.0), unused = leaf(0.0);
  LocalSteps window({w, unused, w}, {.steps = 4, .learning_rate = 1.0});
  window.backward(w * 5.0);
  EXPECT_EQ(window.finish().steps, 1);
  EXPECT_EQ(w.grad().item<double>(), 5.0);
  EXPECT_FALSE(unused.grad().defined());
  EXPECT_TRUE(window.empty());
}

TEST(LocalStepsTest, SparseGradientsStepTheirRows) {
  auto table = torch::zeros({3, 2}, at::kDouble).requires_grad_();
  LocalSteps window({table}, {.steps = 2, .learning_rate = 1.0});
  for (const int row : {1, 2}) {
    window.backward(torch::embedding(table, torch::tensor({row}), -1, false, true).sum());
    EXPECT_EQ(table[row][0].item<double>(), -1.0);
  }
  window.finish();
  EXPECT_TRUE(
      at::equal(table.grad(), torch::tensor({{0.0, 0.0}, {0.5, 0.5}, {0.5, 0.5}}).to(at::kDouble)));
  EXPECT_EQ(table.abs().sum().item<double>(), 0.0);
}

TEST(LocalStepsTest, AbandonedWindowsPutTheParametersBack) {
  const auto w = leaf(2.0);
  {
    LocalSteps window({w}, {.steps = 2, .learning_rate = 1.0});
    window.backward(w * 3.0);
    EXPECT_EQ(w.item<double>(), -1.0);
    auto middle = w * 1.0;
    middle.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("no"); });
    EXPECT_THROW(window.backward(middle), std::exception);
    EXPECT_THAT(message_of([&] { window.finish(); }), HasSubstr("must be reset()"));
    window.reset();
    EXPECT_EQ(w.item<double>(), 2.0);
    window.backward(w * 3.0);
  }
  EXPECT_EQ(w.item<double>(), 2.0) << "an unfinished window ends without a step";
}

TEST(LocalStepsTest, MisuseIsRefusedByName) {
  const auto w = leaf(1.0);
  const auto refused = [&](std::vector<at::Tensor> parameters, LocalStepsOptions options) {
    return message_of([&] { const LocalSteps made(parameters, options); });
  };
  EXPECT_THAT(refused({}, {.learning_rate = 1.0}), HasSubstr("at least one parameter"));
  EXPECT_THAT(refused({w}, {.steps = 0, .learning_rate = 1.0}), HasSubstr("steps must be >= 1"));
  EXPECT_THAT(refused({w}, {}), HasSubstr("learning_rate must be finite and > 0; got 0"));
  LocalSteps window({w}, {.steps = 1, .learning_rate = 1.0});
  EXPECT_THAT(message_of([&] { window.finish(); }), HasSubstr("it is empty"));
  EXPECT_THAT(message_of([&] { window.backward(w.detach()); }), HasSubstr("requires a gradient"));
  window.backward(w * 1.0);
  EXPECT_THAT(message_of([&] { window.backward(w * 1.0); }), HasSubstr("it made 1 of 1 steps"));
  window.finish();
  EXPECT_THAT(message_of([&] { window.backward(w * 1.0); }), HasSubstr("must be cleared"));
}

TEST(LocalStepsTest, OptimizerThatStepsInBackwardIsRefusedByName) {
  const auto w = leaf(1.0);
  {
    const BackwardSteps steps({w}, true);
    EXPECT_THAT(message_of([&] { const LocalSteps window({w}, {.learning_rate = 0.1}); }),
                HasSubstr("LocalSteps sums up gradients after backward"));
  }
  const LocalSteps window({w}, {.learning_rate = 0.1});
  EXPECT_THAT(message_of([&] { const BackwardSteps steps({w}, true); }),
              HasSubstr("LocalSteps sums up gradients after backward"));
}

}  // namespace
}  // namespace gradus::accumulate
