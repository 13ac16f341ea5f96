#include <gradus/train/plan.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>

namespace gradus::train {
namespace {

using testing::ElementsAre;

TEST(PlanTest, SizesAreEqualButForOne) {
  EXPECT_THAT((Plan{.micro_batches = 3}.sizes(8)), ElementsAre(3, 3, 2));
  EXPECT_THAT((Plan{.micro_batches = 4}.sizes(2)), ElementsAre(1, 1));
  EXPECT_EQ((Plan{.micro_batches = 3}.largest(8)), 3);
}

TEST(PlanTest, ParsesRequests) {
  EXPECT_TRUE(parse_plan_request("auto", 8, 4).automatic);
  EXPECT_EQ(parse_plan_request("none", 8, 4).plan, Plan{});
  EXPECT_EQ(parse_plan_request("micro-batch=3,recompute=2", 8, 4).plan,
            (Plan{.micro_batches = 3, .recomputed = 2}));
  EXPECT_EQ(parse_plan_request("recompute=0,micro-batch=8", 8, 4).plan, Plan{});
  for (const char* text :
       {"", "fast", "micro-batch=3", "micro-batch=9,recompute=0", "micro-batch=3,recompute=5",
        "micro-batch=3,recompute=x", "micro-batch=3,recompute=1,recompute=1", "micro-batch=3,,"}) {
    SCOPED_TRACE(text);
    EXPECT_THROW(parse_plan_request(text, 8, 4), UserError);
  }
}

TEST(PlanTest, SaysHowAPlanFits) {
  EXPECT_EQ(describe_plan({.micro_batches = 3, .recomputed = 2}, 8, 6),
            "micro-batch 3 (3 a step), 2 of 6 blocks recomputed");
  EXPECT_EQ(describe_plan({.micro_batches = 1, .budget = true}, 8, 6),
            "micro-batch 8 (1 a step), saved values dropped under pressure");
}

}  // namespace
}  // namespace gradus::train
