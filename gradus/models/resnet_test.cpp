#include <gradus/models/resnet.h>

#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>

#include <gradus/models/internal/model_testing.h>

namespace gradus::models {
namespace {

using internal::error_of;
using internal::gap;

class ResNetTest : public internal::ModelTest {};

ResNetOptions tiny() {
  return {.in_channels = 2, .classes = 5, .blocks = {1, 2}, .width = 4, .groups = 2};
}

// The whole model again from its state: what module calls, their strides and paddings are meant to
// compute.
at::Tensor reference_logits(const ResNetOptions& options,
                            const std::map<std::string, at::Tensor>& state, at::Tensor x) {
  const auto norm = [&](const at::Tensor& y, const std::string& name) {
    const std::int64_t C = y.size(1), groups = std::gcd(options.groups, C);
    const at::Tensor parts = y.reshape({y.size(0), groups, -1});
    const at::Tensor centred = parts - parts.mean(2, true);
    const at::Tensor normal =
        (centred / (centred.square().mean(2, true) + 1e-5).sqrt()).reshape(y.sizes());
    return normal * state.at(name + ".weight").view({C, 1, 1}) +
           state.at(name + ".bias").view({C, 1, 1});
  };
  const auto convolution = [&](const at::Tensor& y, const std::string& name, int stride) {
    const at::Tensor& weight = state.at(name + ".weight");
    return torch::conv2d(y, weight, {}, stride, weight.size(2) / 2);
  };
  const bool large = options.stem == ResNetStem::kLarge;
  x = norm(convolution(x, "conv1", large ? 2 : 1), "bn1").clamp_min(0);
  if (large) x = torch::max_pool2d(x, 3, 2, 1);
  for (std::size_t s = 0; s < options.blocks.size(); ++s) {
    for (std::int64_t b = 0; b < options.blocks[s]; ++b) {
      const std::string name = "layer" + std::to_string(s + 1) + "." + std::to_string(b);
      const int stride = s > 0 && b == 0 ? 2 : 1;
      at::Tensor y = norm(convolution(x, name + ".conv1", stride), name + ".bn1").clamp_min(0);
      y = norm(convolution(y, name + ".conv2", 1), name + ".bn2");
      if (stride == 2) x = norm(convolution(x, name + ".downsample.0", 2), name + ".downsample.1");
      x = (x + y).clamp_min(0);
    }
  }
  return torch::matmul(x.mean(3).mean(2), state.at("fc.weight").t()) + state.at("fc.bias");
}

TEST_F(ResNetTest, ComputesTheModelWrittenOutInElementaryOperators) {
  for (const ResNetStem stem : {ResNetStem::kSmall, ResNetStem::kLarge}) {
    ResNetOptions options = tiny();
    options.stem = stem;
    ResNet resnet(options);
    resnet->to(torch::kDouble);
    internal::disturb(*resnet);
    const at::Tensor x = torch::randn({3, 2, 18, 13}, torch::kDouble);
    const at::Tensor logits = resnet->forward(x);
    ASSERT_EQ(logits.sizes(), (std::vector<std::int64_t>{3, 5}));
    EXPECT_LT(gap(logits, reference_logits(options, internal::state_of(*resnet), x)), 1e-12);
  }
}

TEST_F(ResNetTest, PiecesRunOneByOneGiveTheBitsOfForward) {
  ResNet resnet(tiny());
  const at::Tensor images = torch::randn({2, 2, 8, 8});
  at::Tensor x = resnet->stem(images);
  ASSERT_EQ(resnet->blocks().size(), 3u);
  for (const auto& block : resnet->blocks()) x = block->forward(x);
  EXPECT_EQ(x.sizes(), (std::vector<std::int64_t>{2, 8, 4, 4}));
  EXPECT_TRUE(resnet->head(x).equal(resnet->forward(images)));
}

TEST_F(ResNetTest, AnExampleDoesNotDependOnItsBatch) {
  ResNet resnet(tiny());
  resnet->to(torch::kDouble);
  internal::disturb(*resnet);
  const at::Tensor images = torch::randn({3, 2, 8, 8}, torch::kDouble);
  EXPECT_LT(gap(resnet->forward(images)[1], resnet->forward(images.slice(0, 1, 2))[0]), 1e-12);
}

TEST_F(ResNetTest, CountsParametersByFormula) {
  for (const ResNetStem stem : {ResNetStem::kSmall, ResNetStem::kLarge}) {
    ResNetOptions options = tiny();
    options.stem = stem;
    EXPECT_EQ(internal::value_count(*ResNet(options)), parameter_count(options));
  }
  // As published: torchvision's resnet18 and resnet34.
  EXPECT_EQ(parameter_count({.classes = 1000, .stem = ResNetStem::kLarge}), 11'689'512);
  EXPECT_EQ(parameter_count({.classes = 1000, .blocks = {3, 4, 6, 3}, .stem = ResNetStem::kLarge}),
            21'797'672);
}

TEST_F(ResNetTest, StateNamesAreThoseOfTorchvision) {
  const std::set<std::string> expected{
      "conv1.weight",
      "bn1.weight",
      "bn1.bias",
      "layer1.0.conv1.weight",
      "layer1.0.bn1.weight",
      "layer1.0.bn1.bias",
      "layer1.0.conv2.weight",
      "layer1.0.bn2.weight",
      "layer1.0.bn2.bias",
      "layer2.0.conv1.weight",
      "layer2.0.bn1.weight",
      "layer2.0.bn1.bias",
      "layer2.0.conv2.weight",
      "layer2.0.bn2.weight",
      "layer2.0.bn2.bias",
      "layer2.0.downsample.0.weight",
      "layer2.0.downsample.1.weight",
      "layer2.0.downsample.1.bias",
      "fc.weight",
      "fc.bias",
  };
  EXPECT_EQ(internal::names_of(*ResNet(ResNetOptions{.blocks = {1, 1}, .width = 4})), expected);
}

TEST_F(ResNetTest, GroupsOfANormAreTheGreatestDivisorThatFits) {
  ResNet resnet(ResNetOptions{.blocks = {1, 1}, .width = 12, .groups = 8});
  EXPECT_EQ(resnet->bn1->options.num_groups(), 4);
  EXPECT_EQ(resnet->blocks()[1]->bn1->options.num_groups(), 8);
}

TEST_F(ResNetTest, BlocksThatKeepTheShapeBeginAsTheIdentity) {
  ResNet resnet(tiny());
  const at::Tensor x = torch::rand({2, 4, 6, 6});
  EXPECT_TRUE(resnet->blocks()[0]->forward(x).equal(x));
}

TEST_F(ResNetTest, DrawsWeightsInTheDocumentedOrderFromTheGivenGenerator) {
  ResNet resnet(tiny());
  resnet->reset_parameters(at::make_generator<at::CPUGeneratorImpl>(7));
  at::Generator again = at::make_generator<at::CPUGeneratorImpl>(7);
  for (const auto& item : resnet->named_parameters()) {
    const at::Tensor& value = item.value();
    if (value.dim() == 4) {
      const double deviation =
          std::sqrt(2.0 / static_cast<double>(value.size(0) * value.size(2) * value.size(3)));
      EXPECT_TRUE(torch::empty_like(value).normal_(0.0, deviation, again).equal(value))
          << item.key();
    } else if (item.key().starts_with("fc.")) {
      const double bound = 1 / std::sqrt(8.0);
      EXPECT_TRUE(torch::empty_like(value).uniform_(-bound, bound, again).equal(value))
          << item.key();
    }
  }
}

TEST_F(ResNetTest, GradientsReachEveryParameterAndTheImage) {
  ResNet resnet(tiny());
  internal::disturb(*resnet);
  const at::Tensor images = torch::randn({2, 2, 8, 8}).requires_grad_();
  EXPECT_EQ(internal::out_of_reach(*resnet, resnet->forward(images).square().sum()), "");
  EXPECT_GT(images.grad().abs().min().item<double>(), 0);
}

TEST_F(ResNetTest, LearnsASmallBatchByHeart) {
  ResNet resnet(tiny());
  const at::Tensor images = torch::randn({5, 2, 8, 8}), labels = torch::arange(5);
  const auto loss = [&] {
    return torch::nn::functional::cross_entropy(resnet->forward(images), labels);
  };
  EXPECT_LT(internal::loss_after_training(*resnet, loss, 60, 0.02), 0.05);
}

TEST_F(ResNetTest, CloneIsEqualAndApart) {
  ResNet resnet(tiny());
  const at::Tensor images = torch::randn({2, 2, 8, 8});
  internal::expect_clone_equal_and_apart<ResNetImpl>(
      *resnet, [&](ResNetImpl& model) { return model.forward(images); });
}

TEST_F(ResNetTest, RefusesImpossibleOptions) {
  const struct {
    ResNetOptions options;
    std::string message;
  } cases[] = {
      {{.in_channels = 0}, "in_channels must be at least 1; got 0"},
      {{.classes = -2}, "classes must be at least 1; got -2"},
      {{.width = 0}, "width must be at least 1; got 0"},
      {{.groups = 0}, "groups must be at least 1; got 0"},
      {{.blocks = {}}, "blocks must name 1 to 32 stages; got 0"},
      {{.blocks = {2, 0}}, "blocks of each stage must be at least 1; got 0"},
  };
  EXPECT_EQ(defect(tiny()), "");
  for (const auto& [options, message] : cases) {
    EXPECT_EQ(defect(options), message);
    EXPECT_EQ(error_of([&] { ResNet resnet(options); }), "[resnet] " + message);
  }
  EXPECT_EQ(error_of([] { ResNetBlock block(4, 4, 0, 1); }),
            "[resnet] stride must be at least 1; got 0");
}

TEST_F(ResNetTest, RefusesImagesOfAnotherShape) {
  ResNet resnet(tiny());
  EXPECT_EQ(error_of([&] { resnet->forward(torch::zeros({2, 3, 8, 8})); }),
            "[resnet] images must have shape [batch, 2, height, width]; got [2, 3, 8, 8]");
  EXPECT_EQ(error_of([&] { resnet->forward(torch::zeros({2, 8, 8})); }),
            "[resnet] images must have shape [batch, 2, height, width]; got [2, 8, 8]");
}

}  // namespace
}  // namespace gradus::models
