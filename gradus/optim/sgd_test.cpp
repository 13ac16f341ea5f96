#include <gradus/optim/sgd.h>

#include <cmath>
#include <optional>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

namespace gradus::optim {
namespace {

struct ScalarSGD {
  SGDOptions o;
  std::optional<double> buffer;

  double step(double w, double g) {
    if (o.maximize) g = -g;
    g += o.weight_decay * w;
    if (o.momentum != 0.0) {
      buffer = buffer ? o.momentum * *buffer + (1.0 - o.dampening) * g : g;
      g = o.nesterov ? g + o.momentum * *buffer : *buffer;
    }
    return w - o.lr * g;
  }
};

TEST(SGDTest, EqualsTheAlgorithmOneNumberAtATimeInFloat64) {
  const std::vector<SGDOptions> cases{
      {.lr = 0.1},
      {.lr = 0.1, .weight_decay = 0.2},
      {.lr = 0.1, .momentum = 0.9},
      {.lr = 0.1, .momentum = 0.9, .dampening = 0.4, .weight_decay = 0.1},
      {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true},
      {.lr = 0.1, .momentum = 0.5, .maximize = true}};
  for (std::size_t c = 0; c < cases.size(); ++c) {
    for (const bool fused : {true, false}) {
      SCOPED_TRACE(testing::Message() << "case " << c << (fused ? " fused" : " foreach"));
      torch::manual_seed(4);
      auto options = cases[c];
      options.fused = fused;
      auto early = torch::randn({19}, at::kDouble).requires_grad_();
      auto late = early.detach().clone().requires_grad_();
      std::vector<ScalarSGD> oracle(38, ScalarSGD{options, {}});
      std::vector<double> expected(38);
      for (int i = 0; i < 38; ++i) expected[i] = early[i % 19].item<double>();
      SGD optimizer({early, late}, options);
      for (int step = 0; step < 20; ++step) {
        const auto gradient = torch::randn({38}, at::kDouble);
        early.mutable_grad() = gradient.slice(0, 0, 19).clone();
        // The late parameter's first step, undampened, falls among later steps of the other.
        if (step >= 5) late.mutable_grad() = gradient.slice(0, 19, 38).clone();
        optimizer.step();
        for (int i = 0; i < (step >= 5 ? 38 : 19); ++i) {
          expected[i] = oracle[i].step(expected[i], gradient[i].item<double>());
        }
      }
      for (int i = 0; i < 38; ++i) {
        EXPECT_NEAR((i < 19 ? early[i] : late[i - 19]).item<double>(), expected[i], 1e-12);
      }
    }
  }
}

TEST(SGDTest, WithoutMomentumThereIsNoState) {
  auto w = torch::ones({2}, torch::requires_grad());
  w.mutable_grad() = torch::ones({2});
  SGD optimizer({w});
  optimizer.step();
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(SGDTest, GradientIsLeftAsItWas) {
  for (const bool fused : {true, false}) {
    auto w = torch::ones({2}, torch::requires_grad());
    w.mutable_grad() = torch::ones({2});
    SGD optimizer(
        {w}, {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.5, .nesterov = true, .fused = fused});
    optimizer.step();
    EXPECT_TRUE(torch::equal(w.grad(), torch::ones({2})));
  }
}

TEST(SGDTest, OptionsOutOfRangeAreRefused) {
  const auto w = torch::ones({1}, torch::requires_grad());
  EXPECT_THROW(SGD({w}, {.momentum = -0.1}), UserError);
  EXPECT_THROW(SGD({w}, {.dampening = std::nan("")}), UserError);
  EXPECT_THROW(SGD({w}, {.nesterov = true}), UserError);
  EXPECT_THROW(SGD({w}, {.momentum = 0.9, .dampening = 0.1, .nesterov = true}), UserError);
}

}  // namespace
}  // namespace gradus::optim
