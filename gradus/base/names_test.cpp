#include <gradus/base/names.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace gradus::base {
namespace {

TEST(NamesTest, NamesATensorItsViewsAndItsDetachedHandleWhileTheRegistrationLives) {
  auto w = torch::zeros({4, 4});
  {
    const NamedTensors names({{"layer.weight", w}});
    EXPECT_EQ(tensor_name(w), "layer.weight");
    EXPECT_EQ(tensor_name(w.detach().view({16})), "layer.weight");
    EXPECT_EQ(describe_tensor(w), "layer.weight (Float [4, 4])");
  }
  EXPECT_EQ(tensor_name(w), "");
  EXPECT_EQ(describe_tensor(w), "an unnamed tensor (Float [4, 4])");
}

TEST(NamesTest, SeveralModelsRegisterAndTheFirstNameOfATiedWeightIsGiven) {
  auto w = torch::zeros({2});
  auto first = std::make_unique<NamedTensors>(
      std::vector<std::pair<std::string, at::Tensor>>{{"a", w}, {"b", w}});
  const NamedTensors second({{"other", w}});
  EXPECT_EQ(tensor_name(w), "a");
  first.reset();
  EXPECT_EQ(tensor_name(w), "other");
}

TEST(NamesTest, ADeadTensorsNameIsNotGivenToANewTensor) {
  auto w = torch::zeros({2});
  const NamedTensors names({{"dead", w}});
  w.reset();
  for (int i = 0; i < 100; ++i) EXPECT_EQ(tensor_name(torch::zeros({2})), "");
}

TEST(NamesTest, MovedRegistrationStillNames) {
  auto w = torch::zeros({2});
  NamedTensors names({});
  names = NamedTensors({{"w", w}});
  const NamedTensors moved = std::move(names);
  EXPECT_EQ(tensor_name(w), "w");
  EXPECT_EQ(describe_tensor(at::Tensor()), "an undefined tensor");
}

}  // namespace
}  // namespace gradus::base
