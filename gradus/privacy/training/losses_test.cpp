#include <gradus/privacy/training/losses.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

#include <tests/support/message_of.h>

namespace gradus::privacy {
namespace {

using ::testing::HasSubstr;

// P14: mean over each example's own valid tokens.
TEST(PrivacyLossesTest, IgnoredTargetsLeaveTheMeanOfAnExamplesOwnTokens) {
  torch::manual_seed(1);
  const at::Tensor logits = torch::randn({3, 4, 5}, torch::kDouble).requires_grad_();  // [B, T, K]
  const at::Tensor targets = torch::tensor(
      {{1L, 2L, -100L, -100L}, {3L, -100L, -100L, -100L}, {-100L, -100L, -100L, -100L}});
  const at::Tensor losses = cross_entropy_per_example(logits, targets, -100, -1);
  const at::Tensor log_p = logits.log_softmax(-1);
  const at::Tensor expected = torch::stack(
      {-(log_p[0][0][1] + log_p[0][1][2]) / 2, -log_p[1][0][3], torch::zeros({}, torch::kDouble)});
  EXPECT_TRUE(torch::allclose(losses, expected, 1e-14, 1e-14));
  const at::Tensor by_channels = cross_entropy_per_example(logits.transpose(1, 2), targets);
  EXPECT_TRUE(torch::allclose(by_channels, expected, 1e-14, 1e-14));
  losses.sum().backward();
  EXPECT_TRUE(logits.grad()[2].eq(0).all().item<bool>());
  EXPECT_TRUE(logits.grad().isfinite().all().item<bool>());
  // torch's own mean weighs the second example's token as one of three.
  const at::Tensor whole =
      torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
  EXPECT_FALSE(torch::allclose(whole, losses.narrow(0, 0, 2).mean()));
}

TEST(PrivacyLossesTest, TakesPlainClassification) {
  torch::manual_seed(1);
  const at::Tensor logits = torch::randn({6, 3}, torch::kDouble);
  const at::Tensor targets = torch::randint(3, {6});
  const at::Tensor expected = torch::nn::functional::cross_entropy(
      logits, targets, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
  EXPECT_TRUE(torch::equal(cross_entropy_per_example(logits, targets), expected));
  EXPECT_THAT(
      tests::message_of([&] { cross_entropy_per_example(logits, targets.narrow(0, 0, 5)); }),
      HasSubstr("targets must have the shape of logits without the classes, [6]; got [5]"));
  EXPECT_THAT(tests::message_of([&] { cross_entropy_per_example(logits, targets, -100, 2); }),
              HasSubstr("class_dim must name a dimension"));
}

TEST(PrivacyLossesTest, MeansOverAllButExamples) {
  const at::Tensor values = torch::arange(12.0).reshape({2, 3, 2});
  EXPECT_TRUE(torch::equal(mean_per_example(values), torch::tensor({2.5F, 8.5F})));
  EXPECT_TRUE(torch::equal(mean_per_example(values[0][0]), values[0][0]));
}

}  // namespace
}  // namespace gradus::privacy
