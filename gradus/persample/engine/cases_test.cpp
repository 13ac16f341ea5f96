// Models that per-sample gradients are reported wrong or refused for, each by every engine against
// the gradient of one example's own loss. P1, P2, ... number the kinds in all tests.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/persample/engine/sample_gradients.h>
#include <gradus/persample/graph/rule.h>
#include <gradus/persample/vmap/loop.h>
#include <gradus/persample/vmap/rows.h>
#include <gradus/persample/vmap/vmap.h>
#include <gradus/recompute/checkpoint.h>

namespace gradus::persample {
namespace {

using at::Tensor;
namespace nn = torch::nn;
using testing::HasSubstr;

constexpr std::int64_t kB = 4, kT = 5, kD = 6;
constexpr double kTolerance = 1e-9;

struct Case {
  std::string name{};
  std::vector<NamedParameter> parameters{};
  LossFunction loss = nullptr;
  Batch batch{};
};

Tensor doubles(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); }
Tensor series() { return doubles({kB, kT, kD}); }
Tensor rows() { return doubles({kB, kD}); }
Tensor ids() { return at::randint(10, {kB, kT}); }
Tensor by_example(const Tensor& values) { return values.square().flatten(1).sum(1); }

template <typename Holder>
Case of(std::string name, Holder module, Batch batch,
        std::function<Tensor(Holder&, const Batch&)> loss) {
  module->to(at::kDouble);
  return {.name = std::move(name),
          .parameters = parameters_of(*module),
          .loss = [module, loss](const Batch& b) mutable { return loss(module, b); },
          .batch = std::move(batch)};
}

template <typename Holder>
Case layer(std::string name, Holder module, Tensor input) {
  return of<Holder>(std::move(name), std::move(module), {std::move(input)},
                    [](Holder& m, const Batch& b) { return by_example(m(b[0])); });
}

template <typename Holder>
Case recurrent(std::string name, Holder module) {
  return of<Holder>(std::move(name), std::move(module), {series()}, [](Holder& m, const Batch& b) {
    return by_example(std::get<0>(m(b[0])).select(1, -1));
  });
}

// P7, P22: parameters of its own, a second argument and a mask that the module draws.
struct InnerImpl : nn::Module {
  explicit InnerImpl(double dropped) : dropped(dropped) {
    scale = register_parameter("scale", at::randn({kD}));
    shift = register_parameter("shift", at::randn({1, kD}));
    register_module("linear", linear);
  }
  Tensor forward(const Tensor& x, const Tensor& t) {
    const Tensor h = linear(x) * scale + (t.unsqueeze(1) * shift).sin();
    return at::dropout(h, dropped, is_training()) + scale.square();
  }
  Tensor scale{};
  Tensor shift{};
  nn::Linear linear{kD, kD};
  double dropped = 0;
};
TORCH_MODULE(Inner);

struct OuterImpl : nn::Module {
  explicit OuterImpl(double dropped = 0) : inner(dropped) {
    register_module("inner", inner);
    register_module("head", head);
  }
  Tensor forward(const Tensor& x, const Tensor& t) { return head(inner(x, t).tanh()); }
  Inner inner;
  nn::Linear head{kD, 3};
};
TORCH_MODULE(Outer);

Case bags(const std::string& name, bool mean) {
  auto options = nn::EmbeddingBagOptions(10, kD);
  mean ? options.mode(torch::kMean) : options.mode(torch::kSum);
  // [1, 2, 4], [5, 4], [3, 2, 0] as rows of a batch; offsets [0, 3, 5] follow from the lengths.
  const Tensor padded = at::tensor({1, 2, 4, 5, 4, 9, 3, 2, 0}, at::kLong).view({3, 3});
  return of<nn::EmbeddingBag>(name, nn::EmbeddingBag(options),
                              {padded, at::tensor({3, 2, 3}, at::kLong)},
                              [](nn::EmbeddingBag& m, const Batch& b) {
                                const Tensor used = at::arange(3).unsqueeze(0) < b[1].unsqueeze(1);
                                const Tensor offsets = b[1].cumsum(0) - b[1];
                                return by_example(m->forward(b[0].index({used}), offsets));
                              });
}

std::vector<Case> cases() {
  std::vector<Case> all;
  all.push_back(of<nn::ModuleList>(
      "P1 a parameter used through a broadcast",
      nn::ModuleList(nn::Embedding(10, kD), nn::Embedding(kT, kD), nn::Linear(kD, 3)), {ids()},
      [](nn::ModuleList& m, const Batch& b) {
        const Tensor places = m[1]->as<nn::Embedding>()->forward(at::arange(kT).unsqueeze(0));
        return by_example(
            m[2]->as<nn::Linear>()->forward(m[0]->as<nn::Embedding>()->forward(b[0]) + places));
      }));
  all.push_back(of<nn::Embedding>("P2 tied weights", nn::Embedding(10, kD), {ids()},
                                  [](nn::Embedding& m, const Batch& b) {
                                    return by_example(at::linear(m(b[0]).tanh(), m->weight));
                                  }));
  all.push_back(
      of<nn::Linear>("P3 a layer called twice", nn::Linear(kD, kD), {rows()},
                     [](nn::Linear& m, const Batch& b) { return by_example(m(m(b[0]).tanh())); }));
  nn::Linear frozen(kD, 3);
  frozen->weight.requires_grad_(false);
  all.push_back(layer("P4 a frozen weight and a live bias", frozen, rows()));
  all.push_back(of<nn::ModuleList>("P5 an unused layer",
                                   nn::ModuleList(nn::Linear(kD, 3), nn::Linear(kD, 3)), {rows()},
                                   [](nn::ModuleList& m, const Batch& b) {
                                     return by_example(m[0]->as<nn::Linear>()->forward(b[0]));
                                   }));
  all.push_back(of<nn::ModuleList>(
      "P6 GRU, its last step",
      nn::ModuleList(nn::GRU(nn::GRUOptions(kD, 7).batch_first(true)), nn::Linear(7, 3)),
      {series()}, [](nn::ModuleList& m, const Batch& b) {
        const Tensor y = std::get<0>(m[0]->as<nn::GRU>()->forward(b[0]));
        return by_example(m[1]->as<nn::Linear>()->forward(y.select(1, -1)));
      }));
  all.push_back(recurrent("P6 LSTM", nn::LSTM(nn::LSTMOptions(kD, 7).batch_first(true))));
  all.push_back(recurrent("P6 RNN", nn::RNN(nn::RNNOptions(kD, 7).batch_first(true))));
  all.push_back(
      of<nn::MultiheadAttention>("P6 MultiheadAttention", nn::MultiheadAttention(kD, 2), {series()},
                                 [](nn::MultiheadAttention& m, const Batch& b) {
                                   const Tensor x = b[0].transpose(0, 1);
                                   return by_example(std::get<0>(m(x, x, x)).transpose(0, 1));
                                 }));
  all.push_back(
      of<Outer>("P7 a second forward argument", Outer(), {series(), doubles({kB, 1})},
                [](Outer& m, const Batch& b) { return by_example(m->forward(b[0], b[1])); }));
  all.push_back(of<nn::Linear>("P8 the batch folded with time", nn::Linear(kD, 3), {series()},
                               [](nn::Linear& m, const Batch& b) {
                                 return by_example(m(b[0].reshape({-1, kD})).reshape({-1, kT, 3}));
                               }));
  all.push_back(of<nn::ModuleList>("P9 in place",
                                   nn::ModuleList(nn::Linear(kD, kD), nn::Linear(kD, kD)), {rows()},
                                   [](nn::ModuleList& m, const Batch& b) {
                                     Tensor h = m[0]->as<nn::Linear>()->forward(b[0]);
                                     h = m[1]->as<nn::Linear>()->forward(h.relu_());
                                     h += b[0];
                                     return by_example(h.relu_());
                                   }));
  all.push_back(bags("P10 bags, sum", false));
  all.push_back(bags("P10 bags, mean", true));
  all.push_back(layer(
      "P11 an asymmetric convolution",
      nn::Conv2d(nn::Conv2dOptions(3, 4, {3, 1}).padding({1, 0}).stride({2, 1}).dilation({1, 2})),
      doubles({kB, 3, 7, 5})));
  all.push_back(layer("P11 groups", nn::Conv2d(nn::Conv2dOptions(4, 6, 3).groups(2).padding(1)),
                      doubles({kB, 4, 5, 5})));
  all.push_back(
      layer("P11 transposed",
            nn::ConvTranspose2d(nn::ConvTranspose2dOptions(3, 2, 3).stride(2).output_padding(1)),
            doubles({kB, 3, 4, 4})));
  all.push_back(layer("P12 a bias over time", nn::Linear(kD, 3), series()));
  all.push_back(layer("P13 a padding index",
                      nn::Embedding(nn::EmbeddingOptions(10, kD).padding_idx(0)),
                      at::tensor({0, 1, 2, 0, 3, 9, 0, 0}, at::kLong).view({4, 2})));
  all.push_back(of<nn::Linear>(
      "P14 ignored targets", nn::Linear(kD, 4),
      {doubles({2, 4, kD}),
       at::tensor({1, 2, -100, -100, 3, -100, -100, -100}, at::kLong).view({2, 4})},
      [](nn::Linear& m, const Batch& b) {
        const Tensor losses =
            at::cross_entropy_loss(m(b[0]).transpose(1, 2), b[1], {}, at::Reduction::None, -100);
        return losses.sum(1) / (b[1] != -100).sum(1);
      }));
  nn::BatchNorm1d norm(4);
  norm->running_mean.normal_();
  norm->eval();
  all.push_back(layer("P21 BatchNorm in eval mode", norm, doubles({kB, 4, kT})));
  all.push_back(of<nn::Sequential>(
      "P23 a checkpointed block",
      nn::Sequential(nn::Linear(kD, 8), nn::Tanh(), nn::LayerNorm(nn::LayerNormOptions({8})),
                     nn::Linear(8, kD)),
      {series()}, [](nn::Sequential& m, const Batch& b) {
        const Tensor h = recompute::checkpoint(
            recompute::CheckpointOptions{}, [&](const Tensor& x) { return m->forward(x); },
            b[0] * 2);
        return by_example(h + b[0]);
      }));
  return all;
}

// The oracle shares nothing with an engine: a plain backward pass a batch of one.
std::vector<Tensor> truth_of(const Case& each) {
  std::vector<Tensor> wanted;
  for (const NamedParameter& parameter : each.parameters) {
    std::vector<Tensor> gradients;
    for (std::int64_t b = 0; parameter.tensor.requires_grad() && b < each.batch[0].size(0); ++b) {
      Batch one;
      for (const Tensor& input : each.batch) one.push_back(input.narrow(0, b, 1).clone());
      const auto found = torch::autograd::grad({each.loss(one).sum()}, {parameter.tensor}, {},
                                               false, false, /*allow_unused=*/true);
      gradients.push_back(found[0].defined() ? found[0] : at::zeros_like(parameter.tensor));
    }
    wanted.push_back(gradients.empty() ? Tensor() : at::stack(gradients));
  }
  return wanted;
}

void expect_equal(const Case& each, const std::vector<Tensor>& got,
                  const std::vector<Tensor>& want) {
  ASSERT_EQ(got.size(), want.size());
  bool any = false;
  for (std::size_t i = 0; i < want.size(); ++i) {
    SCOPED_TRACE(each.parameters[i].name);
    ASSERT_EQ(got[i].defined(), want[i].defined());
    if (!want[i].defined()) continue;
    ASSERT_EQ(got[i].sizes(), want[i].sizes());
    EXPECT_LE((got[i] - want[i]).norm().item<double>(), kTolerance * want[i].norm().item<double>());
    any = any || want[i].count_nonzero().item<std::int64_t>() > 0;
  }
  EXPECT_TRUE(any) << "all gradients are zero";
}

std::vector<Tensor> gradients_of(const SampleGradients& table) {
  std::vector<Tensor> all;
  for (std::size_t i = 0; i < table.parameters().size(); ++i) all.push_back(table.gradients(i));
  return all;
}

class CasesTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
  SampleOptions options_for(Engine engine) {
    lines.clear();
    SampleOptions options{.engine = engine};
    options.strict = engine == Engine::graph;
    options.log = [this](const std::string& line) { lines.push_back(line); };
    return options;
  }

  std::vector<std::string> lines{};
};

const std::vector<std::pair<std::string, Engine>> kEngines{{"automatic", Engine::automatic},
                                                           {"graph", Engine::graph},
                                                           {"vmap", Engine::vmap},
                                                           {"loop", Engine::loop}};

TEST_F(CasesTest, EveryEngineEqualsPlainBackwardPassesOfOneExample) {
  for (const Case& each : cases()) {
    SCOPED_TRACE(each.name);
    const auto want = truth_of(each);
    for (const auto& [name, engine] : kEngines) {
      SCOPED_TRACE(name);
      SampleGradients table(each.parameters, options_for(engine));
      try {
        table.backward(each.loss, each.batch);
      } catch (const UserError& error) {
        ADD_FAILURE() << error.what();
        continue;
      }
      expect_equal(each, gradients_of(table), want);
      Tensor squares = at::zeros({each.batch[0].size(0)}, at::kDouble);
      for (const Tensor& gradient : want) {
        if (gradient.defined()) squares += gradient.flatten(1).square().sum(1);
      }
      EXPECT_LE((table.norms() - squares.sqrt()).norm().item<double>(),
                kTolerance * squares.sqrt().norm().item<double>());
      EXPECT_THAT(lines, testing::IsEmpty()) << "work was left to another engine";
    }
    const Tensor losses = each.loss(each.batch);
    for (const std::int64_t rows : {1, 16}) {
      SCOPED_TRACE(base::join("rows, at once: ", rows));
      expect_equal(each, row_gradients(losses, each.parameters, {.rows_at_once = rows}), want);
    }
  }
}

// Bags as a user has them: ids and offsets of a whole batch, whose examples own no row of either.
// The batch numbers the bags.
Case captured_bags(nn::EmbeddingBag table) {
  table->to(at::kDouble);
  return {.parameters = parameters_of(*table),
          .loss =
              [=](const Batch& b) mutable {
                const Tensor ids = at::tensor({1, 2, 4, 5, 4, 3, 2, 0}, at::kLong);
                const std::vector<std::int64_t> bounds{0, 3, 5, 8};
                std::vector<Tensor> parts;
                std::vector<std::int64_t> offsets;
                std::int64_t before = 0;
                for (const Tensor& bag : b[0].unbind()) {
                  const auto place = static_cast<std::size_t>(bag.item<std::int64_t>());
                  parts.push_back(ids.slice(0, bounds[place], bounds[place + 1]));
                  offsets.push_back(before);
                  before += parts.back().size(0);
                }
                return by_example(table->forward(at::cat(parts), at::tensor(offsets, at::kLong)));
              },
          .batch = {at::arange(3)}};
}

TEST_F(CasesTest, BagsThatNoExampleOwnsAreTakenOrRefused) {  // P10
  for (const bool mean : {false, true}) {
    auto options = nn::EmbeddingBagOptions(10, kD);
    mean ? options.mode(torch::kMean) : options.mode(torch::kSum);
    const Case each = captured_bags(nn::EmbeddingBag(options));
    const auto want = truth_of(each);
    for (const auto& [name, engine] : kEngines) {
      SCOPED_TRACE(name);
      SampleGradients gradients(each.parameters, options_for(engine));
      try {
        gradients.backward(each.loss, each.batch);
        expect_equal(each, gradients_of(gradients), want);
      } catch (const Unsupported& error) {
        EXPECT_EQ(engine, Engine::vmap) << error.what();
      }
      EXPECT_THAT(lines, testing::IsEmpty());
    }
    expect_equal(each, row_gradients(each.loss(each.batch), each.parameters), want);
  }
}

TEST_F(CasesTest, WhatVmapRefusesFallsBackToTheLoop) {
  // A wrong rule, in a loss that reads the memory of an activation.
  register_rule(
      "HypotBackward0", [](const NodeUse& use) -> std::optional<std::vector<OperandTerm>> {
        if (use.shared.size() != 1) return std::nullopt;
        std::vector<OperandTerm> terms;
        terms.push_back(
            {use.shared[0], std::make_unique<FormedTerm>(use.gradients[0].unsqueeze(1).clone())});
        return terms;
      });
  Case each = captured_bags(nn::EmbeddingBag(nn::EmbeddingBagOptions(10, kD).mode(torch::kSum)));
  const Tensor slope = doubles({1}).requires_grad_();
  each.parameters.push_back({"slope", slope});
  const LossFunction bags = each.loss;
  each.loss = [=](const Batch& b) {
    const Tensor losses = bags(b);
    const double nothing = losses.const_data_ptr<double>()[0] * 0;
    return at::hypot(losses, slope) + nothing;
  };
  EXPECT_THROW(vmap_gradients(each.parameters, each.loss, each.batch), Unsupported);
  SampleGradients gradients(each.parameters, options_for(Engine::automatic));
  gradients.backward(each.loss, each.batch);
  expect_equal(each, gradients_of(gradients), truth_of(each));
  EXPECT_THAT(lines, testing::Contains(HasSubstr("slope: the graph engine does not match single "
                                                 "examples; computed by the loop")));
  EXPECT_THAT(lines, testing::Not(testing::Contains(HasSubstr("weight: "))));
}

TEST_F(CasesTest, HalfPrecisionOfAutocastIsSummedInFloat) {  // P16
  nn::Sequential model(nn::Linear(kD, 8), nn::LayerNorm(nn::LayerNormOptions({8})),
                       nn::Linear(8, 3));
  const Case each{.parameters = parameters_of(*model),
                  .loss =
                      [&](const Batch& b) {
                        const amp::AutocastGuard autocast({.dtype = at::kBFloat16});
                        return by_example(model->forward(b[0]).to(at::kFloat));
                      },
                  .batch = {at::randn({kB, kD})}};
  const auto want = truth_of(each);
  const auto expect_close = [&](const std::vector<Tensor>& got) {
    for (std::size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(got[i].scalar_type(), at::kFloat);
      EXPECT_LE((got[i] - want[i]).norm().item<double>(), 2e-2 * want[i].norm().item<double>())
          << each.parameters[i].name;
    }
  };
  for (const auto& [name, engine] : kEngines) {
    SCOPED_TRACE(name);
    SampleGradients table(each.parameters, options_for(engine));
    table.backward(each.loss, each.batch);
    EXPECT_THAT(lines, testing::IsEmpty());
    expect_close(gradients_of(table));
    EXPECT_EQ(table.norms().scalar_type(), at::kDouble);
    EXPECT_EQ(table.weighted_sum(0, at::ones({kB})).scalar_type(), at::kFloat);
  }
  expect_close(row_gradients(each.loss(each.batch), each.parameters));
}

TEST_F(CasesTest, TwoBackwardCallsAddUpPerExample) {  // P18
  nn::Sequential judge(nn::Linear(kD, 4), nn::Tanh(), nn::Linear(4, 1));
  const auto of_batch = [&](const LossFunction& loss, const Tensor& batch) {
    judge->to(at::kDouble);
    return Case{.parameters = parameters_of(*judge), .loss = loss, .batch = {batch}};
  };
  const Case real =
      of_batch([&](const Batch& b) { return by_example(judge->forward(b[0]) - 1); }, rows());
  const Case fake =
      of_batch([&](const Batch& b) { return by_example(judge->forward(b[0]).sigmoid()); }, rows());
  auto want = truth_of(real);
  const auto more = truth_of(fake);
  for (std::size_t i = 0; i < want.size(); ++i) want[i] = want[i] + more[i];
  for (const auto& [name, engine] : kEngines) {
    SCOPED_TRACE(name);
    SampleGradients table(real.parameters, options_for(engine));
    table.backward(real.loss, real.batch);
    table.backward(fake.loss, fake.batch);
    expect_equal(real, gradients_of(table), want);
    EXPECT_THROW(table.backward(fake.loss, {fake.batch[0].narrow(0, 0, 3)}), UserError);
    expect_equal(real, gradients_of(table), want);  // nothing was lost
  }
}

TEST_F(CasesTest, ADiscardedForwardLeavesNoMemoryAndNoTrace) {  // P19
  auto& tracker = base::MemoryTracker::install();
  nn::Sequential model(nn::Linear(kD, 32), nn::Tanh(), nn::Linear(32, 3));
  model->to(at::kDouble);
  model->train();
  const Case each{.parameters = parameters_of(*model),
                  .loss = [&](const Batch& b) { return by_example(model->forward(b[0])); },
                  .batch = {series()}};
  const auto want = truth_of(each);
  const Tensor unseen = doubles({100, kT, kD});
  for (const auto& [name, engine] : kEngines) {
    SCOPED_TRACE(name);
    SampleGradients table(each.parameters, options_for(engine));
    const auto step = [&] {
      table.clear();
      table.backward(each.loss, each.batch);
      const auto sums = table.weighted_sums((1 / table.norms()).clamp_max(1.0));
    };
    step();
    step();
    const std::int64_t live = tracker.live().total();
    for (int repeat = 0; repeat < 3; ++repeat) {
      {
        const torch::NoGradGuard no_grad;
        model->forward(unseen);
      }
      EXPECT_EQ(tracker.live().total(), live);
      step();
      EXPECT_EQ(tracker.live().total(), live);
    }
    table.clear();
    table.backward(each.loss, each.batch);
    expect_equal(each, gradients_of(table), want);
  }
}

TEST_F(CasesTest, WhatMixesExamplesIsRefusedUnlessEachIsComputedAlone) {  // P21
  nn::Linear first(kD, kD), second(kD, 3);
  nn::BatchNorm1d norm(kD);
  nn::ModuleList plain(first, second), with_norm(first, norm, second);
  nn::Embedding counted(nn::EmbeddingOptions(10, kD).scale_grad_by_freq(true));
  with_norm->to(at::kDouble);
  counted->to(at::kDouble);
  struct Mixed {
    std::string name{};
    std::shared_ptr<nn::Module> module = nullptr;
    LossFunction loss = nullptr;
    Tensor input{};
    std::string named{};
  };
  const std::vector<Mixed> all{
      {"flip", plain.ptr(), [&](const Batch& b) { return by_example(second(first(b[0].flip(0)))); },
       rows(), "flip"},
      {"a permutation inside", plain.ptr(),
       [&](const Batch& b) {
         return by_example(second(first(b[0]).index_select(0, at::randperm(b[0].size(0)))));
       },
       rows(), "randperm"},
      {"the mean of the batch", plain.ptr(),
       [&](const Batch& b) {
         const Tensor h = first(b[0]);
         return by_example(second(h - h.mean(0) / 2));
       },
       rows(), "changes the loss"},
      {"BatchNorm in training", with_norm.ptr(),
       [&](const Batch& b) { return by_example(second(norm(first(b[0])))); }, rows(),
       "BatchNorm1d \"1\""},
  };
  for (const Mixed& each : all) {
    SCOPED_TRACE(each.name);
    for (const auto& [name, engine] : kEngines) {
      SCOPED_TRACE(name);
      SampleGradients table(each.module, options_for(engine));
      try {
        table.backward(each.loss, {each.input});
        // An example that is computed alone has none to mix with.
        ASSERT_TRUE(engine == Engine::vmap || engine == Engine::loop) << "not refused";
        ASSERT_FALSE(each.module == with_norm.ptr()) << "not refused";
        const Case alone{
            .parameters = table.parameters(), .loss = each.loss, .batch = {each.input}};
        expect_equal(alone, gradients_of(table), truth_of(alone));
      } catch (const UserError& error) {
        EXPECT_THAT(error.what(), HasSubstr(each.named));
      }
    }
  }
  // Frequencies of one example are its own: an engine gives them or refuses by name.
  const Case counts{.parameters = parameters_of(*counted),
                    .loss = [&](const Batch& b) { return by_example(counted(b[0])); },
                    .batch = {at::tensor({1, 1, 2, 1, 3, 3, 3, 3}, at::kLong).view({2, 4})}};
  const auto want = truth_of(counts);
  for (const auto& [name, engine] : kEngines) {
    SCOPED_TRACE(name);
    SampleGradients table(counts.parameters, options_for(engine));
    try {
      table.backward(counts.loss, counts.batch);
      expect_equal(counts, gradients_of(table), want);
    } catch (const UserError& error) {
      EXPECT_THAT(error.what(), HasSubstr("scale_grad_by_freq"));
    }
  }
}

TEST_F(CasesTest, DropoutsMasksAreThoseOfTheForwardPass) {  // P22
  Outer model(0.5);
  model->to(at::kDouble);
  model->train();
  const Case each{.parameters = parameters_of(*model),
                  .loss = [&](const Batch& b) { return by_example(model->forward(b[0], b[1])); },
                  .batch = {series(), doubles({kB, 1})}};
  const auto gradient_of = [&](const Tensor& loss) {
    std::vector<Tensor> leaves;
    for (const auto& parameter : each.parameters) leaves.push_back(parameter.tensor);
    return torch::autograd::grad({loss}, leaves, {}, /*retain_graph=*/true);
  };
  // The masks of one forward pass of the batch, and those of a pass an example, from one seed.
  std::vector<std::vector<Tensor>> together(each.parameters.size()), alone(each.parameters.size());
  torch::manual_seed(7);
  const Tensor losses = each.loss(each.batch);
  torch::manual_seed(7);
  for (std::int64_t b = 0; b < kB; ++b) {
    const auto row = gradient_of(losses[b]);
    const auto own = gradient_of(
        each.loss({each.batch[0].narrow(0, b, 1), each.batch[1].narrow(0, b, 1)}).sum());
    for (std::size_t i = 0; i < row.size(); ++i) {
      together[i].push_back(row[i]);
      alone[i].push_back(own[i]);
    }
  }
  const auto stacked = [](const std::vector<std::vector<Tensor>>& lists) {
    std::vector<Tensor> all;
    for (const auto& list : lists) all.push_back(at::stack(list));
    return all;
  };
  for (const Engine engine : {Engine::automatic, Engine::graph, Engine::loop}) {
    SCOPED_TRACE(static_cast<int>(engine));
    SampleGradients table(each.parameters, options_for(engine));
    torch::manual_seed(7);
    table.backward(each.loss, each.batch);
    expect_equal(each, gradients_of(table), stacked(engine == Engine::loop ? alone : together));
    EXPECT_THAT(lines, testing::IsEmpty());
  }
  expect_equal(each, row_gradients(losses, each.parameters), stacked(together));
  expect_equal(each, vmap_gradients(each.parameters, each.loss, each.batch, {.seed = 5}),
               loop_gradients(each.parameters, each.loss, each.batch, {.seed = 5}));
}

}  // namespace
}  // namespace gradus::persample
