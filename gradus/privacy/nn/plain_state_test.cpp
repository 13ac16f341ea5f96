#include <gradus/privacy/nn/plain_state.h>

#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/privacy/nn/internal/nn_testing.h>
#include <gradus/privacy/nn/multihead_attention.h>
#include <gradus/privacy/nn/recurrent.h>

#include <tests/support/message_of.h>

namespace gradus::privacy::nn {
namespace {

using internal::mismatch;
using tests::message_of;
using AttentionOptions = torch::nn::MultiheadAttentionOptions;

// A block with a buffer, twice in a tree, made of torch::nn's layers or of ours.
template <typename Attention, typename Lstm>
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(bool bias_kv)
      : norm(register_module("norm", torch::nn::BatchNorm1d(4))),
        attention(
            register_module("attention", Attention(AttentionOptions(4, 2).add_bias_kv(bias_kv)))),
        lstm(register_module("lstm", Lstm(torch::nn::LSTMOptions(4, 4).bidirectional(true)))) {
    scale = register_parameter("scale", torch::full({1}, 0.5));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = std::get<0>(attention->forward(x, x, x)) * scale;
    const at::Tensor normed = norm->forward(y.flatten(0, 1)).view_as(y);
    return std::get<0>(lstm->forward(normed)).slice(2, 0, 4);
  }
  torch::nn::BatchNorm1d norm;
  Attention attention;
  Lstm lstm;
  at::Tensor scale;
};

template <typename Attention, typename Lstm>
struct TreeImpl : torch::nn::Module {
  using Block = BlockImpl<Attention, Lstm>;
  TreeImpl()
      : first(register_module("first", std::make_shared<Block>(true))),
        rest(register_module("rest", torch::nn::ModuleList())),
        head(register_module("head", torch::nn::Linear(4, 3))) {
    rest->push_back(std::make_shared<Block>(false));
  }
  at::Tensor forward(const at::Tensor& x) {
    return head->forward(rest[0]->template as<Block>()->forward(first->forward(x)));
  }
  std::shared_ptr<Block> first;
  torch::nn::ModuleList rest;
  torch::nn::Linear head;
};

using Plain = TreeImpl<torch::nn::MultiheadAttention, torch::nn::LSTM>;
using Ours = TreeImpl<DPMultiheadAttention, DPLSTM>;

class PlainStateTest : public internal::NnTest {
 protected:
  void SetUp() override {
    NnTest::SetUp();
    plain_ = std::make_shared<Plain>();
    ours_ = std::make_shared<Ours>();
    // Statistics and weights that no constructor gives.
    plain_->forward(torch::randn({5, 3, 4}));
    const torch::NoGradGuard no_grad;
    for (auto& parameter : ours_->parameters()) parameter.add_(torch::randn_like(parameter), 0.2);
    plain_->eval();
    ours_->eval();
  }

  std::shared_ptr<Plain> plain_;
  std::shared_ptr<Ours> ours_;
  const at::Tensor x_ = torch::randn({5, 3, 4});
};

std::vector<std::string> names_of(const PlainState& state) {
  std::vector<std::string> names = state.keys();
  std::sort(names.begin(), names.end());
  return names;
}

TEST_F(PlainStateTest, OfATreeHasTheNamesAndShapesOfTheSameTreeOfTorchsLayers) {
  const auto state = plain_state(*ours_);
  PlainState expected = plain_->named_parameters();
  for (const auto& item : plain_->named_buffers()) expected.insert(item.key(), item.value());
  ASSERT_EQ(names_of(state), names_of(expected));
  for (const auto& item : state) {
    EXPECT_EQ(item.value().sizes(), expected[item.key()].sizes()) << item.key();
    EXPECT_FALSE(item.value().requires_grad());
  }
  EXPECT_TRUE(state.contains("first.attention.bias_k"));
  EXPECT_TRUE(state.contains("rest.0.norm.running_mean"));
  EXPECT_FALSE(ours_->named_parameters().contains("first.attention.in_proj_weight"))
      << "the module itself keeps its own parameters";
}

TEST_F(PlainStateTest, CarriesATreeEitherWay) {
  EXPECT_NE(mismatch({ours_->forward(x_)}, {plain_->forward(x_)}, 1e-3), "");
  load_plain_state(*ours_, plain_state(*plain_));
  EXPECT_EQ(mismatch({ours_->forward(x_)}, {plain_->forward(x_)}, 1e-5), "");
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : ours_->parameters()) parameter.add_(torch::randn_like(parameter), 0.2);
  }
  load_plain_state(*plain_, plain_state(*ours_));
  EXPECT_EQ(mismatch({plain_->forward(x_)}, {ours_->forward(x_)}, 1e-5), "");
}

TEST_F(PlainStateTest, ATreeIsExchangedByTorchSaveEitherWay) {
  internal::save_and_load(plain_, ours_);
  EXPECT_EQ(mismatch({ours_->forward(x_)}, {plain_->forward(x_)}, 1e-5), "");
  EXPECT_EQ(mismatch(plain_state(*ours_).values(), plain_state(*plain_).values(), 0.0), "");
  const auto fresh = std::make_shared<Plain>();
  fresh->eval();
  internal::save_and_load(ours_, fresh);
  EXPECT_EQ(mismatch({fresh->forward(x_)}, {plain_->forward(x_)}, 0.0), "");
}

TEST_F(PlainStateTest, LoadingKeepsTheParametersThatAnOptimizerHolds) {
  const auto parameters = ours_->parameters();
  const auto version = parameters[0]._version();
  load_plain_state(*ours_, plain_state(*plain_));
  const auto after = ours_->parameters();
  for (std::size_t i = 0; i < after.size(); ++i) {
    EXPECT_TRUE(after[i].is_same(parameters[i]));
    EXPECT_TRUE(after[i].requires_grad());
  }
  EXPECT_GT(parameters[0]._version(), version);
}

TEST_F(PlainStateTest, ListsAllThatDoesNotFitAndChangesNothing) {
  PlainState state("State");
  for (const auto& item : plain_state(*plain_)) {
    if (item.key() == "head.bias") continue;
    if (item.key() == "head.weight") {
      state.insert(item.key(), torch::zeros({4, 3}));
    } else if (item.key() == "first.attention.in_proj_bias") {
      state.insert(item.key(), item.value().to(torch::kFloat64));
    } else {
      state.insert(item.key(), item.value());
    }
  }
  state.insert("first.attention.q_proj_weight", torch::zeros({4, 4}));
  std::vector<at::Tensor> before;
  for (const auto& value : plain_state(*ours_).values()) before.push_back(value.clone());
  const std::string text = message_of([&] { load_plain_state(*ours_, state); });
  for (const char* fault : {"missing head.bias", "head.weight must have shape [3, 4]; got [4, 3]",
                            "first.attention.in_proj_bias must have dtype Float; got Double",
                            "unexpected first.attention.q_proj_weight"}) {
    EXPECT_NE(text.find(fault), std::string::npos) << fault << " in " << text;
  }
  EXPECT_EQ(mismatch(plain_state(*ours_).values(), before, 0.0), "");
}

TEST_F(PlainStateTest, OfALayerAloneIsTorchsState) {
  for (const auto& options :
       {AttentionOptions(6, 2), AttentionOptions(6, 2).kdim(3), AttentionOptions(6, 2).vdim(5),
        AttentionOptions(6, 2).bias(false).add_bias_kv(true)}) {
    DPMultiheadAttention ours(options);
    torch::nn::MultiheadAttention plain(options);
    const auto state = plain_state(*ours);
    EXPECT_EQ(state.keys(), plain->named_parameters().keys());
    load_plain_state(*plain, state);
    EXPECT_EQ(mismatch(plain->parameters(), state.values(), 0.0), "");
  }
}

}  // namespace
}  // namespace gradus::privacy::nn
