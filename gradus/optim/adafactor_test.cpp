#include <gradus/optim/adafactor.h>

#include <cmath>
#include <functional>
#include <limits>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/optim/internal/loops.h>

#include <tests/support/message_of.h>

namespace gradus::optim {
namespace {

using testing::HasSubstr;
using tests::message_of;

// Algorithm 4 of Shazeer and Stern 2018 on one parameter [matrices, n, m] (or a vector, n = 0), one
// number at a time in float64; eps1 and the decay stand where the form has them.
struct ScalarAdafactor {
  AdafactorOptions o;
  std::int64_t matrices = 1, n = 0, m = 0;
  std::vector<double> rows = {}, columns = {}, variance = {}, mean = {};
  int t = 0;

  static double root_mean(const std::vector<double>& x) {
    double sum = 0.0;
    for (const double v : x) sum += v * v;
    return std::sqrt(sum / static_cast<double>(x.size()));
  }

  std::vector<double> reciprocal_roots(const std::vector<double>& g, double keep, double eps1,
                                       bool paper) {
    const double floor = paper ? eps1 : 0.0;
    const auto root = [&](double v) {
      return 1.0 / std::sqrt(paper ? v : std::max(v, eps1 * eps1));
    };
    std::vector<double> result(g.size());
    if (n == 0) {
      variance.resize(g.size());
      for (std::size_t i = 0; i < g.size(); ++i) {
        variance[i] = keep * variance[i] + (1.0 - keep) * (g[i] * g[i] + floor);
        result[i] = root(variance[i]);
      }
      return result;
    }
    rows.resize(matrices * n);
    columns.resize(matrices * m);
    for (std::int64_t b = 0; b < matrices; ++b) {
      const auto at = [&](std::int64_t i, std::int64_t j) { return (b * n + i) * m + j; };
      double mean_row = 0.0;
      for (std::int64_t i = 0; i < n; ++i) {
        double sum = 0.0;
        for (std::int64_t j = 0; j < m; ++j) sum += g[at(i, j)] * g[at(i, j)] + floor;
        rows[b * n + i] = keep * rows[b * n + i] + (1.0 - keep) * sum / m;
        mean_row += rows[b * n + i] / n;
      }
      for (std::int64_t j = 0; j < m; ++j) {
        double sum = 0.0;
        for (std::int64_t i = 0; i < n; ++i) sum += g[at(i, j)] * g[at(i, j)] + floor;
        columns[b * m + j] = keep * columns[b * m + j] + (1.0 - keep) * sum / n;
      }
      if (!paper) mean_row = std::max(mean_row, eps1);
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t j = 0; j < m; ++j) {
          result[at(i, j)] = root(rows[b * n + i] * columns[b * m + j] / mean_row);
        }
      }
    }
    return result;
  }

  void step(std::vector<double>& w, std::vector<double> g) {
    const bool paper = o.form == AdafactorForm::paper;
    const double eps1 = o.eps1.value_or(std::numeric_limits<double>::epsilon());
    if (o.maximize) {
      for (double& v : g) v = -v;
    }
    ++t;
    const double keep = 1.0 - std::pow(t, o.beta2_decay);
    const double most = o.warmup_init ? 1e-6 * t : o.lr;
    double alpha = o.relative_step ? std::min(most, 1.0 / std::sqrt(t)) : o.lr;
    if (o.scale_parameter) alpha *= std::max(o.eps2, root_mean(w));
    auto u = reciprocal_roots(g, keep, eps1, paper);
    for (std::size_t i = 0; i < u.size(); ++i) u[i] *= g[i];
    const double clip = std::max(1.0, root_mean(u) / o.clip_threshold);
    mean.resize(w.size());
    for (std::size_t i = 0; i < w.size(); ++i) {
      w[i] -= (paper ? alpha : o.lr) * o.weight_decay * w[i];
      double update = alpha * u[i] / clip;
      if (o.beta1) update = mean[i] = *o.beta1 * mean[i] + (1.0 - *o.beta1) * update;
      w[i] -= update;
    }
  }
};

std::vector<double> numbers(const at::Tensor& x) {
  const auto flat = x.detach().to(at::kDouble).contiguous().view(-1);
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

double largest_difference(const at::Tensor& x, const std::vector<double>& expected) {
  const auto got = numbers(x);
  double largest = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double difference = std::abs(got[i] - expected[i]);
    largest = difference <= largest ? largest : difference;
  }
  return largest;
}

std::vector<AdafactorOptions> option_sets() {
  return {{},
          {.lr = 0.1, .weight_decay = 0.2},
          {.beta2_decay = -0.5, .eps1 = 0.5, .eps2 = 10.0, .clip_threshold = 0.3},
          {.lr = 0.05, .clip_threshold = std::numeric_limits<double>::infinity(), .maximize = true},
          {.eps1 = 1e-30, .form = AdafactorForm::paper},
          {.eps1 = 1e-3, .weight_decay = 0.2, .beta1 = 0.9, .form = AdafactorForm::paper},
          {.beta1 = 0.5, .warmup_init = true},
          {.lr = 0.02, .relative_step = false, .scale_parameter = false}};
}

TEST(AdafactorTest, EqualsTheAlgorithmOneNumberAtATimeInFloat64) {
  const std::vector<std::vector<std::int64_t>> shapes{
      {}, {37}, {1, 1}, {5, 1}, {1, 40}, {37, 53}, {3, 2, 3, 3}, {2, 300, 130}};
  const auto options = option_sets();
  for (std::size_t c = 0; c < options.size(); ++c) {
    for (const auto& shape : shapes) {
      for (const bool fused : {true, false}) {
        SCOPED_TRACE(testing::Message() << "case " << c << (fused ? " fused " : " operations ")
                                        << at::IntArrayRef(shape));
        torch::manual_seed(3);
        auto own = options[c];
        own.fused = fused;
        auto w = torch::randn(shape, at::kDouble).requires_grad_();
        ScalarAdafactor oracle{own};
        if (shape.size() > 1) {
          oracle.m = shape.back();
          oracle.n = shape[shape.size() - 2];
          oracle.matrices = w.numel() / (oracle.n * oracle.m);
        }
        auto expected = numbers(w);
        Adafactor optimizer({w}, own);
        const int steps = w.numel() > 10000 ? 3 : 20;
        for (int step = 0; step < steps; ++step) {
          // A row and a column of zeros in a quarter of the steps.
          auto gradient = torch::randn(shape, at::kDouble);
          if (step % 4 == 3 && shape.size() > 1) {
            gradient.select(-1, 0).zero_();
            gradient.select(-2, 0).zero_();
          }
          w.mutable_grad() = gradient;
          optimizer.step();
          oracle.step(expected, numbers(gradient));
        }
        EXPECT_LE(largest_difference(w, expected), 1e-12);
      }
    }
  }
}

TEST(AdafactorTest, GivesThePublishedExample) {
  for (const bool fused : {true, false}) {
    for (const auto form : {AdafactorForm::torch, AdafactorForm::paper}) {
      auto w = torch::tensor({{1.0, 2.0}, {3.0, 4.0}}).requires_grad_();
      Adafactor optimizer({w}, {.eps1 = 1e-30, .form = form, .fused = fused});
      w.mutable_grad() = torch::tensor({{0.1, 0.2}, {0.3, 0.4}});
      optimizer.step();
      EXPECT_LE(largest_difference(w, {0.978787, 1.97, 2.971539, 3.973167}), 1e-6);
      w.mutable_grad() = torch::tensor({{0.4, -0.1}, {0.2, 0.3}});
      optimizer.step();
      EXPECT_LE(largest_difference(w, {0.936422, 1.981130, 2.954373, 3.946108}), 1e-6);
    }
  }
}

std::int64_t state_bytes(const Optimizer& optimizer) {
  std::int64_t bytes = 0;
  for (const auto& tensor : optimizer.state_tensors())
    bytes += static_cast<std::int64_t>(tensor.storage().nbytes());
  return bytes;
}

TEST(AdafactorTest, KeepsOneValueARowAndOneAColumn) {
  const auto bytes = [](std::vector<std::int64_t> shape, std::optional<double> beta1) {
    auto w = torch::ones(shape, torch::requires_grad());
    w.mutable_grad() = torch::ones(shape);
    Adafactor optimizer({w}, {.beta1 = beta1});
    optimizer.step();
    return state_bytes(optimizer);
  };
  constexpr std::int64_t kStep = 4;
  EXPECT_EQ(bytes({300, 500}, std::nullopt), 4 * (300 + 500) + kStep);
  EXPECT_EQ(bytes({16, 8, 5, 3}, std::nullopt), 4 * 16 * 8 * (5 + 3) + kStep);
  EXPECT_EQ(bytes({500}, std::nullopt), 4 * 500 + kStep);
  EXPECT_EQ(bytes({300, 500}, 0.9), 4 * (300 + 500 + 300 * 500) + kStep);
}

TEST(AdafactorTest, ThreadsAndInstructionSetsDoNotChangeABit) {
  const auto run = [](int threads) {
    at::set_num_threads(threads);
    torch::manual_seed(1);
    auto matrix = torch::randn({700, 413}).requires_grad_();
    auto windows = torch::randn({64, 96, 3, 3}).requires_grad_();
    auto vector = torch::randn({70000}).requires_grad_();
    Adafactor optimizer({matrix, windows, vector}, {.beta1 = 0.9});
    for (int step = 0; step < 3; ++step) {
      for (auto* w : {&matrix, &windows, &vector}) w->mutable_grad() = torch::randn(w->sizes());
      optimizer.step();
    }
    return std::vector<at::Tensor>{matrix.detach(), windows.detach(), vector.detach()};
  };
  const auto one = run(1);
  const auto two = run(2);
  at::set_num_threads(1);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], two[i])) << i;

  torch::manual_seed(2);
  const auto g = torch::randn({61, 83}), rows = torch::rand({61}), columns = torch::rand({83});
  const auto part = [&](bool widest) {
    const auto& loops = internal::adafactor_loops<float>(widest);
    auto p = g.clone().neg_();
    auto variance = torch::zeros({61 * 83});
    std::vector<double> result(61 + 83);
    const float* const x = g.const_data_ptr<float>();
    loops.matrix_squares(x, 61, 83, result.data(), result.data() + 61);
    result.push_back(loops.square_sum(x, 61 * 83));
    result.push_back(loops.matrix_update_square(x, 61, 83, rows.const_data_ptr<float>(),
                                                columns.const_data_ptr<float>(), 0.7F));
    loops.matrix_apply(p.mutable_data_ptr<float>(), x, nullptr, 61, 83,
                       rows.const_data_ptr<float>(), columns.const_data_ptr<float>(), 0.7F, 0.9F,
                       0.1F, 0.0F, 1.0F);
    result.push_back(
        loops.vector_measure(x, variance.mutable_data_ptr<float>(), 61 * 83, 0.3F, 1e-5F, 100.0F));
    loops.vector_apply(p.mutable_data_ptr<float>(), x, nullptr, variance.const_data_ptr<float>(),
                       61 * 83, 100.0F, 0.9F, 0.1F, 0.0F, 1.0F);
    for (const double v : numbers(p)) result.push_back(v);
    return result;
  };
  EXPECT_EQ(part(true), part(false));
}

TEST(AdafactorTest, SixteenBitParametersAreComputedInFloat32AndRoundedOnce) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const bool fused : {true, false}) {
      SCOPED_TRACE(testing::Message() << dtype << fused);
      torch::manual_seed(5);
      auto w = torch::randn({40, 30}).to(dtype).requires_grad_();
      auto wide = w.detach().to(at::kFloat).requires_grad_();
      Adafactor optimizer({w}, {.lr = 0.1, .fused = fused});
      Adafactor reference({wide}, {.lr = 0.1, .fused = fused});
      for (int step = 0; step < 5; ++step) {
        w.mutable_grad() = torch::randn({40, 30}).mul_(1e-4).to(dtype);
        wide.mutable_grad() = w.grad().to(at::kFloat);
        {
          const at::NoGradGuard no_grad;
          wide.copy_(w);
        }
        optimizer.step();
        reference.step();
        const auto rounded = wide.detach().to(dtype);
        if (fused) {
          EXPECT_TRUE(at::equal(w.detach(), rounded));
        } else {
          EXPECT_TRUE(at::allclose(w.detach(), rounded, 1e-2, 1e-3));
        }
      }
      EXPECT_EQ(optimizer.state()[1].tensor.scalar_type(), at::kFloat);
    }
  }
}

TEST(AdafactorTest, AnyStridesGiveWhatContiguousMemoryGives) {
  const auto run = [](const std::function<at::Tensor(const at::Tensor&)>& lay_out,
                      const std::function<at::Tensor(const at::Tensor&)>& lay_out_gradient) {
    torch::manual_seed(5);
    auto w = lay_out(torch::randn({6, 5, 4, 3}, at::kDouble)).requires_grad_();
    Adafactor optimizer({w});
    for (int step = 0; step < 3; ++step) {
      const auto gradient = torch::randn({6, 5, 4, 3}, at::kDouble);
      w.mutable_grad() = lay_out_gradient(gradient);
      optimizer.step();
    }
    return w.detach().contiguous();
  };
  const auto same = [](const at::Tensor& x) { return x; };
  const auto last = [](const at::Tensor& x) {
    return x.contiguous(at::MemoryFormat::ChannelsLast);
  };
  const auto gaps = [](const at::Tensor& x) { return torch::stack({x, x}, -1).select(-1, 0); };
  const auto expected = run(same, same);
  EXPECT_TRUE(at::equal(run(same, last), expected));
  EXPECT_TRUE(at::allclose(run(last, same), expected, 1e-12, 1e-12));
  EXPECT_TRUE(at::allclose(run(gaps, same), expected, 1e-12, 1e-12));
}

TEST(AdafactorTest, ZeroGradientsWithATinyEpsilonLeaveTheParameterAlone) {
  for (const bool fused : {true, false}) {
    for (const auto form : {AdafactorForm::torch, AdafactorForm::paper}) {
      auto w = torch::ones({4, 3}, torch::requires_grad());
      auto v = torch::ones({4}, torch::requires_grad());
      w.mutable_grad() = torch::zeros({4, 3});
      v.mutable_grad() = torch::zeros({4});
      Adafactor optimizer({w, v}, {.eps1 = 1e-30, .form = form, .fused = fused});
      optimizer.step();
      EXPECT_TRUE(at::equal(w.detach(), torch::ones({4, 3}))) << fused;
      EXPECT_TRUE(at::equal(v.detach(), torch::ones({4}))) << fused;
    }
  }
}

TEST(AdafactorTest, NaNReachesEveryValueOfItsRowAndColumn) {
  for (const bool fused : {true, false}) {
    auto w = torch::ones({4, 3}, torch::requires_grad());
    auto gradient = torch::ones({4, 3});
    gradient[1][2] = std::nanf("");
    w.mutable_grad() = gradient;
    // Without clipping: the root mean square of the update would be NaN and spread everywhere.
    Adafactor optimizer({w}, {.clip_threshold = std::numeric_limits<double>::infinity(),
                              .form = AdafactorForm::torch,
                              .fused = fused});
    optimizer.step();
    EXPECT_TRUE(std::isnan(w[1][2].item<double>()));
    EXPECT_TRUE(std::isnan(w[1][0].item<double>()));
    EXPECT_TRUE(std::isnan(w[0][2].item<double>()));
  }
}

TEST(AdafactorTest, GroupsHaveTheirOwnOptionsAndOptionsOutOfRangeAreRefused) {
  auto a = torch::ones({3, 2}, torch::requires_grad());
  auto b = torch::ones({3, 2}, torch::requires_grad());
  Adafactor optimizer({{.parameters = {a}, .lr = 0.1, .options = {{"clip_threshold", 0.5}}},
                       {.parameters = {b}, .lr = 0.1}},
                      {});
  for (auto* w : {&a, &b}) w->mutable_grad() = torch::ones({3, 2});
  optimizer.step();
  EXPECT_NEAR(a[0][0].item<double>(), 0.95, 1e-6);
  EXPECT_NEAR(b[0][0].item<double>(), 0.90, 1e-6);

  const auto make = [&](AdafactorOptions options) {
    return message_of([&] { Adafactor({a}, options); });
  };
  EXPECT_THAT(make({.beta2_decay = 0.1}),
              HasSubstr("beta2_decay must be finite and <= 0; got 0.1"));
  EXPECT_THAT(make({.eps1 = -1.0}), HasSubstr("eps1 must be finite and >= 0; got -1"));
  EXPECT_THAT(make({.eps2 = std::nan("")}), HasSubstr("eps2"));
  EXPECT_THAT(make({.clip_threshold = 0.0}), HasSubstr("clip_threshold must be > 0; got 0"));
  EXPECT_THAT(make({.beta1 = 1.0}), HasSubstr("beta1 must be in [0, 1); got 1"));
  EXPECT_THAT(make({.relative_step = false, .warmup_init = true}), HasSubstr("relative_step"));
  EXPECT_THAT(message_of([&] { optimizer.set_option(0, "eps2", -1.0); }), HasSubstr("eps2"));
}

TEST(AdafactorTest, FusedRefusesByNameWhatTheKernelDoesNotTake) {
  auto w = torch::ones({4, 3}).t().requires_grad_();
  w.mutable_grad() = torch::ones({3, 4});
  Adafactor optimizer({w}, {.fused = true});
  EXPECT_THAT(message_of([&] { optimizer.step(); }),
              HasSubstr("parameter '0' must suit the kernel"));
  EXPECT_TRUE(at::equal(w.detach(), torch::ones({3, 4})));
}

TEST(AdafactorTest, AReloadedStateContinuesBitForBit) {
  const auto gradient = [](int step) {
    torch::manual_seed(100 + step);
    return torch::randn({9, 7});
  };
  const auto run = [&](Adafactor& optimizer, at::Tensor& w, int begin, int end) {
    for (int step = begin; step < end; ++step) {
      w.mutable_grad() = gradient(step);
      optimizer.step();
    }
  };
  auto straight = torch::ones({9, 7}, torch::requires_grad());
  Adafactor whole({straight}, {.beta1 = 0.9});
  run(whole, straight, 0, 6);
  auto first = torch::ones({9, 7}, torch::requires_grad());
  Adafactor before({first}, {.beta1 = 0.9});
  run(before, first, 0, 3);
  auto second = first.detach().clone().requires_grad_();
  Adafactor after({second}, {.beta1 = 0.9});
  after.load_state(before.state());
  run(after, second, 3, 6);
  EXPECT_TRUE(at::equal(second.detach(), straight.detach()));
}

}  // namespace
}  // namespace gradus::optim
