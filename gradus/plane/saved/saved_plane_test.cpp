#include <gradus/plane/saved/saved_plane.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>

namespace gradus::plane::saved {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class Lambda final : public Hooks {
 public:
  explicit Lambda(std::function<std::optional<Packed>(const Value&)> fn, bool reads_data = true)
      : fn_(std::move(fn)), reads_data_(reads_data) {}
  std::optional<Packed> pack(const Value& value) override { return fn_(value); }
  bool reads_data() const override { return reads_data_; }

 private:
  std::function<std::optional<Packed>(const Value&)> fn_;
  bool reads_data_;
};

std::shared_ptr<Hooks> hooks(std::function<std::optional<Packed>(const Value&)> fn,
                             bool reads_data = true) {
  return std::make_shared<Lambda>(std::move(fn), reads_data);
}

at::Tensor only(std::vector<at::Tensor> payload) { return std::move(payload.at(0)); }

// Copies at pack time: wrong wherever a kernel fills what it saved only later.
std::shared_ptr<Hooks> copies() {
  return hooks([](const Value& v) { return Packed{{v.tensor.clone()}, only}; });
}

class SavedPlaneTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
  void TearDown() override { EXPECT_FALSE(op::active()); }
};

TEST_F(SavedPlaneTest, PacksWhatAutogradSavesWithItsMakerAndGivesItBack) {
  std::vector<std::string> makers;
  int restored = 0;
  auto w = torch::randn({4, 4}).requires_grad_();
  at::Tensor loss;
  {
    const Guard guard = push(Order::offload, hooks([&](const Value& v) {
                               makers.emplace_back(v.maker);
                               EXPECT_FALSE(v.tensor.requires_grad());
                               EXPECT_FALSE(at::GradMode::is_enabled());
                               return Packed{{v.tensor}, [&](std::vector<at::Tensor> p) {
                                               ++restored;
                                               return only(std::move(p));
                                             }};
                             }));
    loss = at::mm(w, w).tanh().sum();
  }
  loss.backward();
  EXPECT_THAT(makers, ElementsAre("aten::mm", "aten::mm", "aten::tanh"));
  EXPECT_EQ(restored, 3);
  const auto hooked = w.grad().clone();
  w.mutable_grad() = at::Tensor();
  at::mm(w, w).tanh().sum().backward();
  EXPECT_TRUE(w.grad().equal(hooked));
}

TEST_F(SavedPlaneTest, KernelsThatSaveBeforeTheyFillGivePlainGradients) {  // M25
  const auto x0 = torch::randn({8, 6});
  torch::nn::BatchNorm1d norm(6);
  norm->to(at::kFloat);
  const std::vector<std::pair<const char*, std::function<at::Tensor(at::Tensor)>>> programs{
      {"rrelu", [](at::Tensor x) { return at::rrelu(x, 0.1, 0.4, /*training=*/true); }},
      {"rrelu_", [](at::Tensor x) { return at::rrelu_(x = x * 1, 0.1, 0.4, true); }},
      {"batch_norm", [&](at::Tensor x) { return norm(x); }},
      {"dropout", [](at::Tensor x) { return at::dropout(x, 0.5, true); }},
      {"native_dropout",
       [](at::Tensor x) { return std::get<0>(at::native_dropout(x, 0.5, true)); }},
      {"layer_norm", [](at::Tensor x) { return at::layer_norm(x, {6}); }},
      {"max_pool", [](at::Tensor x) { return at::max_pool1d(x.unsqueeze(0), {2}); }},
      {"lstm",
       [](at::Tensor x) {
         torch::manual_seed(5);
         torch::nn::LSTM lstm(6, 5);
         return std::get<0>(lstm(x.unsqueeze(0)));
       }},
      {"attention",
       [](at::Tensor x) {
         auto q = x.view({1, 2, 4, 6});
         return at::scaled_dot_product_attention(q, q, q, {}, 0.25, true);
       }},
      {"inplace", [](at::Tensor x) { return x.mul(2).sigmoid_(); }},
  };
  for (const auto& [name, program] : programs) {
    SCOPED_TRACE(name);
    const auto gradient = [&](bool hooked) {
      torch::manual_seed(1);
      auto x = x0.clone().requires_grad_();
      Guard guard;
      if (hooked) guard = push(Order::offload, copies());
      auto loss = program(x).pow(2).sum();
      guard = Guard();
      loss.backward();
      return x.grad();
    };
    EXPECT_TRUE(gradient(true).equal(gradient(false)));
  }
}

struct Doubled : torch::autograd::Function<Doubled> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x) {
    context->save_for_backward({x});
    return x * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * 2 * context->get_saved_variables()[0]};
  }
};

TEST_F(SavedPlaneTest, CustomFunctionsSaveOutsideAnyOperatorAndSettleAtOnce) {
  auto x = torch::randn({4}).requires_grad_();
  int packs = 0;
  at::Tensor y;
  {
    const Guard guard = push(Order::offload, hooks([&](const Value& v) {
                               ++packs;
                               EXPECT_EQ(v.maker, "");
                               return Packed{{v.tensor.clone()}, only};
                             }));
    y = Doubled::apply(x);
    EXPECT_EQ(packs, 1);
  }
  y.sum().backward();
  EXPECT_TRUE(x.grad().equal(2 * x.detach()));
}

TEST_F(SavedPlaneTest, CompressThenOffloadWhateverTheOrderOfPushes) {
  std::vector<at::ScalarType> offloaded;
  auto x = torch::randn({16}).requires_grad_();
  const Guard offload = push(Order::offload, hooks([&](const Value& v) {
                               offloaded.push_back(v.tensor.scalar_type());
                               return Packed{{v.tensor}, only};
                             }));
  const Guard compress =
      push(Order::compress, hooks([](const Value& v) {
             return Packed{{v.tensor.to(at::kBFloat16)},
                           [](std::vector<at::Tensor> p) { return p[0].to(at::kFloat); }};
           }));
  x.exp().sum().backward();
  EXPECT_THAT(offloaded, ElementsAre(at::kBFloat16));
  EXPECT_TRUE(x.grad().equal(x.detach().exp().to(at::kBFloat16).to(at::kFloat)));
}

TEST_F(SavedPlaneTest, WhatHooksDeclineGoesToTheNextAndWhatTheyDropDoesNot) {
  int offered = 0;
  auto x = torch::randn({16}).requires_grad_();
  const Guard outer = push(Order::offload, hooks([&](const Value& v) {
                             ++offered;
                             return Packed{{v.tensor}, only};
                           }));
  const Guard inner = push(Order::checkpoint, hooks([&](const Value& v) -> std::optional<Packed> {
                             if (v.maker == "aten::exp") return std::nullopt;
                             return Packed{{}, [t = v.tensor.clone()](auto) { return t; }};
                           }));
  x.exp().tanh().sum().backward();
  EXPECT_EQ(offered, 1);
  EXPECT_TRUE(x.grad().allclose(x.detach().exp() * (1 - x.detach().exp().tanh().pow(2))));
}

TEST_F(SavedPlaneTest, NewestOfOneOrderTakesFirst) {
  std::vector<int> order;
  const auto note = [&](int n) {
    return hooks([&order, n](const Value&) -> std::optional<Packed> {
      order.push_back(n);
      return std::nullopt;
    });
  };
  auto x = torch::randn({2}).requires_grad_();
  const Guard a = push(Order::checkpoint, note(1));
  const Guard b = push(Order::checkpoint, note(2));
  x.exp();
  EXPECT_THAT(order, ElementsAre(2, 1));
}

TEST_F(SavedPlaneTest, AChangeInPlaceBetweenSaveAndUseIsAnErrorThatNamesTheTensor) {  // M6
  auto w = torch::randn({4, 4}).requires_grad_();
  const base::NamedTensors names({{"layer.weight", w}});
  at::Tensor loss;
  {
    const Guard guard = push(Order::checkpoint, copies());
    loss = at::mm(w, w).sum();
  }
  {
    at::NoGradGuard no_grad;
    w.mul_(2);
  }
  try {
    loss.backward();
    FAIL() << "no error";
  } catch (const UserError& error) {
    EXPECT_THAT(
        error.what(),
        HasSubstr("layer.weight (Float [4, 4]) was saved at version 0 and is now at version 1"));
  }
}

TEST_F(SavedPlaneTest, AnUnnamedActivationChangedInPlaceIsAnErrorToo) {
  auto x = torch::randn({4}).requires_grad_();
  const Guard guard = push(Order::checkpoint, copies());
  auto y = x.exp();
  auto loss = y.sum() + y.mul(2).sum();
  y.detach().add_(1);
  EXPECT_THROW(loss.backward(), UserError);
}

TEST_F(SavedPlaneTest, NothingLeaksWhetherOrNotBackwardRuns) {
  auto& tracker = base::MemoryTracker::install();
  auto w = torch::randn({100, 100}).requires_grad_();
  w.mutable_grad() = torch::zeros_like(w);
  const auto before = tracker.live().total();
  for (int i = 0; i < 4; ++i) {
    const Guard guard =
        push(Order::offload, hooks([](const Value& v) { return Packed{{v.tensor}, only}; }));
    auto loss = w.tanh().sigmoid().sum();  // both save their own output
    if (i % 2 == 0) loss.backward();
  }
  EXPECT_EQ(tracker.live().total(), before);
}

TEST_F(SavedPlaneTest, RetainGraphRestoresAgainAndReleaseDropsThePayload) {
  auto& tracker = base::MemoryTracker::install();
  auto x = torch::randn({1000}).requires_grad_();
  int restored = 0;
  at::Tensor loss;
  const auto before = tracker.live().total();
  {
    const Guard guard = push(Order::offload, hooks([&](const Value& v) {
                               return Packed{{v.tensor.clone()}, [&](auto p) {
                                               ++restored;
                                               return only(std::move(p));
                                             }};
                             }));
    loss = x.exp().sum();
  }
  loss.backward({}, true);
  loss.backward();
  EXPECT_EQ(restored, 2);
  EXPECT_TRUE(x.grad().allclose(2 * x.detach().exp()));
  x.mutable_grad() = at::Tensor();
  loss.reset();
  EXPECT_EQ(tracker.live().total(), before);
  EXPECT_EQ(current_backward(), -1);
}

TEST_F(SavedPlaneTest, DoubleBackwardUnderTheGuardPacksItsOwnAndIsRight) {
  auto x = torch::randn({4}, at::kDouble).requires_grad_();
  int packs = 0;
  const Guard guard = push(Order::offload, hooks([&](const Value& v) {
                             ++packs;
                             return Packed{{v.tensor.clone()}, only};
                           }));
  auto g = torch::autograd::grad({x.pow(3).sum()}, {x}, {}, true, true)[0];
  const int after_first = packs;
  EXPECT_GT(after_first, 1);
  g.pow(2).sum().backward();
  EXPECT_TRUE(x.grad().allclose(36 * x.detach().pow(3)));
}

TEST_F(SavedPlaneTest, AFailingOperatorLeavesThePlaneUsable) {
  auto x = torch::randn({2, 3}).requires_grad_();
  const Guard guard = push(Order::offload, copies());
  EXPECT_THROW(at::mm(x, x), c10::Error);
  x.exp().sum().backward();
  EXPECT_TRUE(x.grad().equal(x.detach().exp()));
}

TEST_F(SavedPlaneTest, AFailingPackFailsTheOperatorAndAFailingRestoreTheBackward) {
  auto x = torch::randn({2}).requires_grad_();
  {
    const Guard guard =
        push(Order::offload,
             hooks([](const Value&) -> std::optional<Packed> { throw UserError("disk full"); }));
    EXPECT_THROW(x.exp(), UserError);
  }
  at::Tensor loss;
  {
    const Guard guard =
        push(Order::offload, hooks([](const Value& v) {
               return Packed{{v.tensor}, [](auto) -> at::Tensor { throw UserError("file gone"); }};
             }));
    loss = x.exp().sum();
  }
  EXPECT_THROW(loss.backward(), UserError);
  x.exp().sum().backward();  // the engine is well
  EXPECT_TRUE(x.grad().defined());
}

TEST_F(SavedPlaneTest, HooksThatGiveBackAnotherShapeAreADefectByName) {
  auto x = torch::randn({2}).requires_grad_();
  const Guard guard = push(Order::offload, hooks([](const Value& v) {
                             return Packed{{v.tensor}, [](auto) { return torch::zeros({3}); }};
                           }));
  auto loss = x.exp().sum();
  EXPECT_THROW(loss.backward(), InternalError);
}

TEST_F(SavedPlaneTest, GuardsNestMoveAndEndOutOfTurn) {
  int a = 0, b = 0;
  const auto count = [](int& n) {
    return hooks([&n](const Value&) -> std::optional<Packed> {
      ++n;
      return std::nullopt;
    });
  };
  auto x = torch::randn({2}).requires_grad_();
  Guard first = push(Order::compress, count(a));
  Guard second = push(Order::offload, count(b));
  x.exp();
  first = Guard();
  x.exp();
  Guard moved = std::move(second);
  x.exp();
  moved = Guard();
  x.exp();
  EXPECT_EQ(a, 1);
  EXPECT_EQ(b, 3);
}

// Backward of depth d runs a backward of depth d - 1 inside itself.
struct Nested : torch::autograd::Function<Nested> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x,
                            std::int64_t depth) {
    context->saved_data["depth"] = depth;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::AutoGradMode on(true);
    const std::int64_t depth = context->saved_data["depth"].toInt();
    auto y = torch::ones({2}).requires_grad_();
    auto z = depth == 0 ? at::rrelu(y, 0.1, 0.4, true).exp() : Nested::apply(y, depth - 1);
    z.sum().backward();
    return {gradients[0], at::Tensor()};
  }
};

TEST_F(SavedPlaneTest, ReentrantBackward70DeepOnPoolThreadsPacksAndSettles) {
  std::mutex mutex;
  std::vector<std::string> deep_makers;
  const auto main_thread = std::this_thread::get_id();
  auto x = torch::ones({2}).requires_grad_();
  const Guard guard = push(Order::offload, hooks([&](const Value& v) {
                             const std::lock_guard lock(mutex);
                             if (std::this_thread::get_id() != main_thread)
                               deep_makers.emplace_back(v.maker);
                             return Packed{{v.tensor.clone()}, only};
                           }));
  Nested::apply(x, 70).sum().backward();
  EXPECT_THAT(deep_makers, testing::IsSupersetOf({"aten::rrelu_with_noise", "aten::exp"}));
}

TEST_F(SavedPlaneTest, ThreadsWithHooksOfTheirOwnDoNotMeet) {
  const auto work = [](std::atomic<int>* packs, int n) {
    auto x = torch::randn({8}).requires_grad_();
    const Guard guard = push(Order::offload, hooks([&](const Value& v) {
                               ++*packs;
                               return Packed{{v.tensor.clone()}, only};
                             }));
    for (int i = 0; i < n; ++i) x.exp().sum().backward();
  };
  std::atomic<int> a{0}, b{0};
  std::thread first(work, &a, 40), second(work, &b, 60);
  first.join();
  second.join();
  EXPECT_EQ(a, 40);
  EXPECT_EQ(b, 60);
}

TEST_F(SavedPlaneTest, BackwardOnAnotherThreadUnpacksWhatThisOnePacked) {
  auto x = torch::randn({8}).requires_grad_();
  at::Tensor loss;
  {
    const Guard guard = push(Order::offload, copies());
    loss = x.exp().sum();
  }
  std::thread([&] { loss.backward(); }).join();
  EXPECT_TRUE(x.grad().equal(x.detach().exp()));
}

TEST_F(SavedPlaneTest, HeldTensorsGoThroughTheHooksAndAreVersionChecked) {
  int packs = 0;
  auto t = torch::ones({3});
  const base::NamedTensors names({{"input", t}});
  Held outside(t);
  Held inside;
  {
    const Guard guard = push(Order::checkpoint, hooks([&](const Value& v) {
                               ++packs;
                               return Packed{{}, [c = v.tensor.clone()](auto) { return c; }};
                             }));
    inside = Held(t);
  }
  EXPECT_EQ(packs, 1);
  EXPECT_TRUE(inside.get().equal(t));
  t.add_(1);
  EXPECT_THROW(inside.get(), UserError);
  EXPECT_THROW(outside.get(), UserError);
}

TEST_F(SavedPlaneTest, BackwardEndIsToldOnceAPass) {
  int ended = 0;
  std::vector<int> passes;
  auto x = torch::randn({4}).requires_grad_();
  at::Tensor loss;
  {
    const Guard guard = push(Order::offload, hooks([&](const Value& v) {
                               return Packed{{v.tensor}, [&](auto p) {
                                               passes.push_back(current_backward());
                                               on_backward_end([&] { ++ended; });
                                               return only(std::move(p));
                                             }};
                             }));
    loss = x.exp().sum();
  }
  loss.backward({}, true);
  EXPECT_EQ(ended, 1);
  loss.backward();
  EXPECT_EQ(ended, 2);
  EXPECT_NE(passes.at(0), passes.at(1));
  EXPECT_THROW(on_backward_end([] {}), UserError);
}

TEST_F(SavedPlaneTest, RefusesNullHooks) {
  EXPECT_THROW(std::ignore = push(Order::offload, nullptr), UserError);
}

}  // namespace
}  // namespace gradus::plane::saved
