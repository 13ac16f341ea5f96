#include <gradus/optim/sgd.h>

#include <cmath>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

#include <tests/support/message_of.h>

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

// LibTorch 2.13's fused CPU kernel leaves 16-bit parameters as they are but for the last n % 16.
TEST(SGDTest, SixteenBitParametersOfEverySizeMoveAsFloat32MathRounded) {
  const std::vector<SGDOptions> cases{{.lr = 0.1},
                                      {.lr = 0.1, .weight_decay = 0.1},
                                      {.lr = 0.1, .momentum = 0.9},
                                      {.lr = 0.1, .momentum = 0.9, .nesterov = true}};
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const double ulp = dtype == at::kHalf ? 0x1p-10 : 0x1p-7;
    for (const std::int64_t size : {1, 16, 33, 4097}) {
      for (std::size_t c = 0; c < cases.size(); ++c) {
        SCOPED_TRACE(testing::Message() << dtype << " [" << size << "] case " << c);
        torch::manual_seed(5);
        auto w = torch::randn({size}).to(dtype).requires_grad_();
        auto plain = w.detach().clone().requires_grad_();
        SGD optimizer({w}, cases[c]);
        auto foreach_options = cases[c];
        foreach_options.fused = false;
        SGD foreach ({plain}, foreach_options);
        at::Tensor buffer;
        for (int step = 0; step < 4; ++step) {
          const auto before = w.detach().to(at::kFloat);
          const auto gradient = torch::randn({size}).to(dtype);
          w.mutable_grad() = gradient.clone();
          plain.mutable_grad() = gradient.clone();
          optimizer.step();
          foreach
            .step();
          auto direction = gradient.to(at::kFloat) + before * cases[c].weight_decay;
          if (cases[c].momentum != 0.0) {
            buffer = buffer.defined() ? buffer * cases[c].momentum + direction : direction;
            direction = cases[c].nesterov ? direction + buffer * cases[c].momentum : buffer;
          }
          const auto expected = before - direction * 0.1;
          EXPECT_TRUE(at::allclose(w.detach().to(at::kFloat), expected, ulp, ulp));
          EXPECT_TRUE(at::equal(w.detach(), plain.detach()));
          if (buffer.defined()) buffer = optimizer.state()[0].tensor.to(at::kFloat);
        }
      }
    }
    auto w = torch::ones({3}, dtype).requires_grad_();
    w.mutable_grad() = torch::ones({3}, dtype);
    SGD insists({w}, {.fused = true});
    EXPECT_THAT(tests::message_of([&] { insists.step(); }),
                testing::HasSubstr("parameter '0' must suit the fused kernel"));
    EXPECT_TRUE(at::equal(w.detach(), torch::ones({3}, dtype)));
  }
}

}  // namespace
}  // namespace gradus::optim
