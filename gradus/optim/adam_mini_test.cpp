#include <gradus/optim/adam_mini.h>

#include <cmath>
#include <functional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/optim/adamw.h>

#include <tests/support/message_of.h>

namespace gradus::optim {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using tests::message_of;

std::vector<double> values(const at::Tensor& tensor) {
  const auto flat = tensor.detach().to(at::kDouble).contiguous().view(-1);
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}

// Zhang et al. 2024, Algorithm 1, for given blocks of consecutive elements.
struct Oracle {
  AdamMiniOptions o;
  std::vector<double> x;
  std::vector<std::size_t> block_elements;
  std::vector<double> m = {}, v = {};
  int t = 0;

  void step(const std::vector<double>& g) {
    m.resize(x.size());
    v.resize(block_elements.size());
    ++t;
    std::size_t begin = 0;
    for (std::size_t b = 0; b < block_elements.size(); ++b) {
      double sum = 0.0;
      for (std::size_t i = begin; i < begin + block_elements[b]; ++i) sum += g[i] * g[i];
      v[b] = o.beta2 * v[b] + (1 - o.beta2) * sum / static_cast<double>(block_elements[b]);
      const double v_hat = v[b] / (1 - std::pow(o.beta2, t));
      for (std::size_t i = begin; i < begin + block_elements[b]; ++i) {
        m[i] = o.beta1 * m[i] + (1 - o.beta1) * g[i];
        const double m_hat = m[i] / (1 - std::pow(o.beta1, t));
        x[i] -= o.lr * o.weight_decay * x[i];
        x[i] -= o.lr * m_hat / (std::sqrt(v_hat) + o.eps);
      }
      begin += block_elements[b];
    }
  }
};

TEST(AdamMiniTest, EqualsThePapersAlgorithmForEveryKindOfBlock) {
  torch::manual_seed(41);
  struct Case {
    std::string name;
    std::vector<std::int64_t> shape;
    std::vector<std::size_t> block_elements;
  };
  const auto repeat = [](std::size_t count, std::size_t size) {
    return std::vector<std::size_t>(count, size);
  };
  auto qkv = repeat(6, 2 * 3);  // 4 query and 2 key heads of 2 rows, then 4 rows of values
  for (int row = 0; row < 4; ++row) qkv.push_back(3);
  auto kv = repeat(2, 4 * 3);
  for (int row = 0; row < 8; ++row) kv.push_back(3);
  const std::vector<Case> cases{{"wte.weight", {5, 3}, repeat(5, 3)},
                                {"blocks.0.attn.q_proj.weight", {8, 3}, repeat(4, 6)},
                                {"blocks.0.attn.k_proj.weight", {8, 3}, repeat(2, 12)},
                                {"blocks.0.attn.qkv.weight", {16, 3}, qkv},
                                {"blocks.0.attn.key_value.weight", {16, 3}, kv},
                                {"blocks.0.attn.q_proj.bias", {8}, {8}},
                                {"blocks.0.mlp.up.weight", {4, 3, 2}, repeat(4, 6)},
                                {"scale", {}, {1}},
                                {"whole", {4, 3}, {12}},
                                {"free", {4, 3}, repeat(12, 1)},
                                {"odd", {5, 2}, {4, 2, 4}}};
  AdamMiniOptions options{.lr = 0.05, .weight_decay = 0.1, .heads = 4, .key_heads = 2};
  options.rules.push_back({{"whole"}, AdamMiniBlocks::tensor});
  options.rules.push_back({{"free"}, AdamMiniBlocks::element});
  options.block_rows = {{"odd", {2, 1, 2}}};
  ParameterGroup group{.parameters = {}, .lr = options.lr, .weight_decay = options.weight_decay};
  std::vector<Oracle> oracles;
  for (const auto& c : cases) {
    group.parameters.push_back(torch::randn(c.shape, at::kDouble).requires_grad_());
    group.names.push_back(c.name);
    oracles.push_back(
        {.o = options, .x = values(group.parameters.back()), .block_elements = c.block_elements});
  }
  AdamMini optimizer({group}, options);
  for (int step = 0; step < 20; ++step) {
    for (std::size_t p = 0; p < cases.size(); ++p) {
      group.parameters[p].mutable_grad() = torch::randn(cases[p].shape, at::kDouble);
      oracles[p].step(values(group.parameters[p].grad()));
    }
    optimizer.step();
  }
  for (std::size_t p = 0; p < cases.size(); ++p) {
    SCOPED_TRACE(cases[p].name);
    const auto got = values(group.parameters[p]);
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], oracles[p].x[i], 1e-12);
    EXPECT_EQ(optimizer.state()[3 * p + 2].tensor.numel(),
              static_cast<std::int64_t>(cases[p].block_elements.size()));
  }
}

TEST(AdamMiniTest, ElementwiseItIsAdamW) {
  torch::manual_seed(42);
  const auto value = torch::randn({6, 4}, at::kDouble);
  auto a = value.clone().requires_grad_();
  auto b = value.clone().requires_grad_();
  AdamMiniOptions options{.lr = 0.1};
  options.rules = {{{"w"}, AdamMiniBlocks::element}};
  AdamMini mini({{.parameters = {a}, .lr = 0.1, .weight_decay = 0.01, .names = {"w"}}}, options);
  AdamW adamw({b}, {.lr = 0.1});
  for (int step = 0; step < 5; ++step) {
    a.mutable_grad() = torch::randn({6, 4}, at::kDouble);
    b.mutable_grad() = a.grad().clone();
    mini.step();
    adamw.step();
  }
  EXPECT_TRUE(torch::allclose(a, b, 1e-12, 1e-12));
}

TEST(AdamMiniTest, PartitionCanBeRead) {
  const auto make = [](std::vector<std::int64_t> shape) {
    return torch::ones(shape, torch::requires_grad());
  };
  AdamMini optimizer({{.parameters = {make({6, 2}), make({4, 2}), make({4})},
                       .names = {"attn.qkv.weight", "mlp.weight", "mlp.bias"}}},
                     {.heads = 2});
  const auto partition = optimizer.partition();
  EXPECT_EQ(partition[0].name, "attn.qkv.weight");
  EXPECT_THAT(partition[0].block_rows, ElementsAre(1, 1, 1, 1, 1, 1));
  EXPECT_THAT(partition[1].block_rows, ElementsAre(1, 1, 1, 1));
  EXPECT_THAT(partition[2].block_rows, ElementsAre(4));
}

TEST(AdamMiniTest, StateIsAboutHalfOfAdams) {
  auto w = torch::randn({64, 64}).requires_grad_();
  w.mutable_grad() = torch::randn({64, 64});
  AdamMini optimizer({w});
  optimizer.step();
  std::int64_t kept = 0;
  for (const auto& tensor : optimizer.state_tensors()) kept += tensor.numel();
  EXPECT_EQ(kept, 64 * 64 + 64 + 1);
}

TEST(AdamMiniTest, WhatCannotBeDividedIsRefusedByNameBeforeTraining) {
  const auto refused = [](const std::string& name, std::vector<std::int64_t> shape,
                          const AdamMiniOptions& options) {
    return message_of([&] {
      AdamMini optimizer(
          {{.parameters = {torch::ones(shape, torch::requires_grad())}, .names = {name}}}, options);
    });
  };
  EXPECT_THAT(refused("a.qkv.weight", {6, 2}, {}),
              HasSubstr("parameter 'a.qkv.weight' is divided by attention heads, so heads must be "
                        "given; got 0. Set heads"));
  EXPECT_THAT(refused("a.q_proj.weight", {7, 2}, {.heads = 2}),
              HasSubstr("parameter 'a.q_proj.weight' must have a number of rows divisible by its 2 "
                        "heads; got 7"));
  EXPECT_THAT(
      refused("w", {4, 2}, {.block_rows = {{"w", {1, 2}}}}),
      HasSubstr("block_rows of parameter 'w' must be >= 1 and add up to its 4 rows; got [1, 2]"));
  EXPECT_THAT(refused("w", {4, 2}, {.block_rows = {{"w", {4, 0}}}}), HasSubstr("must be >= 1"));
  EXPECT_THAT(refused("w", {4, 2}, {.block_rows = {{"v", {4}}}}),
              HasSubstr("block_rows must name parameters of this optimizer; got 'v'"));
  EXPECT_THAT(refused("w", {4, 2}, {.heads = 3, .key_heads = 2}),
              HasSubstr("heads must be a multiple of key_heads; got 3 and 2"));
  EXPECT_THAT(refused("w", {4, 2}, {.beta2 = 1.0}), HasSubstr("in [0, 1); got 1"));
  // A part of a name is no part between dots.
  EXPECT_EQ(refused("monkey.weight", {7, 2}, {}), "no UserError");
}

TEST(AdamMiniTest, SixteenBitParametersAreUpdatedInFloat32AndRounded) {
  torch::manual_seed(43);
  const auto value = torch::randn({9, 4}).to(at::kHalf);
  auto narrow = value.clone().requires_grad_();
  auto wide = value.to(at::kFloat).requires_grad_();
  narrow.mutable_grad() = (torch::randn({9, 4}) * 1e-4).to(at::kHalf);
  wide.mutable_grad() = narrow.grad().to(at::kFloat);
  AdamMini({narrow}, {.lr = 0.1}).step();
  AdamMini({wide}, {.lr = 0.1}).step();
  EXPECT_TRUE(torch::equal(narrow.detach(), wide.detach().to(at::kHalf)));
}

}  // namespace
}  // namespace gradus::optim
