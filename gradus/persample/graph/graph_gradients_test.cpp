#include <gradus/persample/graph/graph_gradients.h>

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/persample/graph/internal/loop_testing.h>
#include <gradus/persample/graph/rule.h>
#include <gradus/persample/graph/term.h>
#include <gradus/persample/vmap/loop.h>

namespace gradus::persample {
namespace {

using at::Tensor;
namespace nn = torch::nn;
using internal::named;
using internal::relative;
using testing::HasSubstr;

constexpr double kTolerance = 1e-9;

// Gradients, norms and weighted sums, kept as factors and formed, against the loop.
void expect_equals_loop(const std::vector<NamedParameter>& parameters, const LossFunction& loss,
                        const Batch& batch, GraphOptions options = {},
                        double tolerance = kTolerance) {
  const std::vector<Tensor> want = loop_gradients(parameters, loss, batch);
  const std::int64_t examples = batch[0].size(0);
  const Tensor weights = at::linspace(0.5, 2.0, examples, at::kDouble);
  Tensor squared = at::zeros({examples}, at::kDouble);
  for (const Tensor& each : want) {
    if (each.defined()) squared += each.reshape({examples, -1}).square().sum(1);
  }
  for (const Keep keep : {Keep::factors, Keep::formed, Keep::cheapest}) {
    options.keep = keep;
    GraphGradients table(parameters, options);
    for (int repeat = 0; repeat < 2; ++repeat) {  // the second uses what the first learned
      table.clear();
      table.backward(loss(batch));
      EXPECT_LE(relative(table.norms(), squared.sqrt()), tolerance);
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const std::string& name = parameters[i].name;
        if (!want[i].defined()) {
          EXPECT_FALSE(table.gradients(i).defined()) << name;
          continue;
        }
        EXPECT_EQ(table.gradients(i).sizes(), want[i].sizes()) << name;
        EXPECT_LE(relative(table.gradients(i), want[i]), tolerance) << name;
        EXPECT_LE(relative(table.norms(i), want[i].reshape({examples, -1}).norm(2, 1)), tolerance)
            << name;
        EXPECT_LE(relative(table.weighted_sum(i, weights),
                           at::tensordot(weights.to(want[i].scalar_type()), want[i], {0}, {0})),
                  tolerance)
            << name;
      }
    }
    for (const auto& each : parameters) EXPECT_FALSE(each.tensor.grad().defined());
  }
}

Tensor by_example(const Tensor& values) { return values.flatten(1).sum(1); }

class GraphGradientsTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
  static Tensor doubles(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); }
};

TEST_F(GraphGradientsTest, LinearOfAnyRankWithAndWithoutBias) {
  for (const bool bias : {true, false}) {
    nn::Linear layer(nn::LinearOptions(6, 7).bias(bias));
    layer->to(at::kDouble);
    const auto loss = [&](const Batch& x) { return by_example(layer(x[0]).tanh().square()); };
    expect_equals_loop(named(*layer), loss, {doubles({4, 6})});
    expect_equals_loop(named(*layer), loss, {doubles({4, 5, 6})});
    expect_equals_loop(named(*layer), loss, {doubles({4, 2, 3, 6})});
    expect_equals_loop(named(*layer), loss, {doubles({1, 5, 6})});
  }
}

TEST_F(GraphGradientsTest, FindsTheBatchWhereverItIs) {
  nn::Linear layer(6, 7);
  layer->to(at::kDouble);
  // Folded with time, either way; last; in the middle.
  const std::vector<LossFunction> losses{
      [&](const Batch& x) {
        const auto b = x[0].size(0);
        return layer(x[0].reshape({-1, 6})).tanh().reshape({b, -1}).sum(1);
      },
      [&](const Batch& x) {
        const auto b = x[0].size(0), t = x[0].size(1);
        return layer(x[0].transpose(0, 1).reshape({-1, 6})).tanh().reshape({t, b, 7}).sum({0, 2});
      },
      [&](const Batch& x) {  // W x^T + b
        const auto flat = x[0].select(1, 0);
        return (at::mm(layer->weight, flat.t()) + layer->bias.unsqueeze(1)).tanh().sum(0);
      },
      [&](const Batch& x) { return layer(x[0].transpose(0, 1)).tanh().sum({0, 2}); },
      [&](const Batch& x) {
        return layer(x[0].permute({1, 0, 2})).tanh().permute({1, 2, 0}).flatten(1).sum(1);
      },
  };
  for (const auto& loss : losses) {
    expect_equals_loop(named(*layer), loss, {doubles({4, 5, 6})});
    expect_equals_loop(named(*layer), loss, {doubles({5, 5, 6})});
    expect_equals_loop(named(*layer), loss, {doubles({2, 2, 6})});
  }
}

TEST_F(GraphGradientsTest, ParametersBroadcastOverTheBatch) {  // P1
  nn::Embedding tokens(10, 6), positions(8, 6);
  nn::Linear head(6, 10);
  nn::ModuleList model(tokens, positions, head);
  model->to(at::kDouble);
  const auto ids = at::randint(10, {4, 5});
  for (const bool row : {true, false}) {
    const auto loss = [&](const Batch& x) {
      auto where = at::arange(5);
      if (row) where = where.unsqueeze(0);
      return by_example(head(tokens(x[0]) + positions(where)).log_softmax(-1).select(2, 1));
    };
    expect_equals_loop(named(*model), loss, {ids});
  }
}

TEST_F(GraphGradientsTest, TiedWeightsAndLayersUsedTwiceAddUp) {  // P2, P3
  auto table = doubles({10, 6}).requires_grad_();
  const auto tied = [&](const Batch& x) {
    return by_example(at::linear(at::embedding(table, x[0]).tanh(), table).square());
  };
  expect_equals_loop({{"table", table}}, tied, {at::randint(10, {4, 5})});
  nn::Linear layer(6, 6);
  layer->to(at::kDouble);
  const auto twice = [&](const Batch& x) { return by_example(layer(layer(x[0]).tanh()).square()); };
  expect_equals_loop(named(*layer), twice, {doubles({4, 6})});
  expect_equals_loop(named(*layer), twice, {doubles({4, 5, 6})});
}

TEST_F(GraphGradientsTest, FrozenAndUnusedParameters) {  // P4, P5
  nn::Linear first(6, 6), second(6, 3), unused(2, 2);
  nn::ModuleList model(first, second, unused);
  model->to(at::kDouble);
  first->weight.requires_grad_(false);
  const auto loss = [&](const Batch& x) { return by_example(second(first(x[0]).relu())); };
  expect_equals_loop(named(*model), loss, {doubles({4, 6})});
  GraphGradients table(named(*model));
  table.backward(loss({doubles({4, 6})}));
  EXPECT_THAT(table.explain(), testing::Contains(HasSubstr("0.weight: frozen")));
  EXPECT_THAT(table.explain(), testing::Contains(HasSubstr("2.weight: not used")));
}

TEST_F(GraphGradientsTest, RecurrentAndAttentionModulesAsTheyAre) {  // P6
  const auto x = doubles({4, 5, 6});
  nn::GRU gru(nn::GRUOptions(6, 7).batch_first(true).num_layers(2).bidirectional(true));
  nn::LSTM lstm(nn::LSTMOptions(6, 7).batch_first(true));
  nn::RNN rnn(nn::RNNOptions(6, 7).nonlinearity(torch::kReLU));
  nn::MultiheadAttention attention(6, 2);
  gru->to(at::kDouble);
  lstm->to(at::kDouble);
  rnn->to(at::kDouble);
  attention->to(at::kDouble);
  expect_equals_loop(
      named(*gru), [&](const Batch& b) { return by_example(std::get<0>(gru(b[0])).select(1, 4)); },
      {x});
  expect_equals_loop(named(*lstm),
                     [&](const Batch& b) { return by_example(std::get<0>(lstm(b[0])).square()); },
                     {x});
  expect_equals_loop(
      named(*rnn),
      [&](const Batch& b) { return std::get<0>(rnn(b[0].transpose(0, 1))).square().sum({0, 2}); },
      {x});
  expect_equals_loop(named(*attention),
                     [&](const Batch& b) {
                       const auto t = b[0].transpose(0, 1);
                       return std::get<0>(attention(t, t, t)).square().sum({0, 2});
                     },
                     {x});
}

TEST_F(GraphGradientsTest, OwnParametersInPlaceOperationsAndMasks) {  // P7, P9, P22
  auto scale = doubles({6}).requires_grad_();
  auto shift = doubles({6}).requires_grad_();
  nn::Linear layer(6, 6);
  layer->to(at::kDouble);
  auto parameters = named(*layer);
  parameters.push_back({"scale", scale});
  parameters.push_back({"shift", shift});
  const auto mask = at::rand({4, 6}, at::kDouble) > 0.5;
  const auto loss = [&](const Batch& b) {
    auto out = layer(b[0]);
    out.relu_();
    out = out * 2;
    out += b[0];
    out = out * scale + shift.sigmoid() / (1 + scale.square());
    return by_example(layer(out * b[1]).square());
  };
  GraphOptions checked{.examples_checked = true};
  expect_equals_loop(parameters, loss, {doubles({4, 6}), mask.to(at::kDouble)}, checked);
}

TEST_F(GraphGradientsTest, NormsOfEveryKind) {
  nn::LayerNorm layer(nn::LayerNormOptions({6}));
  nn::GroupNorm group(nn::GroupNormOptions(2, 4));
  nn::InstanceNorm1d instance(nn::InstanceNorm1dOptions(4).affine(true));
  nn::BatchNorm1d batch(4);
  batch->to(at::kDouble);
  batch->train();
  {
    const torch::NoGradGuard no_grad;
    batch(doubles({8, 4, 6}));
  }
  batch->eval();
  nn::Linear before(6, 6);
  nn::ModuleList model(layer, group, instance, batch, before);
  model->to(at::kDouble);
  batch->eval();
  const auto x = doubles({4, 4, 6});
  const auto with = [&](auto& norm) {
    std::vector<NamedParameter> parameters = named(*before);
    for (const auto& each : named(*norm)) parameters.push_back(each);
    expect_equals_loop(parameters,
                       [&](const Batch& b) { return by_example(norm(before(b[0])).pow(3)); }, {x});
  };
  with(layer);
  with(group);
  with(instance);
  with(batch);
}

TEST_F(GraphGradientsTest, ConvolutionsByTheirOwnFormulaOrRule) {  // P11
  nn::Conv2d odd(nn::Conv2dOptions(3, 4, {3, 1}).padding({1, 0}).stride({2, 1}).dilation({1, 2}));
  nn::Conv2d grouped(nn::Conv2dOptions(4, 6, 3).groups(2).padding(1));
  nn::ConvTranspose2d turned(nn::ConvTranspose2dOptions(6, 2, 3).stride(2).output_padding(1));
  nn::ModuleList model(odd, grouped, turned);
  model->to(at::kDouble);
  expect_equals_loop(
      named(*model),
      [&](const Batch& b) { return by_example(turned(grouped(odd(b[0]).tanh()).tanh()).square()); },
      {doubles({3, 3, 8, 8})});
}

TEST_F(GraphGradientsTest, PaddingRowsStayZero) {  // P13
  nn::Embedding table(nn::EmbeddingOptions(10, 6).padding_idx(0));
  table->to(at::kDouble);
  const auto ids = at::tensor({0, 1, 2, 2, 3, 0, 0, 9}).view({2, 4});
  const auto loss = [&](const Batch& b) { return by_example(table(b[0]).tanh().square()); };
  expect_equals_loop(named(*table), loss, {ids});
  GraphGradients gradients(named(*table));
  gradients.backward(loss({ids}));
  EXPECT_EQ(gradients.gradients(0).select(1, 0).abs().sum().item<double>(), 0);
  const Tensor sparse = gradients.gradients(0, true);
  EXPECT_TRUE(sparse.is_sparse());
  EXPECT_LE(relative(sparse.to_dense(), gradients.gradients(0)), 1e-15);
}

TEST_F(GraphGradientsTest, TwoBackwardCallsAddUpPerExample) {  // P18
  nn::Linear layer(6, 3);
  layer->to(at::kDouble);
  const auto real = doubles({4, 6}), fake = doubles({4, 6});
  const auto loss = [&](const Batch& b) {
    return by_example(layer(b[0]).square()) + by_example(layer(b[1]).tanh());
  };
  GraphGradients table(named(*layer));
  table.backward(by_example(layer(real).square()));
  table.backward(by_example(layer(fake).tanh()));
  const auto want = loop_gradients(named(*layer), loss, {real, fake});
  for (std::size_t i = 0; i < want.size(); ++i)
    EXPECT_LE(relative(table.gradients(i), want[i]), kTolerance);
  EXPECT_THROW(table.backward(by_example(layer(doubles({3, 6})))), UserError);
}

std::string refusal(const std::vector<NamedParameter>& parameters, const Tensor& losses) {
  GraphGradients table(parameters);
  try {
    table.backward(losses);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST_F(GraphGradientsTest, MixedExamplesAreRefusedByName) {  // P21
  nn::Linear first(6, 6), second(6, 3);
  nn::BatchNorm1d norm(6);
  nn::ModuleList model(first, second, norm);
  model->to(at::kDouble);
  const auto x = doubles({4, 6});
  EXPECT_THAT(refusal(named(*model), by_example(second(norm(first(x))).square())),
              HasSubstr("NativeBatchNormBackward0"));
  const auto h = first(x);
  EXPECT_THAT(refusal(named(*model), by_example(second(h - h.mean(0)).square())),
              HasSubstr("Mean"));
  EXPECT_THAT(refusal(named(*model), by_example(second(first(x).flip(0)).square())),
              HasSubstr("flip"));
  nn::Embedding counted(nn::EmbeddingOptions(10, 6).scale_grad_by_freq(true));
  EXPECT_THAT(refusal(named(*counted), by_example(counted(at::randint(10, {4, 5})).square())),
              HasSubstr("scale_grad_by_freq"));
  EXPECT_THAT(refusal(named(*model), first(x).sum()), HasSubstr("[B]"));
}

TEST_F(GraphGradientsTest, AnExampleThatIsNoNumberSpoilsNoOther) {
  nn::Linear first(6, 6), second(6, 3);
  nn::ModuleList model(first, second);
  model->to(at::kDouble);
  const auto loss = [&](const Batch& b) { return by_example(second(first(b[0]).tanh()).square()); };
  auto x = doubles({4, 5, 6});
  x[2][0][0] = std::numeric_limits<double>::quiet_NaN();
  GraphGradients table(named(*model));
  table.backward(loss({x}));
  const auto want = loop_gradients(named(*model), loss, {x});
  for (std::size_t i = 0; i < want.size(); ++i) {
    for (const std::int64_t b : {0, 1, 3}) {
      EXPECT_LE(relative(table.gradients(i)[b], want[i][b]), kTolerance) << b;
    }
  }
}

TEST_F(GraphGradientsTest, LearnsAGraphOnceForBatchesOfAnySize) {
  nn::Linear layer(6, 3);
  layer->to(at::kDouble);
  const auto loss = [&](const Batch& b) { return by_example(layer(b[0]).tanh()); };
  GraphGradients table(named(*layer));
  for (const std::int64_t examples : {4, 7, 2, 1, 100}) {
    const Batch batch{doubles({examples, 5, 6})};
    table.clear();
    table.backward(loss(batch));
    EXPECT_LE(relative(table.gradients(0), loop_gradients(named(*layer), loss, batch)[0]),
              kTolerance);
  }
  EXPECT_EQ(table.analyses(), 1);
  table.clear();
  table.backward(loss({doubles({4, 6, 6})}));
  EXPECT_EQ(table.analyses(), 2);
}

TEST_F(GraphGradientsTest, ExamplesWithoutGradientTeachNothing) {
  nn::Linear layer(4, 4);
  layer->to(at::kDouble);
  const auto loss = [&](const Batch& b) { return by_example(layer(b[0]).tanh() * b[1]); };
  GraphGradients table(named(*layer));
  const auto x = doubles({4, 4, 4});
  auto only = at::zeros({4, 1, 1}, at::kDouble);
  for (int step = 0; step < 3; ++step) {
    if (step == 1) only[2] = 1;
    if (step == 2) only.fill_(1);
    table.clear();
    table.backward(loss({x, only}));
    const auto want = loop_gradients(named(*layer), loss, {x, only});
    EXPECT_LE(relative(table.gradients(0), want[0]), kTolerance) << step;
  }
}

TEST_F(GraphGradientsTest, AnEmbeddingIsALinearLayerOnOneHotInputs) {
  auto table = doubles({12, 6}).requires_grad_();
  const auto ids = at::randint(12, {4, 5});
  GraphGradients looked({{"table", table}}), multiplied({{"table", table}});
  looked.backward(by_example(at::embedding(table, ids).tanh().square()));
  multiplied.backward(
      by_example(at::matmul(at::one_hot(ids, 12).to(at::kDouble), table).tanh().square()));
  EXPECT_LE(relative(looked.gradients(0), multiplied.gradients(0)), 1e-13);
  EXPECT_LE(relative(looked.norms(), multiplied.norms()), 1e-13);
  const Tensor untouched = at::one_hot(ids, 12).sum(1) == 0;
  EXPECT_EQ(looked.gradients(0).index({untouched}).abs().sum().item<double>(), 0);
}

TEST_F(GraphGradientsTest, ARegisteredRuleIsAskedFirst) {
  struct Expert {
    int asked = 0;
    bool knows = false;
  };
  const auto expert = std::make_shared<Expert>();  // a rule outlives its test
  register_rule(
      "HypotBackward0", [expert](const NodeUse& use) -> std::optional<std::vector<OperandTerm>> {
        ++expert->asked;
        EXPECT_EQ(use.shared.size(), 1u);
        EXPECT_EQ(use.gradients.size(), 1u);
        if (!expert->knows) return std::nullopt;
        std::vector<OperandTerm> terms;
        terms.push_back({use.shared[0], std::make_unique<FormedTerm>(
                                            at::full({use.examples(), 3}, 5.0, at::kDouble))});
        return terms;
      });
  const auto weight = doubles({3}).requires_grad_();
  const auto loss = [&](const Batch& b) { return by_example(at::hypot(b[0], weight)); };
  // One that does not know the case leaves it to the next.
  expect_equals_loop({{"weight", weight}}, loss, {doubles({4, 3})});
  EXPECT_GT(expert->asked, 0);
  expert->knows = true;
  GraphGradients table({{"weight", weight}});
  table.backward(loss({doubles({4, 3})}));
  EXPECT_TRUE(table.gradients(0).equal(at::full({4, 3}, 5.0, at::kDouble)));
  expert->knows = false;
}

TEST_F(GraphGradientsTest, HalfPrecisionIsSummedInFloat) {  // P16
  nn::Linear layer(16, 16);
  const auto x = at::randn({8, 16});
  const auto loss = [&](const Batch& b) {
    const auto y = at::linear(b[0].to(at::kBFloat16), layer->weight.to(at::kBFloat16),
                              layer->bias.to(at::kBFloat16));
    return by_example(y.to(at::kFloat).square());
  };
  GraphGradients table(named(*layer));
  table.backward(loss({x}));
  EXPECT_EQ(table.gradients(0).scalar_type(), at::kFloat);
  const auto want = loop_gradients(
      named(*layer), [&](const Batch& b) { return by_example(layer(b[0]).square()); }, {x});
  EXPECT_LE(relative(table.gradients(0), want[0]), 2e-2);
}

// Each of these graphs has the same nodes and shapes in both batches, and other owners.
TEST_F(GraphGradientsTest, WhatWasLearnedIsNotUsedWhereOwnersChange) {
  const GraphOptions checked{.examples_checked = true};
  const auto in_turn = [&](const std::vector<NamedParameter>& parameters, const LossFunction& loss,
                           const std::vector<Batch>& batches) {
    GraphGradients table(parameters, checked);
    for (const Batch& batch : batches) {
      table.clear();
      table.backward(loss(batch));
      const auto want = loop_gradients(parameters, loss, batch);
      for (std::size_t i = 0; i < want.size(); ++i) {
        EXPECT_LE(relative(table.gradients(i), want[i]), kTolerance) << parameters[i].name;
      }
    }
  };
  const auto w = doubles({6, 3}).requires_grad_();
  {
    SCOPED_TRACE("rows chosen by a mask");
    const LossFunction loss = [&](const Batch& b) {
      const auto chosen = b[1].to(at::kBool);
      const auto sums = at::matmul(b[0].index({chosen}), w).tanh().sum(1);
      return at::zeros({b[0].size(0)}, at::kDouble)
          .index_add(0, chosen.nonzero().select(1, 0), sums);
    };
    const auto mask = [](std::vector<std::int64_t> counts) {
      auto all = at::zeros({4, 4}, at::kLong);
      for (std::int64_t b = 0; b < 4; ++b) all[b].narrow(0, 0, counts[b]).fill_(1);
      return all;
    };
    in_turn({{"w", w}}, loss,
            {{doubles({4, 4, 6}), mask({2, 2, 2, 2})}, {doubles({4, 4, 6}), mask({3, 2, 2, 1})}});
  }
  {
    SCOPED_TRACE("sorted and put back");
    const LossFunction loss = [&](const Batch& b) {
      const auto order = at::argsort(b[1], /*stable=*/true, 0, false);
      const auto back = at::argsort(order);
      return at::matmul(b[0].index_select(0, order), w).tanh().index_select(0, back).sum(1);
    };
    in_turn({{"w", w}}, loss,
            {{doubles({4, 6}), at::tensor({0, 0, 0, 0}, at::kLong)},
             {doubles({4, 6}), at::tensor({2, 0, 1, 0}, at::kLong)}});
  }
  {
    SCOPED_TRACE("a table computed from a parameter");
    const auto table = doubles({8, 3}).requires_grad_();
    const LossFunction loss = [&](const Batch& b) {
      return at::embedding(table.exp(), b[0]).sin().sum(1);
    };
    in_turn({{"table", table}}, loss,
            {{at::tensor({0, 1, 2, 3}, at::kLong)}, {at::tensor({2, 7, 1, 4}, at::kLong)}});
  }
  {
    SCOPED_TRACE("a part without gradient at first");
    const auto v = doubles({2, 3}).requires_grad_();
    const LossFunction loss = [&](const Batch& b) {
      const auto parts = v.exp().chunk(2);
      return (b[0] * parts[0] + b[1] * parts[1]).sin().sum(1) - b[1].sum(1).sin();
    };
    in_turn(
        {{"v", v}}, loss,
        {{doubles({4, 3}), at::zeros({4, 3}, at::kDouble)}, {doubles({4, 3}), doubles({4, 3})}});
  }
}

TEST_F(GraphGradientsTest, NormsAreNeverBelowWhatIsReleased) {
  // Steps that nearly cancel: in float32 a Gram matrix has only rounding left of the norm.
  for (const double size : {1e0, 1e2, 1e4}) {
    const auto x = (at::randn({1, 1, 128}) + 5e-5 * at::randn({8, 8, 128})) * size;
    const auto signs =
        at::tensor({1., -1., 1., -1., 1., -1., 1., -1.}).to(at::kFloat).view({1, 8, 1});
    const auto w = at::randn({128, 128}).requires_grad_();
    GraphGradients table({{"w", w}}, {.keep = Keep::factors});
    table.backward((at::linear(x, w) * signs).sum({1, 2}));
    for (std::int64_t b = 0; b < 8; ++b) {
      auto weights = at::zeros({8}, at::kDouble);
      weights[b] = (1.0 / table.norms()[b]).clamp_max(1.0);
      EXPECT_LE(table.weighted_sum(0, weights).norm().item<double>(), 1.0 + 1e-5) << size;
    }
  }
}

TEST_F(GraphGradientsTest, GroupNormIsInstanceNormAndLayerNormAtItsEnds) {
  const auto x = doubles({4, 6, 5});
  const auto gradients_of = [&](auto layer) {
    layer->to(at::kDouble);
    GraphGradients table(named(*layer));
    table.backward(by_example(layer(x).pow(3)));
    return std::pair{table.gradients(0), table.gradients(1)};
  };
  const auto each = gradients_of(nn::GroupNorm(nn::GroupNormOptions(6, 6)));
  const auto instance = gradients_of(nn::InstanceNorm1d(nn::InstanceNorm1dOptions(6).affine(true)));
  EXPECT_LE(relative(each.first, instance.first), kTolerance);
  EXPECT_LE(relative(each.second, instance.second), kTolerance);
  // One group: LayerNorm over channels and length, whose own weights are summed over the length.
  const auto one = gradients_of(nn::GroupNorm(nn::GroupNormOptions(1, 6)));
  const auto whole = gradients_of(nn::LayerNorm(nn::LayerNormOptions({6, 5})));
  EXPECT_LE(relative(one.first, whole.first.sum(2)), kTolerance);
  EXPECT_LE(relative(one.second, whole.second.sum(2)), kTolerance);
}

TEST_F(GraphGradientsTest, HooksOfParametersAreRefusedAndComplexDetoursAreReal) {
  nn::Linear layer(6, 3);
  layer->to(at::kDouble);
  layer->weight.register_hook([](const Tensor& gradient) { return gradient * 2; });
  EXPECT_THAT(refusal(named(*layer), by_example(layer(doubles({4, 6})))),
              HasSubstr("register_hook"));
  const auto w = doubles({5}).requires_grad_();
  const LossFunction loss = [&](const Batch& b) {
    return by_example(at::view_as_real(at::fft_fft(b[0]) * w.to(at::kComplexDouble)).square());
  };
  expect_equals_loop({{"w", w}}, loss, {doubles({4, 5})}, {.examples_checked = true});
}

}  // namespace
}  // namespace gradus::persample
