#include <gradus/amp/autocast/autocast.h>

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

namespace gradus::amp {
namespace {

TEST(AutocastTest, CastsMatrixProductsInsideAndNotOutside) {
  auto a = torch::ones({2, 2});
  {
    const AutocastGuard guard({.dtype = at::kBFloat16});
    EXPECT_EQ(at::mm(a, a).scalar_type(), at::kBFloat16);
    {
      const AutocastGuard off({.enabled = false});
      EXPECT_EQ(at::mm(a, a).scalar_type(), at::kFloat);
    }
    EXPECT_EQ(at::mm(a, a).scalar_type(), at::kBFloat16);
  }
  EXPECT_EQ(at::mm(a, a).scalar_type(), at::kFloat);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(AutocastTest, RestoresEverySettingAlsoByException) {
  const auto dtype = at::autocast::get_autocast_dtype(at::kCPU);
  try {
    const AutocastGuard guard({.dtype = at::kHalf, .cache = false});
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
    throw std::runtime_error("x");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), dtype);
}

TEST(AutocastTest, CacheIsEmptyAfterTheOutermostGuard) {
  auto w = torch::ones({2, 2}).requires_grad_();
  const auto x = torch::ones({2, 2});
  const auto uses = w.use_count();
  {
    const AutocastGuard outer({.dtype = at::kBFloat16});
    const AutocastGuard inner({.dtype = at::kBFloat16});
    at::mm(x, w);
  }
  EXPECT_EQ(w.use_count(), uses);
}

TEST(AutocastTest, CapturedStateIsEnteredAgainAndLeft) {
  AutocastState inside;
  {
    const AutocastGuard guard({.dtype = at::kHalf, .cache = false});
    inside = AutocastState::capture();
  }
  {
    const AutocastStateGuard again(inside);
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kHalf);
    EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
  }
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
}

TEST(AutocastTest, RefusesADtypeThatIsNoLowerPrecision) {
  EXPECT_THROW(AutocastGuard({.dtype = at::kDouble}), UserError);
  EXPECT_THROW(AutocastGuard({.device = at::kMeta, .dtype = at::kHalf}), UserError);
}

}  // namespace
}  // namespace gradus::amp
