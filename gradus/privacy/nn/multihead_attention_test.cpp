#include <gradus/privacy/nn/multihead_attention.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/privacy/nn/convert.h>
#include <gradus/privacy/nn/internal/nn_testing.h>
#include <gradus/privacy/nn/plain_state.h>

#include <tests/support/message_of.h>

namespace gradus::privacy::nn {
namespace {

using internal::Dice;
using internal::flat;
using internal::float64;
using internal::gradients;
using internal::mismatch;
using tests::message_of;
using Options = torch::nn::MultiheadAttentionOptions;

// A random case that torch::nn's C++ layer computes: one width of keys and values. kdim = vdim != E
// takes separate projections there, too.
Options draw_options(Dice& dice) {
  const std::int64_t H = dice(1, 3), E = H * dice(1, 4);
  Options options(E, H);
  options.bias(dice.coin()).add_bias_kv(dice.coin()).add_zero_attn(dice.coin());
  if (dice.coin()) {
    const std::int64_t width = dice(1, 6);
    options.kdim(width).vdim(width);
  }
  return options;
}

std::string text_of(const Options& options) {
  std::ostringstream text;
  text << "E " << options.embed_dim() << " H " << options.num_heads() << " kdim " << options.kdim()
       << " vdim " << options.vdim() << " bias " << options.bias() << " bias_kv "
       << options.add_bias_kv() << " zero " << options.add_zero_attn();
  return text.str();
}

// Biases from 0, or an exchanged pair would not show.
void disturb(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) parameter.add_(torch::randn_like(parameter), 0.3);
}

DPMultiheadAttention make(const Options& options, torch::Dtype dtype = torch::kFloat64) {
  DPMultiheadAttention layer(options);
  layer->to(dtype);
  disturb(*layer);
  return layer;
}

// Masks that leave each query its first key.
at::Tensor draw_padding(std::int64_t B, std::int64_t S) {
  at::Tensor mask = torch::rand({B, S}) < 0.4;
  mask.select(1, 0).fill_(false);
  return mask;
}
at::Tensor draw_mask(at::IntArrayRef shape) {
  at::Tensor mask = torch::rand(shape) < 0.4;
  mask.select(-1, 0).fill_(false);
  return mask;
}
at::Tensor as_scores(const at::Tensor& mask) {
  return torch::zeros(mask.sizes(), float64())
      .masked_fill(mask, -std::numeric_limits<double>::infinity());
}

// Gradients of the plain state's parameters: those of ours are joined as plain_state joins values.
std::vector<at::Tensor> plain_gradients(DPMultiheadAttention& layer,
                                        const std::vector<at::Tensor>& results) {
  const auto parameters = layer->parameters();
  const auto grads = gradients(results, parameters);
  Options options = layer->options;
  DPMultiheadAttention holder(options);
  holder->to(parameters[0].scalar_type());
  const torch::NoGradGuard no_grad;
  auto targets = holder->parameters();
  for (std::size_t i = 0; i < targets.size(); ++i) {
    targets[i].copy_(grads[i].defined() ? grads[i] : torch::zeros_like(targets[i]));
  }
  std::vector<at::Tensor> values;
  for (const auto& item : plain_state(*holder)) values.push_back(item.value());
  return values;
}

using DPMultiheadAttentionTest = internal::NnTest;

TEST_F(DPMultiheadAttentionTest, EqualsTorchsResultsAndGradientsInFloat64WhateverTheOptions) {
  Dice dice(3);
  for (int i = 0; i < 120; ++i) {
    const Options options = draw_options(dice);
    const std::int64_t L = dice(1, 5), S = dice(1, 5), B = dice(1, 4);
    const bool padded = dice.coin(), masks = dice.coin(), averaged = dice.coin();
    const bool need_weights = dice(0, 3) > 0;
    const int relation = static_cast<int>(dice(0, 2));  // Self-attention, one memory, two.
    SCOPED_TRACE(text_of(options) + " case " + std::to_string(i));
    auto ours = make(options);
    auto expected = convert(*ours);
    const bool one_width = options.kdim() == options.embed_dim();
    const at::Tensor query = torch::randn({L, B, options.embed_dim()}, float64());
    const at::Tensor key =
        relation == 0 && one_width ? query : torch::randn({S, B, options.kdim()}, float64());
    const at::Tensor value = relation == 2 ? torch::randn_like(key) : key;
    const at::Tensor padding = padded ? draw_padding(B, key.size(0)) : at::Tensor();
    const at::Tensor mask = masks ? torch::randn({L, key.size(0)}, float64()) : at::Tensor();
    const auto run = [&](auto& layer) {
      return flat(layer->forward(query, key, value, padding, need_weights, mask, averaged));
    };
    const auto got = run(ours), wanted = run(expected);
    EXPECT_EQ(mismatch(got, wanted, 1e-12), "");
    EXPECT_EQ(got[1].defined(), need_weights);
    EXPECT_EQ(
        mismatch(plain_gradients(ours, got), gradients(wanted, expected->parameters()), 1e-12), "");
  }
}

TEST_F(DPMultiheadAttentionTest, GradientsOfInputsEqualTorchs) {
  auto ours = make(Options(6, 2).add_bias_kv(true).add_zero_attn(true));
  auto expected = convert(*ours);
  const std::vector<at::Tensor> inputs{torch::randn({3, 2, 6}, float64().requires_grad(true)),
                                       torch::randn({4, 2, 6}, float64().requires_grad(true)),
                                       torch::randn({4, 2, 6}, float64().requires_grad(true))};
  const auto run = [&](auto& layer) {
    return gradients(flat(layer->forward(inputs[0], inputs[1], inputs[2])), inputs);
  };
  EXPECT_EQ(mismatch(run(ours), run(expected), 1e-12), "");
}

// What the layer says it is, one example and one head at a time.
at::Tensor by_heads(DPMultiheadAttention& layer, const at::Tensor& query, const at::Tensor& key,
                    const at::Tensor& value, const at::Tensor& mask_BHLS) {
  const std::int64_t B = query.size(1), H = layer->options.num_heads();
  const std::int64_t D = layer->options.embed_dim() / H;
  const auto project = [](const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) {
    const at::Tensor y = torch::matmul(x, w.t());
    return b.defined() ? y + b : y;
  };
  std::vector<at::Tensor> examples;
  for (std::int64_t b = 0; b < B; ++b) {
    const at::Tensor q = project(query.select(1, b), layer->q_proj_weight, layer->q_proj_bias);
    const at::Tensor k = project(key.select(1, b), layer->k_proj_weight, layer->k_proj_bias);
    const at::Tensor v = project(value.select(1, b), layer->v_proj_weight, layer->v_proj_bias);
    std::vector<at::Tensor> heads;
    for (std::int64_t h = 0; h < H; ++h) {
      const auto part = [&](const at::Tensor& x) { return x.slice(1, h * D, (h + 1) * D); };
      const at::Tensor scores = torch::matmul(part(q), part(k).t()) / std::sqrt(double(D));
      heads.push_back(torch::matmul(torch::softmax(scores + mask_BHLS[b][h], -1), part(v)));
    }
    examples.push_back(
        project(torch::cat(heads, 1), layer->out_proj->weight, layer->out_proj->bias));
  }
  return torch::stack(examples, 1);
}

TEST_F(DPMultiheadAttentionTest, TakesBooleanAndThreeDimensionalMasksAndDifferentWidths) {
  Dice dice(8);
  for (int i = 0; i < 40; ++i) {
    const std::int64_t H = dice(1, 3), E = H * dice(1, 3), L = dice(1, 4), S = dice(1, 4);
    const std::int64_t B = dice(1, 3);
    const Options options = Options(E, H).kdim(dice(1, 5)).vdim(dice(1, 5)).bias(dice.coin());
    SCOPED_TRACE(text_of(options));
    auto layer = make(options);
    const at::Tensor query = torch::randn({L, B, E}, float64());
    const at::Tensor key = torch::randn({S, B, options.kdim()}, float64());
    const at::Tensor value = torch::randn({S, B, options.vdim()}, float64());
    const bool three = dice.coin();
    const at::Tensor mask = three ? draw_mask({B * H, L, S}) : draw_mask({L, S});
    const at::Tensor padding = draw_padding(B, S);
    const at::Tensor whole =
        (three ? mask.view({B, H, L, S}) : mask.expand({B, H, L, S})) | padding.view({B, 1, 1, S});
    const at::Tensor expected = by_heads(layer, query, key, value, as_scores(whole));
    const auto run = [&](const at::Tensor& padding_mask, const at::Tensor& attn_mask) {
      return std::get<0>(layer->forward(query, key, value, padding_mask, false, attn_mask));
    };
    EXPECT_EQ(mismatch({run(padding, mask)}, {expected}, 1e-12), "");
    EXPECT_EQ(mismatch({run(as_scores(padding), mask)}, {expected}, 1e-12), "");
    EXPECT_EQ(mismatch({run(padding, as_scores(mask))}, {expected}, 1e-12), "");
    const at::Tensor scores = torch::randn({B * H, L, S}, float64());
    EXPECT_EQ(mismatch({run({}, scores)},
                       {by_heads(layer, query, key, value, scores.view({B, H, L, S}))}, 1e-12),
              "");
  }
}

TEST_F(DPMultiheadAttentionTest, NoMaskLeavesOutTheKeysItAdds) {
  auto layer = make(Options(4, 2).add_bias_kv(true).add_zero_attn(true));
  const at::Tensor x = torch::randn({3, 2, 4}, float64());
  const auto [output, weights] = layer->forward(x, x, x, torch::ones({2, 3}, torch::kBool), true,
                                                torch::ones({3, 3}, torch::kBool), false);
  ASSERT_EQ(weights.sizes(), at::IntArrayRef({2, 2, 3, 5}));
  EXPECT_EQ(weights.slice(3, 0, 3).abs().max().item<double>(), 0.0);
  EXPECT_TRUE((weights.slice(3, 3) > 0).all().item<bool>());
  EXPECT_TRUE(output.isfinite().all().item<bool>());
}

TEST_F(DPMultiheadAttentionTest, EqualsTorchInFloat32) {
  for (const bool extras : {false, true}) {
    auto ours = make(Options(32, 4).add_bias_kv(extras).add_zero_attn(extras), torch::kFloat32);
    auto expected = convert(*ours);
    const at::Tensor x = torch::randn({6, 3, 32}, torch::kFloat32);
    EXPECT_EQ(mismatch(flat(ours->forward(x, x, x)), flat(expected->forward(x, x, x)), 1e-5), "");
  }
}

TEST_F(DPMultiheadAttentionTest, HasTorchsInitialValuesAndLeavesTheGeneratorWhereTorchDoes) {
  Dice dice(2);
  for (int i = 0; i < 40; ++i) {
    Options options = draw_options(dice);
    if (dice.coin()) options.vdim(dice(1, 5));
    SCOPED_TRACE(text_of(options));
    torch::manual_seed(50 + i);
    const torch::nn::MultiheadAttention expected(options);
    const at::Tensor torch_next = torch::rand({3});
    torch::manual_seed(50 + i);
    const DPMultiheadAttention ours(options);
    EXPECT_TRUE(torch::rand({3}).equal(torch_next));
    const auto state = plain_state(*ours);
    const auto parameters = expected->named_parameters();
    EXPECT_EQ(state.keys(), parameters.keys());
    EXPECT_EQ(mismatch(state.values(), parameters.values(), 0.0), "");
  }
}

TEST_F(DPMultiheadAttentionTest, DrawsItsWeightsAnew) {
  DPMultiheadAttention layer(Options(4, 2).add_bias_kv(true));
  disturb(*layer);
  const at::Tensor key = layer->bias_k->bias.clone(), weight = layer->k_proj_weight.clone();
  layer->reset_parameters();
  EXPECT_FALSE(layer->bias_k->bias.equal(key));
  EXPECT_FALSE(layer->k_proj_weight.equal(weight));
  for (const auto& bias : {layer->q_proj_bias, layer->k_proj_bias, layer->v_proj_bias}) {
    EXPECT_TRUE(bias.equal(torch::zeros({4})));
  }
  // Glorot's bound for one matrix of all three.
  EXPECT_LE(layer->k_proj_weight.abs().max().item<double>(), std::sqrt(6.0 / (12 + 4)) + 1e-6);
}

TEST_F(DPMultiheadAttentionTest, DropsWeightsInTrainingOnlyWithTorchsMasks) {
  auto ours = make(Options(6, 2).dropout(0.5));
  auto expected = convert(*ours);
  const at::Tensor x = torch::randn({5, 3, 6}, float64());
  torch::manual_seed(7);
  const auto got = flat(ours->forward(x, x, x));
  torch::manual_seed(7);
  EXPECT_EQ(mismatch(got, flat(expected->forward(x, x, x)), 1e-12), "");
  ours->eval();
  expected->eval();
  const auto evaluated = flat(ours->forward(x, x, x));
  EXPECT_EQ(mismatch(evaluated, flat(expected->forward(x, x, x)), 1e-12), "");
  EXPECT_EQ(mismatch(flat(ours->forward(x, x, x)), evaluated, 0.0), "");
  EXPECT_NE(mismatch(got, evaluated, 1e-3), "");
}

TEST_F(DPMultiheadAttentionTest, TrainedItGivesTheSameInTorchsLayerByTheFileOfTorchSave) {
  Dice dice(9);
  for (int i = 0; i < 12; ++i) {
    const Options options = draw_options(dice);
    SCOPED_TRACE(text_of(options));
    auto ours = make(options);
    const at::Tensor query = torch::randn({4, 3, options.embed_dim()}, float64());
    const at::Tensor key = torch::randn({5, 3, options.kdim()}, float64());
    const at::Tensor target = torch::randn_like(query);
    torch::optim::SGD sgd(ours->parameters(), 0.1);
    const auto before = flat(ours->forward(query, key, key));
    for (int step = 0; step < 5; ++step) {
      sgd.zero_grad();
      torch::mse_loss(std::get<0>(ours->forward(query, key, key)), target).backward();
      sgd.step();
    }
    const auto after = flat(ours->forward(query, key, key));
    EXPECT_NE(mismatch(after, before, 1e-6), "") << "training changed nothing";
    torch::nn::MultiheadAttention plain(options);
    plain->to(torch::kFloat64);
    internal::save_and_load(ours, plain);
    EXPECT_EQ(mismatch(flat(plain->forward(query, key, key)), after, 1e-12), "");
    DPMultiheadAttention again(options);
    again->to(torch::kFloat64);
    internal::save_and_load(plain, again);
    EXPECT_EQ(mismatch(again->parameters(), ours->parameters(), 0.0), "");
  }
}

TEST_F(DPMultiheadAttentionTest, AFileThatDoesNotFitIsRefusedByNameAndChangesNothing) {
  const auto message = [](const Options& from, const Options& to,
                          torch::Dtype dtype = torch::kFloat32) {
    torch::nn::MultiheadAttention source(from);
    source->to(dtype);
    DPMultiheadAttention target(to);
    std::vector<at::Tensor> before;
    for (const auto& parameter : target->parameters()) before.push_back(parameter.clone());
    const std::string text = message_of([&] { internal::save_and_load(source, target); });
    EXPECT_EQ(mismatch(target->parameters(), before, 0.0), "");
    return text;
  };
  EXPECT_NE(message(Options(4, 2), Options(6, 2))
                .find("in_proj_weight must have shape [18, 6]; got [12, 4]"),
            std::string::npos);
  EXPECT_NE(message(Options(4, 2), Options(4, 2).add_bias_kv(true))
                .find("the archive must hold bias_k of shape [1, 1, 4]"),
            std::string::npos);
  EXPECT_NE(message(Options(4, 2), Options(4, 2), torch::kFloat64)
                .find("in_proj_weight must have dtype Float; got Double"),
            std::string::npos);
  DPMultiheadAttention target(4, 2);
  torch::nn::Linear linear(4, 4);
  EXPECT_NE(message_of([&] {
              internal::save_and_load(linear, target);
            }).find("the archive must hold out_proj"),
            std::string::npos);
}

TEST_F(DPMultiheadAttentionTest, AnEmptyBatchGivesZeroGradients) {
  DPMultiheadAttention layer(Options(4, 2).add_bias_kv(true).add_zero_attn(true));
  const at::Tensor x = torch::zeros({3, 0, 4});
  const auto [output, weights] = layer->forward(x, x, x);
  EXPECT_EQ(output.sizes(), at::IntArrayRef({3, 0, 4}));
  EXPECT_EQ(weights.sizes(), at::IntArrayRef({0, 3, 5}));
  output.sum().backward();
  for (const auto& item : layer->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_EQ(item.value().grad().abs().max().item<double>(), 0.0) << item.key();
  }
}

TEST_F(DPMultiheadAttentionTest, NoValueOfAnExampleReachesAnother) {
  auto layer = make(Options(4, 2).add_bias_kv(true).add_zero_attn(true));
  const at::Tensor x = torch::randn({3, 4, 4}, float64());
  const at::Tensor before = std::get<0>(layer->forward(x, x, x));
  for (std::int64_t b = 0; b < 4; ++b) {
    at::Tensor changed = x.clone();
    changed.select(1, b).fill_(std::numeric_limits<double>::quiet_NaN());
    const at::Tensor after = std::get<0>(layer->forward(changed, changed, changed));
    for (std::int64_t other = 0; other < 4; ++other) {
      EXPECT_EQ(after.select(1, other).isnan().any().item<bool>(), other == b);
      if (other != b) {
        EXPECT_EQ(mismatch({after.select(1, other)}, {before.select(1, other)}, 1e-14), "");
      }
    }
  }
}

TEST_F(DPMultiheadAttentionTest, AClonePrintsAndComputesTheSameInMemoryOfItsOwn) {
  auto layer = make(Options(4, 2).add_bias_kv(true));
  DPMultiheadAttention clone(std::dynamic_pointer_cast<DPMultiheadAttentionImpl>(layer->clone()));
  const at::Tensor x = torch::randn({3, 2, 4}, float64());
  const auto before = flat(layer->forward(x, x, x));
  EXPECT_EQ(mismatch(flat(clone->forward(x, x, x)), before, 0.0), "");
  disturb(*clone);
  EXPECT_EQ(mismatch(flat(layer->forward(x, x, x)), before, 0.0), "");
  EXPECT_NE(mismatch(flat(clone->forward(x, x, x)), before, 1e-3), "");
  std::ostringstream ours, cloned;
  ours << layer;
  cloned << clone;
  EXPECT_EQ(ours.str(), cloned.str());
  EXPECT_NE(ours.str().find("DPMultiheadAttention(embed_dim=4, num_heads=2"), std::string::npos);
}

TEST_F(DPMultiheadAttentionTest, RefusesImpossibleOptionsAndShapesByName) {
  const auto making = [](const Options& options) {
    return message_of([&] { DPMultiheadAttention layer(options); });
  };
  EXPECT_EQ(making(Options(4, 3)),
            "[dp_multihead_attention] num_heads must divide embed_dim; got 3 heads and 4 (failed "
            "check: options.embed_dim() % options.num_heads() == 0)");
  EXPECT_NE(making(Options(0, 1)).find("embed_dim must be at least 1; got 0"), std::string::npos);
  EXPECT_NE(making(Options(4, 0)).find("num_heads must be at least 1; got 0"), std::string::npos);
  EXPECT_NE(making(Options(4, 2).kdim(0)).find("kdim and vdim must be at least 1; got 0 and 4"),
            std::string::npos);
  EXPECT_NE(making(Options(4, 2).dropout(-0.1)).find("dropout must be in [0, 1]; got -0.1"),
            std::string::npos);

  DPMultiheadAttention layer(Options(4, 2).kdim(5).vdim(6));
  const at::Tensor q = torch::zeros({3, 2, 4}), k = torch::zeros({7, 2, 5}),
                   v = torch::zeros({7, 2, 6});
  const auto running = [&](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& padding = {}, const at::Tensor& mask = {}) {
    return message_of([&] { layer->forward(query, key, value, padding, true, mask); });
  };
  EXPECT_EQ(running(q, k, v), "no UserError");
  EXPECT_NE(running(k, k, v).find("query must have shape [queries, batch, 4]; got [7, 2, 5]"),
            std::string::npos);
  EXPECT_NE(running(q, k.slice(1, 0, 1), v).find("key must have shape [keys, 2, 5]"),
            std::string::npos);
  EXPECT_NE(running(q, k, v.slice(0, 1)).find("value must have shape [7, 2, 6]"),
            std::string::npos);
  EXPECT_NE(running(q, k, v, torch::zeros({7, 2}, torch::kBool))
                .find("key_padding_mask must have shape [batch, keys] = [2, 7]; got [7, 2]"),
            std::string::npos);
  EXPECT_NE(running(q, k, v, {}, torch::zeros({2, 3, 7}, torch::kBool))
                .find("[batch * heads, queries, keys] = [4, 3, 7]; got [2, 3, 7]"),
            std::string::npos);
  EXPECT_NE(running(q, k, v, {}, torch::zeros({3, 7}, torch::kByte))
                .find("attn_mask must be bool (true: left out) or floating"),
            std::string::npos);
}

}  // namespace
}  // namespace gradus::privacy::nn
