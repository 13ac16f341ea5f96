#include <gradus/models/activation.h>

#include <cmath>
#include <limits>

#include <gtest/gtest.h>
#include <torch/types.h>

namespace gradus::models {
namespace {

TEST(ActivationTest, TemperedSigmoidIsTheFormulaAndByDefaultTanh) {
  const at::Tensor x = torch::linspace(-4, 4, 33, torch::kDouble);
  const ActivationOptions tempered{.kind = Activation::tempered_sigmoid,
                                   .scale = 1.58,
                                   .inverse_temperature = 3.0,
                                   .offset = 0.71};
  EXPECT_TRUE(
      torch::allclose(activate(x, tempered), 1.58 / (1 + torch::exp(-3.0 * x)) - 0.71, 0.0, 1e-15));
  EXPECT_TRUE(
      torch::allclose(activate(x, {.kind = Activation::tempered_sigmoid}), x.tanh(), 0.0, 1e-15));
}

TEST(ActivationTest, TanhAndReluAreTheirOperators) {
  const at::Tensor x = torch::linspace(-4, 4, 33, torch::kDouble);
  EXPECT_TRUE(activate(x, {}).equal(x.tanh()));
  EXPECT_TRUE(activate(x, {.kind = Activation::relu}).equal(x.clamp_min(0)));
}

TEST(ActivationTest, SaysWhatIsImpossibleWhereItIsUsed) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(defect(ActivationOptions{.scale = -1}), "");  // not asked of tanh
  const auto tempered = [](double scale, double inverse_temperature, double offset) {
    return defect(
        ActivationOptions{Activation::tempered_sigmoid, scale, inverse_temperature, offset});
  };
  EXPECT_EQ(tempered(2, 2, 0), "");
  EXPECT_EQ(tempered(0, 2, 0), "scale must be finite and > 0; got 0.000000");
  EXPECT_EQ(tempered(2, kInfinity, 0), "inverse_temperature must be finite and > 0; got inf");
  EXPECT_EQ(tempered(2, 2, kInfinity), "offset must be finite; got inf");
}

}  // namespace
}  // namespace gradus::models
