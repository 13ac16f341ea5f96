#include <gradus/models/bert.h>

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
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

constexpr BertOptions kTiny{.vocabulary = 13,
                            .context = 7,
                            .token_types = 2,
                            .layers = 2,
                            .heads = 2,
                            .width = 6,
                            .intermediate = 10,
                            .dropout = 0.0};

class BertTest : public internal::ModelTest {
 protected:
  const at::Tensor ids_ = torch::tensor({{3, 1, 4, 1, 5}, {2, 7, 1, 0, 0}});
  const at::Tensor padding_ = torch::tensor({{0, 0, 0, 0, 0}, {0, 0, 0, 1, 1}}).to(torch::kBool);
  const at::Tensor types_ = torch::tensor({{0, 0, 1, 1, 1}, {0, 1, 1, 0, 0}});
};

at::Tensor normalise(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                     double epsilon) {
  const at::Tensor centred = x - x.mean(-1, /*keepdim=*/true);
  return centred / (centred.square().mean(-1, true) + epsilon).sqrt() * weight + bias;
}

// One text without padding, in elementary operators (Devlin et al. 2018, Vaswani et al. 2017).
at::Tensor reference_hidden(const BertOptions& options,
                            const std::map<std::string, at::Tensor>& state, const at::Tensor& ids,
                            const at::Tensor& types) {
  const auto linear = [&](const at::Tensor& x, const std::string& name) {
    return torch::matmul(x, state.at(name + ".weight").t()) + state.at(name + ".bias");
  };
  const auto norm = [&](const at::Tensor& x, const std::string& name) {
    return normalise(x, state.at(name + ".weight"), state.at(name + ".bias"), options.norm_epsilon);
  };
  const std::int64_t T = ids.size(0), D = options.width / options.heads;
  at::Tensor x = norm(state.at("embeddings.word_embeddings.weight").index({ids}) +
                          state.at("embeddings.position_embeddings.weight").narrow(0, 0, T) +
                          state.at("embeddings.token_type_embeddings.weight").index({types}),
                      "embeddings.LayerNorm");
  for (int n = 0; n < options.layers; ++n) {
    const std::string layer = "encoder.layer." + std::to_string(n) + ".";
    std::vector<at::Tensor> heads;
    for (std::int64_t h = 0; h < options.heads; ++h) {
      const auto part = [&](const char* name) {
        return linear(x, layer + "attention.self." + name).narrow(1, h * D, D);
      };
      const at::Tensor scores =
          torch::matmul(part("query"), part("key").t()) / std::sqrt(double(D));
      heads.push_back(torch::matmul(scores.softmax(-1), part("value")));
    }
    x = norm(x + linear(torch::cat(heads, 1), layer + "attention.output.dense"),
             layer + "attention.output.LayerNorm");
    const at::Tensor y = linear(x, layer + "intermediate.dense");
    const at::Tensor gelu = y * 0.5 * (1 + torch::erf(y / std::sqrt(2.0)));
    x = norm(x + linear(gelu, layer + "output.dense"), layer + "output.LayerNorm");
  }
  return x;
}

TEST_F(BertTest, ComputesTheModelWrittenOutInElementaryOperators) {
  Bert model(kTiny);
  model->to(torch::kDouble);
  internal::disturb(*model);
  const auto state = internal::state_of(*model);
  const at::Tensor hidden = model->forward(ids_, padding_, types_);
  ASSERT_EQ(hidden.sizes(), (std::vector<std::int64_t>{2, 5, 6}));
  EXPECT_LT(gap(hidden[0], reference_hidden(kTiny, state, ids_[0], types_[0])), 1e-12);
  // A padded text has the values of the text alone.
  const at::Tensor alone =
      reference_hidden(kTiny, state, ids_[1].narrow(0, 0, 3), types_[1].narrow(0, 0, 3));
  EXPECT_LT(gap(hidden[1].narrow(0, 0, 3), alone), 1e-12);
  const at::Tensor pooled =
      torch::tanh(torch::matmul(hidden.select(1, 0), state.at("pooler.dense.weight").t()) +
                  state.at("pooler.dense.bias"));
  EXPECT_LT(gap(model->pool(hidden), pooled), 1e-13);
}

TEST_F(BertTest, TypesLeftOutAreAllZeroAndPaddingLeftOutIsNone) {
  Bert model(kTiny);
  model->to(torch::kDouble);
  internal::disturb(*model);
  const at::Tensor plain = model->forward(ids_);
  EXPECT_LT(gap(plain, model->forward(ids_, torch::zeros_like(padding_), torch::zeros_like(ids_))),
            1e-13);
  EXPECT_GT(gap(plain, model->forward(ids_, padding_)), 1e-3);
  EXPECT_GT(gap(plain, model->forward(ids_, {}, types_)), 1e-3);
}

TEST_F(BertTest, MeanPoolLeavesPaddingOutWhateverStandsThere) {
  at::Tensor hidden = torch::randn({3, 4, 2}, torch::kDouble);
  const at::Tensor padding =
      torch::tensor({{0, 0, 0, 0}, {0, 0, 1, 1}, {1, 1, 1, 1}}).to(torch::kBool);
  hidden[1][3].fill_(std::nan(""));
  const at::Tensor pooled = mean_pool(hidden, padding);
  EXPECT_LT(gap(pooled[0], hidden[0].mean(0)), 1e-15);
  EXPECT_LT(gap(pooled[1], hidden[1].narrow(0, 0, 2).mean(0)), 1e-15);
  EXPECT_TRUE(pooled[2].eq(0).all().item<bool>());
  EXPECT_TRUE(mean_pool(hidden)[0].equal(hidden[0].mean(0)));
}

TEST_F(BertTest, DefaultsAreMiniLm) { EXPECT_EQ(parameter_count(BertOptions{}), 22713216); }

TEST_F(BertTest, CountsParametersAndNamesThemAsHuggingFaceDoes) {
  BertOptions options = kTiny;
  options.layers = 1;
  std::set<std::string> expected;
  const auto add = [&](const std::string& name, bool bias = true) {
    expected.insert(name + ".weight");
    if (bias) expected.insert(name + ".bias");
  };
  add("embeddings.word_embeddings", false);
  add("embeddings.position_embeddings", false);
  add("embeddings.token_type_embeddings", false);
  add("embeddings.LayerNorm");
  for (const char* name : {"attention.self.query", "attention.self.key", "attention.self.value",
                           "attention.output.dense", "attention.output.LayerNorm",
                           "intermediate.dense", "output.dense", "output.LayerNorm"}) {
    add("encoder.layer.0." + std::string(name));
  }
  options.pooler = false;
  EXPECT_EQ(internal::names_of(*Bert(options)), expected);
  EXPECT_EQ(internal::value_count(*Bert(options)), parameter_count(options));
  options.pooler = true;
  add("pooler.dense");
  EXPECT_EQ(internal::names_of(*Bert(options)), expected);
  EXPECT_EQ(internal::value_count(*Bert(options)), parameter_count(options));

  BertClassifier classifier(BertClassifierOptions{.bert = options});
  EXPECT_FALSE(classifier->named_parameters().contains("bert.pooler.dense.weight"));
  EXPECT_TRUE(classifier->named_parameters().contains("bert.embeddings.LayerNorm.bias"));
  EXPECT_TRUE(classifier->named_parameters().contains("classifier.weight"));
}

TEST_F(BertTest, FindsItsNamesInTheFilesOfOtherModels) {
  Bert model(kTiny);
  std::vector<std::string> plain{"embeddings.position_ids"}, prefixed{"classifier.weight"}, old;
  for (const auto& item : model->named_parameters()) {
    plain.push_back(item.key());
    prefixed.push_back("bert." + item.key());
    std::string name = "bert." + item.key();
    if (const auto at = name.find("LayerNorm.weight"); at != std::string::npos)
      name.replace(at, 16, "LayerNorm.gamma");
    if (const auto at = name.find("LayerNorm.bias"); at != std::string::npos)
      name.replace(at, 14, "LayerNorm.beta");
    old.push_back(name);
  }
  const auto names = huggingface_names(*model, plain);
  EXPECT_EQ(names.size(), model->named_parameters().size());
  for (const auto& [ours, theirs] : names) EXPECT_EQ(ours, theirs);
  for (const auto& [ours, theirs] : huggingface_names(*model, prefixed))
    EXPECT_EQ("bert." + ours, theirs);
  EXPECT_EQ(huggingface_names(*model, old).at("embeddings.LayerNorm.bias"),
            "bert.embeddings.LayerNorm.beta");
  EXPECT_EQ(huggingface_names(*model, old).at("encoder.layer.1.output.LayerNorm.weight"),
            "bert.encoder.layer.1.output.LayerNorm.gamma");
  plain.pop_back();
  plain.pop_back();
  EXPECT_EQ(error_of([&] { huggingface_names(*model, plain); }),
            "[bert] a file must hold every parameter; missing are pooler.dense.weight, "
            "pooler.dense.bias. Is it a BERT of as many layers, and does it have a pooler?");
}

TEST_F(BertTest, DrawsWeightsInTheDocumentedOrderFromTheGivenGenerator) {
  Bert model(kTiny);
  internal::disturb(*model);
  model->reset_parameters(at::make_generator<at::CPUGeneratorImpl>(7));
  at::Generator again = at::make_generator<at::CPUGeneratorImpl>(7);
  for (const auto& item : model->named_parameters()) {
    at::Tensor expected = torch::empty_like(item.value());
    if (item.value().dim() == 2) {
      expected.normal_(0.0, 0.02, again);
    } else {
      expected.fill_(item.key().ends_with("LayerNorm.weight") ? 1.0 : 0.0);
    }
    EXPECT_TRUE(expected.equal(item.value())) << item.key();
  }
}

TEST_F(BertTest, GradientsAreCentralDifferencesAndReachEveryParameter) {
  const at::Tensor labels = torch::tensor({0, 1}).to(torch::kLong);
  for (const BertPooling pooling : {BertPooling::mean, BertPooling::first}) {
    BertClassifier model(BertClassifierOptions{.bert = kTiny, .pooling = pooling, .dropout = 0.0});
    model->to(torch::kDouble);
    internal::disturb(*model);
    const auto loss = [&] { return cross_entropy(model->forward(ids_, padding_, types_), labels); };
    EXPECT_LT(internal::gradient_error(*model, loss, 3), 1e-7);
    // A key's bias moves all scores of a row alike, which softmax does not see: its gradient is
    // rounding at most.
    EXPECT_THAT(internal::out_of_reach(*model, loss()),
                ::testing::MatchesRegex("(bert.encoder.layer.[01].attention.self.key.bias )*"));
  }
}

TEST_F(BertTest, FrozenLowerLayersGetNoGradientAndTheOthersTheSame) {
  BertClassifier model(BertClassifierOptions{.bert = kTiny, .dropout = 0.0});
  model->to(torch::kDouble);
  const at::Tensor labels = torch::tensor({0, 1}).to(torch::kLong);
  const auto gradients = [&] {
    for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
    cross_entropy(model->forward(ids_, padding_), labels).backward();
    std::map<std::string, at::Tensor> result;
    for (const auto& item : model->named_parameters()) {
      if (item.value().grad().defined()) result[item.key()] = item.value().grad().clone();
    }
    return result;
  };
  const auto whole = gradients();
  const std::int64_t frozen = freeze_lower_layers(*model->bert, 1);
  const auto upper = gradients();
  EXPECT_EQ(frozen, internal::value_count(*model->bert->embeddings) +
                        internal::value_count(*model->bert->layers()[0]));
  EXPECT_EQ(upper.size(), 16U + 2);
  for (const auto& [name, gradient] : upper) {
    EXPECT_TRUE(name.starts_with("bert.encoder.layer.1.") || name.starts_with("classifier."))
        << name;
    EXPECT_TRUE(gradient.equal(whole.at(name))) << name;
  }
  EXPECT_EQ(freeze_lower_layers(*model->bert, 0), internal::value_count(*model->bert->embeddings));
  EXPECT_EQ(gradients().size(), 2U * 16 + 2);
  EXPECT_EQ(error_of([&] { freeze_lower_layers(*model->bert, 3); }),
            "[bert] count of frozen layers must be in [0, 2]; got 3");
  EXPECT_EQ(error_of([&] { freeze_lower_layers(*model->bert, -1); }),
            "[bert] count of frozen layers must be in [0, 2]; got -1");
}

TEST_F(BertTest, DropsOutInTrainingOnly) {
  BertOptions options = kTiny;
  options.dropout = 0.5;
  Bert model(options);
  EXPECT_FALSE(model->forward(ids_, padding_).equal(model->forward(ids_, padding_)));
  model->eval();
  EXPECT_TRUE(model->forward(ids_, padding_).equal(model->forward(ids_, padding_)));
  BertClassifier classifier(BertClassifierOptions{.bert = kTiny, .dropout = 0.5});
  EXPECT_FALSE(classifier->forward(ids_).equal(classifier->forward(ids_)));
}

TEST_F(BertTest, LearnsWhichTokenATextHas) {
  BertClassifier model(BertClassifierOptions{.bert = kTiny, .dropout = 0.0});
  const at::Tensor ids = torch::randint(2, 13, {16, 7}, torch::kLong);
  const at::Tensor labels = torch::arange(16, torch::kLong) % 2;
  ids.select(1, 3).copy_(labels);
  const auto loss = [&] { return cross_entropy(model->forward(ids), labels); };
  EXPECT_LT(internal::loss_after_training(*model, loss, 100, 0.01), 0.05);
}

TEST_F(BertTest, CloneIsEqualAndApart) {
  BertClassifier model(
      BertClassifierOptions{.bert = kTiny, .pooling = BertPooling::first, .dropout = 0.0});
  internal::expect_clone_equal_and_apart<BertClassifierImpl>(
      *model, [&](BertClassifierImpl& m) { return m.forward(ids_, padding_); });
}

TEST_F(BertTest, TakesABatchWithoutTexts) {
  BertClassifier model(BertClassifierOptions{.bert = kTiny});
  const at::Tensor logits =
      model->forward(torch::zeros({0, 5}, torch::kLong), torch::zeros({0, 5}, torch::kBool));
  EXPECT_EQ(logits.sizes(), (std::vector<std::int64_t>{0, 2}));
}

TEST_F(BertTest, RefusesImpossibleOptions) {
  const struct {
    BertOptions options;
    std::string message;
  } cases[] = {
      {{.vocabulary = 0}, "vocabulary must be at least 1; got 0"},
      {{.context = 0}, "context must be at least 1; got 0"},
      {{.token_types = 0}, "token_types must be at least 1; got 0"},
      {{.layers = 0}, "layers must be at least 1; got 0"},
      {{.heads = 0}, "heads must be at least 1; got 0"},
      {{.width = 0}, "width must be at least 1; got 0"},
      {{.intermediate = 0}, "intermediate must be at least 1; got 0"},
      {{.heads = 5}, "width must be a multiple of heads; got width 384 and 5 heads"},
      {{.dropout = 1.0}, "dropout must be in [0, 1); got 1.000000"},
      {{.norm_epsilon = 0.0}, "norm_epsilon must be > 0; got 0.000000"},
  };
  EXPECT_EQ(defect(kTiny), "");
  for (const auto& [options, message] : cases) {
    EXPECT_EQ(defect(options), message);
    EXPECT_EQ(error_of([&] { Bert model(options); }), "[bert] " + message);
  }
  EXPECT_EQ(
      error_of([&] { BertClassifier model(BertClassifierOptions{.bert = kTiny, .classes = 0}); }),
      "[bert_classifier] classes must be at least 1; got 0");
  EXPECT_EQ(defect(BertClassifierOptions{.dropout = -1.0}),
            "dropout must be in [0, 1); got -1.000000");
}

TEST_F(BertTest, RefusesInputsOfAnotherShape) {
  Bert model(kTiny);
  EXPECT_EQ(error_of([&] { model->forward(ids_[0]); }),
            "[bert] ids must have shape [batch, positions] with at least one position; got [5]");
  EXPECT_EQ(error_of([&] { model->forward(torch::zeros({1, 8}, torch::kLong)); }),
            "[bert] positions must be at most the context of 7; got 8. Cut the texts.");
  EXPECT_EQ(error_of([&] { model->forward(ids_, padding_.to(torch::kLong)); }),
            "[bert] padding must be bool of the ids' shape [2, 5]; got Long [2, 5]");
  EXPECT_EQ(error_of([&] { model->forward(ids_, {}, types_[0]); }),
            "[bert] token types must have the shape of the ids, [2, 5]; got [5]");
  BertOptions options = kTiny;
  options.pooler = false;
  EXPECT_EQ(error_of([&] { Bert(options)->pool(torch::zeros({1, 2, 6})); }),
            "[bert] pool() needs options.pooler; got a model without");
}

}  // namespace
}  // namespace gradus::models
