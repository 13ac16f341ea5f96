#include <gradus/persample/engine/sample_gradients.h>

#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/persample/engine/internal/loss_testing.h>
#include <gradus/persample/graph/rule.h>
#include <gradus/persample/vmap/loop.h>

namespace gradus::persample {
namespace {

using at::Tensor;
using internal::by_example;
namespace nn = torch::nn;
using testing::Contains;
using testing::HasSubstr;

double relative(const Tensor& got, const Tensor& want) {
  const double scale = want.norm().item<double>();
  const double error = (got - want).norm().item<double>();
  return scale == 0 ? error : error / scale;
}

class SampleGradientsTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
    options.log = [this](const std::string& line) { lines.push_back(line); };
  }
  static Tensor doubles(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); }

  void expect_equals_loop(const std::vector<NamedParameter>& parameters, const LossFunction& loss,
                          const Batch& batch, double tolerance = 1e-9) {
    SampleGradients table(parameters, options);
    const Tensor losses = table.backward(loss, batch);
    EXPECT_EQ(losses.sizes(), at::IntArrayRef({batch[0].size(0)}));
    const auto want = loop_gradients(parameters, loss, batch);
    for (std::size_t i = 0; i < want.size(); ++i) {
      if (want[i].defined())
        EXPECT_LE(relative(table.gradients(i), want[i]), tolerance) << parameters[i].name;
    }
  }
  template <typename Work>
  std::string error_of(Work work) {
    try {
      work();
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  }

  SampleOptions options;
  std::vector<std::string> lines;
};

TEST_F(SampleGradientsTest, OneCallGivesEachExamplesGradients) {
  auto model = nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 3, 3)), nn::GELU(), nn::Flatten(),
                              nn::Linear(48, 5));
  model->to(at::kDouble);
  const LossFunction loss = [&](const Batch& b) {
    return at::cross_entropy_loss(model->forward(b[0]), b[1], {}, at::Reduction::None);
  };
  const Batch batch{doubles({4, 1, 6, 6}), at::tensor({0, 3, 1, 4}, at::kLong)};
  const auto want = loop_gradients(parameters_of(*model), loss, batch);
  for (const Engine engine : {Engine::automatic, Engine::graph, Engine::vmap, Engine::loop}) {
    options.engine = engine;
    const auto got = gradients(model.ptr(), loss, batch, options);
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < want.size(); ++i) {
      EXPECT_LE(relative(got[i].second, want[i]), 1e-9) << got[i].first;
    }
  }
  EXPECT_THAT(lines, testing::IsEmpty());
}

TEST_F(SampleGradientsTest, IgnoredTargetsAreAMeanOverEachExamplesTokens) {  // P14
  nn::Linear head(6, 5);
  head->to(at::kDouble);
  const LossFunction loss = [&](const Batch& b) {
    const auto each =
        at::cross_entropy_loss(head(b[0]).transpose(1, 2), b[1], {}, at::Reduction::None, -100);
    return each.sum(1) / (b[1] != -100).sum(1);
  };
  const Batch batch{doubles({2, 4, 6}),
                    at::tensor({1, 2, -100, -100, 3, -100, -100, -100}, at::kLong).view({2, 4})};
  expect_equals_loop(parameters_of(*head), loss, batch);
  // The mean of a batch of one is the same number.
  const auto by_mean = loop_gradients(
      parameters_of(*head),
      [&](const Batch& b) {
        return at::cross_entropy_loss(head(b[0]).flatten(0, 1), b[1].flatten(), {},
                                      at::Reduction::Mean, -100);
      },
      batch);
  SampleGradients table(parameters_of(*head), options);
  table.backward(loss, batch);
  EXPECT_LE(relative(table.gradients(0), by_mean[0]), 1e-12);
}

TEST_F(SampleGradientsTest, PackedSequencesOfAnyOrder) {  // P6
  nn::GRU gru(nn::GRUOptions(6, 7).batch_first(true));
  gru->to(at::kDouble);
  const LossFunction loss = [&](const Batch& b) {
    const auto packed = nn::utils::rnn::pack_padded_sequence(b[0], b[1].cpu(), true, false);
    const auto out = nn::utils::rnn::pad_packed_sequence(
        std::get<0>(gru->forward_with_packed_input(packed)), true);
    return by_example(std::get<0>(out).square());
  };
  expect_equals_loop(parameters_of(*gru), loss,
                     {doubles({4, 5, 6}), at::tensor({2, 5, 3, 1}, at::kLong)});
}

TEST_F(SampleGradientsTest, WhatMixesExamplesIsRefusedByName) {  // P21
  nn::Linear first(6, 6), second(6, 3);
  nn::BatchNorm1d norm(6);
  nn::ModuleList model(first, second, norm);
  model->to(at::kDouble);
  const Batch batch{doubles({4, 6})};
  const auto refused = [&](const std::vector<NamedParameter>& parameters,
                           const LossFunction& loss) {
    return error_of([&] { SampleGradients(parameters, options).backward(loss, batch); });
  };
  const auto all = parameters_of(*model);
  EXPECT_THAT(
      refused(all,
              [&](const Batch& b) { return by_example(second(first(b[0].flip(0))).square()); }),
      HasSubstr("aten::flip"));
  EXPECT_THAT(
      refused(all,
              [&](const Batch& b) { return by_example(second(first(b[0]).flip(0)).square()); }),
      HasSubstr("aten::flip"));
  EXPECT_THAT(
      refused(all,
              [&](const Batch& b) {
                return by_example(
                    second(first(b[0].index_select(0, at::randperm(b[0].size(0))))).square());
              }),
      HasSubstr("aten::randperm"));
  EXPECT_THAT(refused(all,
                      [&](const Batch& b) {
                        const auto h = first(b[0]);
                        return by_example(second(h - h.mean(0)).square());
                      }),
              HasSubstr("changes the loss"));
  // BatchNorm in training is refused although frozen, before anything runs, by its name.
  for (auto& each : norm->parameters()) each.requires_grad_(false);
  EXPECT_THAT(
      error_of([&] {
        SampleGradients(model.ptr(), options)
            .backward(
                [&](const Batch& b) { return by_example(second(first(norm(b[0]))).square()); },
                batch);
      }),
      HasSubstr("BatchNorm1d \"2\""));
  norm->eval();
  expect_equals_loop(
      all, [&](const Batch& b) { return by_example(second(norm(first(b[0]))).square()); }, batch);
}

struct Scaled : torch::autograd::Function<Scaled> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& w) {
    ctx->save_for_backward({x, w});
    return x * w.sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list g) {
    const auto saved = ctx->get_saved_variables();
    return {g[0] * saved[1].sum(), (g[0] * saved[0]).sum().expand_as(saved[1])};
  }
};

TEST_F(SampleGradientsTest, CustomFunctionsNeedNoRule) {
  auto w = doubles({3}).requires_grad_();
  expect_equals_loop({{"w", w}},
                     [&](const Batch& b) { return by_example(Scaled::apply(b[0], w).tanh()); },
                     {doubles({4, 6})});
}

TEST_F(SampleGradientsTest, AWrongRuleIsFoundOutAndTheParameterFallsBack) {
  const auto asked = std::make_shared<int>(0);  // a rule outlives its test
  register_rule(
      "Atan2Backward0", [&](const NodeUse& use) -> std::optional<std::vector<OperandTerm>> {
        ++*asked;
        std::vector<OperandTerm> terms;
        terms.push_back(
            {use.shared[0], std::make_unique<FormedTerm>(use.gradients[0].unsqueeze(1).clone())});
        return terms;
      });
  auto w = doubles({1}).requires_grad_();
  nn::Linear layer(6, 6);
  layer->to(at::kDouble);
  auto parameters = parameters_of(*layer);
  parameters.push_back({"w", w});
  const LossFunction loss = [&](const Batch& b) {
    return at::atan2(by_example(layer(b[0]).square()), w);
  };
  expect_equals_loop(parameters, loss, {doubles({4, 6})});
  EXPECT_GT(*asked, 0);
  EXPECT_EQ(lines, std::vector<std::string>{"[persample] w: the graph engine does not match single "
                                            "examples; computed by vmap"});
  options.strict = true;
  EXPECT_THAT(
      error_of([&] { SampleGradients(parameters, options).backward(loss, {doubles({4, 6})}); }),
      HasSubstr("the graph engine differs at w"));
}

TEST_F(SampleGradientsTest, DropoutIsCheckedAndDrawnOncePerExample) {  // P22
  nn::Linear first(6, 6), second(6, 3);
  nn::Dropout dropout(0.5);
  nn::ModuleList model(first, second, dropout);
  model->to(at::kDouble);
  const LossFunction loss = [&](const Batch& b) {
    return by_example(second(dropout(first(b[0]))).square());
  };
  const Batch batch{doubles({4, 6})};
  torch::manual_seed(7);
  SampleGradients table(parameters_of(*model), options);
  table.backward(loss, batch);
  EXPECT_THAT(lines, testing::IsEmpty());
  // The masks are those of a plain forward pass from the same seed.
  torch::manual_seed(7);
  const Tensor losses = loss(batch);
  const auto sum = torch::autograd::grad({losses.sum()}, {first->weight})[0];
  EXPECT_LE(relative(table.gradients(0).sum(0), sum), 1e-12);
}

TEST_F(SampleGradientsTest, StatisticsAndJacobians) {
  nn::Sequential model(nn::Linear(6, 4), nn::Tanh(), nn::Linear(4, 3));
  model->to(at::kDouble);
  const Batch batch{doubles({5, 6})};
  const LossFunction loss = [&](const Batch& b) {
    return by_example(model->forward(b[0]).square());
  };
  const auto rows = loop_gradients(parameters_of(*model), loss, batch);
  Tensor flat;
  for (const Tensor& each : rows)
    flat = flat.defined() ? at::cat({flat, each.flatten(1)}, 1) : each.flatten(1);
  EXPECT_LE(relative(gradient_norms(model.ptr(), loss, batch, options), flat.norm(2, 1)), 1e-12);
  const double trace = flat.var(0).sum().item<double>();
  const double signal = flat.mean(0).square().sum().item<double>() - trace / 5;
  EXPECT_NEAR(noise_scale(model.ptr(), loss, batch, options), trace / signal,
              1e-9 * std::abs(trace / signal));
  const auto jacobian = jacobians(
      parameters_of(*model), [&](const Batch& b) { return model->forward(b[0]); }, batch, options);
  for (std::int64_t k = 0; k < 3; ++k) {
    const auto want = loop_gradients(
        parameters_of(*model), [&](const Batch& b) { return model->forward(b[0]).select(1, k); },
        batch);
    for (std::size_t i = 0; i < want.size(); ++i)
      EXPECT_LE(relative(jacobian[i].select(1, k), want[i]), 1e-12);
  }
}

TEST_F(SampleGradientsTest, ATableWantsOneNumberOfExamplesAndLossesOneAnExample) {
  nn::Linear layer(6, 3);
  SampleGradients table(layer.ptr(), options);
  const LossFunction loss = [&](const Batch& b) { return by_example(layer(b[0])); };
  table.backward(loss, {at::randn({4, 6})});
  EXPECT_THAT(error_of([&] { table.backward(loss, {at::randn({3, 6})}); }), HasSubstr("clear()"));
  table.clear();
  EXPECT_THAT(error_of([&] {
                table.backward([&](const Batch& b) { return layer(b[0]).mean(); },
                               {at::randn({4, 6})});
              }),
              HasSubstr("one loss an example"));
}

TEST_F(SampleGradientsTest, MemoryAndGradientsAreRightAfterADiscardedForward) {  // P19
  nn::Linear layer(6, 3);
  layer->to(at::kDouble);
  const LossFunction loss = [&](const Batch& b) { return by_example(layer(b[0]).square()); };
  {
    const torch::NoGradGuard no_grad;
    layer(doubles({100, 6}));
  }
  const auto kept = layer(doubles({9, 6}));
  expect_equals_loop(parameters_of(*layer), loss, {doubles({4, 6})});
  EXPECT_FALSE(layer->weight.grad().defined());
}

TEST_F(SampleGradientsTest, AFailedCallLeavesNothingOfTheSum) {
  nn::Linear layer(6, 3);
  layer->to(at::kDouble);
  SampleGradients table(layer.ptr(), options);
  const LossFunction loss = [&](const Batch& b) { return by_example(layer(b[0]).square()); };
  const Batch batch{doubles({4, 6})};
  table.backward(loss, batch);
  EXPECT_THROW(
      table.backward([](const Batch&) -> Tensor { throw std::runtime_error("no data"); }, batch),
      std::runtime_error);
  table.backward(loss, batch);
  const auto want = loop_gradients(parameters_of(*layer), loss, batch);
  EXPECT_LE(relative(table.gradients(0), want[0]), 1e-9);
}

TEST_F(SampleGradientsTest, MixingIsFoundWithRealDrawsAndAfterABatchWithoutNumbers) {
  nn::Linear layer(6, 3);
  layer->to(at::kDouble);
  const auto parameters = parameters_of(*layer);
  // Whole examples are exchanged by chance: with constant draws nothing is.
  const LossFunction mixed = [&](const Batch& b) {
    const auto keep = at::bernoulli(at::full({b[0].size(0), 1}, 0.5, at::kDouble));
    return by_example(layer(keep * b[0] + (1 - keep) * b[0].flip(0)).square());
  };
  EXPECT_THAT(
      error_of([&] { SampleGradients(parameters, options).backward(mixed, {doubles({8, 6})}); }),
      HasSubstr("changes the loss"));
  const LossFunction centred = [&](const Batch& b) {
    const auto h = layer(b[0]);
    return by_example((h - h.mean(0)).square());
  };
  SampleGradients table(parameters, options);
  try {
    table.backward(centred,
                   {at::full({4, 6}, std::numeric_limits<double>::quiet_NaN(), at::kDouble)});
  } catch (const UserError&) {
  }
  table.clear();
  EXPECT_THAT(error_of([&] { table.backward(centred, {doubles({4, 6})}); }),
              HasSubstr("changes the loss"));
}

TEST_F(SampleGradientsTest, LossesMayDifferentiateThemselvesAndChangeTheirBatch) {
  nn::Linear layer(6, 1);
  layer->to(at::kDouble);
  const LossFunction penalty = [&](const Batch& b) {
    const auto x = b[0].detach().clone().requires_grad_();
    const auto out = layer(x).tanh();
    const auto slope = torch::autograd::grad({out.sum()}, {x}, {}, true, true)[0];
    return (slope.norm(2, 1) - 1).square();
  };
  SampleGradients table(parameters_of(*layer), options);
  const Batch batch{doubles({4, 6})};
  table.backward(penalty, batch);
  EXPECT_LE(relative(table.gradients(0), loop_gradients(parameters_of(*layer), penalty, batch)[0]),
            1e-9);
}

}  // namespace
}  // namespace gradus::persample
