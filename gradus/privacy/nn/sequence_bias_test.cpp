#include <gradus/privacy/nn/sequence_bias.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/privacy/nn/internal/nn_testing.h>

#include <tests/support/message_of.h>

namespace gradus::privacy::nn {
namespace {

using tests::message_of;
using SequenceBiasTest = internal::NnTest;

TEST_F(SequenceBiasTest, AppendsItsRowToEverySequenceAndGathersTheirGradients) {
  SequenceBias layer(3);
  const at::Tensor x = torch::randn({4, 2, 3}, torch::requires_grad());
  const at::Tensor y = layer->forward(x);
  ASSERT_EQ(y.sizes(), at::IntArrayRef({5, 2, 3}));
  EXPECT_TRUE(y.slice(0, 0, 4).equal(x));
  for (std::int64_t b = 0; b < 2; ++b) EXPECT_TRUE(y[4][b].equal(layer->bias));
  const at::Tensor cotangent = torch::randn_like(y);
  (y * cotangent).sum().backward();
  EXPECT_TRUE(x.grad().equal(cotangent.slice(0, 0, 4)));
  EXPECT_TRUE(torch::allclose(layer->bias.grad(), cotangent[4].sum(0)));
}

TEST_F(SequenceBiasTest, TakesEmptySequencesAndEmptyBatches) {
  SequenceBias layer(3);
  EXPECT_EQ(layer->forward(torch::zeros({0, 2, 3})).sizes(), at::IntArrayRef({1, 2, 3}));
  const at::Tensor y = layer->forward(torch::zeros({4, 0, 3}));
  EXPECT_EQ(y.sizes(), at::IntArrayRef({5, 0, 3}));
  y.sum().backward();
  EXPECT_TRUE(layer->bias.grad().equal(torch::zeros({3})));
}

TEST_F(SequenceBiasTest, IsDrawnAsTorchDrawsBiasK) {
  at::Tensor expected = torch::empty({1, 1, 16});
  torch::manual_seed(5);
  torch::nn::init::xavier_normal_(expected);
  torch::manual_seed(5);
  SequenceBias layer(16);
  EXPECT_TRUE(layer->bias.equal(expected.view({16})));
  EXPECT_EQ(internal::signature(*layer), std::vector<std::string>{"bias [16]"});
}

TEST_F(SequenceBiasTest, RefusesAnotherWidthByName) {
  SequenceBias layer(3);
  EXPECT_NE(message_of([&] {
              layer->forward(torch::zeros({4, 2, 5}));
            }).find("[sequence_bias] input must have shape [positions, batch, 3]; got [4, 2, 5]"),
            std::string::npos);
  EXPECT_NE(message_of([] { SequenceBias layer(0); }).find("embed_dim must be at least 1; got 0"),
            std::string::npos);
}

}  // namespace
}  // namespace gradus::privacy::nn
