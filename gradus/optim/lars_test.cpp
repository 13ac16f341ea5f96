#include <gradus/optim/lars.h>

#include <cmath>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

namespace gradus::optim {
namespace {

std::vector<double> values(const at::Tensor& tensor) {
  const auto flat = tensor.detach().to(at::kDouble).contiguous().view(-1);
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

double norm(const std::vector<double>& x) {
  double sum = 0.0;
  for (const double v : x) sum += v * v;
  return std::sqrt(sum);
}

// Algorithm 1 of You et al. 2017 on one layer, one number at a time.
struct Oracle {
  LarsOptions o;
  std::vector<double> w = {}, v = {};

  void step(const std::vector<double>& g) {
    v.resize(w.size());
    double rate = 1.0;
    if (o.adapt && norm(w) > 0.0 && norm(g) > 0.0) {
      rate = o.trust_coefficient * norm(w) / (norm(g) + o.weight_decay * norm(w) + o.eps);
    }
    for (std::size_t i = 0; i < w.size(); ++i) {
      v[i] = o.momentum * v[i] + o.lr * rate * (g[i] + o.weight_decay * w[i]);
      w[i] -= v[i];
    }
  }
};

TEST(LarsTest, EqualsThePapersAlgorithmInFloat64) {
  const std::vector<LarsOptions> cases{
      {.lr = 1.0, .trust_coefficient = 0.1},
      {.lr = 2.0, .momentum = 0.5, .weight_decay = 0.3, .trust_coefficient = 0.05},
      {.lr = 1.0, .momentum = 0.0, .weight_decay = 0.1, .trust_coefficient = 0.1},
      {.lr = 1.0, .trust_coefficient = 0.1, .eps = 0.5},
      {.lr = 0.1, .weight_decay = 0.1, .adapt = false}};
  for (std::size_t c = 0; c < cases.size(); ++c) {
    SCOPED_TRACE(c);
    torch::manual_seed(21);
    std::vector<at::Tensor> parameters{torch::randn({6, 5}, at::kDouble),
                                       torch::randn({7}, at::kDouble),
                                       torch::zeros({3}, at::kDouble)};
    std::vector<Oracle> oracles;
    for (auto& parameter : parameters) {
      oracles.push_back({.o = cases[c], .w = values(parameter)});
      parameter.requires_grad_();
    }
    Lars optimizer(parameters, cases[c]);
    for (int step = 0; step < 20; ++step) {
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        auto gradient = torch::randn(parameters[p].sizes(), at::kDouble);
        if (p == 1 && step == 7) gradient.zero_();
        parameters[p].mutable_grad() = gradient.clone();
        oracles[p].step(values(gradient));
      }
      optimizer.step();
    }
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const auto got = values(parameters[p]);
      for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], oracles[p].w[i], 1e-12);
    }
  }
}

TEST(LarsTest, GradientIsLeftAsItWasAndItsScaleDoesNotMatter) {
  torch::manual_seed(22);
  const auto value = torch::randn({8, 3}, at::kDouble);
  const auto gradient = torch::randn({8, 3}, at::kDouble);
  auto a = value.clone().requires_grad_();
  auto b = value.clone().requires_grad_();
  a.mutable_grad() = gradient.clone();
  b.mutable_grad() = gradient * 1e6;
  Lars({a}, {.lr = 1.0}).step();
  Lars({b}, {.lr = 1.0}).step();
  EXPECT_TRUE(torch::allclose(a, b, 1e-12, 1e-12));
  EXPECT_TRUE(torch::equal(a.grad(), gradient));
}

TEST(LarsTest, SixteenBitParametersAreUpdatedInFloat32AndRounded) {
  torch::manual_seed(23);
  const auto value = torch::randn({9, 4}).to(at::kHalf);
  const auto gradient = (torch::randn({9, 4}) * 1e-5).to(at::kHalf);
  auto narrow = value.clone().requires_grad_();
  auto wide = value.to(at::kFloat).requires_grad_();
  narrow.mutable_grad() = gradient.clone();
  wide.mutable_grad() = gradient.to(at::kFloat);
  Lars on_narrow({narrow}, {.lr = 10.0});
  on_narrow.step();
  Lars({wide}, {.lr = 10.0}).step();
  EXPECT_TRUE(torch::equal(narrow.detach(), wide.detach().to(at::kHalf)));
  EXPECT_EQ(on_narrow.state()[0].name, "0.momentum_buffer");
  EXPECT_EQ(on_narrow.state()[0].tensor.scalar_type(), at::kFloat);
}

TEST(LarsTest, OptionsOutOfRangeAreRefused) {
  const auto w = torch::ones({1}, torch::requires_grad());
  EXPECT_THROW(Lars({w}, {.momentum = -0.1}), UserError);
  EXPECT_THROW(Lars({w}, {.trust_coefficient = 0.0}), UserError);
  EXPECT_THROW(Lars({w}, {.eps = std::nan("")}), UserError);
  EXPECT_THROW(Lars({{.parameters = {w}, .options = {{"momentum", 0.0}}}}, LarsOptions{}),
               UserError);
}

TEST(LarsTest, ScaleOfAFloat32GradientDoesNotMatterWhereItsSquareIsNoNumber) {
  torch::manual_seed(24);
  const auto value = torch::randn({8, 3});
  const auto gradient = torch::randn({8, 3});
  const auto stepped = [&](double weight_scale, double scale) {
    auto w = (value * weight_scale).requires_grad_();
    w.mutable_grad() = gradient * scale;
    Lars({w}, {.lr = 100.0}).step();
    return at::Tensor(w.detach() / weight_scale);
  };
  const auto expected = stepped(1.0, 1.0);
  EXPECT_GT((expected - value).abs().max().item<float>(), 0.01F);
  for (const double scale : {1e-38, 1e-25, 1e-20, 1e20, 1e30}) {
    EXPECT_TRUE(at::allclose(stepped(1.0, scale), expected, 1e-5, 1e-6)) << scale;
  }
  EXPECT_TRUE(at::allclose(stepped(1e-25, 1.0), expected, 1e-5, 1e-6));
}

}  // namespace
}  // namespace gradus::optim
