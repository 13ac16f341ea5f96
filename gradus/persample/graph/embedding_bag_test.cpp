#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/persample/graph/graph_gradients.h>
#include <gradus/persample/graph/internal/loop_testing.h>

namespace gradus::persample {
namespace {

using at::Tensor;
using internal::expect_equals_loop;
using internal::named;
using internal::relative;
namespace nn = torch::nn;

constexpr double kTolerance = 1e-9;

// Bags of one batch: so many a example, each with the rows that it looks up.
struct Bags {
  std::vector<std::vector<std::int64_t>> rows{};
  std::vector<std::vector<double>> weights{};
  std::int64_t per_example = 1;

  std::int64_t examples() const { return static_cast<std::int64_t>(rows.size()) / per_example; }
  Bags at(std::int64_t example) const {
    Bags one{.per_example = per_example};
    for (std::int64_t i = example * per_example; i < (example + 1) * per_example; ++i) {
      one.rows.push_back(rows[static_cast<std::size_t>(i)]);
      one.weights.push_back(weights[static_cast<std::size_t>(i)]);
    }
    return one;
  }
  Tensor indices() const { return flat(rows, at::kLong); }
  Tensor index_weights() const { return flat(weights, at::kDouble); }
  Tensor offsets(bool with_last) const {
    std::vector<std::int64_t> starts{0};
    for (const auto& bag : rows) {
      starts.push_back(starts.back() + static_cast<std::int64_t>(bag.size()));
    }
    if (!with_last) starts.pop_back();
    return at::tensor(starts, at::kLong);
  }

 private:
  template <typename Value>
  static Tensor flat(const std::vector<std::vector<Value>>& bags, at::ScalarType type) {
    std::vector<Value> all;
    for (const auto& bag : bags) all.insert(all.end(), bag.begin(), bag.end());
    return all.empty() ? at::empty({0}, type) : at::tensor(all, type);
  }
};

class EmbeddingBagTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
  std::int64_t draw(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  bool flip() { return draw(0, 1) == 1; }

 private:
  std::mt19937 random_{11};
};

nn::EmbeddingBagOptions options_for(int mode) {
  nn::EmbeddingBagOptions options(8, 3);
  if (mode == 0) options.mode(torch::kSum);
  if (mode == 1) options.mode(torch::kMean);
  if (mode == 2) options.mode(torch::kMax);
  return options;
}

void expect_by_rule(const std::vector<NamedParameter>& parameters, const Tensor& losses) {
  GraphGradients table(parameters, {.keep = Keep::factors});
  table.backward(losses);
  EXPECT_THAT(table.explain()[0], testing::HasSubstr("lookup"));
}

TEST_F(EmbeddingBagTest, SumsMeansAndMaximaOfGivenBags) {  // P10
  const Bags bags{.rows = {{1, 2, 4}, {5, 4}, {3, 2, 0}},
                  .weights = {{1, 1, 1}, {1, 1}, {1, 1, 1}}};
  for (const int mode : {0, 1, 2}) {
    nn::EmbeddingBag table(options_for(mode));
    table->to(at::kDouble);
    const auto losses = [&](const Bags& some) {
      return table(some.indices(), some.offsets(false)).tanh().square().sum(1);
    };
    expect_equals_loop({.parameters = named(*table),
                        .losses = [&] { return losses(bags); },
                        .true_parameters = named(*table),
                        .loss = [&](std::int64_t b) { return losses(bags.at(b)); }},
                       kTolerance);
    expect_by_rule(named(*table), losses(bags));
  }
}

// A mode, 0 sum, 1 mean, 2 max: 500 random bags of each.
class RandomBagsTest : public EmbeddingBagTest, public testing::WithParamInterface<int> {
 protected:
  nn::EmbeddingBag random_table(nn::EmbeddingBagOptions options) {
    if (flip()) options.padding_idx(draw(0, 7));
    nn::EmbeddingBag table(options);
    table->to(at::kDouble);
    // An index for padding leaves its row zero, which would hide a gradient that it gets.
    const torch::NoGradGuard no_grad;
    table->weight.normal_();
    return table;
  }

  Bags random_bags() {
    Bags bags{.per_example = draw(1, 2)};
    const std::int64_t examples = draw(2, 4), longest = draw(0, 5);
    for (std::int64_t i = 0; i < examples * bags.per_example; ++i) {
      const auto size = static_cast<std::size_t>(draw(0, longest));
      std::vector<std::int64_t> rows(size);
      std::vector<double> weights(size);
      for (auto& row : rows) row = draw(0, 7);
      for (auto& weight : weights) weight = static_cast<double>(draw(-9, 9)) / 4;
      bags.rows.push_back(rows);
      bags.weights.push_back(weights);
    }
    return bags;
  }

  void expect_offsets_equal_loop() {
    const bool with_last = flip(), sparse = GetParam() < 2 && draw(0, 3) == 0;
    const bool weighted = GetParam() == 0 && flip();
    auto table =
        random_table(options_for(GetParam()).include_last_offset(with_last).sparse(sparse));
    const Bags bags = random_bags();
    const auto losses = [&](const Bags& some) {
      const Tensor weights = weighted ? some.index_weights() : Tensor();
      const Tensor out = table(some.indices(), some.offsets(with_last), weights);
      return (out + 1).tanh().square().view({some.examples(), -1}).sum(1);
    };
    expect_equals_loop({.parameters = named(*table),
                        .losses = [&] { return losses(bags); },
                        .true_parameters = named(*table),
                        .loss = [&](std::int64_t b) { return losses(bags.at(b)); }},
                       kTolerance);
    expect_by_rule(named(*table), losses(bags));
  }

  void expect_matrix_equals_loop() {
    auto table = random_table(options_for(GetParam()));
    const Tensor ids = at::randint(8, {draw(2, 4), draw(1, 5)});
    const bool weighted = GetParam() == 0 && flip();
    const Tensor weights = weighted ? at::randn(ids.sizes(), at::kDouble) : Tensor();
    const auto losses = [&](std::int64_t first, std::int64_t count) {
      const Tensor some = weights.defined() ? weights.narrow(0, first, count) : Tensor();
      return (table(ids.narrow(0, first, count), Tensor(), some) + 1).tanh().square().sum(1);
    };
    expect_equals_loop({.parameters = named(*table),
                        .losses = [&] { return losses(0, ids.size(0)); },
                        .true_parameters = named(*table),
                        .loss = [&](std::int64_t b) { return losses(b, 1); }},
                       kTolerance);
    expect_by_rule(named(*table), losses(0, ids.size(0)));
  }
};

TEST_P(RandomBagsTest, EqualTheLoop) {
  for (int trial = 0; trial < internal::random_trials(); ++trial) {
    SCOPED_TRACE(trial);
    if (trial % 4 == 3) {
      expect_matrix_equals_loop();
    } else {
      expect_offsets_equal_loop();
    }
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, RandomBagsTest, testing::Values(0, 1, 2), [](const auto& info) {
  return std::string(info.param == 0 ? "sum" : info.param == 1 ? "mean" : "max");
});

TEST_F(EmbeddingBagTest, WeightsOfIndicesThatAreLearnedThemselves) {
  nn::EmbeddingBag table(options_for(0));
  table->to(at::kDouble);
  const Tensor importance = at::randn({8}, at::kDouble).requires_grad_();  // of each row
  const Tensor place = at::randn({4}, at::kDouble).requires_grad_();       // of each place in a bag
  std::vector<NamedParameter> parameters = named(*table);
  parameters.push_back({"importance", importance});
  parameters.push_back({"place", place});
  const Tensor ids = at::randint(8, {3, 4});
  const auto losses = [&](const Tensor& some) {
    const Tensor weights = importance.index_select(0, some.flatten()).view_as(some) * place;
    return table(some, Tensor(), weights).tanh().square().sum(1);
  };
  // index_select gives rows of a parameter to examples: an operator of which the engine cannot
  // know.
  const GraphOptions checked{.examples_checked = true};
  expect_equals_loop({.parameters = parameters,
                      .losses = [&] { return losses(ids); },
                      .true_parameters = parameters,
                      .loss = [&](std::int64_t b) { return losses(ids.narrow(0, b, 1)); }},
                     kTolerance, checked);
}

TEST_F(EmbeddingBagTest, ATableThatTwoBagsShareAddsUp) {
  nn::EmbeddingBag table(options_for(1));
  nn::Linear head(3, 8);
  nn::ModuleList model(table, head);
  model->to(at::kDouble);
  const Tensor ids = at::randint(8, {3, 4}), more = at::randint(8, {3, 2});
  const auto losses = [&](std::int64_t first, std::int64_t count) {
    const Tensor a = table(ids.narrow(0, first, count)), b = table(more.narrow(0, first, count));
    return head(a * b.tanh()).square().sum(1) + at::linear(a, table->weight).square().sum(1);
  };
  expect_equals_loop({.parameters = named(*model),
                      .losses = [&] { return losses(0, 3); },
                      .true_parameters = named(*model),
                      .loss = [&](std::int64_t b) { return losses(b, 1); }},
                     kTolerance);
}

TEST_F(EmbeddingBagTest, FrequenciesOfTheBatchAreRefusedByName) {
  nn::EmbeddingBag table(options_for(0).scale_grad_by_freq(true));
  GraphGradients gradients(named(*table));
  try {
    gradients.backward(table(at::randint(8, {3, 4})).square().sum(1));
    FAIL();
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("scale_grad_by_freq"));
  }
}

}  // namespace
}  // namespace gradus::persample
