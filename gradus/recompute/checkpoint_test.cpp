#include <gradus/recompute/checkpoint.h>

#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
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
#include <gradus/plane/op/op_plane.h>
#include <gradus/plane/saved/saved_plane.h>
#include <gradus/recompute/run_difference.h>

namespace gradus::recompute {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Keyword-like arguments.
struct Attend {
  at::Tensor query, key;
  std::vector<at::Tensor> extra;
  std::optional<double> scale = std::nullopt;
};

template <typename Visit>
void for_each_tensor(Attend& arguments, Visit&& visit) {
  visit(arguments.query);
  visit(arguments.key);
  visit_tensors(arguments.extra, visit);
}

class CheckpointTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
};

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

TEST_F(CheckpointTest, StructsAreArgumentsAndResultsAndMayLieInContainers) {
  for (const bool reentrant : {false, true}) {
    EXPECT_EQ(
        difference([&](bool on) {
          torch::manual_seed(5);
          std::vector<at::Tensor> leaves;
          for (int i = 0; i < 4; ++i) leaves.push_back(torch::randn({3}).requires_grad_());
          const auto fn = [](std::vector<Attend> all) {
            Attend a = all.at(0);
            auto h = (a.query * a.key * a.scale.value_or(1)).tanh() + a.extra[0];
            return Attend{h.sin(), h.exp(), {a.extra[0] * h}, 2.0};
          };
          const std::vector<Attend> given{
              {.query = leaves[0], .key = leaves[1] * leaves[3], .extra = {leaves[2]}, .scale = 3}};
          const Attend result = on ? checkpoint({.reentrant = reentrant}, fn, given) : fn(given);
          EXPECT_EQ(result.scale, 2.0);
          (result.query.sum() + result.key.sum() + result.extra[0].sum()).backward();
          std::vector<at::Tensor> gradients;
          for (const auto& leaf : leaves) gradients.push_back(leaf.grad());
          return gradients;
        }),
        "");
  }
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
                          EXPECT_TRUE(amp::AutocastState::capture().enabled());
                          EXPECT_EQ(amp::AutocastState::capture().cache(), cache);
                          auto h = linear(v).relu();
                          EXPECT_EQ(h.scalar_type(), at::kBFloat16);
                          return linear(h);
                        },
                        x);
                    if (backward_inside) y.to(at::kFloat).pow(2).sum().backward();
                  }
                  if (!backward_inside) y.to(at::kFloat).pow(2).sum().backward();
                  EXPECT_FALSE(amp::AutocastState::capture().enabled());
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

// Counts the operators that reach a kernel in forward: those outside backward passes' own formulas.
class Counter final : public plane::op::Handler {
 public:
  void call(plane::op::Call& call) override {
    if (call.frame() == plane::op::Frame::autograd) ++counts[std::string(call.name())];
    call.proceed();
  }
  std::map<std::string, int> counts;
};

std::map<std::string, int> forward_counts(bool reentrant, bool checkpointed) {
  auto counter = std::make_shared<Counter>();
  auto x = torch::randn({4, 4}).requires_grad_();
  auto w = torch::randn({4, 4}).requires_grad_();
  const auto block = [w](at::Tensor v) {
    auto h = at::mm(v, w).erf();
    return at::dropout(h.relu(), 0.5, true).sin() + v;
  };
  const auto guard = plane::op::push(plane::op::Order::gather, counter);
  auto y = x;
  for (int i = 0; i < 5; ++i) {
    y = checkpointed ? checkpoint({.reentrant = reentrant}, block, y) : block(y);
  }
  y.sum().backward();
  return counter->counts;
}

TEST_F(CheckpointTest, NoOperatorRunsMoreThanTwiceInEitherMode) {
  // erf, relu and bernoulli_ appear in no backward formula of these; mm appears twice in its own.
  for (const bool reentrant : {false, true}) {
    auto counts = forward_counts(reentrant, true);
    auto plain = forward_counts(reentrant, false);
    EXPECT_EQ(plain["aten::erf"], 5);
    EXPECT_EQ(counts["aten::erf"], 10);
    EXPECT_EQ(counts["aten::relu"], 10);
    EXPECT_EQ(counts["aten::bernoulli_"], 10);
    EXPECT_EQ(counts["aten::sin"], 10);
    EXPECT_EQ(plain["aten::mm"], 15);
    EXPECT_EQ(counts["aten::mm"], 20);
  }
}

TEST_F(CheckpointTest, ABackwardPassInsideARegionAddsToGradientsOnce) {
  for (const bool early : {true, false}) {
    SCOPED_TRACE(early ? "early stop" : "to the end");
    EXPECT_EQ(difference([&](bool on) {
                torch::manual_seed(3);
                auto w = torch::randn({3}).requires_grad_();
                auto x = torch::randn({3}).requires_grad_();
                w.mutable_grad() = torch::ones({3});
                const auto region = [w](at::Tensor v) {
                  auto y = at::dropout((v * w).sin(), 0.3, true).exp();
                  y.sum().backward({}, /*retain_graph=*/true);
                  return (y * w).exp();
                };
                auto out = on ? checkpoint({.early_stop = early}, region, x) : region(x);
                const auto inside = w.grad().clone();
                out.sum().backward();
                return std::vector<at::Tensor>{inside, w.grad(), x.grad()};
              }),
              "");
  }
}

TEST_F(CheckpointTest, AGradientPenaltyInsideARegionEqualsPlain) {
  EXPECT_EQ(difference([&](bool on) {
              torch::manual_seed(3);
              torch::nn::Linear first(4, 4), second(4, 1);
              auto x = torch::randn({5, 4}).requires_grad_();
              auto loss = maybe(
                  on,
                  [=](at::Tensor v) mutable {
                    auto h = at::dropout(first(v).tanh(), 0.2, true);
                    auto y = second(h.sin());
                    auto g = torch::autograd::grad({y.sum()}, {v}, {}, true, true)[0];
                    return (g.pow(2).sum() - 1).pow(2) + y.mean();
                  },
                  x * 1);
              loss.backward();
              return std::vector<at::Tensor>{loss.detach(), x.grad(), first->weight.grad(),
                                             second->weight.grad()};
            }),
            "");
}

TEST_F(CheckpointTest, DebugModeListsBothRunsAroundTheDifference) {
  auto factor = std::make_shared<double>(2.0);
  auto x = torch::randn({8, 3}).requires_grad_();
  const auto region = [=](at::Tensor v) {
    auto y = v.sin().exp();
    y = *factor > 2 ? y.relu() : y.mul(*factor);
    return y.tanh().cos();
  };
  std::string text;
  for (const bool by_override : {false, true}) {
    std::optional<CheckpointOverride> debug;
    if (by_override) debug.emplace(CheckpointOverride::Options{.debug = true});
    *factor = 2.0;
    auto loss = checkpoint({.debug = !by_override}, region, x).sum();
    *factor = 3.0;
    try {
      loss.backward();
      FAIL() << "no error";
    } catch (const UserError& error) {
      text = error.what();
    }
    EXPECT_THAT(text, HasSubstr("operator 2 was aten::mul and is now aten::relu"));
    EXPECT_THAT(text, HasSubstr("The first run:\n    0: aten::sin(Float[8, 3])\n    1: "
                                "aten::exp(Float[8, 3])\n >> 2: aten::mul(Float[8, 3], 2.)"));
    EXPECT_THAT(text, HasSubstr("The second run:\n    0: aten::sin(Float[8, 3])\n    1: "
                                "aten::exp(Float[8, 3])\n >> 2: aten::relu(Float[8, 3])\n    3: "
                                "aten::tanh(Float[8, 3])"));
  }
}

TEST_F(CheckpointTest, WithoutTheCheckADifferenceIsTheCallersOwn) {
  auto factor = std::make_shared<double>(2.0);
  auto x = torch::ones({4}).requires_grad_();
  auto loss = checkpoint(
                  {.determinism_check = DeterminismCheck::none},
                  [=](at::Tensor v) { return (v * *factor).exp(); }, x)
                  .sum();
  *factor = 3.0;
  loss.backward();
  // d/dx exp(2x) with what the second run made: 2 exp(3).
  EXPECT_TRUE(x.grad().allclose(torch::full({4}, 2 * std::exp(3.0))));
}

TEST_F(CheckpointTest, EarlyStopCanBeOverriddenForAScope) {
  int tails = 0;
  auto x = torch::randn({4}).requires_grad_();
  const CheckpointOverride late({.early_stop = false});
  checkpoint(
      [&](at::Tensor v) {
        auto y = v.exp() + 1;
        ++tails;
        return y + 2;
      },
      x)
      .sum()
      .backward();
  EXPECT_EQ(tails, 2);
}

TEST_F(CheckpointTest, PassesOfAGroupRunARegionOnceMoreInAll) {
  for (const bool grouped : {true, false}) {
    int runs = 0;
    auto x = torch::randn({4}).requires_grad_();
    using Two = std::pair<at::Tensor, at::Tensor>;
    const auto [a, b] = checkpoint(
        [&](at::Tensor v) {
          ++runs;
          return Two{v.exp().sin(), v.tanh().cos()};
        },
        x);
    {
      std::optional<BackwardGroup> group;
      if (grouped) {
        group.emplace();
        EXPECT_THROW(const BackwardGroup second, UserError);
      }
      a.sum().backward();
      b.sum().backward();
    }
    EXPECT_EQ(runs, grouped ? 2 : 3);
    auto y = x.detach().requires_grad_();
    (y.exp().sin().sum() + y.tanh().cos().sum()).backward();
    EXPECT_TRUE(x.grad().allclose(y.grad()));
  }
}

TEST_F(CheckpointTest, ContextsAreHeldDuringEachRun) {
  std::vector<std::string> log;
  auto x = torch::randn({4}).requires_grad_();
  const auto context = [&](RegionRun run) {
    log.push_back(run == RegionRun::first ? "first" : "second");
    return std::shared_ptr<void>(nullptr, [&](void*) { log.push_back("end"); });
  };
  checkpoint(
      {.context = context},
      [&](at::Tensor v) {
        log.push_back("run");
        return v.exp().sin();
      },
      x)
      .sum()
      .backward();
  EXPECT_THAT(log, ElementsAre("first", "run", "end", "second", "run", "end"));
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

TEST_F(CheckpointTest, AMovedParameterIsAnErrorThatNamesIt) {
  torch::nn::Linear linear(3, 3);
  const base::NamedTensors names({{"linear.weight", linear->weight}});
  auto loss =
      checkpoint([=](at::Tensor v) mutable { return linear(v).exp(); }, torch::randn({2, 3})).sum();
  linear->weight.set_data(torch::ones({3, 3}));
  EXPECT_THROW(loss.backward(), UserError);
}

TEST_F(CheckpointTest, AChangedSparseTensorIsAnError) {
  auto w = torch::randn({3, 3}).requires_grad_();
  auto sparse = torch::eye(3).to_sparse();
  auto loss =
      checkpoint([=](at::Tensor v) { return (at::mm(sparse, v) * w).sum(); }, torch::randn({3, 3}));
  sparse.mul_(5);
  EXPECT_THROW(loss.backward(), UserError);
}

TEST_F(CheckpointTest, BatchNormInTrainingMayBeUsedTwiceBeforeBackward) {
  EXPECT_EQ(difference([](bool on) {
              torch::manual_seed(3);
              torch::nn::BatchNorm1d norm(4);
              auto x = torch::randn({8, 4}).requires_grad_();
              auto f = [=](at::Tensor v) mutable { return norm(v).exp(); };
              auto a = on ? checkpoint(f, x) : f(x);
              auto b = on ? checkpoint(f, x * 2) : f(x * 2);
              (a.sum() + b.pow(2).sum()).backward();
              return std::vector<at::Tensor>{x.grad(), norm->weight.grad(), norm->running_mean,
                                             norm->num_batches_tracked};
            }),
            "");
}

TEST_F(CheckpointTest, ArgumentsThatShareMemoryThatTheRegionChangesAreRefused) {
  auto base = torch::arange(4.0);
  EXPECT_THROW(checkpoint(
                   [](at::Tensor a, at::Tensor b) {
                     a.mul_(2);
                     return b.sum();
                   },
                   base.view({4}), base),
               UserError);
}

TEST_F(CheckpointTest, AStoppedSecondRunInsideBackwardMayHappenManyTimes) {
  // Each one leaves a backward pass by exception; the engine must not lose count of its depth.
  auto x = torch::randn({3}), w = torch::randn({3}).requires_grad_();
  for (int i = 0; i < 100; ++i) {
    auto y = (x * w).exp().sum();
    auto g =
        checkpoint([=](at::Tensor) { return torch::autograd::grad({y}, {w}, {}, true, true)[0]; },
                   torch::ones({1}));
    torch::autograd::grad({g.sum()}, {w}, {}, true);
  }
}

TEST_F(CheckpointTest, ARegionMayReturnAReference) {
  auto x = torch::randn({3}).requires_grad_();
  checkpoint([](const at::Tensor& v) -> const at::Tensor& { return v; }, x).sum().backward();
  EXPECT_TRUE(x.grad().equal(torch::ones({3})));
}

}  // namespace
}  // namespace gradus::recompute
