#include <gradus/plane/op/op_plane.h>

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

namespace gradus::plane::op {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

// Runs any function as a handler.
class Lambda final : public Handler {
 public:
  explicit Lambda(std::function<void(Call&)> fn) : fn_(std::move(fn)) {}
  void call(Call& call) override { fn_(call); }

 private:
  std::function<void(Call&)> fn_;
};

std::shared_ptr<Handler> handler(std::function<void(Call&)> fn) {
  return std::make_shared<Lambda>(std::move(fn));
}

// Notes the names of the calls of one frame.
class Names final : public Handler {
 public:
  explicit Names(std::optional<Frame> frame = std::nullopt) : frame_(frame) {}
  void call(Call& call) override {
    if (!frame_ || call.frame() == *frame_) {
      const std::lock_guard lock(mutex_);
      names.emplace_back(call.name().substr(6));
      threads.insert(std::this_thread::get_id());
    }
    call.proceed();
  }
  std::vector<std::string> names;
  std::set<std::thread::id> threads;

 private:
  std::mutex mutex_;
  std::optional<Frame> frame_;
};

// Backward of depth d runs a backward of depth d - 1 inside itself.
struct Nested : torch::autograd::Function<Nested> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x,
                            std::int64_t depth, std::function<void()>* at_depth_0) {
    context->saved_data["depth"] = depth;
    context->saved_data["fn"] = reinterpret_cast<std::int64_t>(at_depth_0);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const std::int64_t depth = context->saved_data["depth"].toInt();
    auto* const fn = reinterpret_cast<std::function<void()>*>(context->saved_data["fn"].toInt());
    if (depth == 0) {
      (*fn)();
    } else {
      const at::AutoGradMode on(true);
      auto y = torch::ones({2}).requires_grad_();
      Nested::apply(y, depth - 1, fn).sum().backward();
    }
    return {gradients[0], at::Tensor(), at::Tensor()};
  }
};

class OpPlaneTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
  void TearDown() override {
    EXPECT_FALSE(active());
    EXPECT_FALSE(
        c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::TESTING_ONLY_GenericMode));
    EXPECT_FALSE(
        c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::TESTING_ONLY_GenericMode));
  }
};

TEST_F(OpPlaneTest, SeesForwardAndBackwardAndNothingOutsideTheGuard) {
  auto names = std::make_shared<Names>(Frame::autograd);
  auto w = torch::randn({3, 3}).requires_grad_();
  at::Tensor loss;
  {
    const Guard guard = push(Order::record, names);
    loss = at::mm(w, w).tanh().sum();
    EXPECT_THAT(names->names, ElementsAre("mm", "tanh", "sum"));
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_THAT(names->names, Contains("tanh_backward"));
  }
  const auto seen = names->names.size();
  loss.backward();
  torch::randn({3}).exp();
  EXPECT_EQ(names->names.size(), seen);
}

TEST_F(OpPlaneTest, ComputesTheSameBitsAsWithoutIt) {
  torch::nn::Sequential net(torch::nn::Linear(8, 16), torch::nn::ReLU(),
                            torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})),
                            torch::nn::Dropout(0.5), torch::nn::Linear(16, 4));
  torch::nn::LSTM lstm(8, 8);
  const auto x = torch::randn({5, 4, 8});
  const auto step = [&] {
    torch::manual_seed(1);
    net->zero_grad();
    auto loss = net->forward(std::get<0>(lstm(x)).reshape({20, 8})).pow(2).mean();
    loss.backward();
    std::vector<at::Tensor> result{loss.detach()};
    for (const auto& p : net->parameters()) result.push_back(p.grad().clone());
    return result;
  };
  const auto plain = step();
  const Guard outer = push(Order::profile, handler([](Call& call) { call.proceed(); }));
  const Guard inner = push(Order::gather, handler([](Call& call) { call.proceed(); }));
  const auto seen = step();
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(plain[i].equal(seen[i])) << i;
}

TEST_F(OpPlaneTest, HandlersStandInTheStatedOrderWhateverTheOrderOfPushes) {
  std::vector<std::string> order;
  const auto note = [&](const std::string& name) {
    return handler([&order, name](Call& call) {
      order.push_back(name);
      call.proceed();
      order.push_back("/" + name);
    });
  };
  const Guard gather = push(Order::gather, note("gather"));
  const Guard profile = push(Order::profile, note("profile"));
  const Guard first = push(Order::record, note("first record"));
  const Guard second = push(Order::record, note("second record"));
  const auto x = torch::Tensor();
  order.clear();
  at::exp(at::detail::scalar_tensor_static(2.0, at::kFloat, at::kCPU));
  EXPECT_THAT(order, ElementsAre("profile", "second record", "first record", "gather", "/gather",
                                 "/first record", "/second record", "/profile"));
}

TEST_F(OpPlaneTest, WhatAHandlerCallsGoesStraightToKernelsUnlessItAsksForTheInnerHandlers) {
  auto inner = std::make_shared<Names>();
  bool ask = false;
  int outer_calls = 0;
  const auto outer = handler([&](Call& call) {
    ++outer_calls;
    const auto extra = torch::ones({2});  // outside the handlers
    if (ask && call.name() == "aten::exp") {
      const Call::InnerOperators scope(call);
      at::sin(extra);
    }
    call.proceed();
  });
  auto x = torch::ones({2});
  const Guard a = push(Order::gather, inner);
  const Guard b = push(Order::profile, outer);
  x.exp();
  EXPECT_THAT(inner->names, ElementsAre("exp"));
  EXPECT_EQ(outer_calls, 1);
  ask = true;
  x.exp();
  EXPECT_THAT(inner->names, ElementsAre("exp", "sin", "exp"));
  EXPECT_EQ(outer_calls, 2);
}

TEST_F(OpPlaneTest, TheNewestOfAnOrderMayStandForAllOfIt) {
  const auto counter = [](int& calls, bool alone) {
    return handler([&calls, alone](Call& call) {
      ++calls;
      if (alone) {
        call.proceed_past_order();
      } else {
        call.proceed();
      }
    });
  };
  int oldest = 0, newest_calls = 0, inner = 0;
  EXPECT_EQ(newest(Order::autocast), nullptr);
  const auto old_handler = counter(oldest, false), new_handler = counter(newest_calls, true);
  const auto x = torch::ones({2});
  const Guard a = push(Order::autocast, old_handler);
  const Guard b = push(Order::record, counter(inner, false));
  x.exp();
  {
    const Guard c = push(Order::autocast, new_handler);
    EXPECT_EQ(newest(Order::autocast), new_handler);
    x.exp();
  }
  EXPECT_EQ(newest(Order::autocast), old_handler);
  EXPECT_EQ(newest(Order::gather), nullptr);
  EXPECT_EQ(oldest, 1);
  EXPECT_EQ(newest_calls, 1);
  EXPECT_EQ(inner, 2);
}

TEST_F(OpPlaneTest, AnExceptionOfAKernelOrOfAHandlerLeavesThePlaneAsItWas) {
  auto x = torch::ones({2, 3});
  bool throw_it = false;
  const Guard guard = push(Order::record, handler([&](Call& call) {
                             if (throw_it && call.name() == "aten::exp")
                               throw std::runtime_error("mine");
                             call.proceed();
                           }));
  EXPECT_THROW(at::mm(x, x), c10::Error);
  throw_it = true;
  EXPECT_THROW(x.exp(), std::runtime_error);
  throw_it = false;
  EXPECT_NO_THROW(x.exp());
  EXPECT_TRUE(active());
}

TEST_F(OpPlaneTest, GuardEndsByException) {
  try {
    const Guard guard = push(Order::record, handler([](Call& call) { call.proceed(); }));
    throw std::runtime_error("x");
  } catch (const std::runtime_error&) {
  }
  EXPECT_FALSE(active());
}

TEST_F(OpPlaneTest, GuardsMoveAndMayEndOutOfTurn) {
  auto a = std::make_shared<Names>(), b = std::make_shared<Names>();
  auto x = torch::ones({2});
  Guard first = push(Order::record, a);
  Guard second = push(Order::record, b);
  Guard moved = std::move(first);
  x.exp();
  moved = Guard();  // ends the first before the second
  x.exp();
  EXPECT_EQ(a->names.size(), 1u);
  EXPECT_EQ(b->names.size(), 2u);
  second = Guard();
  x.exp();
  EXPECT_EQ(b->names.size(), 2u);
}

TEST_F(OpPlaneTest, AGuardEndedOnAnotherThreadStopsItsHandlerOnly) {
  auto a = std::make_shared<Names>(), b = std::make_shared<Names>();
  auto x = torch::ones({2});
  Guard second;
  {
    Guard first = push(Order::record, a);
    second = push(Order::record, b);
    std::thread([moved = std::move(first)]() mutable { moved = Guard(); }).join();
    x.exp();
    EXPECT_TRUE(a->names.empty());
    EXPECT_EQ(b->names.size(), 1u);
  }
  second = Guard();
}

TEST_F(OpPlaneTest, SurvivesADebugInfoGuardThatEndsOutOfTurn) {
  auto names = std::make_shared<Names>();
  auto x = torch::ones({2});
  struct Info : c10::DebugInfoBase {};
  Guard guard;
  {
    const c10::DebugInfoGuard other(c10::DebugInfoKind::TEST_INFO, std::make_shared<Info>());
    guard = push(Order::record, names);
  }
  x.exp();  // the plane's entry went with the other guard: unseen, not broken
  guard = Guard();
  const c10::DebugInfoGuard other(c10::DebugInfoKind::TEST_INFO, std::make_shared<Info>());
  EXPECT_FALSE(active());
}

TEST_F(OpPlaneTest, OtherThreadsSeeHandlersOnlyUnderAThreadLocalStateGuard) {
  auto names = std::make_shared<Names>();
  auto x = torch::ones({2});
  const Guard guard = push(Order::record, names);
  std::thread([&] { x.exp(); }).join();
  EXPECT_TRUE(names->names.empty());
  const at::ThreadLocalState state;
  std::thread([&] {
    const at::ThreadLocalStateGuard travelled(state);
    x.exp();
    // A push on the side thread is not seen here.
    const Guard own = push(Order::record, handler([](Call& call) { call.proceed(); }));
  }).join();
  EXPECT_THAT(names->names, ElementsAre("exp"));
}

TEST_F(OpPlaneTest, ReentrantBackward70DeepRunsOnPoolThreadsAndIsSeen) {
  auto names = std::make_shared<Names>();
  std::thread::id deep;
  std::function<void()> at_depth_0 = [&] {
    deep = std::this_thread::get_id();
    torch::ones({2}).erfinv();
    // Nested push and pop on the pool thread.
    auto inner = std::make_shared<Names>();
    {
      const Guard guard = push(Order::profile, inner);
      torch::ones({2}).erfc();
    }
    torch::ones({2}).lgamma();
    EXPECT_THAT(inner->names, Contains("erfc"));
    EXPECT_THAT(inner->names, Not(Contains("lgamma")));
  };
  auto x = torch::ones({2}).requires_grad_();
  const Guard guard = push(Order::record, names);
  Nested::apply(x, 70, &at_depth_0).sum().backward();
  EXPECT_NE(deep, std::this_thread::get_id());
  EXPECT_EQ(names->threads.count(deep), 1u);
  EXPECT_THAT(names->names, Contains("erfinv"));
  EXPECT_THAT(names->names, Contains("lgamma"));
}

TEST_F(OpPlaneTest, DoubleBackwardIsSeenAndRight) {
  auto names = std::make_shared<Names>(Frame::autograd);
  auto x = torch::randn({4}, at::kDouble).requires_grad_();
  const Guard guard = push(Order::record, names);
  auto g = torch::autograd::grad({x.pow(3).sum()}, {x}, {}, true, true)[0];
  g.pow(2).sum().backward();
  EXPECT_TRUE(x.grad().allclose(36 * x.detach().pow(3)));
  EXPECT_GT(std::count(names->names.begin(), names->names.end(), "pow"), 2);
}

TEST_F(OpPlaneTest, UnderAutocastEachStepComesOnceJustAboveAutograd) {
  auto names = std::make_shared<Names>(Frame::autograd);
  auto autocast = std::make_shared<Names>(Frame::autocast);
  torch::nn::Linear linear(8, 8);
  auto x = torch::randn({4, 8});
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  {
    const Guard a = push(Order::record, names);
    const Guard b = push(Order::record, autocast);
    linear(x);
  }
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(std::count(names->names.begin(), names->names.end(), "addmm"), 1);
  EXPECT_EQ(std::count(autocast->names.begin(), autocast->names.end(), "addmm"), 1);
}

TEST_F(OpPlaneTest, CompositesShowTheirPartsOrComeAsAWhole) {
  auto x = torch::randn({2, 3, 8}).requires_grad_();
  auto w = torch::randn({8, 8}).requires_grad_();
  std::map<std::string, Frame> frames;
  bool whole = false;
  const Guard guard = push(Order::record, handler([&](Call& call) {
                             frames.emplace(call.name(), call.frame());
                             whole ? call.proceed_whole() : call.proceed();
                           }));
  at::matmul(x, w);
  EXPECT_EQ(frames.at("aten::matmul"), Frame::composite);
  EXPECT_EQ(frames.at("aten::mm"), Frame::autograd);
  frames.clear();
  whole = true;
  at::matmul(x, w);
  EXPECT_EQ(frames.size(), 1u);
}

TEST_F(OpPlaneTest, ArgumentsAndResultsCanBeReplaced) {
  const auto ones = torch::ones({2});
  const auto fives = torch::full({2}, 5.0);
  Guard guard = push(Order::gather, handler([&](Call& call) {
                       if (call.name() == "aten::neg") call.set_argument(0, fives);
                       if (call.name() == "aten::sin") {
                         call.replace({c10::IValue(fives)});
                         return;
                       }
                       call.proceed();
                       if (call.name() == "aten::exp") call.set_result(0, fives);
                     }));
  const auto neg = ones.neg(), sin = ones.sin(), exp = ones.exp();
  guard = Guard();
  EXPECT_TRUE(neg.equal(torch::full({2}, -5.0)));
  EXPECT_TRUE(sin.equal(fives));
  EXPECT_TRUE(exp.equal(fives));
}

TEST_F(OpPlaneTest, ANewDeviceArgumentIsDispatchedAnewAndItsPartsAreStillSeen) {
  auto names = std::make_shared<Names>();
  const auto meta = handler([](Call& call) {
    const auto& arguments = call.schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == "device") call.set_argument(i, c10::Device(at::kMeta));
    }
    call.proceed();
  });
  at::Tensor huge;
  {
    const Guard guard = push(Order::record, names);
    const Guard to_meta = push(Order::transform, meta);
    huge = torch::zeros({1 << 20, 1 << 20});
  }
  EXPECT_TRUE(huge.is_meta());
  EXPECT_THAT(names->names, Contains("empty"));
}

TEST_F(OpPlaneTest, AHandlerThatForgetsTheCallIsADefectByName) {
  auto x = torch::ones({2});
  const Guard guard = push(Order::record, handler([](Call&) {}));
  try {
    x.exp();
    FAIL();
  } catch (const InternalError& error) {
    EXPECT_THAT(error.what(), HasSubstr("aten::exp"));
  }
}

TEST_F(OpPlaneTest, AGuardMayEndInsideACallAndInsideABackwardPass) {
  auto x = torch::ones({2}).requires_grad_();
  int calls = 0;
  Guard guard;
  guard = push(Order::record, handler([&](Call& call) {
                 ++calls;
                 guard = Guard();
                 call.proceed();
               }));
  auto y = x.exp();
  EXPECT_EQ(calls, 1);
  Guard other = push(Order::record, handler([](Call& call) { call.proceed(); }));
  y.register_hook([&](at::Tensor) { other = Guard(); });
  y.sum().backward();
  x.exp();  // the thread's earlier state is back with a silent entry; this call drops it
  EXPECT_FALSE(active());
}

TEST_F(OpPlaneTest, RefusesANullHandler) {
  EXPECT_THROW(std::ignore = push(Order::record, nullptr), UserError);
}

TEST_F(OpPlaneTest, TwoThreadsWithGuardsOfTheirOwnDoNotSeeEachOther) {
  const auto work = [](int n, std::size_t* seen) {
    auto names = std::make_shared<Names>(Frame::autograd);
    auto x = torch::ones({2}).requires_grad_();
    const Guard guard = push(Order::record, names);
    for (int i = 0; i < n; ++i) x.exp().sum().backward();
    *seen = static_cast<std::size_t>(std::count(names->names.begin(), names->names.end(), "exp"));
  };
  std::size_t a = 0, b = 0;
  std::thread first(work, 50, &a), second(work, 80, &b);
  first.join();
  second.join();
  EXPECT_EQ(a, 50u);
  EXPECT_EQ(b, 80u);
}

}  // namespace
}  // namespace gradus::plane::op
