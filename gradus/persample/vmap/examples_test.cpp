#include <gradus/persample/vmap/examples.h>

#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <tests/support/message_of.h>

namespace gradus::persample {
namespace {

using testing::HasSubstr;
using tests::message_of;

TEST(ExamplesTest, CountsTheExamplesOfDimensionZero) {
  EXPECT_EQ(count_examples({torch::zeros({3, 2}), torch::zeros({3}, torch::kLong)}), 3);
  EXPECT_EQ(count_examples({torch::zeros({1})}), 1);
}

TEST(ExamplesTest, RefusesABatchThatIsNone) {
  EXPECT_THAT(message_of([] { count_examples({}); }), HasSubstr("needs at least one tensor"));
  EXPECT_THAT(message_of([] { count_examples({at::Tensor()}); }),
              HasSubstr("tensor 0 of the batch is undefined"));
  EXPECT_THAT(message_of([] { count_examples({torch::tensor(1.0)}); }), HasSubstr("got a scalar"));
  EXPECT_THAT(message_of([] { count_examples({torch::zeros({0, 2})}); }),
              HasSubstr("at least one example; got shape [0, 2]"));
  EXPECT_THAT(message_of([] { count_examples({torch::zeros({3, 2}), torch::zeros({2})}); }),
              HasSubstr("tensor 0 has 3, tensor 1 has shape [2]"));
  EXPECT_THAT(message_of([] { count_examples({torch::zeros({3, 2}).to_sparse()}); }),
              HasSubstr("must be dense; got layout Sparse"));
}

TEST(ExamplesTest, GivesCopiesOfChosenExamples) {
  const at::Tensor x = torch::arange(6.).reshape({3, 2}).requires_grad_();
  const Batch chosen = examples_at({x}, {2, 0, 2});
  EXPECT_TRUE(at::equal(chosen[0], torch::tensor({{4., 5.}, {0., 1.}, {4., 5.}})));
  EXPECT_FALSE(chosen[0].requires_grad());
  chosen[0].zero_();
  EXPECT_EQ(x.sum().item<double>(), 15.0);
  EXPECT_THAT(message_of([&] { examples_at({x}, {3}); }), HasSubstr("must be in [0, 3); got 3"));
  EXPECT_THAT(message_of([&] { examples_at({x}, {-1}); }), HasSubstr("got -1"));
  EXPECT_THAT(message_of([&] { examples_at({x}, {}); }), HasSubstr("got no index"));
}

TEST(ExamplesTest, TakesOneLossAnExample) {
  EXPECT_EQ(summed_loss(torch::tensor({1.0, 2.0}), 2).item<double>(), 3.0);
  EXPECT_EQ(summed_loss(torch::tensor(4.0), 1).item<double>(), 4.0);
  EXPECT_EQ(summed_loss(torch::tensor({4.0}), 1).item<double>(), 4.0);
  EXPECT_THAT(message_of([] { summed_loss(torch::tensor(4.0), 2); }),
              HasSubstr("one loss an example, shape [2]; got shape []"));
  EXPECT_THAT(message_of([] { summed_loss(torch::zeros({2, 1}), 2); }), HasSubstr("shape [2, 1]"));
  EXPECT_THAT(message_of([] { summed_loss(torch::zeros({1}, torch::kLong), 1); }),
              HasSubstr("floating dtype; got Long"));
  EXPECT_THAT(message_of([] { summed_loss(at::Tensor(), 1); }), HasSubstr("undefined"));
}

TEST(ExamplesTest, KnowsWhichParametersWantGradients) {
  const at::Tensor w = torch::ones({2}, at::requires_grad());
  EXPECT_TRUE(wants_gradient({.name = "w", .tensor = w}));
  EXPECT_FALSE(wants_gradient({.name = "w", .tensor = w.detach()}));
  EXPECT_THAT(message_of([&] { wants_gradient({.name = "w2", .tensor = w * 2}); }),
              HasSubstr("parameter 'w2' must be a leaf"));
  EXPECT_THAT(message_of([] { wants_gradient({.name = "none"}); }),
              HasSubstr("parameter 'none' is undefined"));
}

TEST(ExamplesTest, SeedsExamplesApart) {
  std::set<std::uint64_t> seeds;
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    for (std::int64_t index = 0; index < 200; ++index) seeds.insert(example_seed(seed, index));
  }
  EXPECT_EQ(seeds.size(), 50U * 200U);
  EXPECT_EQ(example_seed(7, 3), example_seed(7, 3));
}

}  // namespace
}  // namespace gradus::persample
