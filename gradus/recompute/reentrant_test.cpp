#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>
#include <gradus/recompute/checkpoint.h>
#include <gradus/recompute/run_difference.h>

#include <tests/support/message_of.h>

namespace gradus::recompute {
namespace {

using testing::HasSubstr;

const CheckpointOptions kReentrant{.reentrant = true};

class ReentrantTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
};

template <typename Fn, typename... Args>
auto maybe(bool checkpointed, Fn fn, Args... args) {
  return checkpointed ? checkpoint(kReentrant, fn, args...) : fn(args...);
}

TEST_F(ReentrantTest, ModulesOfManyKindsWithDropoutEqualPlain) {
  EXPECT_EQ(difference([&](bool on) {
              torch::manual_seed(3);
              torch::nn::LSTM lstm(6, 5);
              torch::nn::GRU gru(5, 5);
              torch::nn::MultiheadAttention attention(5, 1);
              torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({5}));
              torch::nn::Conv1d conv(5, 5, 3);
              torch::nn::BatchNorm1d batch_norm(5);
              auto x = torch::randn({7, 2, 6}).requires_grad_();
              auto y = maybe(
                  on,
                  [=](at::Tensor v) mutable {
                    auto h = std::get<0>(gru(std::get<0>(lstm(v))));
                    h = at::dropout(norm(h + std::get<0>(attention(h, h, h))), 0.3, true);
                    return at::rrelu(batch_norm(conv(h.permute({1, 2, 0}))), 0.1, 0.3, true);
                  },
                  x);
              y.pow(2).sum().backward();
              EXPECT_EQ(batch_norm->num_batches_tracked.item<std::int64_t>(), 1);
              std::vector<at::Tensor> result{x.grad(), y.detach(), batch_norm->running_mean,
                                             batch_norm->running_var};
              for (auto module : {lstm->parameters(), gru->parameters(), attention->parameters(),
                                  conv->parameters(), batch_norm->parameters()}) {
                for (const auto& p : module) result.push_back(p.grad());
              }
              return result;
            }),
            "");
}

TEST_F(ReentrantTest, AnInputThatNeedsNoGradientStillGivesTheWeightsTheirs) {
  for (const bool reentrant : {true, false}) {
    EXPECT_EQ(difference([&](bool on) {
                torch::manual_seed(3);
                torch::nn::Linear first(3, 4), second(4, 4), third(4, 2);
                const auto x = torch::randn({5, 3});
                const CheckpointOptions options{.reentrant = reentrant};
                auto f = [=](at::Tensor v) mutable { return first(v).tanh(); };
                auto h = [=](at::Tensor v) mutable { return third(v).tanh(); };
                auto y = second(on ? checkpoint(options, f, x) : f(x));
                (on ? checkpoint(options, h, y) : h(y)).sum().backward();
                EXPECT_TRUE(first->weight.grad().defined());
                return std::vector<at::Tensor>{first->weight.grad(), first->bias.grad(),
                                               second->weight.grad(), third->weight.grad()};
              }),
              "");
  }
}

TEST_F(ReentrantTest, WhereNothingNeedsAGradientTheResultNeedsNone) {
  auto x = torch::randn({3});
  EXPECT_FALSE(checkpoint(kReentrant, [](at::Tensor v) { return v.exp(); }, x).requires_grad());
  at::NoGradGuard no_grad;
  x.requires_grad_();
  EXPECT_FALSE(checkpoint(kReentrant, [](at::Tensor v) { return v.exp(); }, x).requires_grad());
}

TEST_F(ReentrantTest, KeepsOnlyTheInputsAndReleasesThem) {
  auto& tracker = base::MemoryTracker::install();
  const std::int64_t size = 1 << 16, bytes = size * 4;
  auto x = torch::randn({size}).requires_grad_();
  x.mutable_grad() = torch::zeros_like(x);
  const auto before = tracker.live().total();
  auto y = checkpoint(
      kReentrant,
      [](at::Tensor v) {
        for (int i = 0; i < 10; ++i) v = v.sin();
        return v;
      },
      x * 2);
  EXPECT_LE(tracker.live().total() - before, 2 * bytes + 10000);
  auto loss = y.sum();
  y.reset();
  loss.backward();
  loss.reset();
  EXPECT_LE(tracker.live().total() - before, 100);
}

TEST_F(ReentrantTest, NestsInEveryCombinationOfModes) {
  for (int outer = 0; outer < 3; ++outer) {
    for (int inner = 0; inner < 3; ++inner) {
      SCOPED_TRACE("outer " + std::to_string(outer) + ", inner " + std::to_string(inner));
      EXPECT_EQ(difference([&](bool on) {
                  torch::manual_seed(3);
                  const auto run = [on](int mode, auto fn, at::Tensor v) {
                    if (!on || mode == 0) return fn(v);
                    return checkpoint({.reentrant = mode == 1}, fn, v);
                  };
                  auto w = torch::randn({4}).requires_grad_();
                  auto x = torch::randn({4}).requires_grad_();
                  auto y = run(
                      outer,
                      [=](at::Tensor v) {
                        const auto part = [w](at::Tensor u) {
                          return at::dropout(u.sin().exp() * w, 0.3, true) * u;
                        };
                        auto h = run(inner, part, v.tanh());
                        return run(inner, part, h.sigmoid()).cos() * w;
                      },
                      x * 3);
                  y.sum().backward();
                  return std::vector<at::Tensor>{x.grad(), w.grad()};
                }),
                "");
    }
  }
}

TEST_F(ReentrantTest, AutocastIsEnteredAgain) {
  EXPECT_EQ(difference([&](bool on) {
              torch::manual_seed(3);
              torch::nn::Linear linear(6, 6);
              auto x = torch::randn({4, 6}).requires_grad_();
              at::Tensor y;
              {
                const amp::AutocastGuard guard({.dtype = at::kBFloat16});
                linear(x);
                y = maybe(on, [=](at::Tensor v) mutable { return linear(linear(v).relu()); }, x);
                EXPECT_EQ(y.scalar_type(), at::kBFloat16);
              }
              y.to(at::kFloat).pow(2).sum().backward();
              return std::vector<at::Tensor>{y.detach(), x.grad(), linear->weight.grad()};
            }),
            "");
}

TEST_F(ReentrantTest, ResultsMayBeArgumentsWeightsBuffersViewsAndUndefined) {
  EXPECT_EQ(difference([&](bool on) {
              torch::manual_seed(3);
              auto w = torch::randn({4}).requires_grad_();
              auto buffer = torch::randn({4});
              auto x = torch::randn({4}).requires_grad_();
              const auto results = maybe(
                  on,
                  [=](at::Tensor v) {
                    return std::vector<at::Tensor>{
                        v, w, buffer, v.narrow(0, 1, 2), v.exp(), at::Tensor(), v.argmax(), w * v};
                  },
                  x * 2);
              EXPECT_TRUE(w.is_leaf());
              EXPECT_FALSE(buffer.requires_grad());
              EXPECT_FALSE(results[5].defined());
              EXPECT_FALSE(results[6].requires_grad());
              at::Tensor loss = torch::zeros({});
              for (const int i : {0, 1, 2, 3, 4, 7}) loss = loss + results.at(i).sin().sum();
              loss.backward();
              return std::vector<at::Tensor>{w.grad(), x.grad(), loss.detach()};
            }),
            "");
}

TEST_F(ReentrantTest, RetainGraphAndGradientsOfOnlySomeResultsWork) {
  EXPECT_EQ(
      difference([&](bool on) {
        torch::manual_seed(3);
        auto x = torch::randn({4}).requires_grad_();
        const auto [a, b] = maybe(
            on,
            [](at::Tensor v) { return std::pair{at::dropout(v.exp(), 0.5, true).sin(), v.tanh()}; },
            x);
        a.sum().backward({}, /*retain_graph=*/true);
        (a * b).sum().backward();
        return std::vector<at::Tensor>{x.grad()};
      }),
      "");
}

TEST_F(ReentrantTest, RefusesByNameWhatItCannotDo) {
  auto x = torch::randn({4}).requires_grad_();
  const auto fn = [](at::Tensor v) { return v.exp().sin(); };
  const auto loss = [&] { return checkpoint(kReentrant, fn, x).sum(); };
  EXPECT_THAT(tests::message_of([&] { torch::autograd::grad({loss()}, {x}); }),
              HasSubstr("torch::autograd::grad() and backward(inputs=)"));
  EXPECT_THAT(
      tests::message_of([&] { loss().backward({}, {}, false, std::vector<at::Tensor>{x}); }),
      HasSubstr("torch::autograd::grad() and backward(inputs=)"));
  EXPECT_THAT(tests::message_of([&] { loss().backward({}, {}, /*create_graph=*/true); }),
              HasSubstr("no double backward"));
  EXPECT_THAT(tests::message_of([&] {
                checkpoint({.reentrant = true, .selective = save_matrix_products()}, fn, x);
              }),
              HasSubstr("selective"));
  EXPECT_THAT(tests::message_of(
                  [&] { checkpoint(kReentrant, [](at::Tensor v) { return v.add_(1); }, x * 1); }),
              HasSubstr("must not change its arguments in place"));
  struct Opaque {
    at::Tensor tensor;
  };
  EXPECT_THAT(tests::message_of(
                  [&] { checkpoint(kReentrant, [](at::Tensor v) { return Opaque{v.exp()}; }, x); }),
              HasSubstr("for_each_tensor"));
}

TEST_F(ReentrantTest, ChangedWeightsAndChangedProgramsAreErrorsByName) {
  auto w = torch::randn({3, 3}).requires_grad_();
  const base::NamedTensors names({{"block.weight", w}});
  auto x = torch::randn({3, 3}).requires_grad_();
  auto loss = checkpoint(kReentrant, [=](at::Tensor v) { return at::mm(v, w); }, x).sum();
  {
    at::NoGradGuard no_grad;
    w.mul_(2);
  }
  EXPECT_THAT(tests::message_of([&] { loss.backward(); }),
              HasSubstr("block.weight (Float [3, 3])"));

  torch::nn::Dropout dropout(0.5);
  loss = checkpoint(kReentrant, [=](at::Tensor v) mutable { return dropout(v); }, x).sum();
  dropout->eval();
  EXPECT_THAT(tests::message_of([&] { loss.backward(); }), HasSubstr("eval()"));
}

TEST_F(ReentrantTest, AnExceptionInEitherRunReachesTheCallerAndNothingSticks) {
  auto x = torch::randn({4}).requires_grad_();
  auto fail = std::make_shared<bool>(true);
  const auto region = [=](at::Tensor v) {
    auto y = v.exp();
    if (*fail) throw std::runtime_error("mine");
    return y.sin();
  };
  EXPECT_THROW(checkpoint(kReentrant, region, x), std::runtime_error);
  *fail = false;
  auto loss = checkpoint(kReentrant, region, x).sum();
  *fail = true;
  EXPECT_THROW(loss.backward({}, true), std::runtime_error);
  *fail = false;
  loss.backward();
  EXPECT_TRUE(x.grad().allclose(x.detach().exp() * x.detach().exp().cos()));
}

}  // namespace
}  // namespace gradus::recompute
