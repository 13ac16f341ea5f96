#include <gradus/privacy/training/sampling.h>

#include <algorithm>
#include <cmath>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/accountant.h>

#include <tests/support/message_of.h>

namespace gradus::privacy {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using tests::message_of;
using Batches = std::vector<std::vector<std::int64_t>>;

Batches all_of(Sampler& sampler) {
  Batches batches;
  while (auto batch = sampler.next()) batches.push_back(std::move(*batch));
  return batches;
}

TEST(PrivacySamplingTest, PoissonBatchesAreBinomialInSizeAndEachExampleIsAsLikely) {
  constexpr std::int64_t kExamples = 50, kSteps = 4000;
  PoissonSampler sampler({.examples = kExamples, .sample_rate = 0.1, .steps = kSteps, .seed = 3});
  std::vector<double> hits(kExamples, 0.0);
  double sizes = 0.0, squares = 0.0;
  for (const auto& batch : all_of(sampler)) {
    EXPECT_TRUE(std::ranges::is_sorted(batch));
    EXPECT_EQ(std::set<std::int64_t>(batch.begin(), batch.end()).size(), batch.size());
    const auto size = static_cast<double>(batch.size());
    sizes += size;
    squares += size * size;
    for (const std::int64_t index : batch) hits.at(static_cast<std::size_t>(index)) += 1.0;
  }
  const double mean = sizes / kSteps, variance = squares / kSteps - mean * mean;
  EXPECT_NEAR(mean, 5.0, 5.0 * std::sqrt(4.5 / kSteps));            // 5 standard errors
  EXPECT_NEAR(variance, 4.5, 5.0 * 4.5 * std::sqrt(2.0 / kSteps));  // a fixed size would give 0
  for (const double count : hits) EXPECT_NEAR(count / kSteps, 0.1, 5.0 * std::sqrt(0.09 / kSteps));
  EXPECT_EQ(sampler.next(), std::nullopt);
}

TEST(PrivacySamplingTest, ARateOfOneTakesAllAndASmallRateDrawsEmptyBatches) {
  PoissonSampler full({.examples = 7, .sample_rate = 1.0, .steps = 2, .seed = 1});
  EXPECT_THAT(*full.next(), ElementsAre(0, 1, 2, 3, 4, 5, 6));
  PoissonSampler rare({.examples = 40, .sample_rate = 1.0 / 40, .steps = 200, .seed = 1});
  std::int64_t empty = 0;
  for (const auto& batch : all_of(rare)) empty += batch.empty() ? 1 : 0;
  EXPECT_EQ(rare.step(), 200);
  EXPECT_GT(empty, 40);  // 200 (1 - 1/40)^40 = 73
  EXPECT_LT(empty, 110);
}

TEST(PrivacySamplingTest, CutsLargeBatchesAtRandomAndTellsTheAccountant) {
  constexpr std::int64_t kSteps = 2000;
  PoissonSampler sampler(
      {.examples = 20, .sample_rate = 0.5, .steps = kSteps, .max_batch_size = 4, .seed = 5});
  std::vector<double> hits(20, 0.0);
  for (const auto& batch : all_of(sampler)) {
    EXPECT_LE(batch.size(), 4U);
    for (const std::int64_t index : batch) hits.at(static_cast<std::size_t>(index)) += 1.0;
  }
  for (const double count : hits) EXPECT_NEAR(count / kSteps, 0.2, 0.045);  // not the first four
  const GaussianSteps steps = sampler.accounted(1.5);
  EXPECT_EQ(steps, (GaussianSteps{.noise_multiplier = 1.5,
                                  .sample_rate = 0.5,
                                  .steps = 1,
                                  .dataset_size = 20,
                                  .max_batch_size = 4}));
}

TEST(PrivacySamplingTest, UniformBatchesHaveOneSizeAndCostTwiceTheNoise) {
  constexpr std::int64_t kSteps = 3000;
  UniformSampler sampler({.examples = 100, .sample_rate = 64.0 / 100, .steps = kSteps, .seed = 2});
  std::vector<double> hits(100, 0.0);
  for (const auto& batch : all_of(sampler)) {
    EXPECT_EQ(batch.size(), 64U);
    EXPECT_EQ(std::set<std::int64_t>(batch.begin(), batch.end()).size(), 64U);
    for (const std::int64_t index : batch) hits.at(static_cast<std::size_t>(index)) += 1.0;
  }
  for (const double count : hits)
    EXPECT_NEAR(count / kSteps, 0.64, 5.0 * std::sqrt(0.64 * 0.36 / kSteps));
  EXPECT_EQ(sampler.accounted(3.0), (GaussianSteps{.noise_multiplier = 1.5, .sample_rate = 0.64}));
  EXPECT_THAT(message_of([] { UniformSampler({.examples = 100, .sample_rate = 0.345}); }),
              HasSubstr("must be a whole number >= 1 for uniform sampling; got 34.5"));
}

TEST(PrivacySamplingTest, UniformBatchesAreAccountedByTheSizeThatIsDrawn) {
  UniformSampler sampler({.examples = 3, .sample_rate = 0.3333333332, .seed = 1});
  EXPECT_EQ(sampler.accounted(1.0).sample_rate, 1.0 / 3.0);
  EXPECT_EQ(sampler.expected_batch_size(), 1.0);
  EXPECT_EQ(sampler.next()->size(), 1U);
}

// The bound that UniformSampler is accounted by, against the mechanism itself on its worst case,
// one step, N = 4, batches of 2: all gradients are -C but the one of the example that is removed,
// +C.
TEST(PrivacySamplingTest, TheUniformAccountCoversTheWorstCaseOfOneStep) {
  constexpr double kNoise = 2.0, kDelta = 1e-3;
  const auto density = [](double x, double mean) {
    return std::exp(-0.5 * (x - mean) * (x - mean) / (kNoise * kNoise));
  };
  // With: half of the batches hold the example, whose sum is 0, the others' -2. Without it: -2.
  const double epsilon = epsilon_of(
      History({UniformSampler({.examples = 4, .sample_rate = 0.5, .seed = 1}).accounted(kNoise)}),
      kDelta);
  double remove = 0.0, add = 0.0, total = 0.0;
  constexpr double kStep = 1e-3;
  for (double x = -30.0; x < 30.0; x += kStep) {
    const double with = 0.5 * density(x, 0.0) + 0.5 * density(x, -2.0), without = density(x, -2.0);
    total += without * kStep;
    remove += std::max(0.0, with - std::exp(epsilon) * without) * kStep;
    add += std::max(0.0, without - std::exp(epsilon) * with) * kStep;
  }
  EXPECT_LE(remove / total, kDelta * (1 + 1e-6));
  EXPECT_GE(remove / total, 0.98 * kDelta);  // and this case does need all of it
  EXPECT_LE(add / total, kDelta);
}

TEST(PrivacySamplingTest, RanksTakeDisjointSharesOfOneDraw) {
  const SamplerOptions one{.examples = 60, .sample_rate = 0.3, .steps = 30, .seed = 9};
  SamplerOptions first = one, second = one;
  first.ranks = second.ranks = 2;
  second.rank = 1;
  PoissonSampler whole(one), left(first), right(second);
  for (const auto& batch : all_of(whole)) {
    auto both = *left.next();
    const auto other = *right.next();
    both.insert(both.end(), other.begin(), other.end());
    std::ranges::sort(both);
    EXPECT_EQ(both, batch);
    EXPECT_LE(std::abs(static_cast<double>(both.size()) - 2.0 * static_cast<double>(other.size())),
              1.0);
  }
}

TEST(PrivacySamplingTest, ASecureDrawIsSharedByBroadcast) {
  EXPECT_THAT(message_of([] { PoissonSampler({.examples = 9, .sample_rate = 0.5, .ranks = 2}); }),
              HasSubstr("a secure one needs SamplerOptions::broadcast"));
  at::Tensor drawn;  // what rank 0 would send
  SamplerOptions options{.examples = 200, .sample_rate = 0.5, .ranks = 2};
  options.broadcast = [&](const at::Tensor& mask) { drawn = mask.clone(); };
  PoissonSampler sender(options);
  options.rank = 1;
  options.broadcast = [&](const at::Tensor& mask) { mask.copy_(drawn); };
  PoissonSampler receiver(options);
  auto all = *sender.next();
  const auto rest = *receiver.next();
  all.insert(all.end(), rest.begin(), rest.end());
  std::ranges::sort(all);
  EXPECT_EQ(std::ranges::adjacent_find(all), all.end());
  EXPECT_EQ(static_cast<std::int64_t>(all.size()), drawn.sum().item<std::int64_t>());
  EXPECT_GT(all.size(), 50U);
}

TEST(PrivacySamplingTest, SecureDrawsDiffer) {
  const SamplerOptions options{.examples = 400, .sample_rate = 0.5};
  PoissonSampler a(options), b(options);
  EXPECT_NE(*a.next(), *b.next());
}

TEST(PrivacySamplingTest, AResumedDrawGoesOnExactly) {
  for (const Sampling kind : {Sampling::poisson, Sampling::uniform}) {
    const SamplerOptions options{.examples = 40, .sample_rate = 0.25, .steps = 20, .seed = 4};
    const auto whole = make_sampler(kind, options), first = make_sampler(kind, options);
    const Batches expected = all_of(*whole);
    for (int i = 0; i < 7; ++i) first->next();
    const auto resumed = make_sampler(kind, options);
    resumed->load_state(first->state());
    EXPECT_EQ(resumed->step(), 7);
    EXPECT_EQ(all_of(*resumed), Batches(expected.begin() + 7, expected.end()));
  }
}

TEST(PrivacySamplingTest, RefusesTheStateOfAnotherDrawByName) {
  const SamplerOptions options{.examples = 40, .sample_rate = 0.25, .steps = 20, .seed = 4};
  PoissonSampler sampler(options);
  const auto refusal = [&](SamplerOptions other, Sampling kind = Sampling::poisson) {
    const auto made = make_sampler(kind, std::move(other));
    made->next();
    return message_of([&] { sampler.load_state(made->state()); });
  };
  SamplerOptions other = options;
  other.examples = 44;
  EXPECT_THAT(refusal(other), HasSubstr("the number of examples of the state must be that of this "
                                        "run, 40; got 44"));
  other = options;
  other.sample_rate = 0.5;
  EXPECT_THAT(refusal(other), HasSubstr("the sample rate of the state"));
  other = options;
  other.max_batch_size = 30;
  EXPECT_THAT(refusal(other), HasSubstr("the largest batch size of the state"));
  other = options;
  other.steps = 21;
  EXPECT_THAT(refusal(other), HasSubstr("the number of steps of the state"));
  other = options;
  other.seed.reset();
  EXPECT_THAT(refusal(other), HasSubstr("must be secure as it was when the state was saved"));
  EXPECT_THAT(refusal(options, Sampling::uniform), HasSubstr("the way of sampling"));
  StateEntries more = sampler.state();
  more.emplace_back("colour", more.back().second);
  EXPECT_THAT(message_of([&] { sampler.load_state(more); }), HasSubstr("'colour'"));
  EXPECT_EQ(sampler.step(), 0);
}

TEST(PrivacySamplingTest, RefusesOptionsOutOfRange) {
  const auto refusal = [](SamplerOptions options) {
    return message_of([&] { PoissonSampler sampler(options); });
  };
  EXPECT_THAT(refusal({.sample_rate = 0.1}), HasSubstr("examples must be >= 1; got 0"));
  EXPECT_THAT(refusal({.examples = 9, .sample_rate = 1.5}), HasSubstr("in (0, 1]; got 1.5"));
  EXPECT_THAT(refusal({.examples = 9, .sample_rate = NAN}), HasSubstr("in (0, 1]"));
  EXPECT_THAT(refusal({.examples = 9, .sample_rate = 0.1, .steps = 0}), HasSubstr("steps"));
  EXPECT_THAT(refusal({.examples = 9, .sample_rate = 0.1, .seed = 1, .rank = 2, .ranks = 2}),
              HasSubstr("got rank 2 of 2"));
}

TEST(PrivacySamplingTest, CutsALogicalBatchIntoMicroBatches) {
  EXPECT_THAT(micro_batches({1, 2, 3, 4, 5}, 2),
              ElementsAre(ElementsAre(1, 2), ElementsAre(3, 4), ElementsAre(5)));
  EXPECT_TRUE(micro_batches({}, 2).empty());
  EXPECT_THAT(message_of([] { micro_batches({1}, 0); }), HasSubstr("must be >= 1; got 0"));
}

}  // namespace
}  // namespace gradus::privacy
