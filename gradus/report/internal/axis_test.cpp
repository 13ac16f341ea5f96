#include <gradus/report/internal/axis.h>

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gradus::report::internal {
namespace {

using testing::ElementsAre;

std::vector<std::string> labels(const Axis& axis) {
  std::vector<std::string> result;
  for (const auto& tick : axis.ticks) result.push_back(tick.label);
  return result;
}

TEST(AxisTest, LinearTicksAreRound) {
  EXPECT_THAT(labels(rounded_axis(AxisKind::linear, 3.1, 8.4, 5)),
              ElementsAre("2", "4", "6", "8", "10"));
  EXPECT_THAT(labels(rounded_axis(AxisKind::linear, 0.0, 1e-3, 5)),
              ElementsAre("0", "0.0002", "0.0004", "0.0006", "0.0008", "0.0010"));
  EXPECT_THAT(labels(rounded_axis(AxisKind::linear, -1.0, 1.0, 4)),
              ElementsAre("-1.0", "-0.5", "0", "0.5", "1.0"));
  EXPECT_THAT(labels(rounded_axis(AxisKind::linear, 0.0, 12000.0, 4)),
              ElementsAre("0", "5,000", "10,000", "15,000"));
  EXPECT_THAT(labels(rounded_axis(AxisKind::linear, 2.3, 2.9, 4)),
              ElementsAre("2.2", "2.4", "2.6", "2.8", "3.0"));
}

TEST(AxisTest, ByteTicksAreRoundInTheUnitOfTheLargest) {
  const auto axis = rounded_axis(AxisKind::bytes, 0.0, 650.0 * 1048576, 5);
  EXPECT_EQ(axis.unit, "MiB");
  EXPECT_THAT(labels(axis), ElementsAre("0", "200", "400", "600", "800"));
  EXPECT_EQ(axis.ticks[1].value, 200.0 * 1048576);
  EXPECT_THAT(labels(rounded_axis(AxisKind::bytes, 0.0, 1.9 * 1073741824, 4)),
              ElementsAre("0", "0.5", "1.0", "1.5", "2.0"));
}

TEST(AxisTest, LogarithmicTicksAreDecadesAndTheirParts) {
  EXPECT_THAT(labels(rounded_axis(AxisKind::logarithmic, 0.3, 60.0, 5)),
              ElementsAre("0.1", "1", "10", "100"));
  EXPECT_THAT(labels(rounded_axis(AxisKind::logarithmic, 1.5, 9.0, 5)),
              ElementsAre("1", "2", "5", "10"));
  const auto axis = rounded_axis(AxisKind::logarithmic, 1.0, 100.0, 5);
  EXPECT_NEAR(axis.position(10.0), 0.5, 1e-12);
  EXPECT_EQ(axis.position(0.0), 0.0);
}

TEST(AxisTest, CoversItsRangeAndNeverIsEmpty) {
  for (const auto& [low, high] : std::vector<std::pair<double, double>>{{0, 0},
                                                                        {5, 5},
                                                                        {-3, -3},
                                                                        {1e-30, 1e-30},
                                                                        {1e12, 1e12 + 1},
                                                                        {-1e9, 1e9},
                                                                        {0, 1e-9},
                                                                        {0.1, 0.10001},
                                                                        {0, 1}}) {
    for (const auto kind : {AxisKind::linear, AxisKind::bytes}) {
      if (kind == AxisKind::bytes && low < 0) continue;
      SCOPED_TRACE(std::to_string(low) + " .. " + std::to_string(high));
      const auto axis = rounded_axis(kind, low, high, 5);
      EXPECT_LT(axis.low, axis.high);
      EXPECT_LE(axis.low, low);
      EXPECT_GE(axis.high, high);
      EXPECT_GE(axis.ticks.size(), 2u);
      EXPECT_LE(axis.ticks.size(), 9u);
    }
    const auto exact = exact_axis(low, high, 6);
    for (const auto& tick : exact.ticks) {
      EXPECT_GE(exact.position(tick.value), 0.0);
      EXPECT_LE(exact.position(tick.value), 1.0);
    }
  }
}

}  // namespace
}  // namespace gradus::report::internal
