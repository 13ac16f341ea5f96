#include <gradus/models/gpt.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>
#include <torch/utils.h>

namespace gradus::models {
namespace {

using ::testing::HasSubstr;

constexpr GptOptions kTiny{.vocabulary = 11, .context = 6, .layers = 2, .heads = 2, .width = 8};

Gpt make(GptOptions options, std::uint64_t seed = 1) {
  torch::manual_seed(seed);
  return Gpt(options);
}

at::Tensor some_ids(std::int64_t batch, std::int64_t positions, std::int64_t vocabulary,
                    std::uint64_t seed = 2) {
  torch::manual_seed(seed);
  return torch::randint(vocabulary, {batch, positions}, torch::kLong);
}

at::Tensor loss_of(Gpt& gpt, const at::Tensor& ids, const at::Tensor& targets) {
  return torch::nn::functional::cross_entropy(gpt->forward(ids).flatten(0, 1), targets.flatten());
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no c10::ValueError";
}

// The whole model again from its state, in unfused operators: what at::linear, at::layer_norm,
// at::gelu and scaled_dot_product_attention are meant to compute.
at::Tensor reference_logits(const GptOptions& options,
                            const std::map<std::string, at::Tensor>& state, const at::Tensor& ids) {
  const std::int64_t T = ids.size(1), H = options.heads, D = options.width / options.heads;
  const auto linear = [&](const at::Tensor& x, const std::string& name) {
    at::Tensor y = torch::matmul(x, state.at(name + ".weight").t());
    return options.bias ? y + state.at(name + ".bias") : y;
  };
  const auto norm = [&](const at::Tensor& x, const std::string& name) {
    const at::Tensor centred = x - x.mean(-1, true);
    return centred / (centred.square().mean(-1, true) + 1e-5).sqrt() * state.at(name + ".weight") +
           state.at(name + ".bias");
  };
  const at::Tensor hidden_future = torch::ones({T, T}, torch::kBool).triu(1);
  at::Tensor x = state.at("wte.weight").index({ids}) + state.at("wpe.weight").slice(0, 0, T);
  for (std::int64_t i = 0; i < options.layers; ++i) {
    const std::string block = "blocks." + std::to_string(i);
    const at::Tensor qkv = linear(norm(x, block + ".ln_1"), block + ".attn.qkv");
    std::vector<at::Tensor> heads;
    for (std::int64_t h = 0; h < H; ++h) {
      const auto part = [&](std::int64_t which) {
        return qkv.narrow(-1, which * H * D + h * D, D);
      };
      const at::Tensor scores =
          torch::matmul(part(0), part(1).transpose(1, 2)) / std::sqrt(static_cast<double>(D));
      heads.push_back(
          torch::matmul(scores.masked_fill(hidden_future, -INFINITY).softmax(-1), part(2)));
    }
    x = x + linear(torch::cat(heads, -1), block + ".attn.proj");
    const at::Tensor u = linear(norm(x, block + ".ln_2"), block + ".mlp.up");
    const at::Tensor gelu =
        0.5 * u * (1 + torch::tanh(std::sqrt(2 / M_PI) * (u + 0.044715 * u.pow(3))));
    x = x + linear(gelu, block + ".mlp.down");
  }
  return torch::matmul(norm(x, "ln_f"), state.at("wte.weight").t());
}

class GptTest : public ::testing::Test {
 protected:
  void SetUp() override { torch::set_num_threads(1); }
};

TEST_F(GptTest, ComputesTheModelWrittenOutInElementaryOperators) {
  for (const bool bias : {true, false}) {
    SCOPED_TRACE(bias);
    GptOptions options = kTiny;
    options.bias = bias;
    Gpt gpt = make(options);
    gpt->to(torch::kDouble);
    {
      // Biases and norms away from 0 and 1, or an exchanged pair would not show.
      const at::NoGradGuard no_grad;
      for (auto& parameter : gpt->parameters()) parameter.add_(torch::randn_like(parameter), 0.3);
    }
    std::map<std::string, at::Tensor> state;
    for (const auto& item : gpt->named_parameters()) state[item.key()] = item.value();
    const at::Tensor ids = some_ids(3, 5, options.vocabulary);
    const at::Tensor logits = gpt->forward(ids);
    ASSERT_EQ(logits.sizes(), (std::vector<std::int64_t>{3, 5, 11}));
    EXPECT_LT((logits - reference_logits(options, state, ids)).abs().max().item<double>(), 1e-12);
  }
}

TEST_F(GptTest, PiecesRunOneByOneGiveTheBitsOfForward) {
  Gpt gpt = make(kTiny);
  const at::Tensor ids = some_ids(2, 6, kTiny.vocabulary);
  at::Tensor x = gpt->embed(ids);
  ASSERT_EQ(x.sizes(), (std::vector<std::int64_t>{2, 6, 8}));
  ASSERT_EQ(gpt->blocks().size(), 2u);
  for (const auto& block : gpt->blocks()) x = block->forward(x);
  EXPECT_TRUE(x.equal(gpt->hidden(ids)));
  EXPECT_TRUE(gpt->head(x).equal(gpt->forward(ids)));
}

TEST_F(GptTest, LogitsDoNotDependOnLaterTokens) {
  Gpt gpt = make(kTiny);
  gpt->to(torch::kDouble);
  const at::Tensor ids = some_ids(1, 6, kTiny.vocabulary);
  const at::Tensor before = gpt->forward(ids);
  for (std::int64_t t = 0; t < 6; ++t) {
    SCOPED_TRACE(t);
    at::Tensor changed = ids.clone();
    changed[0][t] = (changed[0][t] + 1) % kTiny.vocabulary;
    const at::Tensor difference = (gpt->forward(changed) - before).abs().amax(-1)[0];
    if (t > 0) EXPECT_LT(difference.slice(0, 0, t).max().item<double>(), 1e-13);
    // And they do depend on the token itself and all earlier ones.
    EXPECT_GT(difference.slice(0, t).min().item<double>(), 1e-8);
  }
}

TEST_F(GptTest, GradientsEqualFiniteDifferencesInDouble) {
  GptOptions options = kTiny;
  options.layers = 1;
  Gpt gpt = make(options);
  gpt->to(torch::kDouble);
  {
    const at::NoGradGuard
        no_grad;  // Weights of 0.02 would leave attention uniform and its gradient untested.
    for (auto& parameter : gpt->parameters()) parameter.add_(torch::randn_like(parameter), 0.2);
  }
  const at::Tensor ids = some_ids(2, 4, options.vocabulary);
  const at::Tensor targets = some_ids(2, 4, options.vocabulary, 3);
  loss_of(gpt, ids, targets).backward();
  const at::NoGradGuard no_grad;
  constexpr double kStep = 1e-5;
  for (const auto& item : gpt->named_parameters()) {
    at::Tensor values = item.value().data().view(-1);
    const at::Tensor gradient = item.value().grad().view(-1);
    for (std::int64_t i = 0; i < values.numel(); ++i) {
      const double kept = values[i].item<double>();
      values[i] = kept + kStep;
      const double above = loss_of(gpt, ids, targets).item<double>();
      values[i] = kept - kStep;
      const double below = loss_of(gpt, ids, targets).item<double>();
      values[i] = kept;
      // Truncation is O(step^2) = 1e-10 times the third derivative, rounding 1e-16 / step = 1e-11.
      ASSERT_NEAR(gradient[i].item<double>(), (above - below) / (2 * kStep), 2e-8)
          << item.key() << "[" << i << "]";
    }
  }
}

TEST_F(GptTest, CountsParametersByFormulaWithTheTiedWeightOnce) {
  for (const bool bias : {true, false}) {
    SCOPED_TRACE(bias);
    GptOptions options = kTiny;
    options.bias = bias;
    std::int64_t values = 0;
    for (const auto& parameter : make(options)->parameters()) values += parameter.numel();
    EXPECT_EQ(values, parameter_count(options));
  }
  // GPT-2 small as published with tied embeddings.
  EXPECT_EQ(parameter_count(GptOptions{}), 124'439'808);
}

TEST_F(GptTest, TiedWeightIsOneParameterThatBothEndsTrain) {
  Gpt gpt = make(kTiny);
  std::int64_t of_vocabulary_size = 0;
  for (const auto& parameter : gpt->parameters())
    of_vocabulary_size += parameter.size(0) == kTiny.vocabulary;
  EXPECT_EQ(of_vocabulary_size, 1);
  const at::Tensor ids = torch::zeros({1, 3}, torch::kLong);
  loss_of(gpt, ids, ids + 1).backward();
  // Through the embedding alone only row 0 would have a gradient.
  EXPECT_TRUE(gpt->wte->weight.grad().abs().amax(1).gt(0).all().item<bool>());
}

TEST_F(GptTest, StateNamesAreThoseOfTheDocumentation) {
  std::set<std::string> names;
  GptOptions options = kTiny;
  options.layers = 1;
  for (const auto& item : make(options)->named_parameters()) names.insert(item.key());
  const std::set<std::string> expected{"wte.weight",
                                       "wpe.weight",
                                       "blocks.0.ln_1.weight",
                                       "blocks.0.ln_1.bias",
                                       "blocks.0.ln_2.weight",
                                       "blocks.0.ln_2.bias",
                                       "blocks.0.attn.qkv.weight",
                                       "blocks.0.attn.qkv.bias",
                                       "ln_f.weight",
                                       "ln_f.bias",
                                       "blocks.0.attn.proj.weight",
                                       "blocks.0.attn.proj.bias",
                                       "blocks.0.mlp.up.bias",
                                       "blocks.0.mlp.up.weight",
                                       "blocks.0.mlp.down.weight",
                                       "blocks.0.mlp.down.bias"};
  EXPECT_EQ(names, expected);
}

TEST_F(GptTest, DrawsWeightsInTheDocumentedOrderFromTheGivenGenerator) {
  Gpt gpt = make(kTiny);
  gpt->reset_parameters(at::make_generator<at::CPUGeneratorImpl>(7));
  at::Generator again = at::make_generator<at::CPUGeneratorImpl>(7);
  const double residual = 0.02 / std::sqrt(4.0);
  const auto expect = [&](const at::Tensor& weight, double deviation) {
    EXPECT_TRUE(torch::empty_like(weight).normal_(0.0, deviation, again).equal(weight));
  };
  expect(gpt->wte->weight, 0.02);
  expect(gpt->wpe->weight, 0.02);
  for (const auto& block : gpt->blocks()) {
    expect(block->attn->qkv->weight, 0.02);
    expect(block->attn->proj->weight, residual);
    expect(block->mlp->up->weight, 0.02);
    expect(block->mlp->down->weight, residual);
    EXPECT_TRUE(block->ln_1->weight.eq(1).all().item<bool>());
    EXPECT_TRUE(block->mlp->up->bias.eq(0).all().item<bool>());
  }
}

TEST_F(GptTest, SameSeedGivesTheSameWeights) {
  Gpt first = make(kTiny, 5), second = make(kTiny, 5), other = make(kTiny, 6);
  for (const auto& item : first->named_parameters()) {
    EXPECT_TRUE(item.value().equal(second->named_parameters()[item.key()])) << item.key();
  }
  EXPECT_FALSE(first->wte->weight.equal(other->wte->weight));
}

TEST_F(GptTest, DropsOutInTrainingOnly) {
  GptOptions options = kTiny;
  options.dropout = 0.5;
  Gpt gpt = make(options);
  const at::Tensor ids = some_ids(2, 6, options.vocabulary);
  EXPECT_FALSE(gpt->forward(ids).equal(gpt->forward(ids)));
  gpt->eval();
  Gpt plain = make(kTiny);
  plain->eval();
  EXPECT_TRUE(gpt->forward(ids).equal(plain->forward(ids)));
}

TEST_F(GptTest, DropsOutEmbeddingAttentionAndBothResiduals) {
  GptOptions options = kTiny;
  options.dropout = 0.5;
  Gpt gpt = make(options);
  const at::Tensor ids = some_ids(4, 6, options.vocabulary);
  const auto zero_share = [](const at::Tensor& x) {
    return x.eq(0).to(torch::kDouble).mean().item<double>();
  };
  const at::Tensor x = gpt->embed(ids);
  EXPECT_NEAR(zero_share(x), 0.5, 0.15);
  GptBlock block(gpt->blocks()[0]);
  EXPECT_FALSE(block->attn->forward(x).equal(block->attn->forward(x)));
  // An output value is the input itself where both residual terms are dropped.
  EXPECT_NEAR(zero_share(block->forward(x) - x), 0.25, 0.15);
}

TEST_F(GptTest, CloneIsEqualAndApart) {
  Gpt gpt = make(kTiny);
  const auto clone = std::dynamic_pointer_cast<GptImpl>(gpt->clone());
  ASSERT_TRUE(clone);
  const at::Tensor ids = some_ids(2, 6, kTiny.vocabulary);
  const at::Tensor before = gpt->forward(ids);
  EXPECT_TRUE(clone->forward(ids).equal(before));
  const at::NoGradGuard no_grad;
  for (auto& parameter : clone->parameters()) parameter.add_(1.0);
  EXPECT_TRUE(gpt->forward(ids).equal(before));
  EXPECT_FALSE(clone->forward(ids).equal(before));
}

TEST_F(GptTest, TakesInt32Ids) {
  Gpt gpt = make(kTiny);
  const at::Tensor ids = some_ids(2, 6, kTiny.vocabulary);
  EXPECT_TRUE(gpt->forward(ids.to(torch::kInt)).equal(gpt->forward(ids)));
}

TEST_F(GptTest, LearnsToRepeatAFixedSequence) {
  GptOptions options = kTiny;
  options.dropout = 0.05;
  Gpt gpt = make(options);
  const at::Tensor ids = torch::tensor({{1, 4, 2, 8, 5, 7}}),
                   targets = torch::tensor({{4, 2, 8, 5, 7, 1}});
  for (int step = 0; step < 200; ++step) {
    gpt->zero_grad();
    loss_of(gpt, ids, targets).backward();
    const at::NoGradGuard no_grad;
    for (auto& parameter : gpt->parameters()) parameter.sub_(parameter.grad(), 0.3);
  }
  gpt->eval();
  EXPECT_LT(loss_of(gpt, ids, targets).item<double>(), 0.1);
  EXPECT_TRUE(gpt->forward(ids).argmax(-1).equal(targets));
}

TEST_F(GptTest, RefusesImpossibleOptions) {
  const auto with = [](auto change) {
    GptOptions options = kTiny;
    change(options);
    return options;
  };
  const struct {
    GptOptions options;
    std::string message;
  } cases[] = {
      {with([](GptOptions& o) { o.heads = 3; }),
       "width must be a multiple of heads; got width 8 and 3 heads"},
      {with([](GptOptions& o) { o.heads = 0; }), "heads must be at least 1; got 0"},
      {with([](GptOptions& o) { o.vocabulary = -1; }), "vocabulary must be at least 1; got -1"},
      {with([](GptOptions& o) { o.context = 0; }), "context must be at least 1; got 0"},
      {with([](GptOptions& o) { o.layers = 0; }), "layers must be at least 1; got 0"},
      {with([](GptOptions& o) { o.width = 0; }), "width must be at least 1; got 0"},
      {with([](GptOptions& o) { o.dropout = 1.0; }), "dropout must be in [0, 1); got 1.000000"},
      {with([](GptOptions& o) { o.dropout = NAN; }), "dropout must be in [0, 1); got nan"},
  };
  EXPECT_EQ(defect(kTiny), "");
  for (const auto& [options, message] : cases) {
    EXPECT_EQ(defect(options), message);
    EXPECT_EQ(error_of([&] { Gpt gpt(options); }), "[gpt] " + message);
  }
}

TEST_F(GptTest, RefusesIdsOfAnotherShape) {
  Gpt gpt = make(kTiny);
  EXPECT_EQ(error_of([&] { gpt->forward(torch::zeros({2, 7}, torch::kLong)); }),
            "[gpt] positions must be between 1 and the context of 6; got 7. Shorten the input or "
            "build the model with "
            "a larger context.");
  EXPECT_THAT(error_of([&] { gpt->forward(torch::zeros({2, 0}, torch::kLong)); }),
              HasSubstr("got 0"));
  EXPECT_EQ(error_of([&] { gpt->forward(torch::zeros({6}, torch::kLong)); }),
            "[gpt] ids must have shape [batch, positions]; got [6]");
}

}  // namespace
}  // namespace gradus::models
