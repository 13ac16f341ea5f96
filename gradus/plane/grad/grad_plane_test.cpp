#include <gradus/plane/grad/grad_plane.h>

#include <algorithm>
#include <map>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/plane/grad/internal/unpack_testing.h>
#include <gradus/plane/saved/saved_plane.h>

namespace gradus::plane::grad {
namespace {

using testing::ElementsAre;

class GradPlaneTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
};

TEST_F(GradPlaneTest, WalksEachNodeOnceUsersBeforeWhatTheyUse) {
  auto w = torch::randn({3, 3}).requires_grad_();
  auto h = at::mm(w, w);
  auto loss = (h.tanh() + h.sigmoid()).sum();
  const auto nodes = walk({loss, h});
  std::map<const void*, std::size_t> place;
  for (std::size_t i = 0; i < nodes.size(); ++i)
    EXPECT_TRUE(place.emplace(nodes[i].id(), i).second);
  for (const auto& node : nodes) {
    for (const auto& edge : node.next()) {
      if (edge.node.defined()) EXPECT_LT(place.at(node.id()), place.at(edge.node.id()));
    }
  }
  EXPECT_EQ(nodes.front().name(), "SumBackward0");
  EXPECT_EQ(nodes.size(), 6u);  // sum, add, tanh, sigmoid, mm, accumulate
  EXPECT_TRUE(nodes.back().leaf().is_same(w));
  EXPECT_FALSE(nodes.front().leaf().defined());
  EXPECT_EQ(gradient_edge(w).node, nodes.back());
}

TEST_F(GradPlaneTest, WalksAGraphOfAHundredThousandNodes) {
  auto x = torch::ones({1}).requires_grad_();
  auto y = x;
  for (int i = 0; i < 100000; ++i) y = y + 1;
  EXPECT_EQ(walk({y}).size(), 100001u);
}

TEST_F(GradPlaneTest, WalkingUnpacksNothing) {
  int unpacked = 0;
  auto w = torch::randn({3, 3}).requires_grad_();
  const auto guard =
      saved::push(saved::Order::offload, std::make_shared<internal::UnpackCounter>(unpacked));
  auto loss = at::mm(w, w).tanh().sum();
  for (const auto& node : walk({loss})) {
    node.name();
    node.next();
    node.leaf();
  }
  EXPECT_EQ(unpacked, 0);
}

TEST_F(GradPlaneTest, BeforeAndAfterSeeGradientsAndMayReplaceThem) {
  auto x = torch::ones({2}).requires_grad_();
  auto y = x * 3;
  auto loss = y.sum();
  std::vector<std::string> order;
  const auto edge = gradient_edge(y);
  const Hook a = before(edge.node, [&](auto& gradients) {
    order.emplace_back("before");
    gradients[0] = gradients[0] * 10;
  });
  const Hook b = after(edge.node, [&](auto& given, const auto& got) {
    order.emplace_back("after");
    EXPECT_TRUE(got[0].equal(torch::full({2}, 10.0f)));
    given[0] = given[0] + 1;
  });
  Hook ended = before(edge.node, [&](auto&) { order.emplace_back("never"); });
  ended = Hook();
  loss.backward();
  EXPECT_THAT(order, ElementsAre("before", "after"));
  EXPECT_TRUE(x.grad().equal(torch::full({2}, 31.0f)));
}

TEST_F(GradPlaneTest, AnyNumberOfAccumulatedHooksOnOneTensorAndAnEarlierForeignOne) {
  struct Foreign : torch::autograd::PostAccumulateGradHook {
    explicit Foreign(std::vector<int>& o) : order(o) {}
    void operator()(const torch::autograd::Variable&) override { order.push_back(0); }
    std::vector<int>& order;
  };
  std::vector<int> order;
  auto w = torch::ones({2}).requires_grad_();
  torch::autograd::impl::set_post_acc_grad_hooks(w, std::make_unique<Foreign>(order));
  const Hook first = on_accumulated(w, [&](const at::Tensor& leaf) {
    order.push_back(1);
    EXPECT_TRUE(leaf.grad().defined());
  });
  Hook second = on_accumulated(w, [&](const at::Tensor&) { order.push_back(2); });
  (w * w).sum().backward();
  EXPECT_THAT(order, ElementsAre(0, 1, 2));
  second = Hook();
  (w * w).sum().backward();
  EXPECT_THAT(order, ElementsAre(0, 1, 2, 0, 1));
}

TEST_F(GradPlaneTest, AccumulatedFiresOnceAWeightUsedTwiceAndNotForGrad) {
  int calls = 0;
  auto w = torch::ones({2, 2}).requires_grad_();
  const Hook hook = on_accumulated(w, [&](const at::Tensor&) { ++calls; });
  at::mm(at::mm(w, w), w).sum().backward();
  EXPECT_EQ(calls, 1);
  torch::autograd::grad({(w * w).sum()}, {w});
  EXPECT_EQ(calls, 1);
}

TEST_F(GradPlaneTest, AccumulatedHookSurvivesAChangeOfDtype) {
  torch::nn::Linear linear(2, 2);
  int calls = 0;
  const Hook hook = on_accumulated(linear->weight, [&](const at::Tensor& leaf) {
    ++calls;
    EXPECT_EQ(leaf.grad().scalar_type(), at::kBFloat16);
  });
  linear->to(at::kBFloat16);
  linear(torch::ones({1, 2}, at::kBFloat16)).sum().backward();
  EXPECT_EQ(calls, 1);
}

TEST_F(GradPlaneTest, AHookMayEndItselfAndTheGradientMayBeDroppedInIt) {
  auto w = torch::ones({2}).requires_grad_();
  int calls = 0;
  Hook hook;
  hook = on_accumulated(w, [&](const at::Tensor& leaf) {
    ++calls;
    leaf.mutable_grad() = at::Tensor();
    hook = Hook();
  });
  (w * w).sum().backward();
  (w * w).sum().backward();
  EXPECT_EQ(calls, 1);
}

TEST_F(GradPlaneTest, AnExceptionInAHookEndsBackwardWithThatException) {
  auto w = torch::ones({2}).requires_grad_();
  {
    const Hook hook = on_accumulated(w, [](const at::Tensor&) { throw UserError("mine"); });
    EXPECT_THROW((w * w).sum().backward(), UserError);
  }
  EXPECT_NO_THROW((w * w).sum().backward());
}

TEST_F(GradPlaneTest, TwoThreadsAccumulateIntoModelsOfTheirOwn) {
  const auto work = [](int* calls) {
    auto w = torch::ones({2}).requires_grad_();
    const Hook hook = on_accumulated(w, [=](const at::Tensor&) { ++*calls; });
    for (int i = 0; i < 50; ++i) (w * w).sum().backward();
  };
  int a = 0, b = 0;
  std::thread first(work, &a), second(work, &b);
  first.join();
  second.join();
  EXPECT_EQ(a, 50);
  EXPECT_EQ(b, 50);
}

TEST_F(GradPlaneTest, DoubleBackwardRunsHooksOfTheGradientGraph) {
  auto x = torch::ones({2}, at::kDouble).requires_grad_();
  auto g = torch::autograd::grad({x.pow(3).sum()}, {x}, {}, true, true)[0];
  int seen = 0;
  const Hook hook = before(gradient_edge(g).node, [&](auto&) { ++seen; });
  g.sum().backward();
  EXPECT_EQ(seen, 1);
  EXPECT_TRUE(x.grad().equal(torch::full({2}, 6.0, at::kDouble)));
}

TEST_F(GradPlaneTest, AHookOnALeafsAccumulatorStaysThoughTheViewIsGone) {
  auto w = torch::ones({2}).requires_grad_();
  int calls = 0;
  const Hook hook = before(gradient_edge(w).node, [&](auto&) { ++calls; });
  (w * w).sum().backward();
  EXPECT_EQ(calls, 1);
}

TEST_F(GradPlaneTest, RefusesWhatHasNoGradientByDescription) {
  EXPECT_THROW(std::ignore = on_accumulated(torch::ones({2}), [](const at::Tensor&) {}), UserError);
  EXPECT_THROW(
      std::ignore = on_accumulated(torch::ones({2}).requires_grad_() * 2, [](const at::Tensor&) {}),
      UserError);
  EXPECT_THROW(gradient_edge(torch::ones({2})), UserError);
  EXPECT_THROW(NodeView().name(), UserError);
  EXPECT_TRUE(walk({torch::ones({2})}).empty());
}

}  // namespace
}  // namespace gradus::plane::grad
