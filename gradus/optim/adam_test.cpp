#include <gradus/optim/adam.h>

#include <cmath>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/optim/adamw.h>

namespace gradus::optim {
namespace {

// Algorithm 1 of Kingma and Ba 2015, one number at a time, with an L2 penalty.
struct ScalarAdam {
  AdamOptions o;
  double mean = 0.0, square = 0.0, max_square = 0.0;
  int t = 0;

  double step(double w, double g) {
    if (o.maximize) g = -g;
    g += o.weight_decay * w;
    ++t;
    mean = o.beta1 * mean + (1.0 - o.beta1) * g;
    square = o.beta2 * square + (1.0 - o.beta2) * g * g;
    max_square = std::max(max_square, square);
    const double corrected_mean = mean / (1.0 - std::pow(o.beta1, t));
    const double corrected_square =
        (o.amsgrad ? max_square : square) / (1.0 - std::pow(o.beta2, t));
    return w - o.lr * corrected_mean / (std::sqrt(corrected_square) + o.eps);
  }
};

TEST(AdamTest, EqualsTheAlgorithmOneNumberAtATimeInFloat64) {
  const std::vector<AdamOptions> cases{
      {},
      {.lr = 0.1, .weight_decay = 0.3},
      {.lr = 0.05, .beta1 = 0.5, .beta2 = 0.9, .eps = 1e-3, .weight_decay = 0.3, .maximize = true},
      {.lr = 0.05, .beta2 = 0.5, .amsgrad = true}};
  for (std::size_t c = 0; c < cases.size(); ++c) {
    for (const bool fused : {true, false}) {
      SCOPED_TRACE(testing::Message() << "case " << c << (fused ? " fused" : " foreach"));
      torch::manual_seed(3);
      auto options = cases[c];
      options.fused = fused;
      auto w = torch::randn({37}, at::kDouble).requires_grad_();
      std::vector<ScalarAdam> oracle(37, ScalarAdam{options});
      std::vector<double> expected(w.data_ptr<double>(), w.data_ptr<double>() + 37);
      Adam optimizer({w}, options);
      for (int step = 0; step < 20; ++step) {
        const auto gradient = torch::randn({37}, at::kDouble);
        w.mutable_grad() = gradient.clone();
        optimizer.step();
        EXPECT_TRUE(at::equal(w.grad(), gradient)) << "the gradient must stay as it was";
        for (int i = 0; i < 37; ++i)
          expected[i] = oracle[i].step(expected[i], gradient[i].item<double>());
      }
      for (int i = 0; i < 37; ++i) EXPECT_NEAR(w[i].item<double>(), expected[i], 1e-12);
    }
  }
}

TEST(AdamTest, WithoutWeightDecayIsAdamWBitForBit) {
  for (const bool fused : {true, false}) {
    torch::manual_seed(4);
    auto a = torch::randn({50}).requires_grad_();
    auto b = a.detach().clone().requires_grad_();
    Adam adam({a}, {.fused = fused});
    AdamW adamw({b}, {.weight_decay = 0.0, .fused = fused});
    for (int step = 0; step < 5; ++step) {
      a.mutable_grad() = torch::randn({50});
      b.mutable_grad() = a.grad().clone();
      adam.step();
      adamw.step();
    }
    EXPECT_TRUE(at::equal(a.detach(), b.detach()));
  }
}

TEST(AdamTest, StateOfAdamWLoadsAndOptionsOutOfRangeAreRefused) {
  auto w = torch::ones({3}, torch::requires_grad());
  w.mutable_grad() = torch::ones({3});
  AdamW adamw({w}, {.amsgrad = true});
  adamw.step();
  Adam adam({w}, {.amsgrad = true});
  adam.load_state(adamw.state());
  EXPECT_EQ(adam.state().size(), 4U);
  EXPECT_THROW(Adam({w}, {.beta1 = 1.0}), UserError);
  EXPECT_THROW(Adam({w}, {.beta2 = -0.1}), UserError);
  EXPECT_THROW(Adam({w}, {.eps = std::nan("")}), UserError);
  EXPECT_THROW(Adam({w}, {.weight_decay = -1.0}), UserError);
}

}  // namespace
}  // namespace gradus::optim
