#include <gradus/optim/groups.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/optim/adamw.h>

namespace gradus::optim {
namespace {

using testing::ElementsAre;

at::Tensor parameter(std::vector<std::int64_t> shape) {
  return torch::ones(shape, torch::requires_grad());
}

TEST(GroupsTest, BiasesAndNormsDoNotDecay) {
  const auto groups = decay_groups({{"up.weight", parameter({3, 2})},
                                    {"up.bias", parameter({3})},
                                    {"ln.weight", parameter({3})},
                                    {"relative_bias", parameter({3, 3})},
                                    {"conv.weight", parameter({3, 2, 1, 1})}},
                                   {.lr = 0.5, .weight_decay = 0.25});
  ASSERT_EQ(groups.size(), 2);
  EXPECT_THAT(groups[0].names, ElementsAre("up.weight", "conv.weight"));
  EXPECT_EQ(groups[0].weight_decay, 0.25);
  EXPECT_EQ(groups[0].lr, 0.5);
  EXPECT_THAT(groups[1].names, ElementsAre("up.bias", "ln.weight", "relative_bias"));
  EXPECT_EQ(groups[1].weight_decay, 0.0);
  EXPECT_EQ(groups[1].lr, 0.5);
}

TEST(GroupsTest, EmptyGroupIsLeftOutAndNamesCount) {
  const auto groups = decay_groups({{"wte", parameter({3, 2})}}, {.no_decay_names = {"wte"}});
  ASSERT_EQ(groups.size(), 1);
  EXPECT_EQ(groups[0].weight_decay, 0.0);
  EXPECT_TRUE(decay_groups({}).empty());
  EXPECT_THROW(decay_groups({{"a", at::Tensor()}}), UserError);
}

}  // namespace
}  // namespace gradus::optim
