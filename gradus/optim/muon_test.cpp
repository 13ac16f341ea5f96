#include <gradus/optim/muon.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

#include <tests/support/message_of.h>

namespace gradus::optim {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using tests::message_of;

using Matrix = std::vector<std::vector<double>>;

Matrix matrix_of(const at::Tensor& t) {
  Matrix result(t.size(0), std::vector<double>(t.size(1)));
  for (int i = 0; i < t.size(0); ++i) {
    for (int j = 0; j < t.size(1); ++j) result[i][j] = t[i][j].item<double>();
  }
  return result;
}

Matrix transposed(const Matrix& a) {
  Matrix result(a[0].size(), std::vector<double>(a.size()));
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t j = 0; j < a[0].size(); ++j) result[j][i] = a[i][j];
  }
  return result;
}

Matrix product(const Matrix& a, const Matrix& b) {
  Matrix result(a.size(), std::vector<double>(b[0].size()));
  for (std::size_t i = 0; i < a.size(); ++i) {
    for (std::size_t j = 0; j < b[0].size(); ++j) {
      for (std::size_t k = 0; k < b.size(); ++k) result[i][j] += a[i][k] * b[k][j];
    }
  }
  return result;
}

// Jordan 2024: X <- a X + (b A + c A A) X with A = X X^T, from X / ||X||.
Matrix orthogonalised(Matrix x, const MuonOptions& o) {
  const bool tall = x.size() > x[0].size();
  if (tall) x = transposed(x);
  double sum = 0.0;
  for (const auto& row : x) {
    for (const double v : row) sum += v * v;
  }
  for (auto& row : x) {
    for (double& v : row) v /= std::max(std::sqrt(sum), o.eps);
  }
  for (int k = 0; k < o.iterations; ++k) {
    const auto gram = product(x, transposed(x));
    auto factor = product(gram, gram);
    for (std::size_t i = 0; i < gram.size(); ++i) {
      for (std::size_t j = 0; j < gram.size(); ++j) {
        factor[i][j] = o.coefficients[1] * gram[i][j] + o.coefficients[2] * factor[i][j];
      }
    }
    const auto more = product(factor, x);
    for (std::size_t i = 0; i < x.size(); ++i) {
      for (std::size_t j = 0; j < x[0].size(); ++j) {
        x[i][j] = o.coefficients[0] * x[i][j] + more[i][j];
      }
    }
  }
  return tall ? transposed(x) : x;
}

struct Oracle {
  MuonOptions o;
  Matrix x;
  Matrix buffer = {};

  void step(const Matrix& g) {
    if (buffer.empty()) buffer = Matrix(x.size(), std::vector<double>(x[0].size()));
    Matrix update = g;
    for (std::size_t i = 0; i < x.size(); ++i) {
      for (std::size_t j = 0; j < x[0].size(); ++j) {
        buffer[i][j] = o.momentum * buffer[i][j] + (1 - o.momentum) * g[i][j];
        update[i][j] =
            o.nesterov ? (1 - o.momentum) * g[i][j] + o.momentum * buffer[i][j] : buffer[i][j];
      }
    }
    update = orthogonalised(update, o);
    const auto rows = static_cast<double>(x.size());
    const auto columns = static_cast<double>(x[0].size());
    const double factor = o.rate == MuonRate::original ? std::sqrt(std::max(1.0, rows / columns))
                                                       : 0.2 * std::sqrt(std::max(rows, columns));
    for (std::size_t i = 0; i < x.size(); ++i) {
      for (std::size_t j = 0; j < x[0].size(); ++j) {
        x[i][j] -= o.lr * o.weight_decay * x[i][j];
        x[i][j] -= o.lr * factor * update[i][j];
      }
    }
  }
};

TEST(MuonTest, EqualsTheAlgorithmInFloat64) {
  const std::vector<MuonOptions> cases{
      {.lr = 0.02},
      {.lr = 0.02, .weight_decay = 0.0, .momentum = 0.5, .nesterov = false, .iterations = 3},
      {.lr = 0.02, .coefficients = {2.0, -1.5, 0.5}, .rate = MuonRate::match_rms_adamw}};
  for (std::size_t c = 0; c < cases.size(); ++c) {
    SCOPED_TRACE(c);
    torch::manual_seed(51);
    auto options = cases[c];
    options.iteration_dtype = at::kDouble;
    std::vector<at::Tensor> parameters{torch::randn({6, 4}, at::kDouble),
                                       torch::randn({3, 5}, at::kDouble)};
    std::vector<Oracle> oracles;
    for (auto& parameter : parameters) {
      oracles.push_back({.o = options, .x = matrix_of(parameter)});
      parameter.requires_grad_();
    }
    Muon optimizer(parameters, options);
    for (int step = 0; step < 10; ++step) {
      for (std::size_t p = 0; p < 2; ++p) {
        parameters[p].mutable_grad() = torch::randn(parameters[p].sizes(), at::kDouble);
        oracles[p].step(matrix_of(parameters[p].grad()));
      }
      optimizer.step();
    }
    for (std::size_t p = 0; p < 2; ++p) {
      const auto got = matrix_of(parameters[p].detach());
      for (std::size_t i = 0; i < got.size(); ++i) {
        for (std::size_t j = 0; j < got[0].size(); ++j) {
          EXPECT_NEAR(got[i][j], oracles[p].x[i][j], 1e-11);
        }
      }
    }
  }
}

TEST(MuonTest, SingularValuesOfAnUpdateAreNearOne) {
  torch::manual_seed(52);
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    auto w = torch::zeros({16, 24}).requires_grad_();
    w.mutable_grad() = torch::randn({16, 24}) * 1e-3;
    Muon({w}, {.lr = 1.0, .weight_decay = 0.0, .iteration_dtype = dtype}).step();
    const auto singular = torch::linalg_svdvals(w.detach());
    // Jordan's coefficients leave them in about [0.7, 1.2].
    EXPECT_GT(singular.min().item<double>(), 0.5);
    EXPECT_LT(singular.max().item<double>(), 1.3);
  }
}

TEST(MuonTest, GradientOfZerosChangesNothing) {
  auto w = torch::ones({3, 3}).requires_grad_();
  w.mutable_grad() = torch::zeros({3, 3});
  Muon({w}, {.weight_decay = 0.0}).step();
  EXPECT_TRUE(torch::equal(w.detach(), torch::ones({3, 3})));
}

TEST(MuonTest, ParameterThatIsNoMatrixIsRefusedByNameWithTheCure) {
  const auto refused = [](std::vector<std::int64_t> shape) {
    return message_of([&] {
      Muon optimizer(
          {{.parameters = {torch::ones(shape, torch::requires_grad())}, .names = {"conv.weight"}}},
          MuonOptions{});
    });
  };
  EXPECT_THAT(refused({4}),
              HasSubstr("parameter 'conv.weight' must be a matrix; got shape [4]. Put "
                        "it in an AdamW group (MuonWithAdamW with use_muon = 0)"));
  EXPECT_THAT(refused({4, 3, 2, 2}), HasSubstr("must be a matrix"));
  EXPECT_EQ(refused({4, 3}), "no UserError");
}

TEST(MuonTest, SixteenBitParametersAreUpdatedInFloat32AndRounded) {
  torch::manual_seed(53);
  const auto value = torch::randn({5, 4}).to(at::kBFloat16);
  auto narrow = value.clone().requires_grad_();
  auto wide = value.to(at::kFloat).requires_grad_();
  narrow.mutable_grad() = torch::randn({5, 4}).to(at::kBFloat16);
  wide.mutable_grad() = narrow.grad().to(at::kFloat);
  Muon({narrow}, {.lr = 0.1}).step();
  Muon({wide}, {.lr = 0.1}).step();
  EXPECT_TRUE(torch::equal(narrow.detach(), wide.detach().to(at::kBFloat16)));
}

TEST(MuonTest, OptionsOutOfRangeAreRefused) {
  const auto w = torch::ones({1, 1}, torch::requires_grad());
  EXPECT_THROW(Muon({w}, {.momentum = 1.1}), UserError);
  EXPECT_THROW(Muon({w}, {.eps = 0.0}), UserError);
  EXPECT_THROW(Muon({w}, {.iterations = 0}), UserError);
  EXPECT_THROW(Muon({w}, {.iterations = 100}), UserError);
  EXPECT_THROW(Muon({w}, {.iteration_dtype = at::kHalf}), UserError);
}

TEST(MuonWithAdamWTest, EachGroupStepsAsItsOwnOptimizerWould) {
  torch::manual_seed(54);
  const auto matrix = torch::randn({4, 3});
  const auto vector = torch::randn({4});
  const auto copy = [](const at::Tensor& t) { return t.clone().requires_grad_(); };
  auto m1 = copy(matrix), m2 = copy(matrix), v1 = copy(vector), v2 = copy(vector);
  MuonWithAdamW both(
      muon_groups({{"w", m1}, {"b", v1}}, {.rates = {.muon = {.lr = 0.1}, .adamw = {.lr = 0.2}}}));
  Muon muon({m2}, {.lr = 0.1});
  AdamW adamw({v2}, {.lr = 0.2});
  for (int step = 0; step < 4; ++step) {
    m1.mutable_grad() = torch::randn({4, 3});
    m2.mutable_grad() = m1.grad().clone();
    v1.mutable_grad() = torch::randn({4});
    v2.mutable_grad() = v1.grad().clone();
    both.step();
    muon.step();
    adamw.step();
  }
  EXPECT_TRUE(torch::equal(m1, m2));
  EXPECT_TRUE(torch::equal(v1, v2));
  std::vector<std::string> names;
  for (const auto& entry : both.state()) names.push_back(entry.name);
  EXPECT_THAT(names, ElementsAre("w.momentum_buffer", "b.step", "b.exp_avg", "b.exp_avg_sq"));
}

TEST(MuonWithAdamWTest, GroupsAreSplitByDimensionAndName) {
  const auto make = [](std::vector<std::int64_t> shape) {
    return torch::ones(shape, torch::requires_grad());
  };
  const auto groups = muon_groups({{"wte.weight", make({4, 2})},
                                   {"up.weight", make({4, 2})},
                                   {"up.bias", make({4})},
                                   {"conv.weight", make({4, 2, 1, 1})},
                                   {"lm_head.weight", make({4, 2})}});
  ASSERT_EQ(groups.size(), 2);
  EXPECT_THAT(groups[0].names, ElementsAre("up.weight"));
  EXPECT_EQ(groups[0].weight_decay, 0.1);
  EXPECT_THAT(groups[1].names,
              ElementsAre("wte.weight", "up.bias", "conv.weight", "lm_head.weight"));
  EXPECT_EQ(muon_groups({{"b", make({4})}}).size(), 1);
}

TEST(MuonWithAdamWTest, GroupsThatDoNotFitTheirRuleAreRefused) {
  const auto refused = [](std::map<std::string, double> options, std::vector<std::int64_t> shape) {
    return message_of([&] {
      MuonWithAdamW optimizer({{.parameters = {torch::ones(shape, torch::requires_grad())},
                                .options = std::move(options)}});
    });
  };
  EXPECT_THAT(refused({}, {2, 2}), HasSubstr("each group must have the option use_muon"));
  EXPECT_THAT(refused({{"use_muon", 1.0}}, {2}), HasSubstr("parameter '0' must be a matrix"));
  EXPECT_THAT(refused({{"use_muon", 1.0}, {"beta1", 0.5}}, {2, 2}),
              HasSubstr("option 'beta1' must not be given in a group with use_muon = 1"));
  EXPECT_THAT(refused({{"use_muon", 0.0}, {"momentum", 0.5}}, {2, 2}),
              HasSubstr("option 'momentum' must not be given"));
  EXPECT_THAT(refused({{"use_muon", 0.0}, {"lr", 0.5}}, {2, 2}),
              HasSubstr("a group's options may be lr, weight_decay, use_muon"));
  EXPECT_EQ(refused({{"use_muon", 0.0}, {"beta2", 0.5}}, {2}), "no UserError");
}

TEST(MuonWithAdamWTest, GroupStaysWithTheRuleItWasConstructedWith) {
  auto w = torch::ones({4, 4}, torch::requires_grad());
  auto v = torch::ones({4, 4}, torch::requires_grad());
  MuonWithAdamW optimizer({{.parameters = {w}, .options = {{"use_muon", 1.0}}},
                           {.parameters = {v}, .options = {{"use_muon", 0.0}}}});
  w.mutable_grad() = torch::ones({4, 4});
  v.mutable_grad() = torch::ones({4, 4});
  optimizer.step();
  for (const double value : {0.0, 1.0}) {
    const auto group = value == 0.0 ? 0 : 1;
    EXPECT_THAT(tests::message_of([&] { optimizer.set_option(group, "use_muon", value); }),
                testing::HasSubstr("'use_muon' of group " + std::to_string(group) +
                                   " must stay as it was constructed"));
  }
  optimizer.set_option(0, "use_muon", 1.0);
  EXPECT_EQ(optimizer.step().updated, 2);
  EXPECT_EQ(optimizer.state().size(), 4);
}

}  // namespace
}  // namespace gradus::optim
