// Programs in which one example changes what belongs to another: each is refused by name, by the
// call that shows it.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/persample/engine/internal/loss_testing.h>
#include <gradus/persample/engine/sample_gradients.h>
#include <gradus/persample/vmap/loop.h>

namespace gradus::persample {
namespace {

using at::Tensor;
using internal::by_example;
using internal::doubles;
using internal::leaf;
using testing::HasSubstr;

Tensor zero_leaf(at::IntArrayRef sizes) { return at::zeros(sizes, at::kDouble).requires_grad_(); }

std::vector<NamedParameter> named(const std::vector<Tensor>& tensors) {
  std::vector<NamedParameter> parameters;
  for (const Tensor& each : tensors) {
    parameters.push_back({"p" + std::to_string(parameters.size()), each});
  }
  return parameters;
}

class MixingTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
    options.log = [this](const std::string& line) { lines.push_back(line); };
  }

  // What one call says, "" if it takes the batch.
  static std::string error_of(SampleGradients& table, const LossFunction& loss,
                              const Batch& batch) {
    table.clear();
    try {
      table.backward(loss, batch);
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  }
  std::string refusal(const std::vector<Tensor>& tensors, const LossFunction& loss,
                      const Batch& batch) {
    SampleGradients table(named(tensors), options);
    return error_of(table, loss, batch);
  }
  static void expect_loop(SampleGradients& table, const LossFunction& loss, const Batch& batch) {
    table.clear();
    table.backward(loss, batch);
    const auto want = loop_gradients(table.parameters(), loss, batch);
    for (std::size_t i = 0; i < want.size(); ++i) {
      EXPECT_LE((table.gradients(i) - want[i]).norm().item<double>(),
                1e-9 * (want[i].norm().item<double>() + 1e-3))
          << table.parameters()[i].name;
    }
  }

  SampleOptions options{};
  std::vector<std::string> lines{};
};

// Every pair of places, in both directions: one example is added to another.
TEST_F(MixingTest, OfAnyTwoExamplesIsFound) {
  const Tensor w = leaf({6, 5});
  for (const std::int64_t examples : {2, 3, 6, 9}) {
    const Batch batch{doubles({examples, 6})};
    for (std::int64_t from = 0; from < examples; ++from) {
      for (std::int64_t to = 0; to < examples; ++to) {
        if (from == to) continue;
        const LossFunction loss = [&](const Batch& b) {
          const Tensor h = b[0].mm(w);
          if (b[0].size(0) != examples) return by_example(h.square());
          Tensor mixed = h.clone();
          mixed.select(0, to).add_(h.select(0, from));
          return by_example(mixed.square());
        };
        EXPECT_THAT(refusal({w}, loss, batch),
                    testing::AllOf(HasSubstr("changing example " + std::to_string(from)),
                                   HasSubstr("the loss of example " + std::to_string(to))));
      }
    }
  }
}

TEST_F(MixingTest, OfStatisticsThatOneExampleHoldsIsFound) {
  const Tensor w = leaf({6, 5});
  const Tensor x = doubles({6, 6});
  x[2].mul_(9);
  const std::vector<std::pair<std::string, LossFunction>> all{
      {"the last row",
       [&](const Batch& b) { return by_example((b[0] - b[0].slice(0, -1)).mm(w)); }},
      {"the largest value",
       [&](const Batch& b) { return by_example((b[0] / b[0].abs().max()).mm(w).tanh()); }},
      {"the largest activation, detached",
       [&](const Batch& b) {
         const Tensor h = b[0].mm(w);
         return by_example((h / h.detach().abs().max()).square());
       }},
      {"the largest loss",
       [&](const Batch& b) {
         const Tensor l = by_example(b[0].mm(w).square());
         return at::where(l >= 0.5 * l.detach().max(), l, l * 0.1);
       }},
      {"the number of examples",
       [&](const Batch& b) { return by_example(b[0].mm(w).square()) / b[0].size(0); }},
      {"the others as negatives",
       [&](const Batch& b) {
         const Tensor h = b[0].mm(w);
         return -h.mm(h.t()).log_softmax(1).diagonal();
       }},
  };
  for (const auto& [name, loss] : all) {
    SCOPED_TRACE(name);
    EXPECT_THAT(refusal({w}, loss, {x}), HasSubstr("depend on one example each"));
  }
  EXPECT_THAT(refusal({w}, all.back().second, {x}), HasSubstr("aten::mm"))
      << "the operator that mixes is named";
}

// Behind weights that are zero no loss changes.
TEST_F(MixingTest, BehindAZeroHeadIsFoundInTheFirstBatch) {
  const std::vector<std::pair<std::string, std::function<Tensor(const Tensor&)>>> all{
      {"flip", [](const Tensor& z) { return z.flip(0); }},
      {"two rows",
       [](const Tensor& z) {
         return z.size(0) < 8 ? z : z.index_select(0, at::tensor({0, 1, 3, 2, 4, 5, 6, 7}));
       }},
      {"mean", [](const Tensor& z) { return z - z.mean(0, true); }},
      {"a detached mean", [](const Tensor& z) { return z * z.detach().mean(); }},
      {"attention", [](const Tensor& z) { return z.mm(z.t()).softmax(1).mm(z); }},
      {"the largest", [](const Tensor& z) { return z * z.abs().amax(); }},
  };
  for (const auto& [name, mix] : all) {
    SCOPED_TRACE(name);
    const Tensor a = leaf({6, 8}), head = zero_leaf({8, 3});
    const LossFunction loss = [&, mix = mix](const Batch& b) {
      return at::cross_entropy_loss(mix(b[0].mm(a)).tanh().mm(head), b[1], {}, at::Reduction::None);
    };
    EXPECT_THAT(refusal({a, head}, loss, {doubles({8, 6}), at::randint(3, {8})}),
                HasSubstr("depend on one example each"));
  }
}

// A gate that is zero hides what is behind it until it opens, at whatever batch that is.
TEST_F(MixingTest, BehindAGateIsFoundWhenTheGateOpens) {
  for (const int opens : {1, 2, 4, 5, 9}) {
    SCOPED_TRACE(opens);
    const Tensor gate = zero_leaf({1}), w = leaf({6, 6}), v = leaf({6, 6});
    const LossFunction loss = [&](const Batch& b) {
      const Tensor h = b[0].mm(v);
      const Tensor m = h.mm(w).tanh();
      // A mean that only the backward pass sees.
      const Tensor mean = m.mean(0, true);
      return by_example((h + gate * (m + mean - mean.detach())).square());
    };
    SampleGradients table(named({gate, w, v}), options);
    for (int batch = 0; batch < opens; ++batch) {
      EXPECT_EQ(error_of(table, loss, {doubles({4, 6})}), "") << batch;
    }
    {
      const torch::NoGradGuard no_grad;
      gate.fill_(0.7);
    }
    EXPECT_THAT(error_of(table, loss, {doubles({4, 6})}), HasSubstr("depend on one example each"));
  }
}

// The same gate before an honest branch changes engines, not numbers.
TEST_F(MixingTest, AGateBeforeAnHonestBranchIsNoMixing) {
  for (const int opens : {1, 3, 5}) {
    const Tensor gate = zero_leaf({1}), w = leaf({6, 6}), unused = leaf({2});
    const LossFunction loss = [&](const Batch& b) {
      return by_example((b[0] + gate * b[0].mm(w).tanh()).square());
    };
    SampleGradients table(named({gate, w, unused}), options);
    for (int batch = 0; batch < 12; ++batch) {
      if (batch == opens) {
        const torch::NoGradGuard no_grad;
        gate.fill_(0.7);
      }
      expect_loop(table, loss, {doubles({4, 6})});
    }
  }
  EXPECT_THAT(lines, testing::IsEmpty());
}

TEST_F(MixingTest, ThatBeginsLaterIsFoundAtAGlance) {
  const Tensor w = leaf({6, 5});
  bool mixes = false;
  const LossFunction loss = [&](const Batch& b) {
    const Tensor h = b[0].mm(w);
    return by_example((mixes ? h - h.detach().mean() : h - at::ones({}, at::kDouble)).square());
  };
  SampleGradients table(named({w}), options);
  std::string error;
  int batches = 0;
  for (; error.empty() && batches < 80; ++batches) {
    mixes = batches > 5;
    error = error_of(table, loss, {doubles({4, 6})});
  }
  EXPECT_THAT(error, HasSubstr("changes the loss"));
  EXPECT_EQ(batches, 64);
}

TEST_F(MixingTest, OfBatchesOfOneByAStateBetweenCallsIsFound) {
  const Tensor w = leaf({6, 5});
  Tensor mean = at::zeros({6}, at::kDouble);
  const LossFunction loss = [&](const Batch& b) {
    const Tensor losses = by_example((b[0] - mean).mm(w).square());
    mean = 0.9 * mean + 0.1 * b[0].detach().mean(0);
    return losses;
  };
  SampleGradients table(named({w}), options);
  table.backward(loss, {doubles({1, 6})});
  EXPECT_THAT(error_of(table, loss, {doubles({1, 6})}), HasSubstr("computed in between"));
  // And after a batch of several that mixed nothing.
  mean.zero_();
  bool keeps = false;
  const LossFunction later = [&](const Batch& b) {
    return keeps ? loss(b) : by_example((b[0] - mean).mm(w).square());
  };
  SampleGradients other(named({w}), options);
  other.backward(later, {doubles({4, 6})});
  keeps = true;
  EXPECT_THAT(error_of(other, later, {doubles({1, 6})}), HasSubstr("computed in between"));
}

TEST_F(MixingTest, BatchesOfOneOfAnHonestModelAreLookedAtAFewTimesOnly) {
  const Tensor w = leaf({6, 5});
  int calls = 0;
  const LossFunction loss = [&](const Batch& b) {
    ++calls;
    return by_example(b[0].mm(w).square());
  };
  SampleGradients table(named({w}), options);
  for (int batch = 0; batch < 3; ++batch) expect_loop(table, loss, {doubles({1, 6})});
  calls = 0;
  for (int batch = 3; batch < 60; ++batch) {
    table.clear();
    table.backward(loss, {doubles({1, 6})});
  }
  EXPECT_EQ(calls, 57);
}

// What is never used proves nothing, and must not be looked at in each step.
TEST_F(MixingTest, ADeadLayerCostsFewLooks) {
  const Tensor w = leaf({6, 5}), dead = leaf({6, 5});
  int calls = 0;
  const LossFunction loss = [&](const Batch& b) {
    ++calls;
    return by_example(b[0].mm(w).square() + (b[0].mm(dead) - 1e6).relu());
  };
  SampleGradients table(named({w, dead}), options);
  const int batches = 300;
  int looked = 0;
  for (int batch = 0; batch < batches; ++batch) {
    const int before = calls;
    table.clear();
    table.backward(loss, {doubles({4, 6})});
    looked += calls - before > 1 ? 1 : 0;
  }
  EXPECT_EQ(looked, 9);  // 1, 2, 4, ..., 256
}

TEST_F(MixingTest, ExamplesAreComparedInThePrecisionOfTheModel) {
  torch::nn::GRUCell cell(4, 5);
  const Tensor head = (at::randn({5, 2}, at::kDouble)).requires_grad_();
  std::vector<NamedParameter> parameters = parameters_of(*cell);
  parameters.push_back({"head", head});
  const LossFunction loss = [&](const Batch& b) {
    Tensor h = at::zeros({b[0].size(0), 5});
    for (std::int64_t t = 0; t < 6; ++t) h = cell->forward(b[0].select(1, t), h);
    return by_example(h.to(at::kDouble).mm(head).square());
  };
  SampleGradients table(parameters, options);
  table.backward(loss, {at::randn({7, 6, 4})});
  EXPECT_THAT(lines, testing::IsEmpty());
}

}  // namespace
}  // namespace gradus::persample
