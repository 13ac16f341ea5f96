#include <gradus/base/rng.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

namespace gradus::base {
namespace {

TEST(RngTest, RestoresTheDefaultAndACustomGenerator) {
  torch::manual_seed(7);
  auto custom = at::make_generator<at::CPUGeneratorImpl>(3);
  const RngState state = RngState::capture({custom});
  const auto a = torch::rand({5});
  const auto b = torch::rand({5}, custom, at::TensorOptions());
  state.restore();
  EXPECT_TRUE(torch::rand({5}).equal(a));
  EXPECT_TRUE(torch::rand({5}, custom, at::TensorOptions()).equal(b));
}

TEST(RngTest, StateSurvivesAHalfDrawnGaussianPair) {
  torch::manual_seed(7);
  torch::randn({1});  // leaves the pair's second half in the generator
  const RngState state = RngState::capture();
  const auto a = torch::randn({3});
  state.restore();
  EXPECT_TRUE(torch::randn({3}).equal(a));
}

TEST(RngTest, GuardRestoresOnException) {
  torch::manual_seed(7);
  const auto expected = torch::rand({4});
  torch::manual_seed(7);
  try {
    const RngGuard guard;
    torch::rand({100});
    throw std::runtime_error("x");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(torch::rand({4}).equal(expected));
}

TEST(RngTest, LoadsWhatTensorsGaveAndRefusesAnotherNumberOrSize) {
  torch::manual_seed(7);
  const auto saved = RngState::capture().tensors();
  const auto expected = torch::rand({4});
  RngState state = RngState::capture();
  state.load(saved);
  state.restore();
  EXPECT_TRUE(torch::rand({4}).equal(expected));
  EXPECT_THROW(state.load({}), UserError);
  EXPECT_THROW(state.load({torch::zeros({3}, at::kByte)}), UserError);
  EXPECT_THROW(RngState::capture({at::Generator()}), UserError);
}

}  // namespace
}  // namespace gradus::base
