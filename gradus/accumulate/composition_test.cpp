// Accumulation together with recomputation: equal to accumulation alone, bit for bit.

#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/accumulate/batch_norm.h>
#include <gradus/accumulate/micro_batch.h>
#include <gradus/accumulate/window.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/recompute/checkpoint.h>
#include <gradus/recompute/memory_budget.h>

namespace gradus::accumulate {
namespace {

struct NormNetImpl : torch::nn::Module {
  std::vector<torch::nn::Conv2d> convs{};
  std::vector<torch::nn::BatchNorm2d> norms{};
  torch::nn::Linear head{nullptr};
  NormNetImpl() {
    for (int i = 0; i < 3; ++i) {
      convs.push_back(
          register_module("conv" + std::to_string(i),
                          torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 4, 3).padding(1))));
      norms.push_back(register_module("norm" + std::to_string(i), torch::nn::BatchNorm2d(4)));
    }
    head = register_module("head", torch::nn::Linear(4, 2));
  }
  at::Tensor block(std::size_t i, const at::Tensor& x) {
    return torch::dropout(torch::relu(norms[i](convs[i](x))), 0.2, is_training());
  }
  at::Tensor forward(at::Tensor x, bool checkpointed) {
    for (std::size_t i = 0; i < convs.size(); ++i) {
      x = checkpointed
              ? recompute::checkpoint([this, i](const at::Tensor& y) { return block(i, y); }, x)
              : block(i, x);
    }
    return head(x.mean({2, 3}));
  }
};
TORCH_MODULE(NormNet);

// The gradients of a window of three micro-batches.
std::vector<at::Tensor> window_of(NormNet& net, const WindowOptions& options, bool checkpointed) {
  torch::manual_seed(3);
  GradientWindow window(net->parameters(), options);
  for (int part = 0; part < 3; ++part) {
    const auto x = torch::randn({part + 2, 4, 16, 16}).to(net->head->weight.scalar_type());
    window.backward(net(x, checkpointed).to(at::kFloat).pow(2).mean(), part + 2);
  }
  window.finish();
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : net->parameters()) {
    gradients.push_back(options.fp32_gradients ? window.wide_gradient(parameter).clone()
                                               : parameter.grad().clone());
  }
  net->zero_grad();
  return gradients;
}

void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
}

NormNet made() {
  torch::manual_seed(2);
  return NormNet();
}

TEST(CompositionTest, GroupNormGuardWithCheckpointsEqualsItWithout) {
  NormNet net = made();
  const GroupNormGuard guard(*net, 2);
  const WindowOptions options{.micro_batches = 3};
  const auto expected = window_of(net, options, false);
  EXPECT_EQ(guard.calls(), 9);
  expect_equal(window_of(net, options, true), expected);
  EXPECT_EQ(guard.calls(), 9 + 18) << "and once more when a block runs again";
}

TEST(CompositionTest, GroupNormGuardUnderABudgetEqualsItWithout) {
  NormNet net = made();
  const WindowOptions options{.micro_batches = 3};
  base::MemoryTracker& tracker = base::MemoryTracker::install();
  for (const bool budget_first : {false, true}) {
    SCOPED_TRACE(budget_first);
    std::vector<at::Tensor> expected;
    std::int64_t peak = 0;
    {
      const GroupNormGuard guard(*net, 2);
      tracker.reset_peak();
      expected = window_of(net, options, false);
      peak = tracker.peak().total();
    }
    const std::int64_t live = tracker.live().total();
    std::optional<GroupNormGuard> guard;
    if (!budget_first) guard.emplace(*net, 2);
    const recompute::MemoryBudget budget({.limit_bytes = live + (peak - live) * 7 / 10});
    if (budget_first) guard.emplace(*net, 2);
    expect_equal(window_of(net, options, false), expected);
    EXPECT_GT(budget.statistics().evicted, 0);
    EXPECT_EQ(guard->calls(), 9);
    guard.reset();
  }
}

TEST(CompositionTest, Fp32GradientsOfABf16ModelUnderCheckpointsAreTheSame) {
  NormNet net = made();
  net->to(at::kBFloat16);
  const WindowOptions options{.micro_batches = 3, .fp32_gradients = true};
  const GroupNormGuard guard(*net, 2);
  const auto expected = window_of(net, options, false);
  EXPECT_EQ(expected.front().scalar_type(), at::kFloat);
  expect_equal(window_of(net, options, true), expected);
}

TEST(CompositionTest, ABudgetFitsALargerMicroBatchUnderTheSameLimit) {
  NormNet net = made();
  base::MemoryTracker& tracker = base::MemoryTracker::install();
  const auto loss_of = [&](std::int64_t size) {
    return net(torch::randn({size, 4, 16, 16}), false).pow(2).mean();
  };
  loss_of(2).backward();
  net->zero_grad();
  tracker.reset_peak();
  loss_of(6).backward();
  loss_of(6).backward();
  const std::int64_t limit = tracker.peak().total();
  net->zero_grad();
  const auto plain = find_micro_batch(*net, loss_of, {.largest = 64, .limit_bytes = limit});
  EXPECT_EQ(plain.size, 6);
  const recompute::MemoryBudget budget({.limit_bytes = limit});
  const auto found = find_micro_batch(*net, loss_of, {.largest = 64});
  EXPECT_GT(found.size, plain.size);
  EXPECT_LE(found.peak_bytes, limit);
}

}  // namespace
}  // namespace gradus::accumulate
