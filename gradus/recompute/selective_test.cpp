#include <gradus/recompute/selective.h>

#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/plane/op/op_plane.h>
#include <gradus/plane/saved/saved_plane.h>
#include <gradus/recompute/checkpoint.h>
#include <gradus/recompute/run_difference.h>

#include <tests/support/message_of.h>

namespace gradus::recompute {
namespace {

using testing::HasSubstr;

class SelectiveTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
};

// Counts the operators that reach a kernel.
class Counter final : public plane::op::Handler {
 public:
  void call(plane::op::Call& call) override {
    if (call.frame() == plane::op::Frame::autograd) ++counts[std::string(call.name())];
    call.proceed();
  }
  std::map<std::string, int> counts;
};

// A transformer block of operators, with dropout in three places.
struct Block {
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({8})};
  torch::nn::Linear qkv{8, 24}, out{8, 8}, up{8, 16}, down{16, 8};

  at::Tensor operator()(at::Tensor x) {
    auto h = norm(x);
    const auto parts = qkv(h).chunk(3, -1);
    auto scores = at::matmul(parts[0], parts[1].transpose(-1, -2)) / 3;
    auto weights = at::dropout(scores.softmax(-1), 0.2, true);
    x = x + at::dropout(out(at::matmul(weights, parts[2])), 0.1, true);
    return x + at::dropout(down(at::gelu(up(norm(x)))), 0.1, true);
  }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const auto& list : {norm->parameters(), qkv->parameters(), out->parameters(),
                             up->parameters(), down->parameters()}) {
      all.insert(all.end(), list.begin(), list.end());
    }
    return all;
  }
};

std::vector<at::Tensor> block_step(bool on, const CheckpointOptions& options,
                                   bool autocast = false) {
  torch::manual_seed(3);
  Block block;
  auto x = torch::randn({2, 5, 8}).requires_grad_();
  auto y = x * 1;
  {
    std::optional<amp::AutocastGuard> guard;
    if (autocast) guard.emplace(amp::AutocastOptions{.dtype = at::kBFloat16});
    for (int i = 0; i < 2; ++i) y = on ? checkpoint(options, block, y) : block(y);
  }
  y.to(at::kFloat).pow(2).sum().backward();
  std::vector<at::Tensor> result{y.detach(), x.grad()};
  for (const auto& p : block.parameters()) result.push_back(p.grad());
  return result;
}

TEST_F(SelectiveTest, ReadyPoliciesEqualPlainAndDoNotRunWhatTheyKeep) {
  struct Case {
    const char* name;
    SelectivePolicy policy;
    std::map<std::string, int> runs;  // in two blocks, forward and backward
  };
  // Forward formulas only: gelu, softmax and bernoulli_ are in no backward formula here.
  const std::vector<Case> cases{
      {"matrix products", save_matrix_products(), {{"aten::gelu", 4}, {"aten::_softmax", 4}}},
      {"attention", recompute_attention(), {{"aten::gelu", 4}, {"aten::_softmax", 4}}},
      {"pointwise", recompute_pointwise(), {{"aten::gelu", 4}, {"aten::_softmax", 2}}},
      {"named",
       save_operators({"aten::_softmax", "aten::gelu"}),
       {{"aten::gelu", 2}, {"aten::_softmax", 2}}},
      {"all",
       {.decide = [](const OperatorCall&) { return Keep::offload; }},
       {{"aten::gelu", 2}, {"aten::_softmax", 2}, {"aten::native_layer_norm", 4}}},
  };
  for (const Case& c : cases) {
    for (const bool autocast : {false, true}) {
      SCOPED_TRACE(std::string(c.name) + (autocast ? " under autocast" : ""));
      auto counter = std::make_shared<Counter>();
      EXPECT_EQ(difference([&](bool on) {
                  const auto guard = plane::op::push(plane::op::Order::gather, counter);
                  counter->counts.clear();
                  return block_step(on, {.selective = c.policy}, autocast);
                }),
                "");
      for (const auto& [name, runs] : c.runs) EXPECT_EQ(counter->counts[name], runs) << name;
    }
  }
}

TEST_F(SelectiveTest, MatrixProductsRunOnceInForwardAndInNoOtherPlace) {
  auto counter = std::make_shared<Counter>();
  auto w = torch::randn({4, 4}).requires_grad_();
  auto x = torch::randn({4, 4}).requires_grad_();
  const auto guard = plane::op::push(plane::op::Order::gather, counter);
  checkpoint(
      {.selective = save_operators({"aten::mm"})},
      [=](at::Tensor v) { return at::mm(at::mm(v, w).sin(), w).exp(); }, x)
      .sum()
      .backward();
  EXPECT_EQ(counter->counts["aten::mm"], 2 + 4);  // forward, and two for each in backward
  EXPECT_EQ(counter->counts["aten::sin"], 2);
}

TEST_F(SelectiveTest, ACompositeOperatorIsKeptAsAWhole) {
  auto counter = std::make_shared<Counter>();
  EXPECT_EQ(
      difference([&](bool on) {
        const auto guard = plane::op::push(plane::op::Order::gather, counter);
        counter->counts.clear();
        return block_step(
            on, {.selective = save_operators({"aten::linear", "aten::dropout", "aten::softmax"})});
      }),
      "");
  EXPECT_EQ(counter->counts["aten::bernoulli_"], 6);  // three a block, none again
  EXPECT_EQ(counter->counts["aten::_softmax"], 2);
  EXPECT_EQ(counter->counts["aten::gelu"], 4);
}

TEST_F(SelectiveTest, KeptRandomOperatorsLeaveTheOthersTheirNumbers) {
  for (const char* const kept : {"aten::bernoulli", "aten::native_dropout", "aten::dropout"}) {
    SCOPED_TRACE(kept);
    EXPECT_EQ(difference([&](bool on) {
                auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
                auto x = torch::ones({50}).requires_grad_();
                const auto fn = [=](at::Tensor v) {
                  auto a = at::bernoulli(at::sigmoid(v.detach())) * v;
                  auto b = std::get<0>(at::native_dropout(a + v, 0.5, true));
                  auto c = at::bernoulli(at::sigmoid(v.detach()), generator) * b.sin();
                  auto d = at::dropout(c, 0.5, true);
                  return d * torch::rand({50}) * torch::rand({50}, generator, at::TensorOptions()) *
                         d;
                };
                auto y = on ? checkpoint({.selective = save_operators({kept})}, fn, x) : fn(x);
                y.sum().backward();
                return std::vector<at::Tensor>{y.detach(), x.grad(),
                                               torch::rand({2}, generator, at::TensorOptions())};
              }),
              "");
  }
}

TEST_F(SelectiveTest, AResultChangedInPlaceIsAnErrorByNameUnlessAllowed) {
  auto w = torch::randn({4, 4}).requires_grad_();
  const auto fn = [w](at::Tensor v) { return at::mm(v, w).mul_(2).sin() * v; };
  auto x = torch::randn({4, 4}).requires_grad_();
  auto policy = save_operators({"aten::mm"});
  EXPECT_THAT(
      tests::message_of([&] { checkpoint({.selective = policy}, fn, x); }),
      HasSubstr("aten::mul_ changes the result of aten::mm (an unnamed tensor (Float [4, 4]))"));
  policy.allow_mutation = true;
  EXPECT_EQ(difference([&](bool on) {
              auto leaf = x.detach().requires_grad_();
              w.mutable_grad() = at::Tensor();
              auto y = on ? checkpoint({.selective = policy}, fn, leaf) : fn(leaf);
              y.sum().backward({}, /*retain_graph=*/true);
              y.sum().backward();
              return std::vector<at::Tensor>{leaf.grad(), w.grad()};
            }),
            "");

  // After the region ended, the earlier value is gone.
  for (const bool allow : {false, true}) {
    policy.allow_mutation = allow;
    auto y = checkpoint(
        {.selective = policy}, [w](at::Tensor v) { return std::pair{at::mm(v, w), (v * w).sin()}; },
        x);
    {
      at::NoGradGuard no_grad;
      y.first.mul_(2);
    }
    EXPECT_THAT(tests::message_of([&] { (y.first.sum() + y.second.sum()).backward(); }),
                HasSubstr("must not change before it is used"));
  }
}

TEST_F(SelectiveTest, WhatHasNoResultOfItsOwnCannotBeSavedButMayBePreferred) {
  auto x = torch::randn({4, 4}).requires_grad_();
  const auto fn = [](at::Tensor v) { return v.t().sin().mul_(2).cos(); };
  for (const char* const name : {"aten::t", "aten::mul_"}) {
    EXPECT_THAT(
        tests::message_of([&] { checkpoint({.selective = save_operators({name})}, fn, x); }),
        HasSubstr(std::string(name) + " returns a view or a list, or changes an argument"));
  }
  checkpoint({.selective = {.decide =
                                [](const OperatorCall& call) {
                                  return call.name == "aten::sin" ? Keep::must_recompute
                                                                  : Keep::prefer_save;
                                }}},
             fn, x)
      .sum()
      .backward();
  EXPECT_TRUE(x.grad().allclose(-2 * x.detach().cos() * (2 * x.detach().sin()).sin()));
  EXPECT_THAT(tests::message_of([] { save_operators({"mm"}); }),
              HasSubstr("no operator is called \"mm\""));
}

TEST_F(SelectiveTest, RetainGraphDoubleBackwardAndNestingEqualPlain) {
  for (const bool outer_selective : {false, true}) {
    EXPECT_EQ(difference([&](bool on) {
                torch::manual_seed(3);
                Block block;
                auto x = torch::randn({2, 5, 8}).requires_grad_();
                const CheckpointOptions inner{.selective = save_matrix_products()};
                const CheckpointOptions outer{.selective = outer_selective ? save_matrix_products()
                                                                           : SelectivePolicy{}};
                const auto pair = [=](at::Tensor v) {
                  for (int i = 0; i < 2; ++i)
                    v = on ? checkpoint(inner, block, v) : Block(block)(v);
                  return v;
                };
                auto y = on ? checkpoint(outer, pair, x) : pair(x);
                auto g = torch::autograd::grad({y.sin().sum()}, {x}, {}, true, true)[0];
                (g.pow(2).sum() + y.sum()).backward({}, true);
                y.sum().backward();
                std::vector<at::Tensor> result{x.grad()};
                for (const auto& p : block.parameters()) result.push_back(p.grad());
                return result;
              }),
              "");
  }
}

TEST_F(SelectiveTest, ABackwardPassInsideIsRefused) {
  auto x = torch::randn({4}).requires_grad_();
  EXPECT_THAT(tests::message_of([&] {
                checkpoint(
                    {.selective = save_operators({"aten::exp"})},
                    [](at::Tensor v) {
                      auto y = v.exp().sin();
                      return torch::autograd::grad({y.sum()}, {v}, {}, true, true)[0];
                    },
                    x);
              }),
              HasSubstr("must not run a backward pass inside"));
}

TEST_F(SelectiveTest, BatchNormStatisticsAreUpdatedOnceWhateverIsKept) {
  for (const Keep keep : {Keep::prefer_save, Keep::prefer_recompute}) {
    EXPECT_EQ(
        difference([&](bool on) {
          torch::manual_seed(3);
          torch::nn::Conv2d conv(2, 3, 3);
          torch::nn::BatchNorm2d norm(3);
          auto x = torch::randn({2, 2, 6, 6}).requires_grad_();
          const auto fn = [=](at::Tensor v) mutable {
            return at::relu(norm(conv(norm(conv(v)).narrow(1, 0, 2)))).sin();
          };
          auto y = on ? checkpoint(
                            {.selective = {.decide = [keep](const OperatorCall&) { return keep; }}},
                            fn, x)
                      : std::decay_t<decltype(fn)>(fn)(x);
          y.sum().backward();
          return std::vector<at::Tensor>{x.grad(), conv->weight.grad(), norm->weight.grad(),
                                         norm->running_mean, norm->num_batches_tracked};
        }),
        "");
  }
}

TEST_F(SelectiveTest, KeepsTheChosenResultsAndNoMore) {
  auto& tracker = base::MemoryTracker::install();
  const std::int64_t n = 256, bytes = n * n * 4;
  auto w = torch::randn({n, n}).requires_grad_();
  auto x = torch::randn({n, n}).requires_grad_();
  const auto fn = [w](at::Tensor v) {
    return at::mm(at::mm(v, w).sin().exp(), w).sin().exp().cos();
  };
  const auto live = [&] { return tracker.live().total(); };
  const auto before = live();
  auto y = checkpoint({.selective = save_matrix_products()}, fn, x);
  EXPECT_NEAR(static_cast<double>(live() - before), 3.0 * bytes, 20000);  // y and two products
  y.sum().backward();
  y.reset();
  w.mutable_grad() = x.mutable_grad() = at::Tensor();
  EXPECT_LE(live() - before, 100);
}

// Keeps a copy elsewhere, after the operator: as offload does.
class CopyAway final : public plane::saved::Hooks {
 public:
  std::optional<plane::saved::Packed> pack(const plane::saved::Value& value) override {
    ++packed;
    return plane::saved::Packed{{}, [copy = value.tensor.clone()](auto) { return copy.clone(); }};
  }
  int packed = 0;
};

TEST_F(SelectiveTest, WhatIsKeptGoesThroughOuterHooks) {
  for (const auto& names : std::vector<std::vector<std::string>>{
           {"aten::_softmax", "aten::gelu"}, {"aten::softmax", "aten::linear"}}) {
    const CheckpointOptions options{.selective = save_operators(names)};
    auto hooks = std::make_shared<CopyAway>();
    EXPECT_EQ(difference([&](bool on) {
                std::optional<plane::saved::Guard> guard;
                if (on) guard = plane::saved::push(plane::saved::Order::offload, hooks);
                return block_step(on, options);
              }),
              "");
    EXPECT_GE(hooks->packed, 4);
  }
}

TEST_F(SelectiveTest, RandomProgramsUnderRandomPoliciesEqualPlain) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    // Reentrant regions add a weight's gradient up in one part a region, not in one sum.
    at::Tensor plain_gradient;
    EXPECT_EQ(
        difference([&](bool on) {
          std::mt19937 draw(seed);
          torch::manual_seed(seed);
          auto w = torch::randn({4, 4}).requires_grad_();
          auto x = torch::randn({4, 4}).requires_grad_();
          const unsigned policy_seed = draw();
          const bool nested = draw() % 3 == 0;
          CheckpointOptions options;
          options.reentrant = draw() % 4 == 0;
          options.early_stop = draw() % 2 == 0;
          if (!options.reentrant && draw() % 4 != 0) {
            options.selective = {.decide =
                                     [policy_seed](const OperatorCall& call) {
                                       const std::size_t h =
                                           std::hash<std::string_view>()(call.name) ^ policy_seed;
                                       return h % 3 == 0   ? Keep::prefer_recompute
                                              : h % 3 == 1 ? Keep::prefer_save
                                                           : Keep::offload;
                                     },
                                 .allow_mutation = true};
          }
          std::vector<unsigned> program(12);
          for (unsigned& step : program) step = draw();
          const auto run = [=](at::Tensor v) {
            std::vector<at::Tensor> values{v, v * w};
            for (const unsigned step : program) {
              const auto& a = values[step / 16 % values.size()];
              const auto& b = values[step / 256 % values.size()];
              switch (step % 12) {
                case 0:
                  values.push_back(at::mm(a, w));
                  break;
                case 1:
                  values.push_back(a * b);
                  break;
                case 2:
                  values.push_back(at::dropout(a, 0.3, true));
                  break;
                case 3:
                  values.push_back(at::softmax(a, -1) + b);
                  break;
                case 4:
                  values.push_back(at::linear(a, w, b[0]));
                  break;
                case 5:
                  values.push_back((a + b).tanh_());
                  break;
                case 6:
                  values.push_back(a.t());
                  break;
                case 7:
                  values.push_back(at::gelu(a));
                  break;
                case 8:
                  values.push_back(std::get<0>(at::native_dropout(a, 0.2, true)).sin());
                  break;
                case 9:
                  values.push_back(at::layer_norm(a, {4}, w[0], w[1]));
                  break;
                case 10:
                  values.push_back(at::cat({a, b}).narrow(0, 2, 4).contiguous());
                  break;
                default:
                  values.push_back(std::get<0>(at::sort(a)) * 0.5);
                  break;
              }
            }
            at::Tensor sum = values[0];
            for (std::size_t i = 1; i < values.size(); ++i) sum = sum + values[i].sigmoid();
            return sum.tanh();
          };
          at::Tensor y = x * 1;
          for (int i = 0; i < 2; ++i) {
            if (!on) {
              y = run(run(y));
            } else if (nested) {
              y = checkpoint({}, [=](at::Tensor v) { return checkpoint(options, run, run(v)); }, y);
            } else {
              y = checkpoint(options, run, checkpoint(options, run, y));
            }
          }
          y.sum().backward();
          if (!on) plain_gradient = w.grad();
          EXPECT_TRUE(w.grad().allclose(plain_gradient, 1e-4, 1e-5));
          return std::vector<at::Tensor>{y.detach(), x.grad(),
                                         options.reentrant ? at::Tensor() : w.grad()};
        }),
        "");
  }
}

}  // namespace
}  // namespace gradus::recompute
