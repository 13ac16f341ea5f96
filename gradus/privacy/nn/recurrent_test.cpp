#include <gradus/privacy/nn/recurrent.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/privacy/nn/internal/nn_testing.h>
#include <gradus/privacy/nn/internal/packed.h>

#include <tests/support/message_of.h>

namespace gradus::privacy::nn {
namespace {

using internal::Dice;
using internal::flat;
using internal::float64;
using internal::gradients;
using internal::mismatch;
using tests::message_of;
using torch::nn::utils::rnn::PackedSequence;
namespace rnn_utils = torch::nn::utils::rnn;

// A kind of layer: torch::nn's, ours, and how its options are drawn.
template <typename TorchLayer, typename OurLayer, typename LayerOptions>
struct Kind {
  using Torch = TorchLayer;
  using Ours = OurLayer;
  using Options = LayerOptions;
};
using RnnKind = Kind<torch::nn::RNN, DPRNN, torch::nn::RNNOptions>;
using GruKind = Kind<torch::nn::GRU, DPGRU, torch::nn::GRUOptions>;
using LstmKind = Kind<torch::nn::LSTM, DPLSTM, torch::nn::LSTMOptions>;

template <typename K>
typename K::Options draw_options(Dice& dice) {
  typename K::Options options(dice(1, 5), dice(2, 6));
  options.num_layers(dice(1, 3)).bias(dice.coin()).batch_first(dice.coin());
  options.bidirectional(dice.coin());
  if constexpr (std::is_same_v<K, RnnKind>) {
    if (dice.coin()) options.nonlinearity(torch::kReLU);
  }
  if constexpr (std::is_same_v<K, LstmKind>) {
    if (dice.coin()) options.proj_size(dice(1, options.hidden_size() - 1));
  }
  return options;
}

template <typename Options>
std::int64_t output_width(const Options& options) {
  if constexpr (std::is_same_v<Options, torch::nn::LSTMOptions>) {
    if (options.proj_size() > 0) return options.proj_size();
  }
  return options.hidden_size();
}

template <typename Options>
std::string text_of(const Options& options) {
  std::ostringstream text;
  text << "input " << options.input_size() << " hidden " << options.hidden_size() << " layers "
       << options.num_layers() << " bias " << options.bias() << " batch_first "
       << options.batch_first() << " bidirectional " << options.bidirectional() << " output "
       << output_width(options);
  return text.str();
}

// The initial states of a layer, as leaves; none if @p given is false.
template <typename Options>
std::vector<at::Tensor> draw_states(const Options& options, std::int64_t B, bool given,
                                    torch::Dtype dtype) {
  if (!given) return {};
  const std::int64_t rows = options.num_layers() * (options.bidirectional() ? 2 : 1);
  const auto draw = [&](std::int64_t width) {
    return torch::randn({rows, B, width}, dtype).requires_grad_();
  };
  std::vector<at::Tensor> states{draw(output_width(options))};
  if constexpr (std::is_same_v<Options, torch::nn::LSTMOptions>) {
    states.push_back(draw(options.hidden_size()));
  }
  return states;
}

template <typename Layer>
constexpr bool kHasCell = std::is_same_v<Layer, torch::nn::LSTM> || std::is_same_v<Layer, DPLSTM>;

template <typename Layer>
std::vector<at::Tensor> run(Layer& layer, const at::Tensor& input,
                            const std::vector<at::Tensor>& states) {
  if constexpr (kHasCell<Layer>) {
    if (states.empty()) return flat(layer->forward(input));
    return flat(layer->forward(input, std::make_tuple(states[0], states[1])));
  } else {
    return flat(layer->forward(input, states.empty() ? at::Tensor() : states[0]));
  }
}

struct PackedResult {
  PackedSequence output;
  std::vector<at::Tensor> tensors = {};  // Its data, then the states.
};

template <typename Layer>
PackedResult run_packed(Layer& layer, const PackedSequence& input,
                        const std::vector<at::Tensor>& states) {
  if constexpr (kHasCell<Layer>) {
    auto [output, last] = states.empty() ? layer->forward_with_packed_input(input)
                                         : layer->forward_with_packed_input(
                                               input, std::make_tuple(states[0], states[1]));
    return {output, {output.data(), std::get<0>(last), std::get<1>(last)}};
  } else {
    auto [output, last] =
        layer->forward_with_packed_input(input, states.empty() ? at::Tensor() : states[0]);
    return {output, {output.data(), last}};
  }
}

// torch::nn's layer and ours with the same weights.
template <typename K>
struct Twins {
  typename K::Torch torch;
  typename K::Ours ours;

  Twins(const typename K::Options& options, torch::Dtype dtype) : torch(options), ours(options) {
    torch->to(dtype);
    ours->to(dtype);
    internal::copy_parameters(*torch, *ours);
  }
};

std::vector<at::Tensor> joined(std::vector<at::Tensor> a, const std::vector<at::Tensor>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

template <typename K>
class RecurrentTest : public internal::NnTest {};

struct KindNames {
  template <typename K>
  static std::string GetName(int) {
    if constexpr (std::is_same_v<K, RnnKind>) return "Rnn";
    if constexpr (std::is_same_v<K, GruKind>) return "Gru";
    return "Lstm";
  }
};
using Kinds = ::testing::Types<RnnKind, GruKind, LstmKind>;
TYPED_TEST_SUITE(RecurrentTest, Kinds, KindNames);

TYPED_TEST(RecurrentTest, HasTorchsNamesShapesAndInitialValuesAndLeavesTheGeneratorWhereTorchDoes) {
  Dice dice(2);
  for (int i = 0; i < 20; ++i) {
    const auto options = draw_options<TypeParam>(dice);
    SCOPED_TRACE(text_of(options));
    torch::manual_seed(100 + i);
    const typename TypeParam::Torch torch_layer(options);
    const at::Tensor torch_next = torch::rand({3});
    torch::manual_seed(100 + i);
    const typename TypeParam::Ours ours(options);
    EXPECT_TRUE(torch::rand({3}).equal(torch_next));
    EXPECT_EQ(internal::signature(*ours), internal::signature(*torch_layer));
    EXPECT_EQ(mismatch(ours->parameters(), torch_layer->parameters(), 0.0), "");
    EXPECT_EQ(mismatch(ours->all_weights(), torch_layer->all_weights(), 0.0), "");
  }
}

TYPED_TEST(RecurrentTest, EqualsTorchsResultsAndGradientsInFloat64WhateverTheOptions) {
  Dice dice(3);
  for (int i = 0; i < 80; ++i) {
    const auto options = draw_options<TypeParam>(dice);
    const std::int64_t T = dice(1, 6), B = dice(1, 5);
    const bool with_states = dice.coin();
    SCOPED_TRACE(text_of(options) + " T " + std::to_string(T) + " B " + std::to_string(B));
    Twins<TypeParam> twins(options, torch::kFloat64);
    const at::Tensor input = torch::randn(
        {options.batch_first() ? B : T, options.batch_first() ? T : B, options.input_size()},
        float64().requires_grad(true));
    const auto states = draw_states(options, B, with_states, torch::kFloat64);
    const auto ours = run(twins.ours, input, states);
    const auto expected = run(twins.torch, input, states);
    EXPECT_EQ(mismatch(ours, expected, 1e-12), "");
    const auto leaves = joined({input}, states);
    EXPECT_EQ(mismatch(gradients(ours, joined(leaves, twins.ours->parameters())),
                       gradients(expected, joined(leaves, twins.torch->parameters())), 1e-12),
              "");
  }
}

TYPED_TEST(RecurrentTest, EqualsTorchsResultsAndGradientsOnPackedSequencesInAnyOrder) {
  Dice dice(4);
  int unsorted = 0;
  for (int i = 0; i < 80; ++i) {
    const auto options = draw_options<TypeParam>(dice);
    const std::int64_t B = dice(1, 6);
    const bool enforce_sorted = dice(0, 3) == 0, with_states = dice.coin();
    std::vector<std::int64_t> lengths;
    for (std::int64_t b = 0; b < B; ++b) lengths.push_back(dice(1, 7));
    if (enforce_sorted) std::sort(lengths.rbegin(), lengths.rend());
    unsorted += enforce_sorted ? 0 : 1;
    SCOPED_TRACE(text_of(options) + " lengths " + ::testing::PrintToString(lengths));
    Twins<TypeParam> twins(options, torch::kFloat64);
    const std::int64_t T = *std::max_element(lengths.begin(), lengths.end());
    const at::Tensor input =
        torch::randn({T, B, options.input_size()}, float64().requires_grad(true));
    const auto states = draw_states(options, B, with_states, torch::kFloat64);
    const auto packed = [&] {
      return rnn_utils::pack_padded_sequence(input, torch::tensor(lengths), false, enforce_sorted);
    };
    const auto ours = run_packed(twins.ours, packed(), states);
    const auto expected = run_packed(twins.torch, packed(), states);
    EXPECT_EQ(mismatch(ours.tensors, expected.tensors, 1e-12), "");
    EXPECT_TRUE(ours.output.batch_sizes().equal(expected.output.batch_sizes()));
    EXPECT_EQ(mismatch({ours.output.sorted_indices(), ours.output.unsorted_indices()},
                       {expected.output.sorted_indices(), expected.output.unsorted_indices()}, 0.0),
              "");
    const auto leaves = joined({input}, states);
    EXPECT_EQ(
        mismatch(gradients(ours.tensors, joined(leaves, twins.ours->parameters())),
                 gradients(expected.tensors, joined(leaves, twins.torch->parameters())), 1e-12),
        "");
  }
  EXPECT_GT(unsorted, 20);
}

TYPED_TEST(RecurrentTest, EqualsTorchInFloat32) {
  Dice dice(5);
  for (int i = 0; i < 20; ++i) {
    const auto options = draw_options<TypeParam>(dice);
    SCOPED_TRACE(text_of(options));
    Twins<TypeParam> twins(options, torch::kFloat32);
    const at::Tensor input = torch::randn({5, 5, options.input_size()}, torch::kFloat32);
    EXPECT_EQ(mismatch(run(twins.ours, input, {}), run(twins.torch, input, {}), 1e-5), "");
    const auto packed =
        rnn_utils::pack_padded_sequence(input, torch::tensor({2, 5, 1, 4, 4}), false, false);
    EXPECT_EQ(mismatch(run_packed(twins.ours, packed, {}).tensors,
                       run_packed(twins.torch, packed, {}).tensors, 1e-5),
              "");
  }
}

TYPED_TEST(RecurrentTest, DropsTheOutputsBetweenLayersInTrainingOnlyWithTorchsMasks) {
  for (const auto& [dtype, tolerance] :
       {std::pair(torch::kFloat64, 1e-12), {torch::kFloat32, 1e-5}}) {
    for (const bool bidirectional : {false, true}) {
      auto options = typename TypeParam::Options(3, 4);
      options.num_layers(3).dropout(0.5).bidirectional(bidirectional);
      Twins<TypeParam> twins(options, dtype);
      const at::Tensor input = torch::randn({4, 3, 3}, dtype);
      torch::manual_seed(7);
      const auto ours = run(twins.ours, input, {});
      torch::manual_seed(7);
      const auto expected = run(twins.torch, input, {});
      EXPECT_EQ(mismatch(ours, expected, tolerance), "");
      EXPECT_NE(mismatch(run(twins.ours, input, {}), ours, 1e-3), "") << "other masks";
      twins.ours->eval();
      twins.torch->eval();
      const auto evaluated = run(twins.ours, input, {});
      EXPECT_EQ(mismatch(evaluated, run(twins.torch, input, {}), tolerance), "");
      EXPECT_EQ(mismatch(run(twins.ours, input, {}), evaluated, 0.0), "");
      EXPECT_NE(mismatch(ours, evaluated, 1e-3), "");
    }
  }
}

TYPED_TEST(RecurrentTest, DropsNothingBehindTheLastLayerAndEverythingBetweenAtOne) {
  const at::Tensor input = torch::randn({4, 3, 3}, float64());
  auto options = typename TypeParam::Options(3, 4);
  typename TypeParam::Ours plain(options);
  plain->to(torch::kFloat64);
  typename TypeParam::Ours dropping(options.dropout(0.9));
  dropping->to(torch::kFloat64);
  internal::copy_parameters(*plain, *dropping);
  EXPECT_EQ(mismatch(run(dropping, input, {}), run(plain, input, {}), 0.0), "");

  typename TypeParam::Ours deep(options.num_layers(2).dropout(1.0));
  deep->to(torch::kFloat64);
  const auto full = run(deep, input, {})[0];
  EXPECT_EQ(mismatch({run(deep, torch::randn_like(input), {})[0]}, {full}, 0.0), "")
      << "the second layer must see zeros only";
}

TYPED_TEST(RecurrentTest, DropsOutputsOfPackedSequencesInTrainingOnly) {
  auto options = typename TypeParam::Options(3, 4);
  typename TypeParam::Ours layer(options.num_layers(2).dropout(0.5));
  const auto packed = rnn_utils::pack_padded_sequence(torch::randn({4, 3, 3}),
                                                      torch::tensor({2, 4, 3}), false, false);
  EXPECT_NE(
      mismatch(run_packed(layer, packed, {}).tensors, run_packed(layer, packed, {}).tensors, 1e-3),
      "");
  layer->eval();
  EXPECT_EQ(
      mismatch(run_packed(layer, packed, {}).tensors, run_packed(layer, packed, {}).tensors, 0.0),
      "");
}

TYPED_TEST(RecurrentTest, FilesOfTorchSaveGoEitherWay) {
  auto options = typename TypeParam::Options(3, 4);
  options.num_layers(2).bidirectional(true);
  const at::Tensor input = torch::randn({4, 2, 3});
  typename TypeParam::Torch torch_layer(options), torch_again(options);
  typename TypeParam::Ours ours(options);
  internal::save_and_load(torch_layer, ours);
  EXPECT_EQ(mismatch(run(ours, input, {}), run(torch_layer, input, {}), 1e-5), "");
  internal::save_and_load(ours, torch_again);
  EXPECT_EQ(mismatch(torch_again->parameters(), torch_layer->parameters(), 0.0), "");
  EXPECT_EQ(mismatch(run(torch_again, input, {}), run(torch_layer, input, {}), 0.0), "");
}

TYPED_TEST(RecurrentTest, AnEmptyBatchGivesZeroGradients) {
  auto options = typename TypeParam::Options(3, 4);
  typename TypeParam::Ours layer(options.num_layers(2).bidirectional(true));
  const auto results = run(layer, torch::zeros({5, 0, 3}), {});
  EXPECT_EQ(results[0].sizes(), at::IntArrayRef({5, 0, 8}));
  EXPECT_EQ(results[1].sizes(), at::IntArrayRef({4, 0, 4}));
  results[0].sum().backward();
  for (const auto& item : layer->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_EQ(item.value().grad().abs().max().template item<double>(), 0.0) << item.key();
  }
}

// Names of the nodes that backward from @p root would reach.
std::set<std::string> node_names(const at::Tensor& root) {
  std::set<std::string> names;
  std::set<const void*> seen;
  std::vector<std::decay_t<decltype(root.grad_fn())>> stack{root.grad_fn()};
  while (!stack.empty()) {
    const auto node = stack.back();
    stack.pop_back();
    if (!node || !seen.insert(node.get()).second) continue;
    names.insert(node->name());
    for (const auto& edge : node->next_edges()) stack.push_back(edge.function);
  }
  return names;
}

TYPED_TEST(RecurrentTest, ItsGraphIsOfLinearStepsAndHoldsNoFusedRecurrence) {
  auto options = typename TypeParam::Options(3, 4);
  Twins<TypeParam> twins(options.num_layers(2), torch::kFloat32);
  const at::Tensor input = torch::randn({4, 2, 3});
  const auto names = node_names(run(twins.ours, input, {})[0]);
  EXPECT_TRUE(names.contains("AddmmBackward0"));
  for (const auto& name : names) {
    EXPECT_EQ(name.find("Rnn"), std::string::npos) << name;
    EXPECT_EQ(name.find("Fused"), std::string::npos) << name;
  }
}

TYPED_TEST(RecurrentTest, NoValueOfAnExampleReachesAnotherNorWhatLiesBehindASequencesEnd) {
  auto options = typename TypeParam::Options(3, 4);
  typename TypeParam::Ours layer(options.num_layers(2).bidirectional(true));
  layer->to(torch::kFloat64);
  const std::vector<std::int64_t> lengths{2, 5, 3, 1};
  const at::Tensor input = torch::randn({5, 4, 3}, float64());
  const auto outputs = [&](const at::Tensor& x) {
    const auto result = run_packed(
        layer, rnn_utils::pack_padded_sequence(x, torch::tensor(lengths), false, false), {});
    return joined({std::get<0>(rnn_utils::pad_packed_sequence(result.output))},
                  {result.tensors.begin() + 1, result.tensors.end()});
  };
  const auto before = outputs(input);
  for (std::int64_t b = 0; b < 4; ++b) {
    at::Tensor changed = input.clone();
    changed.select(1, b).fill_(std::numeric_limits<double>::quiet_NaN());
    const auto after = outputs(changed);
    for (std::size_t i = 0; i < after.size(); ++i) {
      for (std::int64_t other = 0; other < 4; ++other) {
        const at::Tensor row = after[i].select(1, other);
        EXPECT_EQ(row.isnan().any().template item<bool>(), other == b) << i << " " << other;
        if (other != b) {
          EXPECT_EQ(mismatch({row}, {before[i].select(1, other)}, 1e-14), "");
        }
      }
    }
  }
}

TYPED_TEST(RecurrentTest, AClonePrintsAndComputesTheSameInMemoryOfItsOwn) {
  auto options = typename TypeParam::Options(3, 4);
  typename TypeParam::Ours layer(options.num_layers(2));
  typename TypeParam::Ours clone(
      std::dynamic_pointer_cast<typename TypeParam::Ours::Impl>(layer->clone()));
  const at::Tensor input = torch::randn({4, 2, 3});
  const auto before = run(layer, input, {});
  EXPECT_EQ(mismatch(run(clone, input, {}), before, 0.0), "");
  const torch::NoGradGuard no_grad;
  for (auto& parameter : clone->parameters()) parameter.add_(1.0);
  EXPECT_EQ(mismatch(run(layer, input, {}), before, 0.0), "");
  EXPECT_NE(mismatch(run(clone, input, {}), before, 1e-3), "");
  std::ostringstream ours, cloned;
  ours << layer;
  cloned << clone;
  EXPECT_EQ(ours.str(), cloned.str());
  EXPECT_NE(ours.str().find("(input_size=3, hidden_size=4, num_layers=2"), std::string::npos);
}

TYPED_TEST(RecurrentTest, WorksUnderAutocast) {
  auto options = typename TypeParam::Options(8, 16);
  typename TypeParam::Ours layer(options.num_layers(2).bidirectional(true));
  const at::Tensor input = torch::randn({4, 3, 8});
  const auto packed =
      rnn_utils::pack_padded_sequence(input, torch::tensor({2, 4, 3}), false, false);
  const auto expected = run(layer, input, {});
  const auto expected_packed = run_packed(layer, packed, {}).tensors;
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  std::vector<at::Tensor> got, got_packed;
  std::string failure;
  try {
    got = run(layer, input, {});
    got_packed = run_packed(layer, packed, {}).tensors;
  } catch (const std::exception& error) {
    failure = error.what();
  }
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  ASSERT_EQ(failure, "");
  // Two layers of gates of bfloat16, whose rounding is 2^-9.
  EXPECT_EQ(mismatch(got, expected, 0.03), "");
  EXPECT_EQ(mismatch(got_packed, expected_packed, 0.03), "");
  EXPECT_NE(mismatch(got, expected, 1e-5), "") << "nothing was rounded";
}

TYPED_TEST(RecurrentTest, TakesItsPlaceInASequence) {
  torch::nn::AnyModule any(typename TypeParam::Ours(typename TypeParam::Options(3, 4)));
  using Result = decltype(std::declval<typename TypeParam::Ours>()->forward(at::Tensor()));
  EXPECT_EQ(std::get<0>(any.template forward<Result>(torch::randn({2, 1, 3}))).sizes(),
            at::IntArrayRef({2, 1, 4}));
}

TYPED_TEST(RecurrentTest, RefusesImpossibleOptionsAndShapesByName) {
  using Ours = typename TypeParam::Ours;
  using Options = typename TypeParam::Options;
  const auto message = [](const Options& options) {
    return message_of([&] { Ours layer(options); });
  };
  EXPECT_NE(message(Options(0, 4)).find("input_size must be at least 1; got 0"), std::string::npos);
  EXPECT_NE(message(Options(3, 0)).find("hidden_size must be at least 1; got 0"),
            std::string::npos);
  EXPECT_NE(message(Options(3, 4).num_layers(0)).find("num_layers must be at least 1; got 0"),
            std::string::npos);
  EXPECT_NE(message(Options(3, 4).dropout(1.5)).find("dropout must be in [0, 1]; got 1.5"),
            std::string::npos);

  Ours layer(Options(3, 4));
  const auto on = [&](const at::Tensor& input, const std::vector<at::Tensor>& states) {
    return message_of([&] { run(layer, input, states); });
  };
  EXPECT_NE(
      on(torch::zeros({2, 3}), {}).find("input must have shape [steps, batch, 3]; got [2, 3]"),
      std::string::npos);
  EXPECT_NE(on(torch::zeros({2, 1, 5}), {}).find("[steps, batch, 3]; got [2, 1, 5]"),
            std::string::npos);
  EXPECT_NE(on(torch::zeros({0, 1, 3}), {}).find("at least one step; got shape [0, 1, 3]"),
            std::string::npos);
  const at::Tensor good = torch::zeros({1, 2, 4}), bad = torch::zeros({1, 1, 4});
  EXPECT_NE(on(torch::zeros({2, 2, 3}), {bad, good})
                .find("initial state h must have shape [layers * directions, batch, width] = "
                      "[1, 2, 4]; got [1, 1, 4]"),
            std::string::npos);
  if constexpr (kHasCell<Ours>) {
    EXPECT_NE(on(torch::zeros({2, 2, 3}), {good, bad}).find("initial state c must have shape"),
              std::string::npos);
  }
  const auto packed = [&](const at::Tensor& data, std::vector<std::int64_t> batch_sizes) {
    return message_of([&] {
      run_packed(layer, PackedSequence(data, torch::tensor(batch_sizes, torch::kLong)), {});
    });
  };
  EXPECT_NE(packed(torch::zeros({3, 5}), {2, 1}).find("shape [rows, 3]; got [3, 5]"),
            std::string::npos);
  EXPECT_NE(
      packed(torch::zeros({4, 3}), {2, 1}).find("[sum of batch sizes = 3, input]; got [4, 3]"),
      std::string::npos);
  EXPECT_NE(packed(torch::zeros({3, 3}), {1, 2}).find("never grow; got 2 at step 1"),
            std::string::npos);
  EXPECT_NE(packed(torch::zeros({0, 3}), {}).find("at least one step"), std::string::npos);
}

using PackedLayoutTest = internal::NnTest;

TEST_F(PackedLayoutTest, RowsAreExamplesInTheCallersOrderAndRepeatTheirLastStepBehindTheEnd) {
  const std::vector<std::int64_t> lengths{2, 4, 1, 3};
  const at::Tensor input = torch::randn({4, 4, 3});
  const auto packed = rnn_utils::pack_padded_sequence(input, torch::tensor(lengths), false, false);
  const internal::PackedLayout layout("test", packed);
  const at::Tensor padded = layout.padded(packed.data());
  ASSERT_EQ(padded.sizes(), input.sizes());
  for (std::int64_t t = 0; t < 4; ++t) {
    const at::Tensor& live = layout.live()[static_cast<std::size_t>(t)];
    EXPECT_EQ(live.defined(), t > 0) << "all are live in the first step only";
    for (std::int64_t b = 0; b < 4; ++b) {
      const std::int64_t length = lengths[static_cast<std::size_t>(b)];
      EXPECT_TRUE(padded[t][b].equal(input[std::min(t, length - 1)][b])) << t << " " << b;
      if (live.defined()) {
        EXPECT_EQ(live[b][0].item<bool>(), t < length);
      }
    }
  }
  const auto again = layout.packed(padded);
  EXPECT_TRUE(again.data().equal(packed.data()));
  EXPECT_TRUE(again.unsorted_indices().equal(packed.unsorted_indices()));
}

using DPLSTMTest = internal::NnTest;

TEST_F(DPLSTMTest, RefusesAProjectionThatIsNotSmallerThanTheHiddenState) {
  EXPECT_EQ(message_of([] { DPLSTM layer(torch::nn::LSTMOptions(3, 4).proj_size(4)); }),
            "[dp_lstm] proj_size must be 0 (none) or below hidden_size, 4; got 4 (failed check: "
            "options.proj_size() >= 0 && options.proj_size() < options.hidden_size())");
}

TEST_F(DPLSTMTest, FollowsAMoveToAnotherDtypeAndAReplacedParameterValue) {
  DPLSTM layer(3, 4);
  torch::nn::LSTM expected(3, 4);
  layer->to(torch::kFloat64);
  expected->to(torch::kFloat64);
  internal::copy_parameters(*expected, *layer);
  const at::Tensor input = torch::randn({4, 2, 3}, float64());
  EXPECT_EQ(mismatch(flat(layer->forward(input)), flat(expected->forward(input)), 1e-12), "");
  EXPECT_EQ(std::get<0>(layer->forward(input)).scalar_type(), torch::kFloat64);
}

}  // namespace
}  // namespace gradus::privacy::nn
