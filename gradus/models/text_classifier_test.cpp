#include <gradus/models/text_classifier.h>

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/rnn.h>
#include <torch/types.h>

#include <gradus/models/internal/model_testing.h>

namespace gradus::models {
namespace {

using internal::error_of;
using internal::gap;
using torch::nn::functional::cross_entropy;

constexpr TextClassifierOptions kTiny{
    .vocabulary = 11, .classes = 3, .embedding = 6, .width = 8, .layers = 2};

class TextClassifierTest : public internal::ModelTest {
 protected:
  const at::Tensor ids_ = torch::tensor({{3, 1, 4, 1, 5}, {2, 7, 1, 0, 0}, {9, 0, 0, 0, 0}});
  const at::Tensor lengths_ = torch::tensor({5, 3, 1}).to(torch::kLong);
};

// One text by LSTM cells written out (Hochreiter & Schmidhuber 1997 with a forget gate).
at::Tensor reference_logits(const std::map<std::string, at::Tensor>& state, const at::Tensor& ids) {
  at::Tensor x = state.at("embedding.weight").index({ids});
  for (int n = 0; n < kTiny.layers; ++n) {
    const auto weight = [&](const char* name) {
      return state.at("lstm." + std::string(name) + "_l" + std::to_string(n));
    };
    at::Tensor h = torch::zeros({kTiny.width}, torch::kDouble), c = h;
    std::vector<at::Tensor> outputs;
    for (std::int64_t t = 0; t < ids.size(0); ++t) {
      const auto gates = (torch::matmul(weight("weight_ih"), x[t]) + weight("bias_ih") +
                          torch::matmul(weight("weight_hh"), h) + weight("bias_hh"))
                             .chunk(4);
      c = gates[1].sigmoid() * c + gates[0].sigmoid() * gates[2].tanh();
      h = gates[3].sigmoid() * c.tanh();
      outputs.push_back(h);
    }
    x = torch::stack(outputs);
  }
  return torch::matmul(state.at("head.weight"), x[-1]) + state.at("head.bias");
}

TEST_F(TextClassifierTest, ReadsEachTextToItsLastToken) {
  TextClassifier model(kTiny);
  model->to(torch::kDouble);
  internal::disturb(*model);
  const at::Tensor logits = model->forward(ids_, lengths_);
  const auto state = internal::state_of(*model);
  ASSERT_EQ(logits.sizes(), (std::vector<std::int64_t>{3, 3}));
  for (std::int64_t i = 0; i < 3; ++i) {
    const at::Tensor text = ids_[i].narrow(0, 0, lengths_[i].item<std::int64_t>());
    EXPECT_LT(gap(logits[i], reference_logits(state, text)), 1e-12);
  }
  EXPECT_LT(gap(model->forward(ids_)[1], reference_logits(state, ids_[1])), 1e-12);
  // Single precision runs through another kernel.
  model->to(torch::kFloat);
  EXPECT_LT(gap(model->forward(ids_, lengths_), logits), 1e-5);
}

TEST_F(TextClassifierTest, DoesNotSeeWhatStandsBehindAText) {
  TextClassifier model(kTiny);
  model->to(torch::kDouble);
  at::Tensor other = ids_.clone();
  other[1][3] = 8;
  other[2].narrow(0, 1, 4).fill_(10);
  EXPECT_TRUE(model->forward(other, lengths_).equal(model->forward(ids_, lengths_)));
  other[1][2] = 8;
  EXPECT_FALSE(model->forward(other, lengths_)[1].equal(model->forward(ids_, lengths_)[1]));
}

TEST_F(TextClassifierTest, TakesNoTextsAndTextsWithoutTokens) {
  TextClassifier model(kTiny);
  EXPECT_EQ(
      model->forward(torch::zeros({0, 4}, torch::kLong), torch::zeros({0}, torch::kLong)).sizes(),
      (std::vector<std::int64_t>{0, 3}));
  const at::Tensor none = torch::zeros({3}, torch::kLong);
  EXPECT_TRUE(model->forward(ids_, none).equal(model->forward(ids_, none + 1)));
}

TEST_F(TextClassifierTest, CountsParametersAndNamesThemAsDocumented) {
  TextClassifier model(kTiny);
  EXPECT_EQ(internal::value_count(*model), parameter_count(kTiny));
  std::set<std::string> expected{"embedding.weight", "head.weight", "head.bias"};
  for (const char* name : {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}) {
    for (const char* layer : {"_l0", "_l1"}) expected.insert("lstm." + std::string(name) + layer);
  }
  EXPECT_EQ(internal::names_of(*model), expected);
}

TEST_F(TextClassifierTest, DrawsWeightsInTheDocumentedOrderFromTheGivenGenerator) {
  TextClassifier model(kTiny);
  model->reset_parameters(at::make_generator<at::CPUGeneratorImpl>(7));
  at::Generator again = at::make_generator<at::CPUGeneratorImpl>(7);
  const double bound = 1 / std::sqrt(8.0);
  for (const auto& item : model->named_parameters()) {
    at::Tensor expected = torch::empty_like(item.value());
    if (item.key() == "embedding.weight") {
      expected.normal_(0.0, 1.0, again);
    } else {
      expected.uniform_(-bound, bound, again);
    }
    EXPECT_TRUE(expected.equal(item.value())) << item.key();
  }
}

TEST_F(TextClassifierTest, GradientsAreCentralDifferencesAndReachEveryParameter) {
  TextClassifier model(kTiny);
  model->to(torch::kDouble);
  const at::Tensor labels = torch::tensor({0, 2, 1}).to(torch::kLong);
  const auto loss = [&] { return cross_entropy(model->forward(ids_, lengths_), labels); };
  EXPECT_LT(internal::gradient_error(*model, loss, 10), 1e-8);
  EXPECT_EQ(internal::out_of_reach(*model, loss()), "");
}

TEST_F(TextClassifierTest, DropsOutInTrainingOnly) {
  TextClassifierOptions options = kTiny;
  options.dropout = 0.5;
  for (const std::int64_t layers : {1, 2}) {
    options.layers = layers;
    TextClassifier model(options);
    EXPECT_FALSE(model->forward(ids_).equal(model->forward(ids_)));
    model->eval();
    EXPECT_TRUE(model->forward(ids_).equal(model->forward(ids_)));
  }
}

TEST_F(TextClassifierTest, LearnsTheFirstTokenOfTextsOfDifferentLengths) {
  TextClassifier model(kTiny);
  const at::Tensor ids = torch::randint(3, 11, {24, 6}, torch::kLong);
  const at::Tensor labels = torch::arange(24, torch::kLong) % 3;
  ids.select(1, 0).copy_(labels);
  const at::Tensor lengths = torch::arange(24, torch::kLong) % 6 + 1;
  const auto loss = [&] { return cross_entropy(model->forward(ids, lengths), labels); };
  EXPECT_LT(internal::loss_after_training(*model, loss, 80, 0.05), 0.05);
}

TEST_F(TextClassifierTest, CloneIsEqualAndApart) {
  TextClassifier model(kTiny);
  internal::expect_clone_equal_and_apart<TextClassifierImpl>(
      *model, [&](TextClassifierImpl& m) { return m.forward(ids_, lengths_); });
}

TEST_F(TextClassifierTest, RefusesImpossibleOptionsAndShapes) {
  const struct {
    TextClassifierOptions options;
    std::string message;
  } cases[] = {
      {{.vocabulary = 0}, "vocabulary must be at least 1; got 0"},
      {{.classes = 0}, "classes must be at least 1; got 0"},
      {{.embedding = 0}, "embedding must be at least 1; got 0"},
      {{.width = 0}, "width must be at least 1; got 0"},
      {{.layers = 0}, "layers must be at least 1; got 0"},
      {{.dropout = 1.0}, "dropout must be in [0, 1); got 1.000000"},
  };
  EXPECT_EQ(defect(kTiny), "");
  for (const auto& [options, message] : cases) {
    EXPECT_EQ(defect(options), message);
    EXPECT_EQ(error_of([&] { TextClassifier model(options); }), "[text_classifier] " + message);
  }
  TextClassifier model(kTiny);
  EXPECT_EQ(error_of([&] { model->forward(ids_[0]); }),
            "[text_classifier] ids must have shape [batch, positions] with at least one position; "
            "got [5]");
  EXPECT_EQ(error_of([&] { model->forward(ids_, lengths_.narrow(0, 0, 2)); }),
            "[text_classifier] lengths must be int64 [3]; got Long [2]");
  EXPECT_EQ(error_of([&] { model->forward(ids_, lengths_.to(torch::kInt)); }),
            "[text_classifier] lengths must be int64 [3]; got Int [3]");
}

}  // namespace
}  // namespace gradus::models
