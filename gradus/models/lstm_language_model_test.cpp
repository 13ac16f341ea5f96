#include <gradus/models/lstm_language_model.h>

#include <cmath>
#include <map>
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

constexpr LstmLanguageModelOptions kTiny{.vocabulary = 11, .embedding = 6, .width = 8, .layers = 2};
constexpr LstmLanguageModelOptions kTied{
    .vocabulary = 11, .embedding = 8, .width = 8, .layers = 2, .tied = true};

class LstmLanguageModelTest : public internal::ModelTest {};

at::Tensor loss_of(LstmLanguageModel& model, const at::Tensor& ids, const at::Tensor& targets) {
  return torch::nn::functional::cross_entropy(model->forward(ids).flatten(0, 1), targets.flatten());
}

// The recurrence written out (Hochreiter & Schmidhuber 1997 with a forget gate).
at::Tensor reference_logits(const LstmLanguageModelOptions& options,
                            const std::map<std::string, at::Tensor>& state, const at::Tensor& ids) {
  at::Tensor x = state.at("embedding.weight").index({ids});
  for (int n = 0; n < options.layers; ++n) {
    const auto weight = [&](const char* name) {
      return state.at("lstm." + std::string(name) + "_l" + std::to_string(n));
    };
    at::Tensor h = torch::zeros({ids.size(0), options.width}, torch::kDouble), c = h;
    std::vector<at::Tensor> outputs;
    for (std::int64_t t = 0; t < ids.size(1); ++t) {
      const auto gates =
          (torch::matmul(x.select(1, t), weight("weight_ih").t()) + weight("bias_ih") +
           torch::matmul(h, weight("weight_hh").t()) + weight("bias_hh"))
              .chunk(4, 1);
      c = gates[1].sigmoid() * c + gates[0].sigmoid() * gates[2].tanh();
      h = gates[3].sigmoid() * c.tanh();
      outputs.push_back(h);
    }
    x = torch::stack(outputs, 1);
  }
  if (options.tied) return torch::matmul(x, state.at("embedding.weight").t());
  return torch::matmul(x, state.at("head.weight").t()) + state.at("head.bias");
}

TEST_F(LstmLanguageModelTest, ComputesTheModelWrittenOutInElementaryOperators) {
  for (const auto& options : {kTiny, kTied}) {
    SCOPED_TRACE(options.tied);
    LstmLanguageModel model(options);
    model->to(torch::kDouble);
    internal::disturb(*model);
    const at::Tensor ids = torch::randint(11, {3, 5}, torch::kLong);
    const at::Tensor logits = model->forward(ids);
    ASSERT_EQ(logits.sizes(), (std::vector<std::int64_t>{3, 5, 11}));
    const at::Tensor expected = reference_logits(options, internal::state_of(*model), ids);
    EXPECT_LT(gap(logits, expected), 1e-12);
    EXPECT_LT(gap(model->project(model->hidden(ids)), expected), 1e-12);
    // Single precision runs through another kernel.
    model->to(torch::kFloat);
    EXPECT_LT(gap(model->forward(ids), expected), 1e-5);
  }
}

TEST_F(LstmLanguageModelTest, LogitsDoNotDependOnLaterTokens) {
  LstmLanguageModel model(kTiny);
  model->to(torch::kDouble);
  const at::Tensor ids = torch::randint(11, {1, 6}, torch::kLong);
  const at::Tensor before = model->forward(ids);
  for (std::int64_t t = 0; t < 6; ++t) {
    SCOPED_TRACE(t);
    at::Tensor changed = ids.clone();
    changed[0][t] = (changed[0][t] + 1) % 11;
    const at::Tensor difference = (model->forward(changed) - before).abs().amax(-1)[0];
    if (t > 0) EXPECT_EQ(difference.slice(0, 0, t).max().item<double>(), 0);
    EXPECT_GT(difference.slice(0, t).min().item<double>(), 1e-8);
  }
}

TEST_F(LstmLanguageModelTest, CountsParametersByFormulaWithTheTiedWeightOnce) {
  for (const auto& options : {kTiny, kTied}) {
    EXPECT_EQ(internal::value_count(*LstmLanguageModel(options)), parameter_count(options));
  }
}

TEST_F(LstmLanguageModelTest, StateNamesAreThoseOfTheDocumentation) {
  std::set<std::string> expected{"embedding.weight"};
  for (const char* name : {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}) {
    for (const char* layer : {"_l0", "_l1"}) expected.insert("lstm." + std::string(name) + layer);
  }
  EXPECT_EQ(internal::names_of(*LstmLanguageModel(kTied)), expected);
  expected.insert({"head.weight", "head.bias"});
  EXPECT_EQ(internal::names_of(*LstmLanguageModel(kTiny)), expected);
}

TEST_F(LstmLanguageModelTest, DrawsWeightsInTheDocumentedOrderFromTheGivenGenerator) {
  LstmLanguageModel model(kTiny);
  model->reset_parameters(at::make_generator<at::CPUGeneratorImpl>(7));
  at::Generator again = at::make_generator<at::CPUGeneratorImpl>(7);
  const double bound = 1 / std::sqrt(8.0);
  for (const auto& item : model->named_parameters()) {
    at::Tensor expected = torch::empty_like(item.value());
    if (item.key() == "embedding.weight") {
      expected.normal_(0.0, 1 / std::sqrt(6.0), again);
    } else if (item.key() == "head.bias") {
      expected.zero_();
    } else {
      expected.uniform_(-bound, bound, again);
    }
    EXPECT_TRUE(expected.equal(item.value())) << item.key();
  }
}

TEST_F(LstmLanguageModelTest, GradientsReachEveryParameter) {
  for (const auto& options : {kTiny, kTied}) {
    LstmLanguageModel model(options);
    const at::Tensor ids = torch::arange(11).unsqueeze(0);
    EXPECT_EQ(internal::out_of_reach(*model, loss_of(model, ids, 10 - ids)), "");
  }
}

TEST_F(LstmLanguageModelTest, DropsOutInTrainingOnly) {
  LstmLanguageModelOptions options = kTiny;
  options.dropout = 0.5;
  for (const std::int64_t layers : {1, 2}) {
    options.layers = layers;
    LstmLanguageModel model(options);
    const at::Tensor ids = torch::randint(11, {2, 6}, torch::kLong);
    EXPECT_FALSE(model->forward(ids).equal(model->forward(ids)));
    EXPECT_NEAR(model->hidden(ids).eq(0).to(torch::kDouble).mean().item<double>(), 0.5, 0.2);
    model->eval();
    EXPECT_TRUE(model->forward(ids).equal(model->forward(ids)));
  }
}

TEST_F(LstmLanguageModelTest, LearnsToRepeatAFixedSequence) {
  LstmLanguageModel model(kTiny);
  const at::Tensor ids = torch::tensor({{1, 4, 2, 8, 5, 7}}),
                   targets = torch::tensor({{4, 2, 8, 5, 7, 1}});
  const auto loss = [&] { return loss_of(model, ids, targets); };
  EXPECT_LT(internal::loss_after_training(*model, loss, 80, 0.05), 0.05);
}

TEST_F(LstmLanguageModelTest, CloneIsEqualAndApart) {
  LstmLanguageModel model(kTiny);
  const at::Tensor ids = torch::randint(11, {2, 6}, torch::kLong);
  internal::expect_clone_equal_and_apart<LstmLanguageModelImpl>(
      *model, [&](LstmLanguageModelImpl& m) { return m.forward(ids); });
}

TEST_F(LstmLanguageModelTest, RefusesImpossibleOptions) {
  const struct {
    LstmLanguageModelOptions options;
    std::string message;
  } cases[] = {
      {{.vocabulary = 0}, "vocabulary must be at least 1; got 0"},
      {{.embedding = 0}, "embedding must be at least 1; got 0"},
      {{.width = 0}, "width must be at least 1; got 0"},
      {{.layers = 0}, "layers must be at least 1; got 0"},
      {{.dropout = 1.0}, "dropout must be in [0, 1); got 1.000000"},
      {{.embedding = 4, .width = 8, .tied = true},
       "embedding and width must be equal for a tied head; got 4 and 8"},
  };
  EXPECT_EQ(defect(kTiny), "");
  for (const auto& [options, message] : cases) {
    EXPECT_EQ(defect(options), message);
    EXPECT_EQ(error_of([&] { LstmLanguageModel model(options); }),
              "[lstm_language_model] " + message);
  }
}

TEST_F(LstmLanguageModelTest, RefusesIdsOfAnotherShape) {
  LstmLanguageModel model(kTiny);
  EXPECT_EQ(error_of([&] { model->forward(torch::zeros({6}, torch::kLong)); }),
            "[lstm_language_model] ids must have shape [batch, positions] with at least one "
            "position; got [6]");
  EXPECT_EQ(error_of([&] { model->forward(torch::zeros({2, 0}, torch::kLong)); }),
            "[lstm_language_model] ids must have shape [batch, positions] with at least one "
            "position; got [2, 0]");
}

}  // namespace
}  // namespace gradus::models
