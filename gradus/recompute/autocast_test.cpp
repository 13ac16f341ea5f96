// Recomputation under gradus's autocast: bit-equal to the same training without recomputation.

#include <gradus/amp/autocast/autocast.h>

#include <functional>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/memory_tracker.h>
#include <gradus/recompute/checkpoint.h>
#include <gradus/recompute/memory_budget.h>
#include <gradus/recompute/run_difference.h>
#include <gradus/recompute/selective.h>

namespace gradus::recompute {
namespace {

struct Kind {
  const char* name;
  amp::AutocastOptions options;
};

std::vector<Kind> kinds() {
  return {
      {"bf16", {.dtype = at::kBFloat16}},
      {"fp16 rounded", {.dtype = at::kHalf, .arithmetic = amp::Arithmetic::rounded}},
      {"fp16 native", {.dtype = at::kHalf, .arithmetic = amp::Arithmetic::native}},
  };
}

// Attention and a feed-forward layer whose weight is used twice, once transposed.
struct Block {
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({16})};
  torch::nn::Linear qkv{16, 48}, proj{16, 16}, feed{16, 16};

  at::Tensor operator()(at::Tensor x) const {
    const auto B = x.size(0), T = x.size(1);
    const auto h =
        at::linear(at::layer_norm(x, {16}, norm->weight, norm->bias), qkv->weight, qkv->bias);
    const auto parts = h.view({B, T, 3, 2, 8}).permute({2, 0, 3, 1, 4}).unbind();
    const auto mixed =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    x = x + at::linear(mixed.transpose(1, 2).reshape({B, T, 16}), proj->weight, proj->bias);
    const auto y = at::dropout(at::gelu(at::linear(x, feed->weight, feed->bias)), 0.1, true);
    return x + at::matmul(y, feed->weight);
  }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const auto& layer : {qkv, proj, feed}) {
      all.insert(all.end(), {layer->weight, layer->bias});
    }
    all.push_back(norm->weight);
    return all;
  }
};

std::vector<at::Tensor> train(amp::AutocastOptions options, bool backward_inside, int blocks,
                              const std::function<at::Tensor(const Block&, at::Tensor)>& run,
                              std::int64_t batch = 2) {
  torch::manual_seed(3);
  std::vector<Block> net(static_cast<std::size_t>(blocks));
  auto x = torch::randn({batch, 8, 16}).requires_grad_();
  at::Tensor y = x * 1;
  {
    const amp::AutocastGuard guard(options);
    at::linear(x, net[0].qkv->weight);  // the cache may know a weight already
    for (const Block& block : net) y = run(block, y);
    y = y.to(at::kFloat).pow(2).sum();
    if (backward_inside) y.backward();
  }
  if (!backward_inside) y.backward();
  std::vector<at::Tensor> results{y.detach(), x.grad()};
  for (const Block& block : net)
    for (const auto& parameter : block.parameters()) results.push_back(parameter.grad());
  return results;
}

class RecomputeAutocastTest : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_F(RecomputeAutocastTest, CheckpointsOfBothFormsEqualPlain) {  // M7
  for (const Kind& kind : kinds()) {
    for (const bool reentrant : {false, true}) {
      for (const bool cache : {true, false}) {
        for (const bool inside : {true, false}) {
          SCOPED_TRACE(base::join(kind.name, reentrant ? ", reentrant" : "", cache ? ", cache" : "",
                                  inside ? ", backward inside" : ""));
          auto options = kind.options;
          options.cache = cache;
          EXPECT_EQ(difference([&](bool on) {
                      return train(options, inside, 2, [&](const Block& block, at::Tensor x) {
                        if (!on) return block(x);
                        return checkpoint(CheckpointOptions{.reentrant = reentrant}, block, x);
                      });
                    }),
                    "");
        }
      }
    }
  }
}

TEST_F(RecomputeAutocastTest, SelectivePoliciesEqualPlain) {
  for (const Kind& kind : kinds()) {
    for (const auto& [name, policy] : {std::pair("products", save_matrix_products()),
                                       std::pair("attention", recompute_attention()),
                                       std::pair("pointwise", recompute_pointwise())}) {
      SCOPED_TRACE(base::join(kind.name, ", ", name));
      EXPECT_EQ(difference([&](bool on) {
                  return train(kind.options, false, 2, [&](const Block& block, at::Tensor x) {
                    return on ? checkpoint({.selective = policy}, block, x) : block(x);
                  });
                }),
                "");
    }
  }
}

TEST_F(RecomputeAutocastTest, AnotherRegionInsideTheCheckpointIsRunAgainToo) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    EXPECT_EQ(difference([&](bool on) {
                return train(kind.options, false, 1, [&](const Block& block, at::Tensor x) {
                  const auto fn = [block](at::Tensor v) {
                    {
                      const amp::AutocastGuard off({.enabled = false});
                      v = block(v.to(at::kFloat));
                    }
                    return block(v);
                  };
                  return on ? checkpoint(fn, x) : fn(x);
                });
              }),
              "");
  }
}

TEST_F(RecomputeAutocastTest, BudgetsEqualPlainAndAreKept) {
  auto& tracker = base::MemoryTracker::install();
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const auto step = [&] {
      torch::manual_seed(11);
      return train(
          kind.options, false, 6, [](const Block& block, at::Tensor x) { return block(x); }, 16);
    };
    step();  // warm
    const auto live = tracker.live().total();
    tracker.reset_peak();
    const auto plain = step();
    const auto peak = tracker.peak().total() - live;
    for (const double share : {0.8, 0.6}) {
      SCOPED_TRACE(share);
      const auto bytes = static_cast<std::int64_t>(share * static_cast<double>(peak));
      const auto before = tracker.live().total();
      std::vector<at::Tensor> limited;
      {
        MemoryBudget budget(MemoryBudgetOptions{.limit_bytes = before + bytes});
        tracker.reset_peak();
        limited = step();
        EXPECT_LE(tracker.peak().total() - before, bytes);
        EXPECT_GT(budget.statistics().replayed, 0);
      }
      ASSERT_EQ(limited.size(), plain.size());
      for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(limited[i].equal(plain[i])) << i;
    }
  }
}

}  // namespace
}  // namespace gradus::recompute
