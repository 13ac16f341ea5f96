#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
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
constexpr std::int64_t kWords = 8;
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
  std::vector<std::int64_t> lengths{};  // of a packed call: one an example

  std::int64_t examples() const { return x.size(batch_dim); }
  bool packed() const { return !lengths.empty(); }
  bool sorted() const { return std::is_sorted(lengths.rbegin(), lengths.rend()); }
  Call at(std::int64_t example) const {
    const auto of = [&](const Tensor& tensor, std::int64_t dim) {
      return tensor.defined() ? tensor.narrow(dim, example, 1) : Tensor();
    };
    Call one{of(x, batch_dim), of(h, 1), of(c, 1), batch_dim, outputs};
    if (packed()) {
      one.lengths = {lengths[static_cast<std::size_t>(example)]};
      one.x = one.x.narrow(1 - batch_dim, 0, one.lengths[0]);
    }
    return one;
  }
  Call to(at::ScalarType type) const {
    const auto of = [&](const Tensor& tensor) {
      return tensor.defined() && tensor.is_floating_point() ? tensor.to(type) : tensor;
    };
    return {of(x), of(h), of(c), batch_dim, outputs, lengths};
  }
};

packing::PackedSequence pack(const Call& call) {
  // Sorted lengths in the form that must be sorted, which keeps no order of its own.
  return packing::pack_padded_sequence(call.x, at::tensor(call.lengths), call.batch_dim == 0,
                                       call.sorted());
}

Tensor pad(const Call& call, const packing::PackedSequence& y) {
  return std::get<0>(packing::pad_packed_sequence(y, call.batch_dim == 0));
}

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
  if (!call.packed()) {
    const auto [y, states] = lstm(call.x, given);
    return losses_of(call, y, std::get<0>(states), std::get<1>(states));
  }
  const auto [y, states] = lstm->forward_with_packed_input(pack(call), given);
  return losses_of(call, pad(call, y), std::get<0>(states), std::get<1>(states));
}

template <typename Holder>
Tensor run(Holder& module, const Call& call) {
  if (!call.packed()) {
    const auto [y, h] = module(call.x, call.h);
    return losses_of(call, y, h, {});
  }
  const auto [y, h] = module->forward_with_packed_input(pack(call), call.h);
  return losses_of(call, pad(call, y), h, {});
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

  // The module in @p type against its copy in float64.
  template <typename Holder>
  void expect_module_equals_loop(Holder module, const Call& call, at::ScalarType type,
                                 double tolerance, const GraphOptions& options = {}) {
    module->to(type);
    Holder truth = in_double(module);
    const Call typed = call.to(type);
    const Call exact = typed.to(at::kDouble);
    expect_equals_loop({.parameters = named(*module),
                        .losses = [&] { return run(module, typed); },
                        .true_parameters = named(*truth),
                        .loss = [&](std::int64_t b) { return run(truth, exact.at(b)); }},
                       tolerance, options);
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

enum class Layer : std::uint8_t { rnn_tanh, rnn_relu, gru, lstm, fused_lstm };

std::string name_of(Layer layer) {
  return std::array{"rnn_tanh", "rnn_relu", "gru", "lstm",
                    "fused_lstm"}[static_cast<std::size_t>(layer)];
}

// What one random draw makes a layer of, and of its call.
struct Draw {
  std::int64_t layers = 1, input = 1, hidden = 1, projected = 0;
  bool both = false, first = false, bias = true, looked_up = false;
  Call call{};

  std::string about() const {
    return base::join(layers, " layers ", input, " -> ", hidden, " projected to ", projected,
                      both ? " both ways" : "", first ? " batch first" : "", bias ? "" : " no bias",
                      looked_up ? " of words" : "", call.h.defined() ? " given states" : "", " x ",
                      call.x.sizes(), " lengths ", at::IntArrayRef(call.lengths), " outputs ",
                      call.outputs);
  }
};

// 500 random configurations of a kind in float64, or of the fused node in float32, and a tenth as
// many of the others in float32.
class RandomRecurrentTest : public RecurrentTest, public testing::WithParamInterface<Layer> {
 protected:
  Draw random_draw() {
    const bool is_lstm = GetParam() == Layer::lstm, fused = GetParam() == Layer::fused_lstm;
    Draw made{.layers = draw(0, 3) == 0 ? 2 : 1,
              .input = draw(1, 5),
              .hidden = draw(is_lstm ? 2 : 1, fused ? 9 : 6),
              .both = draw(0, 2) == 0,
              .first = flip(),
              .bias = draw(0, 3) > 0,
              .looked_up = draw(0, 3) == 0};
    if (is_lstm && draw(0, 2) == 0) made.projected = made.hidden - 1;
    const std::int64_t examples = draw(2, 4);
    // A fused node has no packed form: the gates are then computed step by step.
    const bool packed = !fused && draw(0, 2) == 0;
    for (std::int64_t b = 0; packed && b < examples; ++b) made.call.lengths.push_back(draw(1, 3));
    if (flip()) std::sort(made.call.lengths.rbegin(), made.call.lengths.rend());
    const std::int64_t steps =
        packed ? *std::max_element(made.call.lengths.begin(), made.call.lengths.end()) : draw(1, 3);
    std::vector<std::int64_t> sizes{made.first ? examples : steps, made.first ? steps : examples};
    if (!made.looked_up) sizes.push_back(made.input);
    made.call.x = made.looked_up ? at::randint(kWords, sizes) : at::randn(sizes);
    made.call.batch_dim = made.first ? 0 : 1;
    made.call.outputs = static_cast<int>(draw(1, 7));
    if (flip()) {
      const std::int64_t states = made.layers * (made.both ? 2 : 1);
      made.call.h =
          at::randn({states, examples, made.projected > 0 ? made.projected : made.hidden});
      made.call.c = at::randn({states, examples, made.hidden});
    }
    return made;
  }

  template <typename Holder>
  void expect_draw_equals_loop(Holder module, const Draw& draw, at::ScalarType type,
                               const GraphOptions& options) {
    // Behind a table, which learns from what the layer passes on, or is not used.
    nn::Embedding table(kWords, draw.input);
    nn::ModuleList model(table, module);
    model->to(type);
    Holder truth = in_double(module);
    nn::Embedding true_table = in_double(table);
    nn::ModuleList true_model(true_table, truth);
    const auto losses = [&](Holder& layer, nn::Embedding& words, Call call) {
      if (draw.looked_up) call.x = words(call.x);
      return run(layer, call);
    };
    const Call typed = draw.call.to(type);
    const Call exact = typed.to(at::kDouble);
    const auto examined = [&] {
      const Tensor result = losses(module, table, typed);
      if (GetParam() == Layer::fused_lstm || type == at::kDouble) {
        EXPECT_EQ(uses(result, kFused), GetParam() == Layer::fused_lstm);
      }
      return result;
    };
    expect_equals_loop(
        {.parameters = named(*model),
         .losses = examined,
         .true_parameters = named(*true_model),
         .loss = [&](std::int64_t b) { return losses(truth, true_table, exact.at(b)); }},
        type == at::kDouble ? kDouble : kSingle, options);
  }

  void expect_equals_loop_for(const Draw& draw, at::ScalarType type, const GraphOptions& options) {
    const auto with = [&](auto settings) {
      return settings.num_layers(draw.layers)
          .bidirectional(draw.both)
          .batch_first(draw.first)
          .bias(draw.bias);
    };
    switch (GetParam()) {
      case Layer::rnn_tanh:
      case Layer::rnn_relu: {
        auto settings = with(nn::RNNOptions(draw.input, draw.hidden));
        if (GetParam() == Layer::rnn_relu) settings.nonlinearity(torch::kReLU);
        return expect_draw_equals_loop(nn::RNN(settings), draw, type, options);
      }
      case Layer::gru:
        return expect_draw_equals_loop(nn::GRU(with(nn::GRUOptions(draw.input, draw.hidden))), draw,
                                       type, options);
      default:
        return expect_draw_equals_loop(
            nn::LSTM(with(nn::LSTMOptions(draw.input, draw.hidden)).proj_size(draw.projected)),
            draw, type, options);
    }
  }
};

TEST_P(RandomRecurrentTest, EqualTheLoop) {
  const bool fused = GetParam() == Layer::fused_lstm;
  if (fused) GRADUS_SKIP_UNLESS_FUSED(at::kFloat);
  const int count = internal::random_trials();
  for (int trial = 0; trial < (fused ? count : count + count / 10); ++trial) {
    const Draw draw = random_draw();
    SCOPED_TRACE(base::join("draw ", trial, ": ", draw.about()));
    expect_equals_loop_for(
        draw, fused || trial >= count ? at::kFloat : at::kDouble,
        {.keep = std::array{Keep::factors, Keep::formed, Keep::cheapest}[trial % 3],
         .examples_checked = draw.call.packed()});
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, RandomRecurrentTest,
                         testing::Values(Layer::rnn_tanh, Layer::rnn_relu, Layer::gru, Layer::lstm,
                                         Layer::fused_lstm),
                         [](const auto& info) { return name_of(info.param); });

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

// What a table of per-sample gradients costs above a plain step, in bytes.
struct Cost {
  std::int64_t held = 0;  // by the table after backward
  std::int64_t peak = 0;  // of backward, norms and clipped sums, above the peak of a plain backward
};

template <typename Holder>
Cost cost_of(Holder module, std::int64_t steps, std::int64_t examples, Keep keep) {
  auto& tracker = base::MemoryTracker::install();
  const auto parameters = named(*module);
  const Tensor weight = parameters[0].tensor;
  const Tensor x = at::randn({steps, examples, weight.size(1)}, weight.options()).detach();
  GraphGradients table(parameters, {.keep = keep, .reproducible = true});
  const auto plain = [&] {
    run(module, {.x = x}).sum().backward();
    for (const auto& each : parameters) each.tensor.mutable_grad() = Tensor();
  };
  const auto clipped = [&] {
    table.clear();
    table.backward(run(module, {.x = x}));
    table.weighted_sums((1.0 / table.norms()).clamp_max(1.0));
  };
  const auto peak_of = [&](const auto& work) {
    work();  // what only the first step takes
    const std::int64_t before = tracker.live().total();
    tracker.reset_peak();
    work();
    return tracker.peak().total() - before;
  };
  const std::int64_t peak = peak_of(clipped) - peak_of(plain);
  table.clear();
  const std::int64_t before = tracker.live().total();
  table.backward(run(module, {.x = x}));
  return {.held = tracker.live().total() - before, .peak = peak};
}

TEST_F(RecurrentTest, GradientMemoryOfACellDoesNotGrowWithTheSteps) {
  constexpr std::int64_t kExamples = 8, kInput = 48, kHidden = 64;
  const auto compare = [&](const std::string& name, auto module, at::ScalarType type) {
    SCOPED_TRACE(name);
    module->to(type);
    std::int64_t parameters = 0;
    for (const Tensor& each : module->parameters()) {
      parameters += static_cast<std::int64_t>(each.nbytes());
    }
    const std::int64_t formed = kExamples * parameters;  // every example's gradient, once
    // Gradients of the gates grow with the steps as activations do; those of one step are less than
    // a hundredth of `formed`.
    const auto gates = [&](std::int64_t steps) {
      return steps * kExamples * static_cast<std::int64_t>(module->parameters()[0].size(0)) *
             static_cast<std::int64_t>(c10::elementSize(type));
    };
    ASSERT_LT(100 * gates(1), formed);
    for (const Keep keep : {Keep::cheapest, Keep::formed}) {
      SCOPED_TRACE(keep == Keep::formed ? "formed" : "cheapest");
      const Cost few = cost_of(module, 8, kExamples, keep),
                 many = cost_of(module, 64, kExamples, keep);
      EXPECT_LE(few.held, formed * 101 / 100);
      EXPECT_LE(many.held, formed * 101 / 100);
      if (keep == Keep::formed) {
        EXPECT_EQ(few.held, many.held);
      }
      EXPECT_LE(few.peak, formed * 8 / 10);
      EXPECT_LE(many.peak - std::max<std::int64_t>(few.peak, 0), gates(64 - 8) * 13 / 10);
    }
    // Factors, where they are asked for: inputs, states and gates of all steps, no product of them.
    const Cost few = cost_of(module, 8, kExamples, Keep::factors),
               many = cost_of(module, 64, kExamples, Keep::factors);
    EXPECT_LE(many.held - few.held,
              2 * gates(64 - 8) + gates(64 - 8) * (kInput + kHidden) / kHidden);
  };
  compare("RNN", nn::RNN(kInput, kHidden), at::kDouble);
  compare("GRU", nn::GRU(kInput, kHidden), at::kDouble);
  compare("LSTM", nn::LSTM(kInput, kHidden), at::kDouble);
  if (is_fused(at::kFloat)) compare("fused LSTM", nn::LSTM(kInput, kHidden), at::kFloat);
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
