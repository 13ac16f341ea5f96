#include <gradus/privacy/accountant/history.h>

#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>

namespace gradus::privacy {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

TEST(HistoryTest, MergesStepsOfEqualParametersInWhateverOrderTheyCome) {
  const GaussianSteps a{.noise_multiplier = 1.1, .sample_rate = 0.01, .steps = 3};
  const GaussianSteps b{.noise_multiplier = 1.2, .sample_rate = 0.01, .steps = 5};
  History history;
  for (const GaussianSteps& steps : {a, b, a, a, b}) history.add(steps);
  GaussianSteps all_a = a, all_b = b;
  all_a.steps = 9, all_b.steps = 10;
  EXPECT_THAT(history.entries(), ElementsAre(all_a, all_b));
  EXPECT_EQ(history.steps(), 19);
}

TEST(HistoryTest, KeepsLimitedBatchesApartAndDropsNoSteps) {
  History history;
  history.add({.noise_multiplier = 1.0, .sample_rate = 0.1, .steps = 0});
  EXPECT_THAT(history.entries(), IsEmpty());
  history.add({.noise_multiplier = 1.0, .sample_rate = 0.1});
  history.add(
      {.noise_multiplier = 1.0, .sample_rate = 0.1, .dataset_size = 100, .max_batch_size = 20});
  EXPECT_EQ(history.entries().size(), 2u);
}

TEST(HistoryTest, RestoresFromItsEntries) {
  History history;
  history.add({.noise_multiplier = 1.0, .sample_rate = 0.1, .steps = 7});
  history.add({.noise_multiplier = 0.0, .sample_rate = 1.0, .steps = 2});
  EXPECT_EQ(History(history.entries()), history);
}

TEST(HistoryTest, AddsItselfToItself) {
  History history({{.noise_multiplier = 1.0, .sample_rate = 0.1, .steps = 7}});
  history.add(history);
  EXPECT_EQ(history.steps(), 14);
}

TEST(HistoryTest, RefusesValuesOutsideTheirRangesAndCountsNothing) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  History history;
  for (const double noise : {-1.0, nan, infinity})
    EXPECT_THROW(history.add({.noise_multiplier = noise, .sample_rate = 0.1}), UserError) << noise;
  for (const double rate : {-0.1, 1.1, nan})
    EXPECT_THROW(history.add({.noise_multiplier = 1.0, .sample_rate = rate}), UserError) << rate;
  EXPECT_THROW(history.add({.sample_rate = 0.1, .steps = -1}), UserError);
  EXPECT_THROW(history.add({.sample_rate = 0.1, .max_batch_size = -1}), UserError);
  EXPECT_THROW(history.add({.sample_rate = 0.1, .dataset_size = -1}), UserError);
  EXPECT_THAT(
      [&] { history.add({.sample_rate = 0.1, .max_batch_size = 64}); },
      ThrowsMessage<UserError>(HasSubstr("max_batch_size 64 needs dataset_size > 0; got 0")));
  EXPECT_THAT([&] { history.add({.sample_rate = 1.5}); },
              ThrowsMessage<UserError>(
                  HasSubstr("sample_rate must be in [0, 1]; got 1.5. It is the expected "
                            "batch size over the number of examples")));
  EXPECT_EQ(history, History());
}

TEST(HistoryTest, RefusesMoreStepsThanItCanCount) {
  History history({{.sample_rate = 0.1, .steps = std::int64_t{1} << 62}});
  const History before = history;
  EXPECT_THROW(history.add({.sample_rate = 0.1, .steps = 1}), UserError);
  EXPECT_THROW(history.add(History({{.sample_rate = 0.2, .steps = 1}})), UserError);
  EXPECT_THROW(history.add({.sample_rate = 0.1, .steps = std::numeric_limits<std::int64_t>::max()}),
               UserError);
  EXPECT_EQ(history, before);
}

}  // namespace
}  // namespace gradus::privacy
