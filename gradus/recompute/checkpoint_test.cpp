#include <gradus/recompute/checkpoint.h>

#include <string>
#include <thread>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/amp/autocast.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>

namespace gradus::recompute {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class CheckpointTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
};

// Runs `step` (which returns the tensors to compare) plainly and checkpointed from the same random
// state; returns "" if all bits and the final random states agree.
std::string difference(const std::function<std::vector<at::Tensor>(bool checkpointed)>& step) {
  torch::manual_seed(11);
  const auto plain = step(false);
  const auto plain_next = torch::rand({3});
  torch::manual_seed(11);
  const auto checkpointed = step(true);
  if (!torch::rand({3}).equal(plain_next)) return "the generator ends in another state";
  if (plain.size() != checkpointed.size()) return "another number of results";
  for (std::size_t i = 0; i < plain.size(); ++i) {
    if (plain[i].defined() != checkpointed[i].defined())
      return "result " + std::to_string(i) + " is missing";
    if (plain[i].defined() && !plain[i].equal(checkpointed[i]))
      return "result " + std::to_string(i) + " differs";
  }
  return "";
}

template <typename Fn, typename... Args>
auto maybe(bool checkpointed, Fn fn, Args... args) {
  return checkpointed ? checkpoint(fn, args...) : fn(args...);
}

TEST_F(CheckpointTest, DropoutDrawsTheSameMaskAndTheGeneratorEndsAsInAPlainRun) {  // M1
  const auto x0 = torch::randn({50});
  EXPECT_EQ(difference([&](bool on) {
              auto x = x0.clone().requires_grad_();
              auto y = maybe(on, [](at::Tensor v) { return at::dropout(v, 0.5, true) * v; }, x);
              y.sum().backward();
              // dx = 2 x mask / (1 - p)
              EXPECT_TRUE(((x.grad() == 0) | x.grad().isclose(4 * x.detach())).all().item<bool>());
              return std::vector<at::Tensor>{y.detach(), x.grad()};
            }),
            "");
}

TEST_F(CheckpointTest, RunningStatisticsAreUpdatedOnce) {  // M2
  for (const bool backward : {true, false}) {
    EXPECT_EQ(
        difference([&](bool on) {
          torch::manual_seed(3);
          torch::nn::BatchNorm1d norm(4);
          torch::nn::BatchNorm1d cumulative(
              torch::nn::BatchNorm1dOptions(4).momentum(std::nullopt));
          auto x = torch::randn({8, 4}).requires_grad_();
          auto y = maybe(on, [=](at::Tensor v) mutable { return cumulative(norm(v)).tanh(); }, x);
          if (backward) y.pow(2).sum().backward();
          EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 1);
          return std::vector<at::Tensor>{norm->running_mean,       norm->running_var,
                                         cumulative->running_mean, cumulative->num_batches_tracked,
                                         norm->weight.grad(),      x.grad()};
        }),
        "");
  }
}

TEST_F(CheckpointTest, AWeightGetsItsGradientThoughTheInputNeedsNone) {  // M3
  torch::nn::Linear linear(3, 2);
  const auto x = torch::randn({4, 3});
  checkpoint([=](at::Tensor v) mutable { return linear(v); }, x).pow(2).sum().backward();
  const auto gradient = linear->weight.grad().clone();
  linear->zero_grad();
  linear(x).pow(2).sum().backward();
  EXPECT_TRUE(linear->weight.grad().equal(gradient));
}

TEST_F(CheckpointTest, GradientsFlowThroughContainersAndResultsMayBeContainers) {  // M4
  using Pair = std::pair<at::Tensor, std::vector<at::Tensor>>;
  EXPECT_EQ(
      difference([&](bool on) {
        torch::manual_seed(5);
        std::vector<at::Tensor> leaves;
        for (int i = 0; i < 6; ++i) leaves.push_back(torch::randn({3}).requires_grad_());
        const auto fn = [](std::vector<at::Tensor> a, std::tuple<at::Tensor, double> b,
                           std::map<std::string, at::Tensor> c, std::optional<at::Tensor> d,
                           std::optional<at::Tensor> none, at::Tensor undefined, int power) {
          EXPECT_FALSE(none.has_value());
          EXPECT_FALSE(undefined.defined());
          auto sum = a[0] * a[1] + std::get<0>(b) * std::get<1>(b) + c.at("k").exp() + d->sin();
          return Pair{sum.pow(power), {sum.tanh(), a[0]}};
        };
        Pair result = maybe(on, fn, std::vector{leaves[0], leaves[1]}, std::tuple{leaves[2], 2.5},
                            std::map<std::string, at::Tensor>{{"k", leaves[3]}},
                            std::optional{leaves[4]}, std::optional<at::Tensor>(), at::Tensor(), 2);
        (result.first.sum() + result.second[0].sum() + result.second[1].sum()).backward();
        std::vector<at::Tensor> gradients;
        for (const auto& leaf : leaves) gradients.push_back(leaf.grad());
        return gradients;
      }),
      "");
}

TEST_F(CheckpointTest, ASharedWeightAccumulatesOnce) {  // M5
  auto w = torch::randn({3, 3}).requires_grad_();
  int calls = 0;
  struct Count : torch::autograd::PostAccumulateGradHook {
    explicit Count(int& n) : n(n) {}
    void operator()(const torch::autograd::Variable&) override { ++n; }
    int& n;
  };
  torch::autograd::impl::set_post_acc_grad_hooks(w, std::make_unique<Count>(calls));
  const auto block = [w](at::Tensor x) { return at::mm(x, w).tanh(); };
  auto x = torch::randn({2, 3});
  checkpoint(block, checkpoint(block, x)).sum().backward();
  EXPECT_EQ(calls, 1);
  const auto gradient = w.grad().clone();
  w.mutable_grad() = at::Tensor();
  block(block(x)).sum().backward();
  EXPECT_TRUE(w.grad().equal(gradient));
}

TEST_F(CheckpointTest, AWeightChangedBeforeBackwardIsAnErrorThatNamesIt) {  // M6
  for (const bool saved : {true, false}) {
    SCOPED_TRACE(saved ? "saved by autograd" : "read only");
    auto w = torch::randn({3, 3}).requires_grad_();
    const base::NamedTensors names({{"block.weight", w}});
    auto x = torch::randn({3, 3}).requires_grad_();
    // tanh(x + w) saves its output alone: no saved tensor has w's version.
    auto loss =
        checkpoint([=](at::Tensor v) { return saved ? at::mm(v, w) : (v + w).tanh(); }, x).sum();
    {
      at::NoGradGuard no_grad;
      w.mul_(2);
    }
    try {
      loss.backward();
      FAIL() << "no error";
    } catch (const UserError& error) {
      EXPECT_THAT(error.what(), HasSubstr("block.weight (Float [3, 3])"));
    }
  }
}

TEST_F(CheckpointTest, AnInputChangedBeforeBackwardIsAnError) {
  auto x = torch::randn({3}).requires_grad_();
  auto y = x * 2;
  auto loss = checkpoint([](at::Tensor v) { return v.exp().sin(); }, y).sum();
  {
    at::NoGradGuard no_grad;
    y.mul_(2);
  }
  EXPECT_THROW(loss.backward(), UserError);
}

TEST_F(CheckpointTest, AutocastIsEnteredAgainWithItsDtypeAndCacheFlag) {  // M7
  for (const bool cache : {true, false}) {
    for (const bool backward_inside : {true, false}) {
      EXPECT_EQ(difference([&](bool on) {
                  torch::manual_seed(3);
                  torch::nn::Linear linear(6, 6);
                  auto x = torch::randn({4, 6}).requires_grad_();
                  at::Tensor y;
                  {
                    const amp::AutocastGuard guard({.dtype = at::kBFloat16, .cache = cache});
                    linear(x);  // the cache may know the weight already
                    y = maybe(
                        on,
                        [=](at::Tensor v) mutable {
                          EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
                          EXPECT_EQ(at::autocast::is_autocast_cache_enabled(), cache);
                          auto h = linear(v).relu();
                          EXPECT_EQ(h.scalar_type(), at::kBFloat16);
                          return linear(h);
                        },
                        x);
                    if (backward_inside) y.to(at::kFloat).pow(2).sum().backward();
                  }
                  if (!backward_inside) y.to(at::kFloat).pow(2).sum().backward();
                  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
                  return std::vector<at::Tensor>{y.detach(), x.grad(), linear->weight.grad(),
                                                 linear->bias.grad()};
                }),
                "");
    }
  }
}

TEST_F(CheckpointTest, DoubleBackwardEqualsPlain) {  // M8
  EXPECT_EQ(difference([&](bool on) {
              torch::manual_seed(3);
              torch::nn::Linear linear(3, 3);
              auto x = torch::randn({4, 3}).requires_grad_();
              auto y = maybe(on, [=](at::Tensor v) mutable { return linear(v).tanh().pow(2); }, x);
              auto g = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
              (g.pow(2).sum() + y.sum()).backward();
              return std::vector<at::Tensor>{x.grad(), linear->weight.grad(), linear->bias.grad()};
            }),
            "");
}

TEST_F(CheckpointTest, NestedInnerRunsThreeTimesOuterTwice) {  // M9
  int inner_runs = 0, outer_runs = 0;
  EXPECT_EQ(difference([&](bool on) {
              torch::manual_seed(3);
              inner_runs = outer_runs = 0;
              auto x = torch::randn({4}).requires_grad_();
              const auto inner = [&](at::Tensor v) {
                ++inner_runs;
                return at::dropout(v.sin().exp(), 0.3, true);
              };
              auto y = maybe(
                  on,
                  [&](at::Tensor v) {
                    ++outer_runs;
                    return maybe(on, inner, v.tanh()).sigmoid().cos();
                  },
                  x);
              y.sum().backward();
              return std::vector<at::Tensor>{x.grad()};
            }),
            "");
  EXPECT_EQ(inner_runs, 3);
  EXPECT_EQ(outer_runs, 2);
}

TEST_F(CheckpointTest, ThreeLevelsDeepEqualsPlain) {
  EXPECT_EQ(difference([&](bool on) {
              torch::manual_seed(3);
              auto x = torch::randn({4}).requires_grad_();
              auto y = maybe(
                  on,
                  [=](at::Tensor a) {
                    return maybe(
                               on,
                               [=](at::Tensor b) {
                                 return maybe(
                                            on,
                                            [](at::Tensor c) {
                                              return at::dropout(c.exp().sin(), 0.5, true) * c;
                                            },
                                            b.tanh()) *
                                        b;
                               },
                               a.sigmoid())
                        .cos();
                  },
                  x);
              y.sum().backward();
              return std::vector<at::Tensor>{x.grad()};
            }),
            "");
}

TEST_F(CheckpointTest, OutsideStateThatChangesTheProgramIsAnErrorByOperator) {  // M10
  torch::nn::Dropout dropout(0.5);
  auto x = torch::randn({8}).requires_grad_();
  auto loss = checkpoint([=](at::Tensor v) mutable { return dropout(v) * v; }, x).sum();
  dropout->eval();
  try {
    loss.backward();
    FAIL() << "no error";
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr("eval()"));
  }

  // Neither shape nor number of saved tensors gives this one away.
  auto factor = std::make_shared<double>(2.0);
  auto other = checkpoint([=](at::Tensor v) { return (v * *factor).tanh(); }, x).sum();
  *factor = 3.0;
  try {
    other.backward();
    FAIL() << "no error";
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr("aten::mul with other arguments"));
  }

  torch::nn::BatchNorm1d norm(4);
  auto z = torch::randn({8, 4}).requires_grad_();
  auto third = checkpoint([=](at::Tensor v) mutable { return norm(v); }, z).pow(2).sum();
  norm->eval();
  EXPECT_THROW(third.backward(), UserError);
}

TEST_F(CheckpointTest, AShorterSecondRunIsAnErrorWithoutEarlyStopToo) {
  auto longer = std::make_shared<bool>(true);
  auto x = torch::randn({8}).requires_grad_();
  auto loss = checkpoint(
                  {.early_stop = false},
                  [=](at::Tensor v) {
                    auto y = v.exp();
                    if (*longer) y = y + 1;
                    return y;
                  },
                  x)
                  .sum();
  *longer = false;
  EXPECT_THROW(loss.backward(), UserError);
}

TEST_F(CheckpointTest, CustomGeneratorsAreReplayed) {
  EXPECT_EQ(difference([&](bool on) {
              auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
              auto x = torch::ones({100}).requires_grad_();
              auto y = maybe(
                  on,
                  [=](at::Tensor v) {
                    return v * torch::empty_like(v.detach()).bernoulli_(0.5, generator) *
                           torch::rand({100}, generator, at::TensorOptions());
                  },
                  x);
              auto between = torch::rand({2}, generator, at::TensorOptions());
              y.sum().backward();
              return std::vector<at::Tensor>{x.grad(), between,
                                             torch::rand({2}, generator, at::TensorOptions())};
            }),
            "");
}

TEST_F(CheckpointTest, ARegionMayChangeItsInputAndOutsideTensorsInPlace) {
  EXPECT_EQ(difference([&](bool on) {
              torch::manual_seed(3);
              auto x = torch::randn({6}).requires_grad_();
              auto counter = torch::zeros({1});
              auto buffer = torch::zeros({6});
              auto y = maybe(
                  on,
                  [=](at::Tensor v) {
                    counter.add_(1);
                    buffer.narrow(0, 0, 3).add_(2);
                    auto z = v.relu_() * counter + buffer;
                    return z.sin() * z;
                  },
                  x * 2);
              y.sum().backward({}, /*retain_graph=*/true);
              y.sum().backward();
              return std::vector<at::Tensor>{x.grad(), counter, buffer};
            }),
            "");
}

TEST_F(CheckpointTest, EarlyStopEndsTheSecondRunAndCanBeTurnedOff) {
  for (const bool early : {true, false}) {
    int tails = 0;
    auto x = torch::randn({4}).requires_grad_();
    checkpoint(
        {.early_stop = early},
        [&](at::Tensor v) {
          auto y = v.exp();
          y = y + 1;  // saves nothing
          ++tails;
          return y + 2;
        },
        x)
        .sum()
        .backward();
    EXPECT_EQ(tails, early ? 1 : 2);
  }
}

TEST_F(CheckpointTest, RetainGraphRunsOnceAPass) {
  int runs = 0;
  auto x = torch::randn({4}).requires_grad_();
  auto loss = checkpoint(
                  [&](at::Tensor v) {
                    ++runs;
                    return v.exp().sin().tanh();
                  },
                  x)
                  .sum();
  EXPECT_EQ(runs, 1);
  loss.backward({}, true);
  EXPECT_EQ(runs, 2);
  loss.backward();
  EXPECT_EQ(runs, 3);
}

TEST_F(CheckpointTest, KeepsNothingOfTheRegionButItsInputAndReleasesWhatItMadeAgain) {
  auto& tracker = base::MemoryTracker::install();
  const std::int64_t size = 1 << 16, bytes = size * 4;
  auto x = torch::randn({size}).requires_grad_();
  x.mutable_grad() = torch::zeros_like(x);
  const auto live = [&] { return tracker.live().total(); };
  const auto before = live();
  const auto region = [](at::Tensor v) {
    for (int i = 0; i < 10; ++i) v = v.sin();
    return v;
  };
  auto y = checkpoint(region, x);
  EXPECT_LE(live() - before, bytes + 10000);  // the output, and a generator's state
  auto loss = y.sum();
  y.reset();
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_LE(live() - before, bytes + 10000);  // the graph is kept, what was made again is not
  loss.backward();
  loss.reset();
  EXPECT_LE(live() - before, 100);

  // Two regions are never both made again at once.
  tracker.reset_peak();
  checkpoint(region, checkpoint(region, x)).sum().backward();
  EXPECT_LE(tracker.peak().total() - before, 15 * bytes);
  EXPECT_LE(live() - before, 100);
}

TEST_F(CheckpointTest, AGraphThatIsNeverUsedLeaksNothing) {
  auto& tracker = base::MemoryTracker::install();
  auto w = torch::randn({100, 100}).requires_grad_();
  const auto before = tracker.live().total();
  for (int i = 0; i < 3; ++i) checkpoint([=](at::Tensor v) { return at::mm(v, w).tanh(); }, w * 2);
  EXPECT_EQ(tracker.live().total(), before);
}

TEST_F(CheckpointTest, NoOperatorRunsMoreThanTwice) {
  std::map<std::string, int> counts;
  auto x = torch::randn({4}).requires_grad_();
  const auto note = [&](const char* name, at::Tensor v) {
    ++counts[name];
    return v;
  };
  checkpoint(
      [&](at::Tensor v) {
        auto a = note("exp", v.exp());
        auto b = note("sin", a.sin());
        return note("mul", a * b);
      },
      x)
      .sum()
      .backward();
  for (const auto& [name, count] : counts) EXPECT_LE(count, 2) << name;
  EXPECT_EQ(counts["exp"], 2);
}

TEST_F(CheckpointTest, UnderNoGradItJustRuns) {
  at::NoGradGuard no_grad;
  int runs = 0;
  auto x = torch::randn({4}).requires_grad_();
  EXPECT_FALSE(checkpoint(
                   [&](at::Tensor v) {
                     ++runs;
                     return v.exp();
                   },
                   x)
                   .requires_grad());
  EXPECT_EQ(runs, 1);
}

TEST_F(CheckpointTest, AnExceptionInEitherRunReachesTheCallerAndNothingSticks) {
  auto x = torch::randn({4}).requires_grad_();
  auto fail = std::make_shared<bool>(true);
  const auto region = [=](at::Tensor v) {
    auto y = v.exp();
    if (*fail) throw std::runtime_error("mine");
    return y.sin();
  };
  EXPECT_THROW(checkpoint(region, x), std::runtime_error);
  *fail = false;
  auto loss = checkpoint(region, x).sum();
  *fail = true;
  EXPECT_THROW(loss.backward({}, true), std::runtime_error);
  *fail = false;
  loss.backward();
  EXPECT_TRUE(x.grad().allclose(x.detach().exp() * x.detach().exp().cos()));
}

TEST_F(CheckpointTest, BackwardOnAnotherThreadEqualsPlain) {
  auto x = torch::randn({64}).requires_grad_();
  auto loss =
      checkpoint([](at::Tensor v) { return at::dropout(v.exp(), 0.5, true).sin(); }, x).sum();
  std::thread([&] { loss.backward({}, true); }).join();
  const auto first = x.grad().clone();
  x.mutable_grad() = at::Tensor();
  loss.backward();
  EXPECT_TRUE(x.grad().equal(first));
}

TEST_F(CheckpointTest, ModulesOfManyKindsEqualPlain) {
  EXPECT_EQ(difference([&](bool on) {
              torch::manual_seed(3);
              torch::nn::LSTM lstm(6, 5);
              torch::nn::GRU gru(5, 5);
              torch::nn::MultiheadAttention attention(5, 1);
              torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({5}));
              torch::nn::Conv1d conv(5, 5, 3);
              auto x = torch::randn({7, 2, 6}).requires_grad_();
              auto y = maybe(
                  on,
                  [=](at::Tensor v) mutable {
                    auto h = std::get<0>(gru(std::get<0>(lstm(v))));
                    h = norm(h + std::get<0>(attention(h, h, h)));
                    return at::rrelu(conv(h.permute({1, 2, 0})), 0.1, 0.3, true);
                  },
                  x);
              y.pow(2).sum().backward();
              std::vector<at::Tensor> result{x.grad()};
              for (auto module : {lstm->parameters(), gru->parameters(), attention->parameters(),
                                  conv->parameters()}) {
                for (const auto& p : module) result.push_back(p.grad());
              }
              return result;
            }),
            "");
}

TEST_F(CheckpointTest, SequentialRunsAllButTheLastSegmentTwice) {
  std::vector<int> calls(7, 0);
  std::vector<Stage> stages;
  for (int i = 0; i < 7; ++i) {
    stages.emplace_back([&calls, i](at::Tensor v) {
      ++calls[static_cast<std::size_t>(i)];
      return v.sin();
    });
  }
  auto x = torch::randn({4}).requires_grad_();
  checkpoint_sequential(stages, 3, x).sum().backward();
  EXPECT_THAT(calls, ElementsAre(2, 2, 2, 2, 1, 1, 1));
  auto y = x.detach();
  auto expected = torch::ones({4});
  for (int i = 0; i < 7; ++i) {
    expected = expected * y.cos();
    y = y.sin();
  }
  EXPECT_TRUE(x.grad().allclose(expected));
  EXPECT_THROW(checkpoint_sequential(stages, 0, x), UserError);
  EXPECT_THROW(checkpoint_sequential(stages, 8, x), UserError);
}

}  // namespace
}  // namespace gradus::recompute
