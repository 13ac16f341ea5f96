#include <gradus/models/image_classifier.h>

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/conv.h>
#include <torch/nn/functional/loss.h>
#include <torch/types.h>

#include <gradus/models/internal/model_testing.h>

namespace gradus::models {
namespace {

using internal::error_of;
using internal::gap;
using torch::nn::functional::cross_entropy;

const ImageClassifierOptions kTiny{
    .image_size = 14, .classes = 3, .first_channels = 2, .second_channels = 3, .hidden = 5};

class ImageClassifierTest : public internal::ModelTest {};

// Max pooling 2x2 with stride 1, as the largest of four shifted images.
at::Tensor pool(const at::Tensor& x) {
  const auto shifted = [&](int row, int column) {
    return x.slice(2, row, x.size(2) - 1 + row).slice(3, column, x.size(3) - 1 + column);
  };
  return torch::max(torch::max(shifted(0, 0), shifted(0, 1)),
                    torch::max(shifted(1, 0), shifted(1, 1)));
}

TEST_F(ImageClassifierTest, ComputesTheNetworkWrittenOut) {
  for (const Activation kind : {Activation::tanh, Activation::relu, Activation::tempered_sigmoid}) {
    const ActivationOptions activation{kind, 1.5, 3.0, 0.5};
    ImageClassifierOptions options{.in_channels = 2, .image_size = 20, .activation = activation};
    ImageClassifier model(options);
    model->to(torch::kDouble);
    internal::disturb(*model, 0.05);
    const auto state = internal::state_of(*model);
    const at::Tensor x = torch::randn({3, 2, 20, 20}, torch::kDouble);
    // Convolutions as products of unfolded windows.
    const auto convolve = [&](const at::Tensor& in, const std::string& name, std::int64_t padding) {
      const at::Tensor weight = state.at(name + ".weight");
      const std::int64_t window = weight.size(2);
      const at::Tensor columns =
          torch::im2col(in, {window, window}, {1, 1}, {padding, padding}, {2, 2});
      const std::int64_t side = (in.size(2) + 2 * padding - window) / 2 + 1;
      return (torch::matmul(weight.flatten(1), columns) + state.at(name + ".bias").unsqueeze(1))
          .view({in.size(0), weight.size(0), side, side});
    };
    const auto linear = [&](const at::Tensor& in, const std::string& name) {
      return torch::matmul(in, state.at(name + ".weight").t()) + state.at(name + ".bias");
    };
    at::Tensor y = pool(activate(convolve(x, "conv1", 3), activation));
    y = pool(activate(convolve(y, "conv2", 0), activation)).flatten(1);
    y = linear(activate(linear(y, "hidden"), activation), "head");
    EXPECT_LT(gap(model->forward(x), y), 1e-12);
  }
}

TEST_F(ImageClassifierTest, DefaultsAreTheNetworkOfThePaper) {
  ImageClassifier model(ImageClassifierOptions{});
  EXPECT_EQ(internal::value_count(*model), 26010);
  EXPECT_EQ(model->hidden->weight.sizes(), (std::vector<std::int64_t>{32, 512}));
  EXPECT_EQ(model->forward(torch::randn({4, 1, 28, 28})).sizes(),
            (std::vector<std::int64_t>{4, 10}));
  EXPECT_EQ(model->forward(torch::randn({0, 1, 28, 28})).sizes(),
            (std::vector<std::int64_t>{0, 10}));
  for (const auto& options : {ImageClassifierOptions{}, kTiny}) {
    EXPECT_EQ(internal::value_count(*ImageClassifier(options)), parameter_count(options));
  }
}

TEST_F(ImageClassifierTest, StateNamesAreThoseOfTheDocumentation) {
  std::set<std::string> expected;
  for (const std::string name : {"conv1", "conv2", "hidden", "head"})
    expected.insert({name + ".weight", name + ".bias"});
  EXPECT_EQ(internal::names_of(*ImageClassifier(kTiny)), expected);
}

TEST_F(ImageClassifierTest, DrawsWeightsInTheDocumentedOrderFromTheGivenGenerator) {
  ImageClassifier model(kTiny);
  model->reset_parameters(at::make_generator<at::CPUGeneratorImpl>(7));
  at::Generator again = at::make_generator<at::CPUGeneratorImpl>(7);
  const std::map<std::string, double> inputs{
      {"conv1", 64}, {"conv2", 2 * 16}, {"hidden", 3}, {"head", 5}};
  for (const auto& item : model->named_parameters()) {
    const double bound = 1 / std::sqrt(inputs.at(item.key().substr(0, item.key().find('.'))));
    EXPECT_TRUE(torch::empty_like(item.value()).uniform_(-bound, bound, again).equal(item.value()))
        << item.key();
  }
}

TEST_F(ImageClassifierTest, GradientsAreCentralDifferencesAndReachEveryParameter) {
  for (const Activation kind : {Activation::tanh, Activation::tempered_sigmoid}) {
    ImageClassifierOptions options = kTiny;
    options.activation.kind = kind;
    ImageClassifier model(options);
    model->to(torch::kDouble);
    const at::Tensor x = torch::randn({4, 1, 14, 14}, torch::kDouble);
    const at::Tensor y = torch::tensor({0, 2, 1, 2}).to(torch::kLong);
    const auto loss = [&] { return cross_entropy(model->forward(x), y); };
    EXPECT_LT(internal::gradient_error(*model, loss), 1e-8);
    EXPECT_EQ(internal::out_of_reach(*model, loss()), "");
  }
}

TEST_F(ImageClassifierTest, LearnsWhereTheLightIs) {
  ImageClassifier model(kTiny);
  at::Tensor x = 0.1 * torch::randn({12, 1, 14, 14});
  const at::Tensor y = torch::arange(12, torch::kLong) % 3;
  for (std::int64_t i = 0; i < 12; ++i) x[i][0].narrow(1, 5 * (i % 3), 4).add_(1.0);
  const auto loss = [&] { return cross_entropy(model->forward(x), y); };
  EXPECT_LT(internal::loss_after_training(*model, loss, 60, 0.02), 0.05);
}

TEST_F(ImageClassifierTest, CloneIsEqualAndApart) {
  ImageClassifier model(kTiny);
  const at::Tensor x = torch::randn({2, 1, 14, 14});
  internal::expect_clone_equal_and_apart<ImageClassifierImpl>(
      *model, [&](ImageClassifierImpl& m) { return m.forward(x); });
}

TEST_F(ImageClassifierTest, RefusesImpossibleOptionsAndImages) {
  const struct {
    ImageClassifierOptions options;
    std::string message;
  } cases[] = {
      {{.in_channels = 0}, "in_channels must be at least 1; got 0"},
      {{.classes = 0}, "classes must be at least 1; got 0"},
      {{.first_channels = 0}, "first_channels must be at least 1; got 0"},
      {{.second_channels = 0}, "second_channels must be at least 1; got 0"},
      {{.hidden = 0}, "hidden must be at least 1; got 0"},
      {{.image_size = 13}, "image_size must leave something to classify, which takes 14; got 13"},
      {{.activation = {.kind = Activation::tempered_sigmoid, .scale = -1}},
       "scale must be finite and > 0; got -1.000000"},
  };
  EXPECT_EQ(defect(kTiny), "");
  for (const auto& [options, message] : cases) {
    EXPECT_EQ(defect(options), message);
    EXPECT_EQ(error_of([&] { ImageClassifier model(options); }), "[image_classifier] " + message);
  }
  ImageClassifier model(kTiny);
  EXPECT_EQ(
      error_of([&] { model->forward(torch::zeros({2, 3, 14, 14})); }),
      "[image_classifier] images must have shape [batch, 1, height, width]; got [2, 3, 14, 14]");
  EXPECT_EQ(error_of([&] { model->forward(torch::zeros({2, 1, 14, 15})); }),
            "[image_classifier] images must be 14 x 14; got [2, 1, 14, 15]");
}

}  // namespace
}  // namespace gradus::models
