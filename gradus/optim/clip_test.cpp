#include <gradus/optim/clip.h>

#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/optim/sgd.h>

#include <tests/support/message_of.h>

namespace gradus::optim {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");

at::Tensor parameter_with(const at::Tensor& gradient) {
  auto w = torch::zeros_like(gradient).requires_grad_();
  w.mutable_grad() = gradient.clone();
  return w;
}

std::vector<at::Tensor> three_and_four() {
  return {parameter_with(torch::tensor({3.0}, at::kDouble)),
          torch::zeros({2}, torch::requires_grad()),
          parameter_with(torch::tensor({4.0}, at::kDouble))};
}

TEST(ClipTest, ScalesAllGradientsByTheirCommonNorm) {
  const auto parameters = three_and_four();
  EXPECT_DOUBLE_EQ(clip_gradient_norm(parameters, 1.0), 5.0);
  EXPECT_DOUBLE_EQ(parameters[0].grad().item<double>(), 3.0 / (5.0 + 1e-6));
  EXPECT_DOUBLE_EQ(parameters[2].grad().item<double>(), 4.0 / (5.0 + 1e-6));
  EXPECT_FALSE(parameters[1].grad().defined());
}

TEST(ClipTest, GradientsBelowTheBoundStayBitEqual) {
  const auto parameters = three_and_four();
  EXPECT_DOUBLE_EQ(clip_gradient_norm(parameters, 5.1), 5.0);
  EXPECT_EQ(parameters[0].grad().item<double>(), 3.0);
  EXPECT_DOUBLE_EQ(clip_gradient_norm(parameters, kInfinity), 5.0);
  EXPECT_EQ(parameters[2].grad().item<double>(), 4.0);
}

TEST(ClipTest, TakesOtherNorms) {
  EXPECT_DOUBLE_EQ(gradient_norm(three_and_four(), 1.0), 7.0);
  EXPECT_DOUBLE_EQ(gradient_norm(three_and_four(), kInfinity), 4.0);
  EXPECT_NEAR(gradient_norm(three_and_four(), 3.0), std::cbrt(91.0), 1e-12);
  EXPECT_EQ(gradient_norm({}), 0.0);
  EXPECT_EQ(gradient_norm({parameter_with(torch::ones({0})), parameter_with(torch::tensor({-2.0}))},
                          kInfinity),
            2.0);
}

TEST(ClipTest, AgreesWithLibTorchOnRandomGradients) {
  for (const double norm_type : {1.0, 2.0, 3.5, kInfinity}) {
    SCOPED_TRACE(norm_type);
    torch::manual_seed(5);
    std::vector<at::Tensor> ours, theirs;
    for (const int64_t n : {1, 7, 64, 1000}) {
      ours.push_back(parameter_with(torch::randn({n})));
      theirs.push_back(parameter_with(ours.back().grad()));
    }
    const double expected = torch::nn::utils::clip_grad_norm_(theirs, 0.7, norm_type);
    EXPECT_NEAR(clip_gradient_norm(ours, 0.7, {.norm_type = norm_type}), expected, 1e-5 * expected);
    for (std::size_t i = 0; i < ours.size(); ++i)
      EXPECT_TRUE(torch::allclose(ours[i].grad(), theirs[i].grad(), 1e-5));
  }
}

TEST(ClipTest, SixteenBitGradientsAreSummedInFloat32AndDtypesMayMix) {
  const auto parameters =
      std::vector<at::Tensor>{parameter_with(torch::ones({70000}, at::kBFloat16)),
                              parameter_with(torch::ones({30000}, at::kFloat)),
                              parameter_with(torch::full({4}, 300.0, at::kHalf))};
  EXPECT_NEAR(gradient_norm(parameters), std::sqrt(100000.0 + 4 * 90000.0), 1e-2);
}

TEST(ClipTest, SharedGradientCountsOnce) {
  const auto w = parameter_with(torch::tensor({3.0}, at::kDouble));
  EXPECT_DOUBLE_EQ(clip_gradient_norm({w, w}, 1.0), 3.0);
  EXPECT_DOUBLE_EQ(w.grad().item<double>(), 3.0 / (3.0 + 1e-6));
}

TEST(ClipTest, NonFiniteNormIsReturnedAndNotHidden) {
  auto nan = three_and_four();
  nan[0].mutable_grad().fill_(kNan);
  EXPECT_TRUE(std::isnan(clip_gradient_norm(nan, 1.0)));
  EXPECT_TRUE(std::isnan(nan[2].grad().item<double>()));
  auto infinite = three_and_four();
  infinite[0].mutable_grad().fill_(kInfinity);
  EXPECT_EQ(clip_gradient_norm(infinite, 1.0), kInfinity);
  EXPECT_TRUE(std::isnan(infinite[0].grad().item<double>()));
  EXPECT_EQ(infinite[2].grad().item<double>(), 0.0);
}

TEST(ClipTest, ErrorIfNonfiniteLeavesTheGradientsUntouched) {
  auto parameters = three_and_four();
  parameters[0].mutable_grad().fill_(kNan);
  EXPECT_THROW(clip_gradient_norm(parameters, 1.0, {.error_if_nonfinite = true}), UserError);
  EXPECT_EQ(parameters[2].grad().item<double>(), 4.0);
}

TEST(ClipTest, ValueClippingLimitsEachElementAndKeepsNan) {
  const auto w = parameter_with(torch::tensor({-3.0, 0.5, 3.0, kNan}));
  clip_gradient_value({w}, 1.0);
  EXPECT_TRUE(torch::equal(w.grad().slice(0, 0, 3), torch::tensor({-1.0, 0.5, 1.0})));
  EXPECT_TRUE(w.grad()[3].isnan().item<bool>());
}

TEST(ClipTest, MisuseIsRefused) {
  EXPECT_THROW(clip_gradient_norm(three_and_four(), -1.0), UserError);
  EXPECT_THROW(clip_gradient_norm(three_and_four(), kNan), UserError);
  EXPECT_THROW(gradient_norm(three_and_four(), 0.0), UserError);
  EXPECT_THROW(gradient_norm(three_and_four(), kNan), UserError);
  EXPECT_THROW(clip_gradient_value(three_and_four(), kInfinity), UserError);
  const auto sparse = torch::zeros({2, 2}, torch::requires_grad());
  sparse.mutable_grad() = torch::ones({2, 2}).to_sparse();
  EXPECT_THROW(gradient_norm({sparse}), UserError);
}

TEST(ClipTest, NormsOfGroupsMakeUpTheWhole) {
  auto a = torch::zeros({2}, torch::requires_grad());
  auto b = torch::zeros({2}, torch::requires_grad());
  auto c = torch::zeros({2}, torch::requires_grad());
  a.mutable_grad() = torch::tensor({3.0F, 0.0F});
  b.mutable_grad() = torch::tensor({0.0F, 4.0F});
  const SGD optimizer({{.parameters = {a, b}}, {.parameters = {c}}}, SGDOptions{});
  EXPECT_EQ(gradient_norm_by_group(optimizer), (std::vector<double>{5.0, 0.0}));
  c.mutable_grad() = torch::tensor({12.0F, 0.0F});
  EXPECT_EQ(gradient_norm_by_group(optimizer), (std::vector<double>{5.0, 12.0}));
  EXPECT_EQ(gradient_norm({a, b, c}), 13.0);
  EXPECT_EQ(gradient_norm_by_group(optimizer, 1.0), (std::vector<double>{7.0, 12.0}));
}

TEST(ClipTest, GradientThatOverlapsItselfIsMeasuredButNotScaled) {
  auto a = parameter_with(torch::ones({4}));
  auto b = torch::ones({3, 4}).requires_grad_();
  b.mutable_grad() = torch::ones({1, 4}).expand({3, 4});
  EXPECT_NEAR(gradient_norm({a, b}), 4.0, 1e-6);
  const auto message = "gradient of parameter 1 must not overlap itself in memory";
  EXPECT_THAT(tests::message_of([&] { clip_gradient_norm({a, b}, 1.0); }),
              testing::HasSubstr(message));
  EXPECT_THAT(tests::message_of([&] { clip_gradient_value({a, b}, 0.5); }),
              testing::HasSubstr(message));
  EXPECT_TRUE(torch::equal(a.grad(), torch::ones({4})));
  EXPECT_NEAR(clip_gradient_norm({a, b}, 8.0), 4.0, 1e-6);  // nothing to scale
}

}  // namespace
}  // namespace gradus::optim
