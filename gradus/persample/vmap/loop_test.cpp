#include <gradus/persample/vmap/loop.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/persample/vmap/internal/compare.h>

#include <tests/support/message_of.h>

namespace gradus::persample {
namespace {

namespace nn = torch::nn;
using gradus::tests::message_of;
using testing::HasSubstr;
using tests::gap;
using tests::named;

class LoopTest : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    torch::manual_seed(1);
    linear_ = nn::Linear(nn::LinearOptions(3, 2));
    linear_->to(torch::kDouble);
    x_ = torch::randn({4, 3}, torch::kDouble);
  }
  LossFunction squares() {
    return [this](const Batch& b) { return linear_->forward(b[0]).pow(2).sum(1); };
  }

  nn::Linear linear_{nullptr};
  at::Tensor x_;
};

TEST_F(LoopTest, GivesTheGradientOfALinearLayerByHand) {
  const auto got = loop_gradients(named(*linear_), squares(), {x_});
  const at::NoGradGuard no_grad;
  const at::Tensor output = 2 * linear_->forward(x_);
  EXPECT_EQ(gap(got, {torch::einsum("bo,bi->boi", {output, x_}), output}), "");
}

TEST_F(LoopTest, GivesChosenExamplesInTheirOrder) {
  const auto all = loop_gradients(named(*linear_), squares(), {x_});
  const auto some = loop_gradients(named(*linear_), squares(), {x_},
                                   {.examples = std::vector<std::int64_t>{3, 0, 3}});
  const at::Tensor order = torch::tensor({3, 0, 3}, torch::kLong);
  EXPECT_EQ(gap(some, {all[0].index_select(0, order), all[1].index_select(0, order)}, 0), "");
  EXPECT_THAT(message_of([&] {
                loop_gradients(named(*linear_), squares(), {x_},
                               {.examples = std::vector<std::int64_t>{4}});
              }),
              HasSubstr("must be in [0, 4); got 4"));
}

TEST_F(LoopTest, LeavesGradAloneAndWorksWithoutGradMode) {
  linear_->bias.mutable_grad() = torch::ones_like(linear_->bias);
  const auto want = loop_gradients(named(*linear_), squares(), {x_});
  const at::NoGradGuard no_grad;
  EXPECT_EQ(gap(loop_gradients(named(*linear_), squares(), {x_}), want, 0), "");
  EXPECT_FALSE(linear_->weight.grad().defined());
  EXPECT_EQ(linear_->bias.grad().sum().item<double>(), 2.0);
}

TEST_F(LoopTest, GivesZerosForAnUnusedAndNothingForAFrozenParameter) {
  linear_->bias.requires_grad_(false);
  std::vector<NamedParameter> parameters = named(*linear_);
  parameters.push_back({"unused", torch::randn({5}, torch::kDouble).requires_grad_()});
  const auto got = loop_gradients(parameters, squares(), {x_});
  EXPECT_FALSE(got[1].defined());
  EXPECT_EQ(got[2].sizes(), (std::vector<std::int64_t>{4, 5}));
  EXPECT_EQ(got[2].abs().sum().item<double>(), 0.0);
  EXPECT_TRUE(loop_gradients({}, squares(), {x_}).empty());
  const auto none = loop_gradients(parameters, [](const Batch& b) { return b[0].sum(1); }, {x_});
  EXPECT_EQ(none[0].abs().sum().item<double>(), 0.0);
}

TEST_F(LoopTest, TakesSparseGradients) {
  const at::Tensor ids = torch::randint(0, 6, {4, 5}, torch::kLong);
  std::vector<std::vector<at::Tensor>> both;
  for (const bool sparse : {false, true}) {
    torch::manual_seed(2);
    nn::Embedding table(nn::EmbeddingOptions(6, 3).sparse(sparse));
    table->to(torch::kDouble);
    both.push_back(loop_gradients(
        named(*table), [&](const Batch& b) { return table->forward(b[0]).pow(2).sum({1, 2}); },
        {ids}));
  }
  EXPECT_EQ(gap(both[1], both[0], 1e-14), "");
}

TEST_F(LoopTest, DrawsTheSameMasksForAnExampleWhateverTheOrder) {
  const LossFunction loss = [this](const Batch& b) {
    return at::dropout(linear_->forward(b[0]), 0.5, true).sum(1);
  };
  const at::Tensor before = torch::rand({1});
  torch::manual_seed(9);
  const auto all = loop_gradients(named(*linear_), loss, {x_}, {.seed = 4});
  const double next = torch::rand({1}).item<double>();
  const auto last = loop_gradients(named(*linear_), loss, {x_},
                                   {.examples = std::vector<std::int64_t>{3}, .seed = 4});
  EXPECT_EQ(gap(last, {all[0].narrow(0, 3, 1), all[1].narrow(0, 3, 1)}, 0), "");
  torch::manual_seed(9);
  EXPECT_EQ(torch::rand({1}).item<double>(), next) << "the generator must be put back";
}

TEST_F(LoopTest, NeverShowsTheLossTheCallersBatch) {
  const at::Tensor kept = x_.clone();
  loop_gradients(named(*linear_),
                 [this](const Batch& b) {
                   b[0].mul_(3);
                   return linear_->forward(b[0]).sum(1);
                 },
                 {x_});
  EXPECT_TRUE(at::equal(x_, kept));
}

}  // namespace
}  // namespace gradus::persample
