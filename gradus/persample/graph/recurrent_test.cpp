#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/persample/graph/graph_gradients.h>
#include <gradus/persample/graph/internal/loop_testing.h>

// Recurrent layers as torch::nn and at:: offer them, whose graphs are one fused node (LSTM in
// float32 and less on a CPU) or chains of products, against a batch of one at a time.

namespace gradus::persample {
namespace {

using at::Tensor;
using internal::expect_equals_loop;
using internal::named;
using internal::relative;
using internal::uses;
namespace nn = torch::nn;
namespace packing = torch::nn::utils::rnn;

constexpr double kDouble = 1e-9;
constexpr double kSingle = 1e-5;
const std::string kFused = "MkldnnRnnLayerBackward0";

// A copy in float64: its graph has no fused node.
template <typename Holder>
Holder in_double(const Holder& module) {
  auto copy = std::dynamic_pointer_cast<typename Holder::ContainedType>(module->clone());
  copy->to(at::kDouble);
  return Holder(copy);
}

// The arguments of one call: x in the layer's own layout, states [layers, B, H].
struct Call {
  Tensor x{};
  Tensor h{};
  Tensor c{};
  std::int64_t batch_dim = 1;
  int outputs = 1;  // bits: 1 all steps, 2 the last hidden states, 4 the last cells

  Call at(std::int64_t example) const {
    const auto of = [&](const Tensor& tensor, std::int64_t dim) {
      return tensor.defined() ? tensor.narrow(dim, example, 1) : Tensor();
    };
    return {of(x, batch_dim), of(h, 1), of(c, 1), batch_dim, outputs};
  }
  Call to(at::ScalarType type) const {
    const auto of = [&](const Tensor& tensor) {
      return tensor.defined() ? tensor.to(type) : Tensor();
    };
    return {of(x), of(h), of(c), batch_dim, outputs};
  }
};

// Losses [B] of all outputs that the call wants.
Tensor losses_of(const Call& call, const Tensor& y, const Tensor& h, const Tensor& c) {
  const auto by_example = [](const Tensor& tensor, std::int64_t dim) {
    return tensor.tanh().square().movedim(dim, 0).flatten(1).sum(1);
  };
  std::vector<Tensor> parts;
  if ((call.outputs & 1) != 0) parts.push_back(by_example(y, call.batch_dim));
  if ((call.outputs & 2) != 0 || (!c.defined() && parts.empty())) {
    parts.push_back(2 * by_example(h, 1));
  }
  if ((call.outputs & 4) != 0 && c.defined()) parts.push_back(3 * by_example(c, 1));
  return at::stack(parts).sum(0);
}

Tensor run(nn::LSTM& lstm, const Call& call) {
  const auto given = call.h.defined()
                         ? torch::optional<std::tuple<Tensor, Tensor>>({call.h, call.c})
                         : torch::nullopt;
  const auto [y, states] = lstm(call.x, given);
  return losses_of(call, y, std::get<0>(states), std::get<1>(states));
}

template <typename Holder>
Tensor run(Holder& module, const Call& call) {
  const auto [y, h] = module(call.x, call.h);
  return losses_of(call, y, h, {});
}

std::tuple<packing::PackedSequence, Tensor, Tensor> run_packed(
    nn::LSTM& lstm, const packing::PackedSequence& packed) {
  const auto [y, states] = lstm->forward_with_packed_input(packed);
  return {y, std::get<0>(states), std::get<1>(states)};
}

template <typename Holder>
std::tuple<packing::PackedSequence, Tensor, Tensor> run_packed(
    Holder& module, const packing::PackedSequence& packed) {
  const auto [y, h] = module->forward_with_packed_input(packed);
  return {y, h, Tensor()};
}

class RecurrentTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }

  std::int64_t draw(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  bool flip() { return draw(0, 1) == 1; }

  Call call_for(std::int64_t input, std::int64_t hidden, std::int64_t states, bool batch_first,
                std::int64_t projected = 0) {
    const std::int64_t examples = draw(2, 4), steps = draw(1, 4);
    Call call{
        .x = at::randn({batch_first ? examples : steps, batch_first ? steps : examples, input}),
        .batch_dim = batch_first ? 0 : 1,
        .outputs = static_cast<int>(draw(1, 7))};
    if (flip()) {
      call.h = at::randn({states, examples, projected > 0 ? projected : hidden});
      call.c = at::randn({states, examples, hidden});
    }
    return call;
  }

  // The module in @p type against its copy in float64.
  template <typename Holder>
  void expect_module_equals_loop(Holder module, const Call& call, at::ScalarType type,
                                 double tolerance) {
    module->to(type);
    Holder truth = in_double(module);
    const Call typed = call.to(type);
    const Call exact = typed.to(at::kDouble);
    expect_equals_loop({.parameters = named(*module),
                        .losses = [&] { return run(module, typed); },
                        .true_parameters = named(*truth),
                        .loss = [&](std::int64_t b) { return run(truth, exact.at(b)); }},
                       tolerance);
  }

  // A layer whose sequences have different lengths, behind an Embedding.
  template <typename Holder>
  void expect_packed_equals_loop(Holder module, std::int64_t hidden, at::ScalarType type,
                                 double tolerance, bool sorted) {
    nn::Embedding table(8, hidden);
    nn::ModuleList model(table, module);
    model->to(type);
    const std::int64_t examples = draw(2, 4);
    std::vector<std::int64_t> lengths;
    for (std::int64_t b = 0; b < examples; ++b) lengths.push_back(draw(1, 4));
    if (sorted) std::sort(lengths.rbegin(), lengths.rend());
    const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
    const bool batch_first = flip();
    const Tensor ids = at::randint(8, {examples, longest});
    const int outputs = static_cast<int>(draw(1, 7));
    const auto losses = [&](Holder& layer, nn::Embedding& words, const Tensor& tokens,
                            const Tensor& length, bool is_sorted) {
      const Tensor x = words(batch_first ? tokens : tokens.t());
      const auto packed = packing::pack_padded_sequence(x, length, batch_first, is_sorted);
      const auto [y, h, c] = run_packed(layer, packed);
      const Tensor padded = std::get<0>(packing::pad_packed_sequence(y, batch_first));
      return losses_of({.x = x, .batch_dim = batch_first ? 0 : 1, .outputs = outputs}, padded, h,
                       c);
    };
    Holder truth = in_double(module);
    nn::Embedding true_table = in_double(table);
    nn::ModuleList true_model(true_table, truth);
    expect_equals_loop(
        {.parameters = named(*model),
         .losses = [&] { return losses(module, table, ids, at::tensor(lengths), sorted); },
         .true_parameters = named(*true_model),
         .loss =
             [&](std::int64_t b) {
               const std::int64_t length = lengths[static_cast<std::size_t>(b)];
               return losses(truth, true_table, ids.narrow(0, b, 1).narrow(1, 0, length),
                             at::tensor({length}), true);
             }},
        tolerance, {.examples_checked = true});
  }

  static bool is_fused(at::ScalarType type) {
    nn::LSTM probe(6, 7);
    probe->to(type);
    return uses(run(probe, {.x = at::randn({5, 4, 6}, type)}), kFused);
  }

 private:
  std::mt19937 random_{7};
};

#define GRADUS_SKIP_UNLESS_FUSED(type) \
  if (!is_fused(type)) GTEST_SKIP() << "an LSTM in " << (type) << " is no " << kFused << " here"

void expect_by_rule(const std::vector<NamedParameter>& parameters, const Tensor& losses) {
  EXPECT_TRUE(uses(losses, kFused));
  GraphGradients table(parameters);
  table.backward(losses);
  for (const std::string& line : table.explain()) {
    EXPECT_EQ(line.find("own formula"), std::string::npos) << line;
  }
}

TEST_F(RecurrentTest, FusedLstmOfAnyShapeWithAnyOutputs) {
  GRADUS_SKIP_UNLESS_FUSED(at::kFloat);
  for (int trial = 0; trial < 100; ++trial) {
    SCOPED_TRACE(trial);
    const std::int64_t layers = draw(1, 2), input = draw(1, 5), hidden = draw(1, 9);
    const bool both = flip(), first = flip();
    nn::LSTM lstm(nn::LSTMOptions(input, hidden)
                      .num_layers(layers)
                      .bidirectional(both)
                      .batch_first(first)
                      .bias(draw(0, 3) > 0));
    const Call call = call_for(input, hidden, layers * (both ? 2 : 1), first);
    expect_module_equals_loop(lstm, call, at::kFloat, kSingle);
    if (trial % 10 == 0) expect_by_rule(named(*lstm), run(lstm, call));
  }
}

TEST_F(RecurrentTest, FusedLstmInBfloat16) {
  GRADUS_SKIP_UNLESS_FUSED(at::kBFloat16);
  for (int trial = 0; trial < 5; ++trial) {
    SCOPED_TRACE(trial);
    nn::LSTM lstm(nn::LSTMOptions(5, 9).bidirectional(flip()));
    const Call call{.x = at::randn({4, 3, 5}), .outputs = 7};
    // Outputs and gradients between steps are rounded to 8 bits.
    expect_module_equals_loop(lstm, call, at::kBFloat16, 0.03);
    expect_by_rule(named(*lstm), run(lstm, call.to(at::kBFloat16)));
    GraphGradients table(named(*lstm));
    table.backward(run(lstm, call.to(at::kBFloat16)));
    EXPECT_EQ(table.gradients(0).scalar_type(), at::kFloat);
  }
}

TEST_F(RecurrentTest, FusedLstmPassesGradientsOnToWhatItsInputsCameFrom) {
  GRADUS_SKIP_UNLESS_FUSED(at::kFloat);
  struct Net : nn::Module {
    nn::Linear before{4, 5}, hidden{4, 6}, cell{4, 6};
    nn::LSTM lstm{nn::LSTMOptions(5, 6).num_layers(2)};
    Tensor learned = at::randn({1, 1, 6}).requires_grad_();
    Net() {
      register_module("before", before);
      register_module("hidden", hidden);
      register_module("cell", cell);
      register_module("lstm", lstm);
      learned = register_parameter("learned", learned);
    }
    Tensor forward(const Tensor& x) {  // [B, T, 4]
      const Tensor first = x.select(1, 0);
      const Tensor h = at::cat({learned.expand({1, x.size(0), 6}), hidden(first).unsqueeze(0)});
      const Tensor c = cell(first).unsqueeze(0).expand({2, -1, -1});
      const auto [y, states] = lstm(before(x).transpose(0, 1), std::make_tuple(h, c));
      return y.square().sum({0, 2}) + std::get<1>(states).square().sum({0, 2});
    }
  };
  Net net;
  Net truth;
  truth.to(at::kDouble);
  const auto from = net.parameters(), to = truth.parameters();
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);
  }
  const Tensor x = at::randn({3, 4, 4});
  const auto compare = [&] {
    expect_equals_loop(
        {.parameters = named(net),
         .losses = [&] { return net.forward(x); },
         .true_parameters = named(truth),
         .loss = [&](std::int64_t b) { return truth.forward(x.to(at::kDouble).narrow(0, b, 1)); }},
        kSingle);
  };
  compare();
  expect_by_rule(named(net), net.forward(x));
  for (const std::string frozen : {"before.weight", "lstm.weight_hh_l0", "lstm.bias_ih_l1"}) {
    net.named_parameters()[frozen].requires_grad_(false);
    truth.named_parameters()[frozen].requires_grad_(false);
    compare();
  }
  // All of the layer frozen: what is before it still learns.
  for (auto& each : net.lstm->parameters()) each.requires_grad_(false);
  for (auto& each : truth.lstm->parameters()) each.requires_grad_(false);
  compare();
}

TEST_F(RecurrentTest, FusedLstmWithTheBatchFoldedIntoItsOwn) {
  GRADUS_SKIP_UNLESS_FUSED(at::kFloat);
  nn::LSTM lstm(5, 6);
  nn::LSTM truth = in_double(lstm);
  const Tensor x = at::randn({3, 2, 4, 5});  // [B, K, T, D]
  for (const bool batch_outside : {true, false}) {
    const auto losses = [&](nn::LSTM& layer, const Tensor& in) {
      const std::int64_t b = in.size(0);
      const Tensor arranged = batch_outside ? in.flatten(0, 1) : in.transpose(0, 1).flatten(0, 1);
      const Tensor y = std::get<0>(layer(arranged.transpose(0, 1))).square().sum({0, 2});
      return batch_outside ? y.view({b, 2}).sum(1) : y.view({2, b}).sum(0);
    };
    expect_equals_loop(
        {.parameters = named(*lstm),
         .losses = [&] { return losses(lstm, x); },
         .true_parameters = named(*truth),
         .loss = [&](std::int64_t b) { return losses(truth, x.to(at::kDouble).narrow(0, b, 1)); }},
        kSingle);
    expect_by_rule(named(*lstm), losses(lstm, x));
  }
}

TEST_F(RecurrentTest, FusedLstmOfWhichOneExampleAloneHasGradients) {
  GRADUS_SKIP_UNLESS_FUSED(at::kFloat);
  nn::LSTM lstm(5, 6);
  nn::LSTM truth = in_double(lstm);
  const Call call{.x = at::randn({4, 3, 5}), .outputs = 7};
  const Tensor only = at::tensor({0., 1., 0.});
  expect_equals_loop(
      {.parameters = named(*lstm),
       .losses = [&] { return run(lstm, call) * only.to(at::kFloat); },
       .true_parameters = named(*truth),
       .loss = [&](std::int64_t b) { return run(truth, call.to(at::kDouble).at(b)) * only[b]; }},
      kSingle);
}

TEST_F(RecurrentTest, FusedLstmsGraphIsKeptOrFreedAsAsked) {
  GRADUS_SKIP_UNLESS_FUSED(at::kFloat);
  for (const bool trained_below : {true, false}) {
    nn::LSTM lstm(5, 6);
    nn::Linear below(5, 5);
    auto parameters = named(*lstm);
    if (trained_below) {
      for (const auto& each : named(*below)) parameters.push_back(each);
    }
    const Tensor x = at::randn({4, 3, 5});
    const Tensor input = trained_below ? below(x) : x;
    const Tensor losses = run(lstm, {.x = input, .outputs = 7});
    GraphGradients table(parameters);
    table.backward(losses, /*keep_graph=*/true);
    const Tensor once = table.gradients(0).clone();
    table.backward(losses);
    EXPECT_LE(relative(table.gradients(0), 2 * once), 1e-6);
    EXPECT_ANY_THROW(losses.sum().backward());  // never a formula whose workspace is gone
  }
}

TEST_F(RecurrentTest, LongSequencesAreFormed) {
  nn::LSTM lstm(4, 4);
  GraphGradients table(named(*lstm), {.reproducible = true});
  for (const std::int64_t steps : {50, 100}) {
    table.clear();
    table.backward(run(lstm, {.x = at::randn({steps, 3, 4})}));
    EXPECT_EQ(table.explain()[0], "weight_ih_l0: formed [3, 16, 4]");
    EXPECT_EQ(table.explain()[1], "weight_hh_l0: formed [3, 16, 4]");
  }
}

TEST_F(RecurrentTest, GruOfAnyShape) {
  for (int trial = 0; trial < 100; ++trial) {
    SCOPED_TRACE(trial);
    const std::int64_t layers = draw(1, 2), input = draw(1, 5), hidden = draw(1, 6);
    const bool both = flip(), first = flip();
    nn::GRU gru(nn::GRUOptions(input, hidden)
                    .num_layers(layers)
                    .bidirectional(both)
                    .batch_first(first)
                    .bias(draw(0, 3) > 0));
    const Call call = call_for(input, hidden, layers * (both ? 2 : 1), first);
    const bool exact = trial % 4 != 0;
    expect_module_equals_loop(gru, call, exact ? at::kDouble : at::kFloat,
                              exact ? kDouble : kSingle);
  }
}

TEST_F(RecurrentTest, RnnOfAnyShape) {
  for (int trial = 0; trial < 100; ++trial) {
    SCOPED_TRACE(trial);
    const std::int64_t layers = draw(1, 2), input = draw(1, 5), hidden = draw(1, 6);
    const bool both = flip(), first = flip();
    nn::RNNOptions options(input, hidden);
    options.num_layers(layers).bidirectional(both).batch_first(first).bias(draw(0, 3) > 0);
    if (flip()) options.nonlinearity(torch::kReLU);
    nn::RNN rnn(options);
    const Call call = call_for(input, hidden, layers * (both ? 2 : 1), first);
    const bool exact = trial % 4 != 0;
    expect_module_equals_loop(rnn, call, exact ? at::kDouble : at::kFloat,
                              exact ? kDouble : kSingle);
  }
}

TEST_F(RecurrentTest, LstmOfAnyShapeInFloat64AndWithProjections) {
  for (int trial = 0; trial < 100; ++trial) {
    SCOPED_TRACE(trial);
    const std::int64_t layers = draw(1, 2), input = draw(1, 5), hidden = draw(2, 6);
    const bool both = flip(), first = flip();
    const std::int64_t projected = flip() ? hidden - 1 : 0;
    nn::LSTM lstm(nn::LSTMOptions(input, hidden)
                      .num_layers(layers)
                      .bidirectional(both)
                      .batch_first(first)
                      .proj_size(projected));
    const Call call = call_for(input, hidden, layers * (both ? 2 : 1), first, projected);
    const bool exact = projected == 0 || flip();
    expect_module_equals_loop(lstm, call, exact ? at::kDouble : at::kFloat,
                              exact ? kDouble : kSingle);
  }
}

TEST_F(RecurrentTest, DropoutBetweenLayersDropsForEachExampleWhatItDroppedInTheBatch) {
  const auto compare = [&](auto module, at::ScalarType type, double tolerance) {
    module->to(type);
    module->train();
    const Call call = Call{.x = at::randn({4, 3, 5}), .outputs = 7}.to(type);
    const auto losses = [&] {
      torch::manual_seed(5);
      return run(module, call);
    };
    // One example's own loss under the masks that it had.
    expect_equals_loop({.parameters = named(*module),
                        .losses = losses,
                        .true_parameters = named(*module),
                        .loss = [&](std::int64_t b) { return losses().narrow(0, b, 1); }},
                       tolerance);
  };
  compare(nn::LSTM(nn::LSTMOptions(5, 6).num_layers(3).dropout(0.5)), at::kFloat, kSingle);
  compare(nn::LSTM(nn::LSTMOptions(5, 6).num_layers(3).dropout(0.5)), at::kDouble, kDouble);
  compare(nn::GRU(nn::GRUOptions(5, 6).num_layers(2).dropout(0.5)), at::kDouble, kDouble);
  compare(nn::RNN(nn::RNNOptions(5, 6).num_layers(2).dropout(0.5)), at::kDouble, kDouble);
}

TEST_F(RecurrentTest, CellsInALoopOfTheirOwn) {
  for (int trial = 0; trial < 102; ++trial) {
    SCOPED_TRACE(trial);
    const std::int64_t input = draw(1, 5), hidden = draw(1, 6), examples = draw(2, 4);
    const bool bias = flip();
    const bool exact = trial % 4 != 0;
    const auto type = exact ? at::kDouble : at::kFloat;
    const Tensor x = at::randn({examples, draw(1, 4), input}, type);
    const auto compare = [&](auto cell, const auto& step) {
      cell->to(type);
      auto truth = in_double(cell);
      const auto losses = [&](auto& layer, const Tensor& in) {
        std::tuple<Tensor, Tensor> state{at::zeros({in.size(0), hidden}, in.options()),
                                         at::zeros({in.size(0), hidden}, in.options())};
        Tensor total = at::zeros({in.size(0)}, in.options());
        for (std::int64_t t = 0; t < in.size(1); ++t) {
          state = step(layer, in.select(1, t), state);
          total = total + std::get<0>(state).square().sum(1);
        }
        return total;
      };
      expect_equals_loop(
          {.parameters = named(*cell),
           .losses = [&] { return losses(cell, x); },
           .true_parameters = named(*truth),
           .loss =
               [&](std::int64_t b) { return losses(truth, x.to(at::kDouble).narrow(0, b, 1)); }},
          exact ? kDouble : kSingle);
    };
    using State = std::tuple<Tensor, Tensor>;
    const auto plain = [](auto& layer, const Tensor& in, const State& state) {
      return State{layer(in, std::get<0>(state)), std::get<1>(state)};
    };
    if (trial % 3 == 0) {
      compare(nn::LSTMCell(nn::LSTMCellOptions(input, hidden).bias(bias)),
              [](auto& layer, const Tensor& in, const State& state) { return layer(in, state); });
    } else if (trial % 3 == 1) {
      compare(nn::GRUCell(nn::GRUCellOptions(input, hidden).bias(bias)), plain);
    } else {
      compare(nn::RNNCell(nn::RNNCellOptions(input, hidden).bias(bias)), plain);
    }
  }
}

TEST_F(RecurrentTest, PackedSequencesOfAnyLengths) {
  for (int trial = 0; trial < 102; ++trial) {
    SCOPED_TRACE(trial);
    const std::int64_t hidden = draw(1, 5), layers = draw(1, 2);
    const bool both = flip(), sorted = flip();
    const bool exact = trial % 6 < 5;
    const auto type = exact ? at::kDouble : at::kFloat;
    const double tolerance = exact ? kDouble : kSingle;
    if (trial % 3 == 0) {
      nn::LSTM lstm(nn::LSTMOptions(hidden, hidden).num_layers(layers).bidirectional(both));
      expect_packed_equals_loop(lstm, hidden, type, tolerance, sorted);
    } else if (trial % 3 == 1) {
      nn::GRU gru(nn::GRUOptions(hidden, hidden).num_layers(layers).bidirectional(both));
      expect_packed_equals_loop(gru, hidden, type, tolerance, sorted);
    } else {
      nn::RNN rnn(nn::RNNOptions(hidden, hidden).num_layers(layers).bidirectional(both));
      expect_packed_equals_loop(rnn, hidden, type, tolerance, sorted);
    }
  }
}

TEST_F(RecurrentTest, SmallGradientsBesideLargeOnesKeepTheirExample) {
  nn::GRU gru(4, 1);
  gru->to(at::kDouble);
  const Tensor x = at::randn({3, 2, 4}, at::kDouble);
  const std::vector<std::int64_t> lengths{1, 3};
  const std::vector<double> scales{1e6, 1};
  const auto last = [&](const Tensor& steps, const Tensor& length) {
    const auto packed = packing::pack_padded_sequence(steps, length, false, false);
    return std::get<1>(gru->forward_with_packed_input(packed)).square().sum({0, 2});
  };
  GraphGradients table(named(*gru), {.examples_checked = true});
  table.backward(last(x, at::tensor(lengths)) * at::tensor(scales, at::kDouble));
  for (std::int64_t b = 0; b < 2; ++b) {
    const auto place = static_cast<std::size_t>(b);
    const Tensor loss =
        last(x.narrow(1, b, 1).narrow(0, 0, lengths[place]), at::tensor({lengths[place]}));
    const auto want = torch::autograd::grad({loss.sum() * scales[place]}, gru->parameters());
    for (std::size_t i = 0; i < want.size(); ++i) {
      EXPECT_LE(relative(table.gradients(i)[b], want[i]), kDouble) << b << " " << i;
    }
  }
}

TEST_F(RecurrentTest, DeadUnitsAreNotTakenForAnOrderOfExamples) {
  nn::RNN rnn(nn::RNNOptions(2, 2).nonlinearity(torch::kReLU).bias(false));
  rnn->to(at::kDouble);
  {
    // Of two examples each wakes one unit, and gives all of that unit's row of the weights.
    const torch::NoGradGuard no_grad;
    rnn->named_parameters()["weight_ih_l0"].copy_(at::tensor({-1., 1., 1., -1.}).view({2, 2}));
  }
  const std::vector<Tensor> batches{at::tensor({1., 2., 2., 1.}, at::kDouble).view({1, 2, 2}),
                                    at::tensor({2., 1., 1., 2.}, at::kDouble).view({1, 2, 2}),
                                    at::tensor({1., 2., 1., 3.}, at::kDouble).view({1, 2, 2})};
  GraphGradients table(named(*rnn));
  for (const Tensor& x : batches) {
    table.clear();
    table.backward(run(rnn, {.x = x}));
    for (std::int64_t b = 0; b < 2; ++b) {
      const Tensor loss = run(rnn, Call{.x = x}.at(b)).sum();
      const Tensor want = torch::autograd::grad({loss}, {rnn->parameters()[0]})[0];
      EXPECT_LE(relative(table.gradients(0)[b], want), kDouble);
    }
  }
}

TEST_F(RecurrentTest, PackedSequencesAreRefusedUnlessExamplesWereChecked) {
  nn::GRU gru(4, 5);
  gru->to(at::kDouble);
  const auto packed = packing::pack_padded_sequence(at::randn({4, 3, 4}, at::kDouble),
                                                    at::tensor({2, 4, 3}), false, false);
  const Tensor y = std::get<0>(
      packing::pad_packed_sequence(std::get<0>(gru->forward_with_packed_input(packed))));
  GraphGradients table(named(*gru));
  EXPECT_THROW(table.backward(y.square().sum({0, 2})), UserError);
}

}  // namespace
}  // namespace gradus::persample
