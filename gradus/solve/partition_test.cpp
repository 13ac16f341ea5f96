#include <gradus/solve/partition.h>

#include <cmath>
#include <numeric>
#include <random>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>

namespace gradus::solve {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The objective of partition.h over all sets of cuts.
double least_cost(const std::vector<double>& times, const std::vector<std::int64_t>& cuts,
                  const PartitionOptions& options, double longest) {
  const double total = std::accumulate(times.begin(), times.end(), 0.0);
  const double even = total / static_cast<double>(options.max_stages);
  double mean = 0.0, places = 0.0;
  for (const std::int64_t cut : cuts)
    if (cut != kNoCut) mean += double(cut), ++places;
  mean /= std::max(places, 1.0);
  double best = std::numeric_limits<double>::infinity();
  for (std::uint32_t mask = 0; mask < 1u << cuts.size(); ++mask) {
    double cost = 0.0, stage = 0.0;
    std::int64_t stages = 1;
    bool allowed = true;
    for (std::size_t i = 0; i < times.size(); ++i) {
      stage += times[i];
      const bool cut = i < cuts.size() && (mask >> i & 1);
      if (!cut && i < cuts.size()) continue;
      allowed = allowed && stage <= longest * even + 1e-9;
      cost += options.balance_weight * (stage / even) * (stage / even);
      stage = 0.0;
      if (!cut) continue;
      ++stages;
      allowed = allowed && cuts[i] != kNoCut;
      if (mean > 0.0) cost += double(cuts[i]) / mean;
    }
    if (allowed && stages <= options.max_stages) best = std::min(best, cost);
  }
  return best;
}

TEST(PartitionTest, EqualsEnumerationOfAllCuts) {
  std::mt19937_64 random(1);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int trial = 0; trial < 300; ++trial) {
    SCOPED_TRACE(trial);
    const int count = draw(1, 12);
    std::vector<double> times{1.0 + draw(0, 9)};
    std::vector<std::int64_t> cuts;
    for (int i = 1; i < count; ++i) {
      times.push_back(draw(0, 9));
      cuts.push_back(draw(0, 9));
    }
    const PartitionOptions options{.max_stages = draw(1, 6),
                                   .balance_weight = 0.25 * draw(1, 8),
                                   .max_stage_ratio = 2.0 + draw(0, 2)};
    const double total = std::accumulate(times.begin(), times.end(), 0.0);
    const double longest =
        std::max(options.max_stage_ratio, *std::max_element(times.begin(), times.end()) /
                                              (total / double(options.max_stages)));
    const Partition result = partition(times, cuts, options);
    EXPECT_NEAR(result.cost, least_cost(times, cuts, options, longest), 1e-9);
    EXPECT_LE(result.ends.size(), static_cast<std::size_t>(options.max_stages));
    EXPECT_EQ(result.ends.back(), count);
    EXPECT_LE(result.longest_ms, longest * total / double(options.max_stages) + 1e-9);
  }
}

TEST(PartitionTest, CutsAtTheNarrowPlaces) {
  // Eight blocks of four operators, narrow between blocks.
  std::vector<double> times(32, 1.0);
  std::vector<std::int64_t> cuts(31, 100);
  for (int i = 3; i < 31; i += 4) cuts[i] = 1;
  const Partition result = partition(times, cuts, {.max_stages = 8});
  EXPECT_THAT(result.ends, ElementsAre(4, 8, 12, 16, 20, 24, 28, 32));
  EXPECT_EQ(result.cut_bytes, 7);
  EXPECT_EQ(result.longest_ms, 4.0);
}

TEST(PartitionTest, NeverCutsWhereItMustNot) {
  const Partition result = partition(
      std::vector<double>(10, 1.0),
      {kNoCut, kNoCut, kNoCut, kNoCut, kNoCut, kNoCut, 5, kNoCut, kNoCut}, {.max_stages = 10});
  EXPECT_THAT(result.ends, ElementsAre(7, 10));
  EXPECT_THAT(partition({1.0, 1.0}, {kNoCut}, {.max_stages = 2}).ends, ElementsAre(2));
}

TEST(PartitionTest, CountsOperatorsWhereNoTimeIsKnown) {
  const Partition result =
      partition(std::vector<double>(6, 0.0), std::vector<std::int64_t>(5, 0), {.max_stages = 3});
  EXPECT_THAT(result.ends, ElementsAre(2, 4, 6));
}

TEST(PartitionTest, RefusesInvalidInput) {
  const auto message = [](auto&&... arguments) -> std::string {
    try {
      partition(arguments...);
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  };
  const std::vector<double> two{1.0, 1.0};
  const std::vector<std::int64_t> cut{1};
  EXPECT_THAT(message(std::vector<double>{}, cut), HasSubstr("at least one operator"));
  EXPECT_THAT(message(two, std::vector<std::int64_t>{}), HasSubstr("got 0 and 2"));
  EXPECT_THAT(message(std::vector<double>{1.0, NAN}, cut), HasSubstr("finite"));
  EXPECT_THAT(message(two, std::vector<std::int64_t>{-1}), HasSubstr("got -1"));
  EXPECT_THAT(message(two, cut, PartitionOptions{.max_stages = 0}), HasSubstr("max_stages"));
  EXPECT_THAT(message(two, cut, PartitionOptions{.balance_weight = 0.0}), HasSubstr("weight"));
  EXPECT_THAT(message(two, cut, PartitionOptions{.max_stage_ratio = 1.0}), HasSubstr("got 1"));
}

}  // namespace
}  // namespace gradus::solve
