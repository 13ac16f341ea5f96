#include <gradus/models/tabular_classifier.h>

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/types.h>

#include <gradus/models/internal/model_testing.h>

namespace gradus::models {
namespace {

using internal::error_of;
using internal::gap;
using torch::nn::functional::cross_entropy;

const TabularClassifierOptions kTiny{
    .features = 3, .id_counts = {4, 2}, .embedding = 5, .hidden = {7, 6}, .classes = 3};
const TabularClassifierOptions kNumbers{.features = 3, .hidden = {}};
const TabularClassifierOptions kIds{.id_counts = {4, 2}};

class TabularClassifierTest : public internal::ModelTest {
 protected:
  const at::Tensor ids_ = torch::tensor({{3, 0}, {0, 1}, {1, 1}, {2, 0}}).to(torch::kLong);
};

TEST_F(TabularClassifierTest, ComputesTheNetworkWrittenOut) {
  TabularClassifierOptions options = kTiny;
  options.activation = {Activation::tempered_sigmoid, 1.5, 3.0, 0.5};
  TabularClassifier model(options);
  model->to(torch::kDouble);
  internal::disturb(*model);
  auto state = internal::state_of(*model);
  const at::Tensor x = torch::randn({4, 3}, torch::kDouble);
  const at::Tensor table = state["embedding.weight"];
  // Column 0 has rows 0 to 3 of the table, column 1 rows 4 and 5.
  at::Tensor y =
      torch::cat({x, table.index({ids_.select(1, 0)}), table.index({ids_.select(1, 1) + 4})}, 1);
  for (const std::string n : {"0", "1", "2"}) {
    y = torch::matmul(y, state["layers." + n + ".weight"].t()) + state["layers." + n + ".bias"];
    if (n != "2") y = activate(y, options.activation);
  }
  EXPECT_LT(gap(model->forward(x, ids_), y), 1e-13);
}

TEST_F(TabularClassifierTest, OneHotColumnsAndIdsComputeTheSame) {
  TabularClassifier with_ids(kIds);
  // A first layer of one-hot features whose weight is the embedding's, multiplied out.
  TabularClassifier one_hot(TabularClassifierOptions{.features = 6});
  with_ids->to(torch::kDouble);
  one_hot->to(torch::kDouble);
  {
    const at::NoGradGuard no_grad;
    const at::Tensor table = with_ids->embedding->weight, weight = with_ids->layers()[0]->weight;
    one_hot->layers()[0]->weight.copy_(
        torch::cat({torch::matmul(weight.narrow(1, 0, 8), table.narrow(0, 0, 4).t()),
                    torch::matmul(weight.narrow(1, 8, 8), table.narrow(0, 4, 2).t())},
                   1));
    one_hot->layers()[0]->bias.copy_(with_ids->layers()[0]->bias);
    one_hot->layers()[1]->weight.copy_(with_ids->layers()[1]->weight);
    one_hot->layers()[1]->bias.copy_(with_ids->layers()[1]->bias);
  }
  const at::Tensor features =
      torch::cat({torch::one_hot(ids_.select(1, 0), 4), torch::one_hot(ids_.select(1, 1), 2)}, 1);
  const at::Tensor none = torch::empty({4, 0}, torch::kDouble);
  EXPECT_LT(gap(with_ids->forward(none, ids_), one_hot->forward(features.to(torch::kDouble))),
            1e-13);
}

TEST_F(TabularClassifierTest, CountsAndNamesItsParameters) {
  for (const auto& options : {kTiny, kNumbers, kIds}) {
    EXPECT_EQ(internal::value_count(*TabularClassifier(options)), parameter_count(options));
  }
  EXPECT_EQ(internal::names_of(*TabularClassifier(kNumbers)),
            (std::set<std::string>{"layers.0.weight", "layers.0.bias"}));
  EXPECT_EQ(internal::names_of(*TabularClassifier(kIds)),
            (std::set<std::string>{"embedding.weight", "layers.0.weight", "layers.0.bias",
                                   "layers.1.weight", "layers.1.bias"}));
}

TEST_F(TabularClassifierTest, DrawsWeightsInTheDocumentedOrderFromTheGivenGenerator) {
  TabularClassifier model(kTiny);
  model->reset_parameters(at::make_generator<at::CPUGeneratorImpl>(7));
  at::Generator again = at::make_generator<at::CPUGeneratorImpl>(7);
  const std::map<char, double> inputs{{'0', 13}, {'1', 7}, {'2', 6}};
  for (const auto& item : model->named_parameters()) {
    at::Tensor expected = torch::empty_like(item.value());
    if (item.key() == "embedding.weight") {
      expected.normal_(0.0, 1.0, again);
    } else {
      const double bound = 1 / std::sqrt(inputs.at(item.key()[7]));
      expected.uniform_(-bound, bound, again);
    }
    EXPECT_TRUE(expected.equal(item.value())) << item.key();
  }
}

TEST_F(TabularClassifierTest, GradientsAreCentralDifferencesAndReachEveryParameter) {
  TabularClassifier model(kTiny);
  model->to(torch::kDouble);
  const at::Tensor x = torch::randn({4, 3}, torch::kDouble);
  const at::Tensor y = torch::tensor({0, 2, 1, 2}).to(torch::kLong);
  const auto loss = [&] { return cross_entropy(model->forward(x, ids_), y); };
  EXPECT_LT(internal::gradient_error(*model, loss, 10), 1e-8);
  EXPECT_EQ(internal::out_of_reach(*model, loss()), "");
}

TEST_F(TabularClassifierTest, LearnsARuleOfANumberAndAnId) {
  TabularClassifier model(
      TabularClassifierOptions{.features = 1, .id_counts = {2}, .embedding = 3, .hidden = {8}});
  const at::Tensor x = torch::randn({64, 1});
  const at::Tensor ids = torch::randint(2, {64, 1}, torch::kLong);
  const at::Tensor y = (x.squeeze(1) > 0).logical_xor(ids.squeeze(1) > 0).to(torch::kLong);
  const auto loss = [&] { return cross_entropy(model->forward(x, ids), y); };
  EXPECT_LT(internal::loss_after_training(*model, loss, 200, 0.05), 0.1);
}

TEST_F(TabularClassifierTest, TakesNoRowsAndClones) {
  TabularClassifier model(kTiny);
  EXPECT_EQ(model->forward(torch::zeros({0, 3}), torch::zeros({0, 2}, torch::kLong)).sizes(),
            (std::vector<std::int64_t>{0, 3}));
  const at::Tensor x = torch::randn({4, 3});
  internal::expect_clone_equal_and_apart<TabularClassifierImpl>(
      *model, [&](TabularClassifierImpl& m) { return m.forward(x, ids_); });
}

TEST_F(TabularClassifierTest, RefusesImpossibleOptionsAndShapes) {
  const struct {
    TabularClassifierOptions options;
    std::string message;
  } cases[] = {
      {{}, "a row needs columns; got no features and no id_counts"},
      {{.features = -1}, "features must be at least 0; got -1"},
      {{.features = 2, .embedding = 0}, "embedding must be at least 1; got 0"},
      {{.features = 2, .classes = 0}, "classes must be at least 1; got 0"},
      {{.id_counts = {3, 0}}, "each of id_counts must be at least 1; got 0"},
      {{.features = 2, .hidden = {4, 0}}, "each hidden width must be at least 1; got 0"},
      {{.features = 2, .activation = {.kind = Activation::tempered_sigmoid, .scale = 0}},
       "scale must be finite and > 0; got 0.000000"},
  };
  EXPECT_EQ(defect(kTiny), "");
  for (const auto& [options, message] : cases) {
    EXPECT_EQ(defect(options), message);
    EXPECT_EQ(error_of([&] { TabularClassifier model(options); }),
              "[tabular_classifier] " + message);
  }
  TabularClassifier model(kTiny);
  EXPECT_EQ(error_of([&] { model->forward(torch::zeros({4, 2}), ids_); }),
            "[tabular_classifier] features must have shape [batch, 3]; got [4, 2]");
  EXPECT_EQ(error_of([&] { model->forward(torch::zeros({4, 3})); }),
            "[tabular_classifier] ids must be int64 [4, 2]; got none");
  EXPECT_EQ(error_of([&] { model->forward(torch::zeros({3, 3}), ids_); }),
            "[tabular_classifier] ids must be int64 [3, 2]; got Long [4, 2]");
}

}  // namespace
}  // namespace gradus::models
