#include <gradus/base/step_boundary.h>

#include <vector>

#include <gtest/gtest.h>

namespace gradus::base {
namespace {

TEST(StepBoundaryTest, TellsListenersInOrderUntilTheyUnsubscribe) {
  StepBoundary boundary;
  std::vector<int> told;
  auto first =
      boundary.subscribe([&](std::int64_t step) { told.push_back(static_cast<int>(step)); });
  const auto second =
      boundary.subscribe([&](std::int64_t step) { told.push_back(100 + static_cast<int>(step)); });
  boundary.notify(1);
  first = StepBoundary::Subscription();
  boundary.notify(2);
  EXPECT_EQ(told, (std::vector<int>{1, 101, 102}));
}

TEST(StepBoundaryTest, AListenerMayUnsubscribeItselfAndOthersWhileItIsTold) {
  StepBoundary boundary;
  int calls = 0;
  StepBoundary::Subscription self, other;
  self = boundary.subscribe([&](std::int64_t) {
    ++calls;
    self = StepBoundary::Subscription();
    other = StepBoundary::Subscription();
  });
  other = boundary.subscribe([&](std::int64_t) { calls += 10; });
  boundary.notify(1);
  boundary.notify(2);
  EXPECT_EQ(calls, 1);
}

TEST(StepBoundaryTest, SubscriptionMayOutliveTheBoundary) {
  StepBoundary::Subscription subscription;
  {
    StepBoundary boundary;
    subscription = boundary.subscribe([](std::int64_t) {});
  }
  SUCCEED();
}

}  // namespace
}  // namespace gradus::base
