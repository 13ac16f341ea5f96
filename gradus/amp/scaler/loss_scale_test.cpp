#include <gradus/amp/scaler/internal/loss_scale.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

#include <tests/support/message_of.h>

namespace gradus::amp::scaler {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using tests::message_of;

std::vector<float> scales(LossScale& scale, const std::string& iterations) {
  std::vector<float> result;
  for (const char iteration : iterations) {
    EXPECT_TRUE(scale.advance(iteration == 'x'));
    result.push_back(scale.value());
  }
  return result;
}

TEST(LossScaleTest, MovesAsLibTorchsOperatorDoes) {
  std::mt19937 engine(3);
  for (int run = 0; run < 40; ++run) {
    const double growth = std::uniform_real_distribution(1.1, 4.0)(engine);
    const double backoff = std::uniform_real_distribution(0.1, 0.9)(engine);
    const std::int64_t interval = std::uniform_int_distribution(1, 4)(engine);
    // Up to float32's end, where growth must stop as theirs does; far from their zero below.
    const double start = std::exp2(std::uniform_real_distribution(-10.0, 127.5)(engine));
    LossScale scale({.init_scale = start,
                     .growth_factor = growth,
                     .backoff_factor = backoff,
                     .growth_interval = interval,
                     .min_scale = 1e-37});
    auto theirs = torch::full({}, start, torch::kFloat);
    auto tracker = torch::zeros({}, torch::kInt);
    for (int i = 0; i < 100 && theirs.item<float>() > 1e-36F; ++i) {
      const bool overflow = std::bernoulli_distribution(0.25)(engine);
      const auto found = torch::full({}, overflow ? 1.0 : 0.0, torch::kFloat);
      at::_amp_update_scale_(theirs, tracker, found, growth, backoff, interval);
      ASSERT_TRUE(scale.advance(overflow));
      if (theirs.item<float>() < 1e-36F) break;
      ASSERT_EQ(scale.value(), theirs.item<float>()) << run << " " << i;
      ASSERT_EQ(scale.growth_tracker(), tracker.item<int>()) << run << " " << i;
    }
  }
}

TEST(LossScaleTest, TotalHysteresisCountsOverflowsUntilTheScaleGrows) {
  // Megatron-LM's DynamicGradScaler: the second overflow backs off, and from then on each does.
  LossScale scale({.init_scale = 64.0, .growth_interval = 3, .hysteresis = 2});
  EXPECT_THAT(scales(scale, "x.x"), ElementsAre(64, 64, 32));
  EXPECT_THAT(scales(scale, "x"), ElementsAre(16));
  EXPECT_THAT(scales(scale, "...x.x"), ElementsAre(16, 16, 32, 32, 32, 16));
}

TEST(LossScaleTest, ConsecutiveHysteresisStartsAgainAfterACleanIteration) {
  LossScale scale({.init_scale = 64.0,
                   .growth_interval = 100,
                   .hysteresis = 2,
                   .hysteresis_counts = Hysteresis::consecutive});
  EXPECT_THAT(scales(scale, "x.x.xx"), ElementsAre(64, 64, 64, 64, 64, 32));
  EXPECT_THAT(scales(scale, "x.x"), ElementsAre(16, 16, 16));
}

TEST(LossScaleTest, AToleratedOverflowStillRestartsTheGrowthInterval) {
  LossScale scale({.init_scale = 64.0, .growth_interval = 3, .hysteresis = 2});
  EXPECT_THAT(scales(scale, "..x..."), ElementsAre(64, 64, 64, 64, 64, 128));
}

TEST(LossScaleTest, StopsAtTheFloorAndReportsTheNextOverflow) {
  LossScale scale({.init_scale = 8.0, .min_scale = 3.0});
  EXPECT_THAT(scales(scale, "xx"), ElementsAre(4, 3));
  EXPECT_FALSE(scale.advance(true));
  EXPECT_EQ(scale.value(), 3.0F);
  EXPECT_EQ(scale.streak(), 3);
  EXPECT_TRUE(scale.advance(false));
  EXPECT_EQ(scale.streak(), 0);
}

TEST(LossScaleTest, GrowthStopsAtTheCeiling) {
  LossScale scale({.init_scale = 8.0, .growth_interval = 1, .max_scale = 24.0});
  EXPECT_THAT(scales(scale, "...x"), ElementsAre(16, 24, 24, 12));
}

TEST(LossScaleTest, AStaticScaleNeverMoves) {
  LossScale scale({.init_scale = 8.0, .growth_interval = 1, .dynamic = false, .min_scale = 8.0});
  EXPECT_THAT(scales(scale, "..xx."), ElementsAre(8, 8, 8, 8, 8));
  EXPECT_EQ(scale.growth_tracker(), 0);
}

TEST(LossScaleTest, ATrackerBeyondTheIntervalStillGrows) {
  LossScale scale({.init_scale = 8.0});
  auto state = scale.state();
  state["growth_interval"] = 3;
  state["_growth_tracker"] = 5;
  scale.load_state(state);
  EXPECT_THAT(scales(scale, "."), ElementsAre(16));
}

TEST(LossScaleTest, OptionsOutOfRangeAreRefused) {
  const auto refused = [](const GradScalerOptions& options) {
    return message_of([&] { const LossScale scale(options); });
  };
  EXPECT_THAT(refused({.growth_factor = 1.0}), HasSubstr("growth_factor must be finite and > 1"));
  EXPECT_THAT(refused({.backoff_factor = 1.0}), HasSubstr("backoff_factor must be in (0, 1)"));
  EXPECT_THAT(refused({.backoff_factor = 0.0}), HasSubstr("backoff_factor"));
  EXPECT_THAT(refused({.growth_interval = 0}), HasSubstr("growth_interval must be >= 1"));
  EXPECT_THAT(refused({.min_scale = 0.0}), HasSubstr("min_scale must be >="));
  EXPECT_THAT(refused({.max_scale = 1e-9}), HasSubstr("max_scale must be >= min_scale"));
  EXPECT_THAT(refused({.hysteresis = 0}), HasSubstr("hysteresis must be >= 1"));
  EXPECT_THAT(refused({.init_scale = NAN}), HasSubstr("the scale must be a finite float32"));
  EXPECT_THAT(refused({.init_scale = 1e39}), HasSubstr("the scale must be a finite float32"));
  EXPECT_THAT(refused({.init_scale = 0.0}), HasSubstr("the scale must be within"));
  EXPECT_THAT(refused({.init_scale = 32.0, .max_scale = 16.0}), HasSubstr("within"));
}

TEST(LossScaleTest, HysteresisSurvivesSaveAndLoad) {
  const GradScalerOptions options{.init_scale = 64.0, .hysteresis = 3};
  LossScale first(options);
  scales(first, "xx");
  EXPECT_EQ(first.state().at("_hysteresis_tracker"), 1.0);
  LossScale second(options);
  second.load_state(first.state());
  EXPECT_THAT(scales(second, "x"), ElementsAre(32));
}

}  // namespace
}  // namespace gradus::amp::scaler
