#include <gradus/privacy/training/clipping.h>

#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

#include <tests/support/message_of.h>

namespace gradus::privacy {
namespace {

using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using tests::message_of;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<double> list(const at::Tensor& tensor) {
  const at::Tensor values = tensor.to(at::kDouble).contiguous();
  const auto* data = values.const_data_ptr<double>();
  return {data, data + values.numel()};
}

at::Tensor norms(std::vector<double> values) { return torch::tensor(values, torch::kDouble); }

TEST(PrivacyClippingTest, FlatScalesLongGradientsToTheThreshold) {
  const Clipper clipper({.max_norm = 2.0});
  const ClipWeights weights = clipper.weights({norms({0.0, 1.0, 2.0, 8.0})});
  EXPECT_THAT(list(weights.groups.at(0)), ElementsAre(1.0, 1.0, 1.0, 0.25));
  EXPECT_THAT(list(weights.clipped), ElementsAre(0, 0, 0, 1));
  EXPECT_EQ(clipper.sensitivity(), 2.0);
}

TEST(PrivacyClippingTest, ExamplesThatAreNotFiniteHaveNoWeightInAnyGroup) {
  for (const Clipping policy : {Clipping::flat, Clipping::adaptive, Clipping::automatic}) {
    const Clipper clipper({.policy = policy});
    const ClipWeights weights = clipper.weights({norms({kNaN, 0.5, kInfinity})});
    const auto factors = list(weights.groups.at(0));
    EXPECT_EQ(factors[0], 0.0);
    EXPECT_GT(factors[1], 0.0);
    EXPECT_EQ(factors[2], 0.0);
    EXPECT_THAT(list(weights.finite), ElementsAre(0, 1, 0));
    EXPECT_THAT(list(weights.clipped), ElementsAre(0, 0, 0));
  }
  const Clipper layers({.policy = Clipping::per_layer}, {"a", "b"});
  const ClipWeights weights = layers.weights({norms({kNaN, 0.1}), norms({0.1, 0.1})});
  EXPECT_THAT(list(weights.groups.at(1)), ElementsAre(0.0, 1.0));
}

TEST(PrivacyClippingTest, LayersHaveThresholdsOfTheirOwnAndTheRootOfTheirSquaresForSensitivity) {
  const std::vector<std::string> names{"conv.weight", "conv.bias", "head.weight"};
  const Clipper clipper({.policy = Clipping::per_layer,
                         .layers = {{.names = {"conv"}, .max_norm = 3.0},
                                    {.names = {"head.weight"}, .max_norm = 4.0}}},
                        names);
  EXPECT_EQ(clipper.groups(), 2U);
  EXPECT_EQ(clipper.group_of(1), 0U);
  EXPECT_EQ(clipper.group_of(2), 1U);
  EXPECT_DOUBLE_EQ(clipper.sensitivity(), 5.0);
  const ClipWeights weights = clipper.weights({norms({6.0, 1.0}), norms({2.0, 16.0})});
  EXPECT_THAT(list(weights.groups[0]), ElementsAre(0.5, 1.0));
  EXPECT_THAT(list(weights.groups[1]), ElementsAre(1.0, 0.25));
  EXPECT_THAT(list(weights.clipped), ElementsAre(1, 1));
  const Clipper even({.policy = Clipping::per_layer, .max_norm = 6.0}, {"a", "b", "c", "d"});
  EXPECT_THAT(even.thresholds(), ElementsAre(3.0, 3.0, 3.0, 3.0));
  EXPECT_DOUBLE_EQ(even.sensitivity(), 6.0);
}

TEST(PrivacyClippingTest, FrozenGroupsCountNeitherInTheNumberNorInTheSensitivity) {
  Clipper even({.policy = Clipping::per_layer, .max_norm = 6.0}, {"a", "b", "c", "d", "e"});
  even.set_live({true, true, true, true, false});
  EXPECT_EQ(even.thresholds().front(), 3.0);
  EXPECT_DOUBLE_EQ(even.sensitivity(), 6.0);
  Clipper given(
      {.policy = Clipping::per_layer,
       .layers = {{.names = {"a", "b"}, .max_norm = 3.0}, {.names = {"c"}, .max_norm = 4.0}}},
      {"a", "b", "c"});
  given.set_live({false, true, true});
  EXPECT_DOUBLE_EQ(given.sensitivity(), 5.0);
  given.set_live({false, true, false});
  EXPECT_DOUBLE_EQ(given.sensitivity(), 3.0);
  EXPECT_THAT(message_of([&] { given.set_live({true}); }), HasSubstr("each of 3 parameters"));
}

TEST(PrivacyClippingTest, RefusesLayersThatDoNotFitTheModel) {
  const std::vector<std::string> names{"conv.weight", "conv.bias", "head.weight"};
  const auto refusal = [&](std::vector<ClippedLayer> layers) {
    return message_of([&] {
      Clipper clipper({.policy = Clipping::per_layer, .layers = std::move(layers)}, names);
    });
  };
  EXPECT_THAT(refusal({{.names = {"conv"}}}),
              HasSubstr("'head.weight' must be in a clipped layer"));
  EXPECT_THAT(refusal({{.names = {"conv", "head"}}, {.names = {"head.weight"}}}),
              HasSubstr("it is in layers 0 and 1"));
  EXPECT_THAT(refusal({{.names = {"conv", "head", "tail"}}}), HasSubstr("names 'tail'"));
  EXPECT_THAT(message_of([] { Clipper clipper({.max_norm = 0.0}); }), HasSubstr("got 0"));
  EXPECT_THAT(message_of([] { Clipper clipper({.max_norm = kNaN}); }), HasSubstr("max_norm"));
}

TEST(PrivacyClippingTest, AutomaticNormalisesWithAStabiliser) {
  const Clipper clipper({.policy = Clipping::automatic, .max_norm = 2.0});
  const ClipWeights weights = clipper.weights({norms({0.0, 0.99, 99.99})});
  EXPECT_THAT(list(weights.groups.at(0)),
              ElementsAre(DoubleEq(200.0), DoubleEq(2.0), DoubleEq(0.02)));
  for (const double norm : {1e-9, 0.99, 99.99, 1e9})
    EXPECT_LT(norm * 2.0 / (norm + 0.01), clipper.sensitivity());
}

TEST(PrivacyClippingTest, AScheduleScalesAllThresholds) {
  Clipper clipper({.policy = Clipping::per_layer}, {"a", "b"});
  clipper.set_scale(3.0);
  EXPECT_NEAR(clipper.sensitivity(), 3.0, 1e-14);
  clipper.set_scale(0.5);
  EXPECT_NEAR(clipper.sensitivity(), 0.5, 1e-14);
  EXPECT_THAT(message_of([&] { clipper.set_scale(0.0); }), HasSubstr("got 0"));
}

// Andrew et al. 2021, theorem 1: z^-2 = z_gradients^-2 + (2 sigma_b)^-2.
TEST(PrivacyClippingTest, TheCountsNoiseIsPaidForByTheGradients) {
  const Clipper clipper({.policy = Clipping::adaptive, .count_noise = 0.9});
  const auto shares = clipper.shares(1.1, 100.0);
  EXPECT_EQ(shares.count, 0.9);
  EXPECT_GT(shares.gradients, 1.1);
  EXPECT_NEAR(1.0 / (shares.gradients * shares.gradients) + 1.0 / (1.8 * 1.8), 1.0 / (1.1 * 1.1),
              1e-14);
  EXPECT_THAT(message_of([&] { clipper.shares(1.8, 100.0); }),
              HasSubstr("count_noise must be more"));
  const Clipper unset({.policy = Clipping::adaptive});
  EXPECT_EQ(unset.shares(1.1, 100.0).count, 5.0);
  EXPECT_EQ(unset.shares(1.1, 8.0).count, 1.1);
  EXPECT_EQ(unset.shares(0.0, 100.0).gradients, 0.0);
  EXPECT_EQ(Clipper({}).shares(1.1, 100.0).gradients, 1.1);
}

TEST(PrivacyClippingTest, AdaptiveThresholdsConvergeToTheQuantile) {
  Clipper clipper({.policy = Clipping::adaptive, .max_norm = 0.1, .target_quantile = 0.3});
  const at::Tensor batch = torch::linspace(0.0, 10.0, 1001, torch::kDouble);
  for (int step = 0; step < 300; ++step) {
    const at::Tensor count = clipper.count(clipper.weights({batch}));
    clipper.adapt(count.item<double>(), 1001.0);
  }
  EXPECT_NEAR(clipper.thresholds()[0], 3.0, 0.05);
  EXPECT_EQ(clipper.sensitivity(), clipper.thresholds()[0]);
}

TEST(PrivacyClippingTest, OneAdaptiveStepIsGeometricAndBounded) {
  Clipper clipper({.policy = Clipping::adaptive, .max_norm = 2.0, .greatest_norm = 2.5});
  const ClipWeights weights = clipper.weights({norms({1.0, 2.0, 3.0, kNaN})});
  EXPECT_EQ(clipper.count(weights).item<double>(), 0.0);  // two below, two not
  clipper.adapt(-1.0, 4.0);                               // a quarter below
  EXPECT_DOUBLE_EQ(clipper.adapted_norm(), 2.0 * std::exp(-0.2 * (0.25 - 0.5)));
  for (int i = 0; i < 9; ++i) clipper.adapt(-2.0, 4.0);
  EXPECT_EQ(clipper.adapted_norm(), 2.5);
}

}  // namespace
}  // namespace gradus::privacy
