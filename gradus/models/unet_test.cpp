#include <gradus/models/unet.h>

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/conv.h>
#include <torch/types.h>

#include <gradus/models/internal/model_testing.h>

namespace gradus::models {
namespace {

using internal::error_of;
using internal::gap;

constexpr UNetOptions kTiny{
    .in_channels = 2, .out_channels = 3, .width = 4, .levels = 2, .groups = 2};

class UNetTest : public internal::ModelTest {};

// The whole model again from its state.
at::Tensor reference_result(const UNetOptions& options,
                            const std::map<std::string, at::Tensor>& state, at::Tensor x) {
  const auto stage = [&](at::Tensor y, const std::string& name) {
    for (const char* n : {"1", "2"}) {
      y = torch::conv2d(y, state.at(name + ".conv" + n + ".weight"), {}, 1, 1);
      y = torch::group_norm(y, options.groups, state.at(name + ".norm" + n + ".weight"),
                            state.at(name + ".norm" + n + ".bias"))
              .clamp_min(0);
    }
    return y;
  };
  std::vector<at::Tensor> skips;
  for (int n = 0; n < options.levels; ++n) {
    skips.push_back(stage(x, "down." + std::to_string(n)));
    const at::Tensor& y = skips.back();
    x = y.view({y.size(0), y.size(1), y.size(2) / 2, 2, y.size(3) / 2, 2}).amax({3, 5});
  }
  x = stage(x, "bottom");
  for (int n = 0; n < options.levels; ++n) {
    const std::string name = "up." + std::to_string(n);
    // Windows of 2x2 do not overlap: each value makes one window.
    const at::Tensor windows =
        torch::einsum("bihw,iokl->bohkwl", {x, state.at(name + ".up.weight")});
    const at::Tensor grown =
        windows.reshape({x.size(0), x.size(1) / 2, 2 * x.size(2), 2 * x.size(3)}) +
        state.at(name + ".up.bias").view({-1, 1, 1});
    x = stage(torch::cat({skips.back(), grown}, 1), name + ".stage");
    skips.pop_back();
  }
  return torch::einsum("bihw,oi->bohw", {x, state.at("out.weight").flatten(1)}) +
         state.at("out.bias").view({-1, 1, 1});
}

TEST_F(UNetTest, ComputesTheModelWrittenOutInElementaryOperators) {
  UNet unet(kTiny);
  unet->to(torch::kDouble);
  internal::disturb(*unet);
  const at::Tensor x = torch::randn({2, 2, 8, 12}, torch::kDouble);
  const at::Tensor y = unet->forward(x);
  ASSERT_EQ(y.sizes(), (std::vector<std::int64_t>{2, 3, 8, 12}));
  EXPECT_LT(gap(y, reference_result(kTiny, internal::state_of(*unet), x)), 1e-11);
}

TEST_F(UNetTest, PiecesRunOneByOneGiveTheBitsOfForward) {
  UNet unet(kTiny);
  const at::Tensor image = torch::randn({1, 2, 8, 8});
  at::Tensor x = image;
  std::vector<at::Tensor> skips;
  for (const auto& stage : unet->down()) {
    skips.push_back(stage->forward(x));
    x = at::max_pool2d(skips.back(), {2, 2});
  }
  x = unet->bottom->forward(x);
  for (const auto& level : unet->up()) {
    x = level->forward(x, skips.back());
    skips.pop_back();
  }
  EXPECT_TRUE(unet->out->forward(x).equal(unet->forward(image)));
}

TEST_F(UNetTest, CountsParametersByFormula) {
  for (const std::int64_t levels : {1, 2, 3}) {
    UNetOptions options = kTiny;
    options.levels = levels;
    EXPECT_EQ(internal::value_count(*UNet(options)), parameter_count(options));
  }
  // The network of the paper, 31 million without norms and with biases of its convolutions.
  EXPECT_NEAR(static_cast<double>(parameter_count({.out_channels = 2, .width = 64})), 31.0e6,
              0.1e6);
}

TEST_F(UNetTest, StateNamesAreThoseOfTheDocumentation) {
  std::set<std::string> expected{"up.0.up.weight", "up.0.up.bias", "out.weight", "out.bias"};
  for (const std::string stage : {"down.0", "bottom", "up.0.stage"}) {
    for (const char* name : {"conv1.weight", "norm1.weight", "norm1.bias", "conv2.weight",
                             "norm2.weight", "norm2.bias"}) {
      expected.insert(stage + "." + name);
    }
  }
  UNetOptions options = kTiny;
  options.levels = 1;
  EXPECT_EQ(internal::names_of(*UNet(options)), expected);
}

TEST_F(UNetTest, DrawsWeightsInTheDocumentedOrderFromTheGivenGenerator) {
  UNet unet(kTiny);
  unet->reset_parameters(at::make_generator<at::CPUGeneratorImpl>(7));
  at::Generator again = at::make_generator<at::CPUGeneratorImpl>(7);
  for (const auto& item : unet->named_parameters()) {
    const at::Tensor& value = item.value();
    if (value.dim() != 4) continue;
    const bool transposed = item.key().ends_with(".up.weight");
    const std::int64_t inputs = transposed ? value.size(0) : value[0].numel();
    const double deviation = std::sqrt(2.0 / static_cast<double>(inputs));
    EXPECT_TRUE(torch::empty_like(value).normal_(0.0, deviation, again).equal(value)) << item.key();
  }
}

TEST_F(UNetTest, GradientsReachEveryParameterAndTheImage) {
  UNet unet(kTiny);
  const at::Tensor image = torch::randn({2, 2, 8, 8}).requires_grad_();
  EXPECT_EQ(internal::out_of_reach(*unet, unet->forward(image).square().sum()), "");
  EXPECT_GT(image.grad().abs().max().item<double>(), 0);
}

TEST_F(UNetTest, LearnsASmallBatchByHeart) {
  UNet unet(kTiny);
  const at::Tensor image = torch::randn({2, 2, 8, 8});
  const at::Tensor target = image.cumsum(2).slice(1, 0, 1).tanh().repeat({1, 3, 1, 1});
  const auto loss = [&] { return (unet->forward(image) - target).square().mean(); };
  const double before = loss().item<double>();
  EXPECT_LT(internal::loss_after_training(*unet, loss, 150, 0.02), 0.05 * before);
}

TEST_F(UNetTest, CloneIsEqualAndApart) {
  UNet unet(kTiny);
  const at::Tensor image = torch::randn({2, 2, 8, 8});
  internal::expect_clone_equal_and_apart<UNetImpl>(
      *unet, [&](UNetImpl& model) { return model.forward(image); });
}

TEST_F(UNetTest, RefusesImpossibleOptions) {
  const struct {
    UNetOptions options;
    std::string message;
  } cases[] = {
      {{.in_channels = 0}, "in_channels must be at least 1; got 0"},
      {{.out_channels = 0}, "out_channels must be at least 1; got 0"},
      {{.width = -1}, "width must be at least 1; got -1"},
      {{.groups = 0}, "groups must be at least 1; got 0"},
      {{.levels = 0}, "levels must be between 1 and 16; got 0"},
      {{.levels = 17}, "levels must be between 1 and 16; got 17"},
  };
  EXPECT_EQ(defect(kTiny), "");
  for (const auto& [options, message] : cases) {
    EXPECT_EQ(defect(options), message);
    EXPECT_EQ(error_of([&] { UNet unet(options); }), "[unet] " + message);
  }
}

TEST_F(UNetTest, RefusesImagesOfAnotherShape) {
  UNet unet(kTiny);
  EXPECT_EQ(error_of([&] { unet->forward(torch::zeros({1, 1, 8, 8})); }),
            "[unet] images must have shape [batch, 2, height, width]; got [1, 1, 8, 8]");
  EXPECT_EQ(error_of([&] { unet->forward(torch::zeros({1, 2, 8, 10})); }),
            "[unet] height and width must be multiples of 2^levels = 4; got [1, 2, 8, 10]. Pad the "
            "images or build the model with fewer levels.");
}

}  // namespace
}  // namespace gradus::models
