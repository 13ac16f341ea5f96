#include <gradus/optim/lamb.h>

#include <algorithm>
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

// Algorithm 2 of You et al. 2020 on one layer, one number at a time.
struct Oracle {
  LambOptions o;
  std::vector<double> x = {}, m = {}, v = {};
  int t = 0;

  void step(const std::vector<double>& g) {
    m.resize(x.size());
    v.resize(x.size());
    ++t;
    std::vector<double> r(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * g[i];
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * g[i] * g[i];
      const double m_hat = m[i] / (1 - std::pow(o.beta1, t));
      const double v_hat = v[i] / (1 - std::pow(o.beta2, t));
      r[i] = m_hat / (std::sqrt(v_hat) + o.eps) + o.weight_decay * x[i];
    }
    const double phi = std::clamp(norm(x), o.min_norm, o.max_norm);
    const double ratio = !o.adapt || phi == 0.0 || norm(r) == 0.0 ? 1.0 : phi / norm(r);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] -= o.lr * ratio * r[i];
  }
};

TEST(LambTest, EqualsThePapersAlgorithmInFloat64) {
  const std::vector<LambOptions> cases{
      {.lr = 0.1},
      {.lr = 0.05, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.2},
      {.lr = 0.1, .weight_decay = 0.0, .min_norm = 5.0, .max_norm = 6.0},
      {.lr = 0.1, .max_norm = 0.5},
      {.lr = 0.1, .adapt = false}};
  for (std::size_t c = 0; c < cases.size(); ++c) {
    SCOPED_TRACE(c);
    torch::manual_seed(11);
    std::vector<at::Tensor> parameters{torch::randn({6, 5}, at::kDouble),
                                       torch::randn({7}, at::kDouble),
                                       torch::zeros({3}, at::kDouble)};
    std::vector<Oracle> oracles;
    for (auto& parameter : parameters) {
      oracles.push_back({.o = cases[c], .x = values(parameter)});
      parameter.requires_grad_();
    }
    Lamb optimizer(parameters, cases[c]);
    for (int step = 0; step < 20; ++step) {
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        if (p == 1 && step < 4) continue;  // joins late: its own bias corrections
        const auto gradient = torch::randn(parameters[p].sizes(), at::kDouble);
        parameters[p].mutable_grad() = gradient;
        oracles[p].step(values(gradient));
      }
      optimizer.step();
    }
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const auto got = values(parameters[p]);
      for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], oracles[p].x[i], 1e-12);
    }
  }
}

TEST(LambTest, UpdateHasTheParametersNormTimesTheRate) {
  torch::manual_seed(12);
  auto w = torch::randn({40, 30}).requires_grad_();
  const auto before = w.detach().clone();
  w.mutable_grad() = torch::randn({40, 30}) * 1e-4;
  Lamb({w}, {.lr = 0.01}).step();
  EXPECT_NEAR((w.detach() - before).norm().item<double>(), 0.01 * before.norm().item<double>(),
              1e-5);
}

TEST(LambTest, SixteenBitParametersAreUpdatedInFloat32AndRounded) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    torch::manual_seed(13);
    const auto value = torch::randn({9, 4}).to(dtype);
    // Squares below float16's range: moments in 16 bits would be 0 and the update eps-sized.
    const auto gradient = (torch::randn({9, 4}) * 1e-4).to(dtype);
    auto narrow = value.clone().requires_grad_();
    auto wide = value.to(at::kFloat).requires_grad_();
    Lamb on_narrow({narrow}, {.lr = 0.1});
    Lamb on_wide({wide}, {.lr = 0.1});
    narrow.mutable_grad() = gradient.clone();
    wide.mutable_grad() = gradient.to(at::kFloat);
    on_narrow.step();
    on_wide.step();
    EXPECT_TRUE(torch::equal(narrow.detach(), wide.detach().to(dtype)));
    EXPECT_EQ(on_narrow.state()[1].tensor.scalar_type(), at::kFloat);
  }
}

TEST(LambTest, GroupWithoutAdaptationAndWithItsOwnBetas) {
  torch::manual_seed(14);
  auto a = torch::randn({5}, at::kDouble).requires_grad_();
  auto b = torch::randn({5}, at::kDouble).requires_grad_();
  Oracle oracle_a{.o = {.lr = 0.1, .weight_decay = 0.0}, .x = values(a)};
  Oracle oracle_b{.o = {.lr = 0.2, .beta1 = 0.5, .weight_decay = 0.3, .adapt = false},
                  .x = values(b)};
  Lamb optimizer({{.parameters = {a}, .lr = 0.1, .weight_decay = 0.0},
                  {.parameters = {b},
                   .lr = 0.2,
                   .weight_decay = 0.3,
                   .options = {{"adapt", 0.0}, {"beta1", 0.5}}}},
                 LambOptions{});
  for (int step = 0; step < 3; ++step) {
    a.mutable_grad() = torch::randn({5}, at::kDouble);
    b.mutable_grad() = torch::randn({5}, at::kDouble);
    oracle_a.step(values(a.grad()));
    oracle_b.step(values(b.grad()));
    optimizer.step();
  }
  for (int i = 0; i < 5; ++i) {
    EXPECT_NEAR(a[i].item<double>(), oracle_a.x[i], 1e-13);
    EXPECT_NEAR(b[i].item<double>(), oracle_b.x[i], 1e-13);
  }
}

TEST(LambTest, OptionsOutOfRangeAreRefused) {
  const auto w = torch::ones({1}, torch::requires_grad());
  EXPECT_THROW(Lamb({w}, {.beta1 = 1.0}), UserError);
  EXPECT_THROW(Lamb({w}, {.beta2 = -0.1}), UserError);
  EXPECT_THROW(Lamb({w}, {.eps = -1.0}), UserError);
  EXPECT_THROW(Lamb({w}, {.min_norm = -1.0}), UserError);
  EXPECT_THROW(Lamb({w}, {.min_norm = 2.0, .max_norm = 1.0}), UserError);
  EXPECT_THROW(Lamb({{.parameters = {w}, .options = {{"beta1", 1.0}}}}, LambOptions{}), UserError);
}

}  // namespace
}  // namespace gradus::optim
