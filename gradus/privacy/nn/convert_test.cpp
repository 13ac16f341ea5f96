#include <gradus/privacy/nn/convert.h>

#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/privacy/nn/internal/nn_testing.h>
#include <gradus/privacy/nn/plain_state.h>

namespace gradus::privacy::nn {
namespace {

using internal::flat;
using internal::float64;
using internal::mismatch;
using ConvertTest = internal::NnTest;

// There and back: the same values, results, mode, dtype and frozen parameters.
template <typename Torch, typename Run>
void expect_round_trip(Torch layer, const Run& run) {
  layer->to(torch::kFloat64);
  layer->eval();
  layer->named_parameters().values()[1].set_requires_grad(false);
  auto ours = convert(*layer);
  EXPECT_FALSE(ours->is_training());
  EXPECT_EQ(mismatch(run(ours), run(layer), 1e-12), "");
  const auto back = convert(*ours);
  EXPECT_FALSE(back->is_training());
  EXPECT_EQ(internal::signature(*back), internal::signature(*layer));
  EXPECT_EQ(mismatch(back->parameters(), layer->parameters(), 0.0), "");
  const auto a = back->parameters(), b = layer->parameters();
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].requires_grad(), b[i].requires_grad()) << i;
    EXPECT_EQ(a[i].scalar_type(), torch::kFloat64);
    EXPECT_FALSE(a[i].is_alias_of(b[i])) << i;
  }
  ours->train();
  EXPECT_TRUE(convert(*ours)->is_training());

  const std::shared_ptr<torch::nn::Module> replacement = replacement_of(*layer);
  ASSERT_TRUE(replacement);
  EXPECT_TRUE(replacement->template as<typename decltype(ours)::Impl>());
  EXPECT_EQ(mismatch(plain_state(*replacement).values(), layer->parameters(), 0.0), "");
}

TEST_F(ConvertTest, RecurrentLayersGoThereAndBack) {
  const at::Tensor x = torch::randn({4, 2, 3}, float64());
  const auto run = [&](auto& layer) { return flat(layer->forward(x)); };
  expect_round_trip(torch::nn::RNN(torch::nn::RNNOptions(3, 4).nonlinearity(torch::kReLU)), run);
  expect_round_trip(torch::nn::RNN(torch::nn::RNNOptions(3, 4).num_layers(2).bias(false)), run);
  expect_round_trip(torch::nn::GRU(torch::nn::GRUOptions(3, 4).bidirectional(true)), run);
  expect_round_trip(
      torch::nn::LSTM(torch::nn::LSTMOptions(3, 4).num_layers(2).proj_size(2).batch_first(true)),
      run);
}

TEST_F(ConvertTest, AttentionGoesThereAndBack) {
  const at::Tensor x = torch::randn({4, 2, 6}, float64());
  const at::Tensor memory = torch::randn({5, 2, 3}, float64());
  using Options = torch::nn::MultiheadAttentionOptions;
  expect_round_trip(
      torch::nn::MultiheadAttention(Options(6, 2).add_bias_kv(true).add_zero_attn(true)),
      [&](auto& layer) { return flat(layer->forward(x, x, x)); });
  expect_round_trip(torch::nn::MultiheadAttention(Options(6, 2).kdim(3).vdim(3)),
                    [&](auto& layer) { return flat(layer->forward(x, memory, memory)); });
}

TEST_F(ConvertTest, AFrozenPartOfOneMatrixLeavesItLive) {
  DPMultiheadAttention ours(4, 2);
  ours->q_proj_weight.set_requires_grad(false);
  EXPECT_TRUE(convert(*ours)->in_proj_weight.requires_grad());
  ours->k_proj_weight.set_requires_grad(false);
  ours->v_proj_weight.set_requires_grad(false);
  EXPECT_FALSE(convert(*ours)->in_proj_weight.requires_grad());
}

TEST_F(ConvertTest, ThereIsNoReplacementForOtherLayers) {
  EXPECT_FALSE(replacement_of(*torch::nn::Linear(2, 2)));
  EXPECT_FALSE(replacement_of(*DPLSTM(2, 2)));
}

}  // namespace
}  // namespace gradus::privacy::nn
