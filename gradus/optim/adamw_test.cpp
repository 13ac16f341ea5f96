#include <gradus/optim/adamw.h>

#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

namespace gradus::optim {
namespace {

// Algorithm 2 of Loshchilov and Hutter 2019, one number at a time.
struct ScalarAdamW {
  AdamWOptions o;
  double mean = 0.0, square = 0.0, max_square = 0.0;
  int t = 0;

  double step(double w, double g) {
    if (o.maximize) g = -g;
    ++t;
    w -= o.lr * o.weight_decay * w;
    mean = o.beta1 * mean + (1.0 - o.beta1) * g;
    square = o.beta2 * square + (1.0 - o.beta2) * g * g;
    max_square = std::max(max_square, square);
    const double corrected_mean = mean / (1.0 - std::pow(o.beta1, t));
    const double corrected_square =
        (o.amsgrad ? max_square : square) / (1.0 - std::pow(o.beta2, t));
    return w - o.lr * corrected_mean / (std::sqrt(corrected_square) + o.eps);
  }
};

TEST(AdamWTest, EqualsTheAlgorithmOneNumberAtATimeInFloat64) {
  const std::vector<AdamWOptions> cases{
      {},
      {.lr = 0.1, .weight_decay = 0.0},
      {.lr = 0.05, .beta1 = 0.5, .beta2 = 0.9, .eps = 1e-3, .weight_decay = 0.3},
      {.lr = 0.05, .beta2 = 0.5, .amsgrad = true},
      {.lr = 0.05, .maximize = true}};
  for (std::size_t c = 0; c < cases.size(); ++c) {
    for (const bool fused : {true, false}) {
      SCOPED_TRACE(testing::Message() << "case " << c << (fused ? " fused" : " foreach"));
      torch::manual_seed(3);
      auto options = cases[c];
      options.fused = fused;
      auto w = torch::randn({37}, at::kDouble).requires_grad_();
      std::vector<ScalarAdamW> oracle(37, ScalarAdamW{options});
      std::vector<double> expected(w.data_ptr<double>(), w.data_ptr<double>() + 37);
      AdamW optimizer({w}, options);
      for (int step = 0; step < 20; ++step) {
        const auto gradient = torch::randn({37}, at::kDouble);
        w.mutable_grad() = gradient.clone();
        optimizer.step();
        for (int i = 0; i < 37; ++i)
          expected[i] = oracle[i].step(expected[i], gradient[i].item<double>());
      }
      for (int i = 0; i < 37; ++i) EXPECT_NEAR(w[i].item<double>(), expected[i], 1e-12);
    }
  }
}

TEST(AdamWTest, ParametersThatJoinAtDifferentStepsHaveTheirOwnBiasCorrection) {
  for (const bool fused : {true, false}) {
    auto a = torch::zeros({1}, at::kDouble).requires_grad_();
    auto b = torch::zeros({1}, at::kDouble).requires_grad_();
    AdamW optimizer({a, b}, {.lr = 1.0, .eps = 0.0, .weight_decay = 0.0, .fused = fused});
    for (int step = 0; step < 3; ++step) {
      a.mutable_grad() = torch::ones({1}, at::kDouble);
      if (step == 2) b.mutable_grad() = torch::ones({1}, at::kDouble);
      optimizer.step();
    }
    // With a constant gradient each corrected step is exactly lr; a wrong correction would give b
    // another length.
    EXPECT_NEAR(a.item<double>(), -3.0, 1e-12);
    EXPECT_NEAR(b.item<double>(), -1.0, 1e-12);
  }
}

TEST(AdamWTest, OptionsOutOfRangeAreRefused) {
  const auto w = torch::ones({1}, torch::requires_grad());
  EXPECT_THROW(AdamW({w}, {.beta1 = 1.0}), UserError);
  EXPECT_THROW(AdamW({w}, {.beta2 = -0.1}), UserError);
  EXPECT_THROW(AdamW({w}, {.eps = std::nan("")}), UserError);
  EXPECT_THROW(AdamW({w}, {.weight_decay = -1.0}), UserError);
  EXPECT_THROW(AdamW({w}, {.lr = std::nan("")}), UserError);
}

// In float16, eps and the squares of small gradients are 0.
TEST(AdamWTest, Float16ParameterWithGapsIsUpdatedAsOneWithout) {
  torch::manual_seed(7);
  auto base = torch::randn({4, 6}).to(at::kHalf);
  auto gapped = base.slice(1, 0, 3).detach().requires_grad_();
  auto dense = gapped.detach().clone().requires_grad_();
  const auto beside = base.slice(1, 3, 6).clone();
  AdamW on_gapped({gapped}, {.lr = 0.1, .amsgrad = true});
  AdamW on_dense({dense}, {.lr = 0.1, .amsgrad = true});
  for (int step = 0; step < 3; ++step) {
    const auto gradient = (torch::randn({4, 3}) * (step == 0 ? 1e-5 : 1e-2)).to(at::kHalf);
    gapped.mutable_grad() = gradient.clone();
    dense.mutable_grad() = gradient.clone();
    on_gapped.step();
    on_dense.step();
    EXPECT_TRUE(torch::isfinite(gapped).all().item<bool>());
    EXPECT_TRUE(
        at::allclose(gapped.detach().to(at::kFloat), dense.detach().to(at::kFloat), 2e-3, 2e-3))
        << step << gapped << dense;
  }
  EXPECT_TRUE(torch::equal(base.slice(1, 3, 6), beside));
}

}  // namespace
}  // namespace gradus::optim
