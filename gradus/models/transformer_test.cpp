#include <gradus/models/transformer.h>

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <gradus/models/internal/model_testing.h>

namespace gradus::models {
namespace {

using internal::error_of;
using internal::gap;
using internal::loss_of;

constexpr TransformerOptions kTiny{.source_vocabulary = 9,
                                   .target_vocabulary = 11,
                                   .context = 7,
                                   .encoder_layers = 2,
                                   .decoder_layers = 3,
                                   .heads = 2,
                                   .width = 8,
                                   .hidden = 12};

TransformerOptions untied() {
  TransformerOptions options = kTiny;
  options.tied_output = false;
  return options;
}

class TransformerTest : public internal::TranslatorTest {};

// The whole model again from its state, in unfused operators.
class Reference {
 public:
  Reference(const TransformerOptions& options, std::map<std::string, at::Tensor> state)
      : options_(options), state_(std::move(state)) {}

  at::Tensor logits(const at::Tensor& source, const at::Tensor& target, const at::Tensor& padding) {
    const at::Tensor hidden_keys = padding.unsqueeze(1);
    at::Tensor memory = embed(source, "source_embedding");
    for (int n = 0; n < options_.encoder_layers; ++n) {
      const std::string layer = "encoder." + std::to_string(n);
      const at::Tensor asks = norm(memory, layer + ".norm_1");
      memory = memory + attend(asks, asks, hidden_keys, layer + ".attention");
      memory = memory + feed(norm(memory, layer + ".norm_2"), layer);
    }
    memory = norm(memory, "encoder_norm");
    const at::Tensor future =
        torch::ones({target.size(1), target.size(1)}, torch::kBool).triu(1).unsqueeze(0);
    at::Tensor x = embed(target, "target_embedding");
    for (int n = 0; n < options_.decoder_layers; ++n) {
      const std::string layer = "decoder." + std::to_string(n);
      const at::Tensor asks = norm(x, layer + ".norm_1");
      x = x + attend(asks, asks, future, layer + ".attention");
      x = x + attend(norm(x, layer + ".norm_2"), memory, hidden_keys, layer + ".cross");
      x = x + feed(norm(x, layer + ".norm_3"), layer);
    }
    const std::string table = options_.tied_output ? "target_embedding" : "output";
    return torch::matmul(norm(x, "decoder_norm"), state_.at(table + ".weight").t());
  }

 private:
  at::Tensor linear(const at::Tensor& x, const std::string& name) {
    return torch::matmul(x, state_.at(name + ".weight").t()) + state_.at(name + ".bias");
  }
  at::Tensor norm(const at::Tensor& x, const std::string& name) {
    const at::Tensor centred = x - x.mean(-1, true);
    return centred / (centred.square().mean(-1, true) + 1e-5).sqrt() * state_.at(name + ".weight") +
           state_.at(name + ".bias");
  }
  at::Tensor feed(const at::Tensor& x, const std::string& layer) {
    return linear(linear(x, layer + ".up").clamp_min(0), layer + ".down");
  }
  at::Tensor embed(const at::Tensor& ids, const std::string& name) {
    at::Tensor positions = torch::empty({ids.size(1), options_.width}, torch::kDouble);
    for (int t = 0; t < ids.size(1); ++t) {
      for (int i = 0; i < options_.width; ++i) {
        const double angle =
            t / std::pow(10000.0, (i - i % 2) / static_cast<double>(options_.width));
        positions[t][i] = i % 2 == 0 ? std::sin(angle) : std::cos(angle);
      }
    }
    return state_.at(name + ".weight").index({ids}) *
               std::sqrt(static_cast<double>(options_.width)) +
           positions;
  }
  at::Tensor attend(const at::Tensor& x, const at::Tensor& memory, const at::Tensor& hidden,
                    const std::string& name) {
    const std::int64_t D = options_.width / options_.heads;
    const at::Tensor q = linear(x, name + ".query");
    const auto kv = linear(memory, name + ".key_value").chunk(2, -1);
    std::vector<at::Tensor> heads;
    for (std::int64_t h = 0; h < options_.heads; ++h) {
      const auto part = [&](const at::Tensor& all) { return all.narrow(-1, h * D, D); };
      const at::Tensor scores =
          torch::matmul(part(q), part(kv[0]).transpose(1, 2)) / std::sqrt(static_cast<double>(D));
      heads.push_back(
          torch::matmul(scores.masked_fill(hidden, -INFINITY).softmax(-1), part(kv[1])));
    }
    return linear(torch::cat(heads, -1), name + ".output");
  }

  TransformerOptions options_;
  std::map<std::string, at::Tensor> state_;
};

TEST_F(TransformerTest, ComputesTheModelWrittenOutInElementaryOperators) {
  for (const TransformerOptions& options : {kTiny, untied()}) {
    SCOPED_TRACE(options.tied_output);
    Transformer model(options);
    model->to(torch::kDouble);
    internal::disturb(*model);
    const at::Tensor logits = model->forward(source_, target_, padding_);
    ASSERT_EQ(logits.sizes(), (std::vector<std::int64_t>{2, 4, 11}));
    Reference reference(options, internal::state_of(*model));
    EXPECT_LT(gap(logits, reference.logits(source_, target_, padding_)), 1e-11);
    EXPECT_LT(gap(model->forward(source_, target_),
                  reference.logits(source_, target_, torch::zeros_like(padding_))),
              1e-11);
  }
}

TEST_F(TransformerTest, APaddedSourceGivesTheLogitsOfTheUnpadded) {
  Transformer model(kTiny);
  model->to(torch::kDouble);
  internal::disturb(*model);
  const at::Tensor padded = model->forward(source_, target_, padding_).slice(0, 1, 2);
  const at::Tensor alone =
      model->forward(source_.slice(0, 1, 2).slice(1, 0, 3), target_.slice(0, 1, 2));
  EXPECT_LT(gap(padded, alone), 1e-12);
  EXPECT_GT(gap(model->forward(source_, target_).slice(0, 1, 2), alone), 1e-3);
}

TEST_F(TransformerTest, LogitsDependOnTheWholeSourceAndNotOnLaterTargets) {
  Transformer model(kTiny);
  model->to(torch::kDouble);
  const at::Tensor source = source_.slice(0, 0, 1), target = target_.slice(0, 0, 1);
  const at::Tensor before = model->forward(source, target);
  for (std::int64_t t = 0; t < 4; ++t) {
    SCOPED_TRACE(t);
    at::Tensor changed = target.clone();
    changed[0][t] = (changed[0][t] + 1) % 11;
    const at::Tensor difference = (model->forward(source, changed) - before).abs().amax(-1)[0];
    if (t > 0) EXPECT_LT(difference.slice(0, 0, t).max().item<double>(), 1e-13);
    EXPECT_GT(difference.slice(0, t).min().item<double>(), 1e-8);
  }
  for (std::int64_t s = 0; s < 5; ++s) {
    SCOPED_TRACE(s);
    at::Tensor changed = source.clone();
    changed[0][s] = (changed[0][s] + 1) % 9;
    const at::Tensor difference = (model->forward(changed, target) - before).abs().amax(-1)[0];
    EXPECT_GT(difference.min().item<double>(), 1e-8);
  }
}

TEST_F(TransformerTest, EncodeAndDecodeGiveTheBitsOfForward) {
  Transformer model(kTiny);
  const at::Tensor memory = model->encode(source_, padding_);
  EXPECT_TRUE(
      model->decode(target_, memory, padding_).equal(model->forward(source_, target_, padding_)));
  EXPECT_EQ(model->encoder().size(), 2u);
  EXPECT_EQ(model->decoder().size(), 3u);
}

TEST_F(TransformerTest, CountsParametersByFormulaWithTheTiedWeightOnce) {
  for (const TransformerOptions& options : {kTiny, untied()}) {
    EXPECT_EQ(internal::value_count(*Transformer(options)), parameter_count(options));
  }
  // The base model has 65 million with a shared vocabulary of 37000 (Vaswani et al. 2017, Table 3);
  // here the source has an embedding of its own.
  EXPECT_NEAR(static_cast<double>(
                  parameter_count({.source_vocabulary = 37000, .target_vocabulary = 37000})) -
                  37000.0 * 512,
              63e6, 0.5e6);
}

TEST_F(TransformerTest, StateNamesAreThoseOfTheDocumentation) {
  std::set<std::string> expected{"source_embedding.weight", "target_embedding.weight"};
  const auto add = [&](const std::string& name) {
    expected.insert({name + ".weight", name + ".bias"});
  };
  for (const char* part : {"query", "key_value", "output"}) {
    add("encoder.0.attention." + std::string(part));
    add("decoder.0.attention." + std::string(part));
    add("decoder.0.cross." + std::string(part));
  }
  for (const char* part : {"norm_1", "norm_2", "up", "down"}) {
    add("encoder.0." + std::string(part));
    add("decoder.0." + std::string(part));
  }
  for (const char* part : {"decoder.0.norm_3", "encoder_norm", "decoder_norm"}) add(part);
  TransformerOptions options = untied();
  options.encoder_layers = options.decoder_layers = 1;
  std::set<std::string> with_output = expected;
  with_output.insert("output.weight");
  EXPECT_EQ(internal::names_of(*Transformer(options)), with_output);
  options.tied_output = true;
  EXPECT_EQ(internal::names_of(*Transformer(options)), expected);
}

TEST_F(TransformerTest, DrawsWeightsInTheDocumentedOrderFromTheGivenGenerator) {
  Transformer model(untied());
  model->reset_parameters(at::make_generator<at::CPUGeneratorImpl>(7));
  at::Generator again = at::make_generator<at::CPUGeneratorImpl>(7);
  for (const auto& item : model->named_parameters()) {
    const std::string& name = item.key();
    at::Tensor expected = torch::empty_like(item.value());
    if (name.find("embedding") != std::string::npos || name == "output.weight") {
      expected.normal_(0.0, 1 / std::sqrt(8.0), again);
    } else if (name.find("norm") != std::string::npos) {
      expected.fill_(name.ends_with("weight") ? 1.0 : 0.0);
    } else if (name.ends_with("bias")) {
      expected.zero_();
    } else {
      const bool feed =
          name.find("up") != std::string::npos || name.find("down") != std::string::npos;
      const double bound = std::sqrt(6.0 / (feed ? 8 + 12 : 8 + 8));
      expected.uniform_(-bound, bound, again);
    }
    EXPECT_TRUE(expected.equal(item.value())) << name;
  }
}

TEST_F(TransformerTest, GradientsReachEveryParameter) {
  for (const TransformerOptions& options : {kTiny, untied()}) {
    Transformer model(options);
    internal::disturb(*model);
    EXPECT_EQ(internal::out_of_reach(*model, loss_of(model, source_, target_, target_, padding_)),
              "");
  }
}

TEST_F(TransformerTest, DropsOutInTrainingOnly) {
  TransformerOptions options = kTiny;
  options.dropout = 0.5;
  Transformer model(options);
  EXPECT_FALSE(model->encode(source_).equal(model->encode(source_)));
  const at::Tensor memory = model->encode(source_);
  EXPECT_FALSE(model->decode(target_, memory).equal(model->decode(target_, memory)));
  const auto attention = model->decoder()[0]->cross;
  EXPECT_FALSE(attention.ptr()
                   ->forward(memory, memory, {}, false)
                   .equal(attention.ptr()->forward(memory, memory, {}, false)));
  model->eval();
  EXPECT_TRUE(model->forward(source_, target_).equal(model->forward(source_, target_)));
}

TEST_F(TransformerTest, LearnsToTranslateASmallBatchAndDecodesItGreedily) {
  Transformer model(kTiny);
  const at::Tensor next = torch::tensor({{6, 1, 8, 10}, {2, 5, 10, 0}});
  const auto loss = [&] { return loss_of(model, source_, target_, next, padding_); };
  EXPECT_LT(internal::loss_after_training(*model, loss, 60, 0.01), 0.1);
  const at::NoGradGuard no_grad;
  const at::Tensor memory = model->encode(source_, padding_);
  at::Tensor ids = torch::ones({2, 1}, torch::kLong);
  for (int t = 0; t < 4; ++t) {
    const at::Tensor best = model->decode(ids, memory, padding_).select(1, -1).argmax(-1, true);
    ids = torch::cat({ids, best}, 1);
  }
  EXPECT_TRUE(ids.slice(1, 1).equal(next)) << ids;
}

TEST_F(TransformerTest, CloneIsEqualAndApart) {
  Transformer model(kTiny);
  internal::expect_clone_equal_and_apart<TransformerImpl>(
      *model, [&](TransformerImpl& m) { return m.forward(source_, target_, padding_); });
}

TEST_F(TransformerTest, RefusesImpossibleOptions) {
  const struct {
    TransformerOptions options;
    std::string message;
  } cases[] = {
      {{.source_vocabulary = 0}, "source_vocabulary must be at least 1; got 0"},
      {{.target_vocabulary = 0}, "target_vocabulary must be at least 1; got 0"},
      {{.context = 0}, "context must be at least 1; got 0"},
      {{.encoder_layers = 0}, "encoder_layers must be at least 1; got 0"},
      {{.decoder_layers = -1}, "decoder_layers must be at least 1; got -1"},
      {{.heads = 0}, "heads must be at least 1; got 0"},
      {{.hidden = 0}, "hidden must be at least 1; got 0"},
      {{.heads = 3, .width = 8}, "width must be a multiple of heads; got width 8 and 3 heads"},
      {{.heads = 3, .width = 9}, "width must be even; got 9"},
      {{.dropout = -0.5}, "dropout must be in [0, 1); got -0.500000"},
  };
  EXPECT_EQ(defect(kTiny), "");
  for (const auto& [options, message] : cases) {
    EXPECT_EQ(defect(options), message);
    EXPECT_EQ(error_of([&] { Transformer model(options); }), "[transformer] " + message);
  }
}

TEST_F(TransformerTest, RefusesInputsOfAnotherShape) {
  Transformer model(kTiny);
  const at::Tensor long_ids = torch::zeros({2, 8}, torch::kLong);
  EXPECT_EQ(error_of([&] { model->forward(long_ids, target_); }),
            "[transformer] source ids must have at most 7 positions, the context; got 8. Shorten "
            "the input or build the model with a larger context.");
  EXPECT_EQ(error_of([&] { model->forward(source_, long_ids); }),
            "[transformer] target ids must have at most 7 positions, the context; got 8. Shorten "
            "the input or build the model with a larger context.");
  EXPECT_EQ(error_of([&] { model->forward(source_[0], target_); }),
            "[transformer] source ids must have shape [batch, positions] with at least one "
            "position; got [5]");
  EXPECT_EQ(error_of([&] { model->forward(source_, target_.slice(0, 0, 1)); }),
            "[transformer] source and target must have the same batch; got [2, 5] and [1, 4]");
  EXPECT_EQ(error_of([&] { model->forward(source_, target_, padding_.slice(1, 1)); }),
            "[transformer] source padding must be bool of the source's shape [2, 5]; got Bool [2, "
            "4]");
  EXPECT_EQ(error_of([&] { model->forward(source_, target_, source_); }),
            "[transformer] source padding must be bool of the source's shape [2, 5]; got Long [2, "
            "5]");
  EXPECT_EQ(error_of([&] { model->decode(target_, torch::zeros({1, 5, 8})); }),
            "[transformer] memory must have shape [2, source positions, 8], the target's batch and "
            "the width; got [1, 5, 8]");
}

}  // namespace
}  // namespace gradus::models
