#include <gradus/optim/came.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

namespace gradus::optim {
namespace {

using Matrix = std::vector<std::vector<double>>;

// Algorithm 2 of Luo et al. 2023 on an n x m matrix, one number at a time; with n = 0 on a vector,
// which is neither factored nor guided.
struct Oracle {
  CameOptions o;
  Matrix x;
  bool factored = true;
  Matrix mean = {}, square = {};
  std::vector<double> r = {}, c = {}, u = {}, s = {};

  std::size_t rows() const { return x.size(); }
  std::size_t columns() const { return x[0].size(); }

  // Row and column means of `values` into moments, and 1 / sqrt(row col / mean row) of each
  // element.
  Matrix factor(std::vector<double>& row, std::vector<double>& column, const Matrix& values,
                double beta) const {
    row.resize(rows());
    column.resize(columns());
    double row_mean = 0.0;
    for (std::size_t i = 0; i < rows(); ++i) {
      double sum = 0.0;
      for (const double v : values[i]) sum += v;
      row[i] = beta * row[i] + (1 - beta) * sum / static_cast<double>(columns());
      row_mean += row[i] / static_cast<double>(rows());
    }
    for (std::size_t j = 0; j < columns(); ++j) {
      double sum = 0.0;
      for (std::size_t i = 0; i < rows(); ++i) sum += values[i][j];
      column[j] = beta * column[j] + (1 - beta) * sum / static_cast<double>(rows());
    }
    Matrix result = values;
    for (std::size_t i = 0; i < rows(); ++i) {
      for (std::size_t j = 0; j < columns(); ++j) {
        result[i][j] = 1.0 / std::sqrt(row[i] * column[j] / row_mean);
      }
    }
    return result;
  }

  void step(const Matrix& g) {
    const Matrix zeros(rows(), std::vector<double>(columns()));
    if (mean.empty()) mean = square = zeros;
    Matrix values = zeros;
    const auto each = [&](auto fn) {
      for (std::size_t i = 0; i < rows(); ++i) {
        for (std::size_t j = 0; j < columns(); ++j) fn(i, j);
      }
    };
    each([&](auto i, auto j) { values[i][j] = g[i][j] * g[i][j] + o.eps1; });
    Matrix update = zeros;
    if (factored) {
      update = factor(r, c, values, o.beta2);
    } else {
      each([&](auto i, auto j) {
        square[i][j] = o.beta2 * square[i][j] + (1 - o.beta2) * values[i][j];
        update[i][j] = 1.0 / std::sqrt(square[i][j]);
      });
    }
    double sum = 0.0;
    each([&](auto i, auto j) {
      update[i][j] *= g[i][j];
      sum += update[i][j] * update[i][j];
    });
    const double rms = std::sqrt(sum / static_cast<double>(rows() * columns()));
    each([&](auto i, auto j) {
      update[i][j] /= std::max(1.0, rms / o.clip_threshold);
      mean[i][j] = o.beta1 * mean[i][j] + (1 - o.beta1) * update[i][j];
      values[i][j] = (update[i][j] - mean[i][j]) * (update[i][j] - mean[i][j]) + o.eps2;
    });
    Matrix confidence(rows(), std::vector<double>(columns(), 1.0));
    if (factored) confidence = factor(u, s, values, o.beta3);
    each([&](auto i, auto j) {
      x[i][j] -= o.lr * o.weight_decay * x[i][j];
      x[i][j] -= o.lr * confidence[i][j] * mean[i][j];
    });
  }
};

Matrix matrix_of(const at::Tensor& tensor) {
  const auto t = (tensor.dim() == 2 ? tensor : tensor.reshape({1, -1})).detach();
  Matrix result(t.size(0), std::vector<double>(t.size(1)));
  for (int i = 0; i < t.size(0); ++i) {
    for (int j = 0; j < t.size(1); ++j) result[i][j] = t[i][j].item<double>();
  }
  return result;
}

TEST(CameTest, EqualsThePapersAlgorithmInFloat64) {
  const std::vector<CameOptions> cases{
      {.lr = 0.01},
      {.lr = 0.02, .beta1 = 0.5, .beta2 = 0.9, .beta3 = 0.95, .weight_decay = 0.1},
      {.lr = 0.01, .eps1 = 1e-3, .eps2 = 1e-2, .clip_threshold = 0.1}};
  for (std::size_t k = 0; k < cases.size(); ++k) {
    SCOPED_TRACE(k);
    torch::manual_seed(31);
    std::vector<at::Tensor> parameters{torch::randn({6, 5}, at::kDouble),
                                       torch::randn({7}, at::kDouble),
                                       torch::randn({2, 3, 4}, at::kDouble)};
    // A tensor of three dimensions is a stack of matrices whose update is clipped in common.
    std::vector<Oracle> oracles{{.o = cases[k], .x = matrix_of(parameters[0])},
                                {.o = cases[k], .x = matrix_of(parameters[1]), .factored = false}};
    for (auto& parameter : parameters) parameter.requires_grad_();
    Came optimizer(parameters, cases[k]);
    for (int step = 0; step < 20; ++step) {
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        parameters[p].mutable_grad() = torch::randn(parameters[p].sizes(), at::kDouble);
        if (p < oracles.size()) oracles[p].step(matrix_of(parameters[p].grad()));
      }
      optimizer.step();
    }
    for (std::size_t p = 0; p < oracles.size(); ++p) {
      const auto got = matrix_of(parameters[p]);
      for (std::size_t i = 0; i < got.size(); ++i) {
        for (std::size_t j = 0; j < got[i].size(); ++j) {
          EXPECT_NEAR(got[i][j], oracles[p].x[i][j], 1e-11) << "parameter " << p;
        }
      }
    }
  }
}

TEST(CameTest, StackOfMatricesIsFactoredOneByOne) {
  torch::manual_seed(32);
  // Without clipping, matrices of a stack do not meet.
  const CameOptions options{.lr = 0.01, .clip_threshold = 1e9};
  const auto value = torch::randn({2, 3, 4}, at::kDouble);
  auto stack = value.clone().requires_grad_();
  auto first = value[0].clone().requires_grad_();
  Came on_stack({stack}, options);
  Came on_first({first}, options);
  for (int step = 0; step < 3; ++step) {
    stack.mutable_grad() = torch::randn({2, 3, 4}, at::kDouble);
    first.mutable_grad() = stack.grad()[0].clone();
    on_stack.step();
    on_first.step();
  }
  EXPECT_TRUE(torch::allclose(stack[0], first, 1e-12, 1e-12));
}

TEST(CameTest, KeepsOneValueAnElementAndTwiceRowsAndColumns) {
  auto w = torch::randn({30, 20}).requires_grad_();
  w.mutable_grad() = torch::randn({30, 20});
  Came optimizer({w});
  optimizer.step();
  std::int64_t kept = 0;
  for (const auto& tensor : optimizer.state_tensors()) kept += tensor.numel();
  EXPECT_EQ(kept, 30 * 20 + 2 * (30 + 20));
  EXPECT_EQ(optimizer.state()[1].name, "0.exp_avg_sq_row");
  EXPECT_EQ(optimizer.state()[4].name, "0.exp_avg_res_col");
}

TEST(CameTest, SixteenBitParametersAreUpdatedInFloat32AndRounded) {
  torch::manual_seed(33);
  const auto value = torch::randn({9, 4}).to(at::kBFloat16);
  auto narrow = value.clone().requires_grad_();
  auto wide = value.to(at::kFloat).requires_grad_();
  narrow.mutable_grad() = torch::randn({9, 4}).to(at::kBFloat16);
  wide.mutable_grad() = narrow.grad().to(at::kFloat);
  Came({narrow}, {.lr = 0.1}).step();
  Came({wide}, {.lr = 0.1}).step();
  EXPECT_TRUE(torch::equal(narrow.detach(), wide.detach().to(at::kBFloat16)));
}

TEST(CameTest, OptionsOutOfRangeAreRefused) {
  const auto w = torch::ones({1}, torch::requires_grad());
  EXPECT_THROW(Came({w}, {.beta3 = 1.0}), UserError);
  EXPECT_THROW(Came({w}, {.eps1 = -1.0}), UserError);
  EXPECT_THROW(Came({w}, {.clip_threshold = 0.0}), UserError);
}

}  // namespace
}  // namespace gradus::optim
