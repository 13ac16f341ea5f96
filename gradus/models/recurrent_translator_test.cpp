#include <gradus/models/recurrent_translator.h>

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/utils/rnn.h>
#include <torch/types.h>

#include <gradus/models/internal/model_testing.h>

namespace gradus::models {
namespace {

using internal::error_of;
using internal::gap;
using internal::loss_of;

constexpr RecurrentTranslatorOptions kTiny{
    .source_vocabulary = 9, .target_vocabulary = 11, .width = 8, .layers = 2};

class RecurrentTranslatorTest : public internal::TranslatorTest {};

// One sentence through the equations of Luong et al. 2015, position by position.
class Reference {
 public:
  Reference(const RecurrentTranslatorOptions& options, std::map<std::string, at::Tensor> state)
      : options_(options), state_(std::move(state)) {}

  // source [S], target [T] -> [T, V].
  at::Tensor logits(const at::Tensor& source, const at::Tensor& target) {
    std::vector<at::Tensor> h, c;
    std::vector<at::Tensor> x = state_.at("source_embedding.weight").index({source}).unbind(0);
    const std::size_t S = x.size();
    for (int n = 0; n < options_.layers; ++n) {
      std::vector<at::Tensor> ahead(S), back(S);
      at::Tensor ha = zero(options_.width / 2), ca = ha, hb = ha, cb = ha;
      for (std::size_t s = 0; s < S; ++s) {
        const std::size_t r = S - 1 - s;
        cell(x[s], ha, ca, "encoder_forward." + std::to_string(n), "_l0");
        cell(x[r], hb, cb, "encoder_backward." + std::to_string(n), "_l0");
        ahead[s] = ha;
        back[r] = hb;
      }
      h.push_back(torch::cat({ha, hb}));
      c.push_back(zero(options_.width));
      for (std::size_t s = 0; s < S; ++s) x[s] = torch::cat({ahead[s], back[s]});
    }
    at::Tensor fed = zero(options_.width);
    std::vector<at::Tensor> result;
    for (std::int64_t t = 0; t < target.size(0); ++t) {
      at::Tensor y =
          torch::cat({state_.at("target_embedding.weight")[target[t].item<std::int64_t>()], fed});
      for (int n = 0; n < options_.layers; ++n) {
        cell(y, h[static_cast<std::size_t>(n)], c[static_cast<std::size_t>(n)],
             "cells." + std::to_string(n), "");
        y = h[static_cast<std::size_t>(n)];
      }
      std::vector<at::Tensor> scores;
      for (const at::Tensor& value : x) {
        scores.push_back(y.dot(torch::mv(state_.at("attention.weight"), value)));
      }
      const at::Tensor weights = torch::stack(scores).softmax(0);
      const at::Tensor context = torch::mv(torch::stack(x).t(), weights);
      fed = torch::mv(state_.at("combine.weight"), torch::cat({context, y})).tanh();
      result.push_back(torch::mv(state_.at("output.weight"), fed) + state_.at("output.bias"));
    }
    return torch::stack(result);
  }

 private:
  static at::Tensor zero(std::int64_t width) { return torch::zeros({width}, torch::kDouble); }

  void cell(const at::Tensor& x, at::Tensor& h, at::Tensor& c, const std::string& name,
            const std::string& suffix) {
    const auto weight = [&](const char* which) { return state_.at(name + "." + which + suffix); };
    const auto gates = (torch::mv(weight("weight_ih"), x) + weight("bias_ih") +
                        torch::mv(weight("weight_hh"), h) + weight("bias_hh"))
                           .chunk(4);
    c = gates[1].sigmoid() * c + gates[0].sigmoid() * gates[2].tanh();
    h = gates[3].sigmoid() * c.tanh();
  }

  RecurrentTranslatorOptions options_;
  std::map<std::string, at::Tensor> state_;
};

TEST_F(RecurrentTranslatorTest, ComputesTheModelWrittenOutForEachSentence) {
  RecurrentTranslator model(kTiny);
  model->to(torch::kDouble);
  internal::disturb(*model);
  Reference reference(kTiny, internal::state_of(*model));
  const at::Tensor logits = model->forward(source_, target_, padding_);
  ASSERT_EQ(logits.sizes(), (std::vector<std::int64_t>{2, 4, 11}));
  EXPECT_LT(gap(logits[0], reference.logits(source_[0], target_[0])), 1e-12);
  EXPECT_LT(gap(logits[1], reference.logits(source_[1].slice(0, 0, 3), target_[1])), 1e-12);
  const at::Tensor unpadded = model->forward(source_, target_);
  EXPECT_LT(gap(unpadded[1], reference.logits(source_[1], target_[1])), 1e-12);
  EXPECT_GT(gap(unpadded[1], logits[1]), 1e-3);
  // Single precision runs through another kernel.
  model->to(torch::kFloat);
  EXPECT_LT(gap(model->forward(source_, target_, padding_), logits), 1e-4);
}

TEST_F(RecurrentTranslatorTest, WhatStandsInThePaddingDoesNotMatter) {
  RecurrentTranslator model(kTiny);
  model->to(torch::kDouble);
  const at::Tensor other = torch::where(padding_, 8 - source_, source_);
  EXPECT_TRUE(
      model->forward(other, target_, padding_).equal(model->forward(source_, target_, padding_)));
}

TEST_F(RecurrentTranslatorTest, LogitsDependOnTheWholeSourceAndNotOnLaterTargets) {
  RecurrentTranslator model(kTiny);
  model->to(torch::kDouble);
  internal::disturb(*model);
  const at::Tensor source = source_.slice(0, 0, 1), target = target_.slice(0, 0, 1);
  const at::Tensor before = model->forward(source, target);
  for (std::int64_t t = 0; t < 4; ++t) {
    SCOPED_TRACE(t);
    at::Tensor changed = target.clone();
    changed[0][t] = (changed[0][t] + 1) % 11;
    const at::Tensor difference = (model->forward(source, changed) - before).abs().amax(-1)[0];
    if (t > 0) EXPECT_EQ(difference.slice(0, 0, t).max().item<double>(), 0);
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

TEST_F(RecurrentTranslatorTest, StepsGiveTheLogitsOfForward) {
  RecurrentTranslator model(kTiny);
  model->to(torch::kDouble);
  const at::Tensor logits = model->forward(source_, target_, padding_);
  const RecurrentTranslatorMemory memory = model->encode(source_, padding_);
  RecurrentTranslatorState state = memory.start;
  for (std::int64_t t = 0; t < 4; ++t) {
    const at::Tensor stepped = model->step(target_.select(1, t), memory, state);
    EXPECT_LT(gap(stepped, logits.select(1, t)), 1e-14);
  }
  // The memory's first state is as it was: a second sentence can begin from it.
  EXPECT_EQ(memory.start.fed_BC.abs().max().item<double>(), 0);
}

TEST_F(RecurrentTranslatorTest, CountsParametersByFormula) {
  for (const std::int64_t layers : {1, 2, 3}) {
    RecurrentTranslatorOptions options = kTiny;
    options.layers = layers;
    EXPECT_EQ(internal::value_count(*RecurrentTranslator(options)), parameter_count(options));
  }
}

TEST_F(RecurrentTranslatorTest, StateNamesAreThoseOfTheDocumentation) {
  std::set<std::string> expected{"source_embedding.weight", "target_embedding.weight",
                                 "attention.weight",        "combine.weight",
                                 "output.weight",           "output.bias"};
  for (const std::string name : {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}) {
    for (const std::string layer : {"0.", "1."}) {
      expected.insert("encoder_forward." + layer + name + "_l0");
      expected.insert("encoder_backward." + layer + name + "_l0");
      expected.insert("cells." + layer + name);
    }
  }
  EXPECT_EQ(internal::names_of(*RecurrentTranslator(kTiny)), expected);
}

TEST_F(RecurrentTranslatorTest, DrawsWeightsInTheDocumentedOrderFromTheGivenGenerator) {
  RecurrentTranslator model(kTiny);
  model->reset_parameters(at::make_generator<at::CPUGeneratorImpl>(7));
  at::Generator again = at::make_generator<at::CPUGeneratorImpl>(7);
  for (const auto& item : model->named_parameters()) {
    const std::string& name = item.key();
    at::Tensor expected = torch::empty_like(item.value());
    if (name.find("embedding") != std::string::npos) {
      expected.normal_(0.0, 1 / std::sqrt(8.0), again);
    } else if (name == "output.bias") {
      expected.zero_();
    } else {
      const double bound = 1 / std::sqrt(name.starts_with("encoder") ? 4.0 : 8.0);
      expected.uniform_(-bound, bound, again);
    }
    EXPECT_TRUE(expected.equal(item.value())) << name;
  }
}

TEST_F(RecurrentTranslatorTest, GradientsReachEveryParameter) {
  RecurrentTranslator model(kTiny);
  EXPECT_EQ(internal::out_of_reach(*model, loss_of(model, source_, target_, target_, padding_)),
            "");
}

TEST_F(RecurrentTranslatorTest, DropsOutInTrainingOnly) {
  RecurrentTranslatorOptions options = kTiny;
  options.dropout = 0.5;
  RecurrentTranslator model(options);
  EXPECT_FALSE(model->encode(source_).values_BSC.equal(model->encode(source_).values_BSC));
  const RecurrentTranslatorMemory memory = model->encode(source_);
  RecurrentTranslatorState first = memory.start, second = memory.start;
  EXPECT_FALSE(model->step(target_.select(1, 0), memory, first)
                   .equal(model->step(target_.select(1, 0), memory, second)));
  model->eval();
  EXPECT_TRUE(model->forward(source_, target_).equal(model->forward(source_, target_)));
}

TEST_F(RecurrentTranslatorTest, LearnsToTranslateASmallBatchAndDecodesItGreedily) {
  RecurrentTranslator model(kTiny);
  const at::Tensor next = torch::tensor({{6, 1, 8, 10}, {2, 5, 10, 0}});
  const auto loss = [&] { return loss_of(model, source_, target_, next, padding_); };
  EXPECT_LT(internal::loss_after_training(*model, loss, 80, 0.03), 0.1);
  const at::NoGradGuard no_grad;
  const RecurrentTranslatorMemory memory = model->encode(source_, padding_);
  RecurrentTranslatorState state = memory.start;
  at::Tensor ids_B = torch::ones({2}, torch::kLong);
  std::vector<at::Tensor> translation;
  for (int t = 0; t < 4; ++t) {
    ids_B = model->step(ids_B, memory, state).argmax(-1);
    translation.push_back(ids_B);
  }
  EXPECT_TRUE(torch::stack(translation, 1).equal(next));
}

TEST_F(RecurrentTranslatorTest, CloneIsEqualAndApart) {
  RecurrentTranslator model(kTiny);
  internal::expect_clone_equal_and_apart<RecurrentTranslatorImpl>(
      *model, [&](RecurrentTranslatorImpl& m) { return m.forward(source_, target_, padding_); });
}

TEST_F(RecurrentTranslatorTest, RefusesImpossibleOptions) {
  const struct {
    RecurrentTranslatorOptions options;
    std::string message;
  } cases[] = {
      {{.source_vocabulary = 0}, "source_vocabulary must be at least 1; got 0"},
      {{.target_vocabulary = 0}, "target_vocabulary must be at least 1; got 0"},
      {{.width = 0}, "width must be at least 1; got 0"},
      {{.width = 3}, "width must be even; got 3"},
      {{.layers = 0}, "layers must be at least 1; got 0"},
      {{.dropout = 1.5}, "dropout must be in [0, 1); got 1.500000"},
  };
  EXPECT_EQ(defect(kTiny), "");
  for (const auto& [options, message] : cases) {
    EXPECT_EQ(defect(options), message);
    EXPECT_EQ(error_of([&] { RecurrentTranslator model(options); }),
              "[recurrent_translator] " + message);
  }
}

TEST_F(RecurrentTranslatorTest, RefusesInputsOfAnotherShape) {
  RecurrentTranslator model(kTiny);
  EXPECT_EQ(error_of([&] { model->forward(source_[0], target_); }),
            "[recurrent_translator] source ids must have shape [batch, positions] with at least "
            "one position; got [5]");
  EXPECT_EQ(error_of([&] { model->forward(source_, target_.slice(1, 0, 0)); }),
            "[recurrent_translator] target ids must have shape [batch, positions] with at least "
            "one position; got [2, 0]");
  EXPECT_EQ(error_of([&] { model->forward(source_, target_.slice(0, 0, 1)); }),
            "[recurrent_translator] source and target must have the same batch; got [2, 5] and [1, "
            "4]");
  EXPECT_EQ(error_of([&] { model->forward(source_, target_, source_); }),
            "[recurrent_translator] source padding must be bool of the source's shape [2, 5]; got "
            "Long [2, 5]");
  const RecurrentTranslatorMemory memory = model->encode(source_);
  RecurrentTranslatorState state = memory.start;
  EXPECT_EQ(error_of([&] { model->step(target_, memory, state); }),
            "[recurrent_translator] ids must have shape [batch], the memory's batch of 2; got [2, "
            "4]");
}

}  // namespace
}  // namespace gradus::models
