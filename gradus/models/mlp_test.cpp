#include <gradus/models/mlp.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

namespace gradus::models {
namespace {

TEST(MlpTest, ComputesLinearLayersWithReluBetween) {
  torch::manual_seed(1);
  Mlp mlp(MlpOptions{{5, 7, 4, 3}});
  mlp->to(torch::kDouble);
  const at::Tensor x = torch::randn({6, 5}, torch::kDouble);
  auto state = mlp->named_parameters();
  const auto layer = [&](const at::Tensor& in, const std::string& n) {
    return torch::matmul(in, state[n + ".weight"].t()) + state[n + ".bias"];
  };
  const at::Tensor expected = layer(layer(layer(x, "0").clamp_min(0), "2").clamp_min(0), "4");
  EXPECT_LT((mlp->forward(x) - expected).abs().max().item<double>(), 1e-13);
}

TEST(MlpTest, OneLayerIsLinear) {
  Mlp mlp(MlpOptions{{3, 2}});
  const at::Tensor x = torch::randn({4, 3});
  auto state = mlp->named_parameters();
  EXPECT_EQ(state.size(), 2u);
  EXPECT_TRUE(
      torch::allclose(mlp->forward(x), torch::matmul(x, state["0.weight"].t()) + state["0.bias"]));
}

TEST(MlpTest, DrawsWeightsInTheDocumentedOrder) {
  Mlp mlp(MlpOptions{{9, 4, 2}});
  mlp->reset_parameters(at::make_generator<at::CPUGeneratorImpl>(3));
  at::Generator again = at::make_generator<at::CPUGeneratorImpl>(3);
  for (const auto& item : mlp->named_parameters()) {
    const double bound = item.key()[0] == '0' ? 1.0 / 3.0 : 0.5;
    EXPECT_TRUE(torch::empty_like(item.value()).uniform_(-bound, bound, again).equal(item.value()))
        << item.key();
  }
}

TEST(MlpTest, CloneIsEqualAndApart) {
  Mlp mlp(MlpOptions{{3, 4, 2}});
  const auto clone = std::dynamic_pointer_cast<MlpImpl>(mlp->clone());
  const at::Tensor x = torch::ones({1, 3});
  const at::Tensor before = mlp->forward(x);
  EXPECT_TRUE(clone->forward(x).equal(before));
  const at::NoGradGuard no_grad;
  for (auto& parameter : clone->parameters()) parameter.add_(1.0);
  EXPECT_TRUE(mlp->forward(x).equal(before));
}

TEST(MlpTest, RefusesTooFewOrEmptyWidths) {
  const auto message = [](const std::vector<std::int64_t>& widths) -> std::string {
    try {
      Mlp mlp(MlpOptions{widths});
    } catch (const c10::ValueError& error) {
      return error.what_without_backtrace();
    }
    return "no error";
  };
  EXPECT_EQ(message({5}), "[mlp] widths must name at least an input and an output; got 1 of them");
  EXPECT_EQ(message({5, 0, 2}), "[mlp] each width must be at least 1; got 0");
}

}  // namespace
}  // namespace gradus::models
