#include <gradus/amp/levels/rounding.h>

#include <bit>
#include <cmath>
#include <limits>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

namespace gradus::amp {
namespace {

at::Tensor rounded(const at::Tensor& values, RoundingStream stream) {
  auto result = at::empty_like(values, at::kBFloat16);
  round_stochastically(values, result, stream);
  return result;
}

TEST(RoundingTest, TheMeanIsTheValueAndOnlyTheNeighboursCome) {
  // Between 1 and 1 + 2^-7, at a third, near an end, and negative; a subnormal of bfloat16 too.
  const double step = std::ldexp(1.0, -7);
  const double tiny = std::ldexp(1.0, -133);
  for (const auto& [low, gap, share] :
       {std::tuple(1.0, step, 0.3), std::tuple(1.0, step, 0.001), std::tuple(-2.0, 2 * step, 0.5),
        std::tuple(3 * tiny, tiny, 0.25)}) {
    const std::int64_t n = 200'000;
    const float value = static_cast<float>(low + (low < 0 ? -1 : 1) * share * gap);
    const auto result = rounded(at::full({n}, value, at::kFloat), {.seed = 7}).to(at::kDouble);
    const auto up = (result - low).abs() / gap;  // 0 or 1
    EXPECT_TRUE(((up == 0) | (up == 1)).all().item<bool>()) << low;
    // Four standard deviations of the mean of n draws; the share itself has 16 bits.
    const double p = std::abs(static_cast<double>(value) - low) / gap;
    EXPECT_NEAR(up.mean().item<double>(), p, 4 * std::sqrt(p * (1 - p) / n) + 1e-5) << low;
  }
}

TEST(RoundingTest, WhatBfloat16HoldsStays) {
  const auto values = at::randn({1000}).to(at::kBFloat16);
  EXPECT_TRUE(rounded(values.to(at::kFloat), {.seed = 1}).equal(values));
  const float inf = std::numeric_limits<float>::infinity();
  // The second NaN has all its bits in the lower half.
  const auto special =
      at::tensor({inf, -inf, std::nanf(""), std::bit_cast<float>(0x7F800001U), 0.0F, -0.0F});
  const auto result = rounded(special, {.seed = 1}).to(at::kFloat);
  EXPECT_TRUE(result.narrow(0, 0, 2).equal(special.narrow(0, 0, 2)));
  EXPECT_TRUE(result.narrow(0, 2, 2).isnan().all().item<bool>());
  EXPECT_TRUE(std::signbit(result[5].item<float>()));
}

TEST(RoundingTest, OneSeedGivesOneResultOnAnyNumberOfThreadsAndEachUseAnother) {
  const auto values = at::randn({100'003});
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = rounded(values, {.seed = 5});
  at::set_num_threads(2);
  const auto two = rounded(values, {.seed = 5});
  at::set_num_threads(threads);
  EXPECT_TRUE(one.equal(two));
  EXPECT_FALSE(rounded(values, {.seed = 6}).equal(one));
  RoundingStream stream{.seed = 5};
  auto target = at::empty_like(values, at::kBFloat16);
  round_stochastically(values, target, stream);
  EXPECT_TRUE(target.equal(one));
  round_stochastically(values, target, stream);
  EXPECT_FALSE(target.equal(one));
  EXPECT_EQ(stream.uses, 2U);
}

TEST(RoundingTest, FollowsTheTargetsLayoutAndBumpsItsVersion) {
  const auto values = at::randn({2, 3, 4, 5}).to(at::kBFloat16).to(at::kFloat);
  auto target = at::empty_like(values, at::kBFloat16, at::MemoryFormat::ChannelsLast);
  const auto before = target._version();
  RoundingStream stream;
  round_stochastically(values, target, stream);
  EXPECT_TRUE(target.to(at::kFloat).equal(values));
  EXPECT_EQ(target._version(), before + 1);
}

TEST(RoundingTest, RefusesOtherTypesAndShapes) {
  RoundingStream stream;
  EXPECT_THROW(round_stochastically(at::ones({2}), at::ones({2}), stream), UserError);
  EXPECT_THROW(round_stochastically(at::ones({3}), at::ones({2}).to(at::kBFloat16), stream),
               UserError);
}

}  // namespace
}  // namespace gradus::amp
