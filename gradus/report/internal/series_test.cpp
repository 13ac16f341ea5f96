#include <gradus/report/internal/series.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include <gtest/gtest.h>

namespace gradus::report::internal {
namespace {

TEST(SeriesTest, DownsamplingKeepsEndsExtremesAndGapsWithinItsBound) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal;
  for (const bool gaps : {false, true}) {
    for (const std::size_t count : {0u, 1u, 999u, 1000u, 1001u, 1500u, 123457u}) {
      SCOPED_TRACE(count);
      std::vector<double> values(count);
      for (auto& value : values) value = normal(random);
      if (count > 900) {
        values[count / 3] = 1e6;
        values[count / 2] = -1e6;
        if (gaps) values[count / 5] = std::nan("");
      }
      const auto kept = downsample(values, 1000);
      EXPECT_LE(kept.size(), 1000u);
      EXPECT_EQ(kept.size(), count <= 1000 ? count : kept.size());
      EXPECT_TRUE(std::is_sorted(kept.begin(), kept.end(), std::less_equal<>()) || count < 2);
      const auto has = [&](std::size_t i) {
        return std::binary_search(kept.begin(), kept.end(), i);
      };
      if (count > 900) {
        EXPECT_GE(kept.size(), 600u);
        EXPECT_TRUE(has(0) && has(count - 1) && has(count / 3) && has(count / 2));
        if (gaps) EXPECT_TRUE(has(count / 5));
      }
    }
  }
}

TEST(SeriesTest, SmoothingOfAConstantIsThatConstantFromTheStart) {
  const auto result = smooth({{1, 4.0},
                              {2, std::nan("")},
                              {3, 4.0},
                              {4, std::numeric_limits<double>::infinity()},
                              {5, 4.0}},
                             10.0);
  EXPECT_DOUBLE_EQ(result[0].y, 4.0);
  EXPECT_TRUE(std::isnan(result[1].y));
  EXPECT_DOUBLE_EQ(result[2].y, 4.0);
  EXPECT_TRUE(std::isinf(result[3].y));
  EXPECT_DOUBLE_EQ(result[4].y, 4.0);
}

TEST(SeriesTest, SmoothingEqualsTheWeightedMeanOfItsDefinition) {
  const std::vector<Point> points{{0, 1.0}, {1, 5.0}, {2, -2.0}};
  const double r = std::exp(-1.0 / 3.0);
  EXPECT_NEAR(smooth(points, 3.0)[2].y, (r * r * 1.0 + r * 5.0 - 2.0) / (r * r + r + 1.0), 1e-12);
}

}  // namespace
}  // namespace gradus::report::internal
