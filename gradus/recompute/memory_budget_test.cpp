#include <gradus/recompute/memory_budget.h>

#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>
#include <gradus/recompute/checkpoint.h>
#include <gradus/recompute/random_program.h>

namespace gradus::recompute {
namespace {

using testing::HasSubstr;

// One training step: returns the tensors to compare. Makes its own leaves, the same every time.
using Step = std::function<std::vector<at::Tensor>()>;

struct Outcome {
  std::vector<at::Tensor> results;
  at::Tensor next_random;
  std::int64_t peak = 0;  // above what was live before
  BudgetStatistics statistics;
};

class MemoryBudgetTest : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }

  Outcome run(const Step& step, std::optional<std::int64_t> budget_bytes = std::nullopt) {
    torch::manual_seed(11);
    Outcome outcome;
    const std::int64_t live = tracker.live().total();
    std::optional<MemoryBudget> budget;
    if (budget_bytes) budget.emplace(MemoryBudgetOptions{.limit_bytes = live + *budget_bytes});
    tracker.reset_peak();
    outcome.results = step();
    outcome.peak = tracker.peak().total() - live;
    outcome.next_random = torch::rand({3});
    if (budget) outcome.statistics = budget->statistics();
    return outcome;
  }

  // Plain against shares of the plain peak, down to the given one: bit-equal, and inside the
  // budget.
  void expect_equal_down_to(const Step& step, double least_share) {
    run(step);  // warm
    const Outcome plain = run(step);
    for (const double share : {1.0, 0.75, 0.5, 0.35, 0.25}) {
      if (share < least_share) break;
      SCOPED_TRACE("share " + std::to_string(share));
      const auto budget = static_cast<std::int64_t>(share * static_cast<double>(plain.peak));
      const Outcome limited = run(step, budget);
      EXPECT_LE(limited.peak, budget);
      if (share < 0.9) EXPECT_GT(limited.statistics.replayed, 0);
      ASSERT_EQ(limited.results.size(), plain.results.size());
      for (std::size_t i = 0; i < plain.results.size(); ++i) {
        ASSERT_EQ(plain.results[i].defined(), limited.results[i].defined()) << i;
        if (plain.results[i].defined())
          EXPECT_TRUE(same_bits(plain.results[i], limited.results[i])) << i;
      }
      EXPECT_TRUE(limited.next_random.equal(plain.next_random));
    }
  }

  base::MemoryTracker& tracker = base::MemoryTracker::install();
};

template <typename Module>
std::vector<at::Tensor> gradients(const Module& module) {
  std::vector<at::Tensor> result;
  for (const auto& p : module->parameters()) result.push_back(p.grad());
  for (const auto& b : module->buffers()) result.push_back(b.clone());
  return result;
}

TEST_F(MemoryBudgetTest, ADeepChainEqualsPlainAtAQuarterOfThePeak) {
  expect_equal_down_to(
      [] {
        torch::manual_seed(1);
        auto x = torch::randn({64, 256}).requires_grad_();
        auto y = x;
        for (int i = 0; i < 40; ++i) y = at::dropout(y.tanh().sin(), 0.1, true);
        y.pow(2).sum().backward();
        return std::vector<at::Tensor>{x.grad()};
      },
      0.25);
}

TEST_F(MemoryBudgetTest, AnMlpWithNormAndDropoutEqualsPlain) {
  expect_equal_down_to(
      [] {
        torch::manual_seed(1);
        torch::nn::Sequential net;
        for (int i = 0; i < 12; ++i) {
          net->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})));
          net->push_back(torch::nn::Linear(32, 128));
          net->push_back(torch::nn::GELU());
          net->push_back(torch::nn::Dropout(0.2));
          net->push_back(torch::nn::Linear(128, 32));
          net->push_back(torch::nn::Tanh());
        }
        net->forward(torch::randn({512, 32})).pow(2).mean().backward();
        return gradients(net);
      },
      0.25);
}

TEST_F(MemoryBudgetTest, AConvolutionNetWithBatchNormInPlaceReluAndSkipsEqualsPlain) {
  expect_equal_down_to(
      [] {
        torch::manual_seed(1);
        struct Net : torch::nn::Module {
          std::vector<torch::nn::Conv2d> convs;
          std::vector<torch::nn::BatchNorm2d> norms;
          Net() {
            for (int i = 0; i < 8; ++i) {
              convs.push_back(
                  register_module("c" + std::to_string(i),
                                  torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 8, 3).padding(1))));
              norms.push_back(register_module("n" + std::to_string(i), torch::nn::BatchNorm2d(8)));
            }
          }
          at::Tensor forward(at::Tensor x) {
            for (std::size_t i = 0; i < convs.size(); i += 2) {
              auto y = norms[i](convs[i](x)).relu_();
              y = norms[i + 1](convs[i + 1](y));
              y += x;
              x = at::relu_(y);
            }
            return at::max_pool2d(x, {2, 2});
          }
        };
        auto net = std::make_shared<Net>();
        net->forward(torch::randn({8, 8, 24, 24})).pow(2).mean().backward();
        return gradients(net);
      },
      0.5);
}

TEST_F(MemoryBudgetTest, RecurrentAndAttentionModulesEqualPlain) {
  expect_equal_down_to(
      [] {
        torch::manual_seed(1);
        torch::nn::LSTM lstm(16, 16);
        torch::nn::GRU gru(16, 16);
        torch::nn::MultiheadAttention attention(16, 2);
        auto x = torch::randn({24, 8, 16}).requires_grad_();
        auto h = std::get<0>(gru(std::get<0>(lstm(x))));
        auto y = std::get<0>(attention(h, h, h));
        y.pow(2).sum().backward();
        auto result = gradients(lstm);
        for (auto& g : gradients(gru)) result.push_back(g);
        for (auto& g : gradients(attention)) result.push_back(g);
        result.push_back(x.grad());
        return result;
      },
      1.0);
}

TEST_F(MemoryBudgetTest, AnInPlaceProductSavesACloneOfWhatItOverwrites) {
  // The clone is made inside mul_; the clone's input is gone when it has to be made again.
  expect_equal_down_to(
      [] {
        torch::manual_seed(1);
        auto x = torch::randn({64, 64}).requires_grad_();
        auto y = x;
        for (int i = 0; i < 20; ++i) {
          const auto factor = y.sigmoid();
          y = (y.tanh() + 0.1).mul_(factor);
        }
        y.sum().backward();
        return std::vector<at::Tensor>{x.grad()};
      },
      0.35);
}

TEST_F(MemoryBudgetTest, AttentionWithDropoutEqualsPlain) {
  expect_equal_down_to(
      [] {
        torch::manual_seed(1);
        auto q = torch::randn({2, 4, 48, 16}).requires_grad_();
        auto h = q;
        for (int i = 0; i < 4; ++i)
          h = at::scaled_dot_product_attention(h, h, h, {}, 0.1, true) + h;
        h.pow(2).sum().backward();
        return std::vector<at::Tensor>{q.grad()};
      },
      0.5);
}

TEST_F(MemoryBudgetTest, AutocastEqualsPlain) {
  expect_equal_down_to(
      [] {
        torch::manual_seed(1);
        torch::nn::Sequential net;
        for (int i = 0; i < 10; ++i) {
          net->push_back(torch::nn::Linear(64, 64));
          net->push_back(torch::nn::GELU());
        }
        at::Tensor loss;
        {
          const amp::AutocastGuard guard({.dtype = at::kBFloat16});
          loss = net->forward(torch::randn({256, 64})).to(at::kFloat).pow(2).mean();
          loss.backward();
        }
        return gradients(net);
      },
      0.5);
}

TEST_F(MemoryBudgetTest, AProgramWithViewsInPlaceWritesAndSharedTensorsEqualsPlain) {
  expect_equal_down_to(
      [] {
        torch::manual_seed(1);
        auto w = torch::randn({64, 64}).requires_grad_();
        auto x = torch::randn({64, 64});
        auto buffer = torch::zeros({64, 64});
        auto y = at::mm(x, w);
        for (int i = 0; i < 10; ++i) {
          auto z = at::mm(y, w).sigmoid() * 1;
          z.narrow(0, 0, 8).mul_(2);
          auto parts = z.split(32, 1);
          y = at::cat({parts[1], parts[0]}, 1).sin() + buffer;
          {
            at::NoGradGuard no_grad;
            buffer.narrow(1, 0, 16).add_(y.detach().narrow(1, 0, 16));
          }
          y = y.index({torch::arange(63, -1, -1)}).t().contiguous();
        }
        y.pow(2).sum().backward();
        return std::vector<at::Tensor>{w.grad(), buffer};
      },
      0.75);
}

TEST_F(MemoryBudgetTest, ACustomGeneratorDrawsTheSameNumbersAgain) {
  expect_equal_down_to(
      [] {
        torch::manual_seed(1);
        auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
        auto x = torch::randn({64, 64}).requires_grad_();
        auto y = x;
        for (int i = 0; i < 12; ++i) {
          y = (y * torch::empty({64, 64}).bernoulli_(0.5, generator)).exp().sin();
        }
        y.sum().backward();
        return std::vector<at::Tensor>{x.grad(), torch::rand({2}, generator, at::TensorOptions())};
      },
      0.75);
}

TEST_F(MemoryBudgetTest, RetainGraphGivesTheSameGradientsTwice) {
  expect_equal_down_to(
      [] {
        torch::manual_seed(1);
        auto x = torch::randn({64, 256}).requires_grad_();
        auto y = x;
        for (int i = 0; i < 20; ++i) y = y.tanh().sin();
        auto loss = y.sum();
        y.reset();
        loss.backward({}, true);
        auto first = x.grad().clone();
        loss.backward();
        return std::vector<at::Tensor>{first, x.grad()};
      },
      0.35);
}

TEST_F(MemoryBudgetTest, DoubleBackwardEqualsPlain) {
  expect_equal_down_to(
      [] {
        torch::manual_seed(1);
        auto x = torch::randn({64, 64}, at::kDouble).requires_grad_();
        auto y = x;
        for (int i = 0; i < 10; ++i) y = (y * 0.9).tanh();
        auto g = torch::autograd::grad({y.sum()}, {x}, {}, true, true)[0];
        (g.pow(2).sum() + y.sum()).backward();
        return std::vector<at::Tensor>{x.grad()};
      },
      1.0);
}

TEST_F(MemoryBudgetTest, NestsWithManualCheckpoints) {
  expect_equal_down_to(
      [] {
        torch::manual_seed(1);
        auto x = torch::randn({64, 256}).requires_grad_();
        auto y = x;
        for (int i = 0; i < 8; ++i) {
          y = y.sin();
          y = checkpoint([](at::Tensor v) { return at::dropout(v.tanh().exp(), 0.1, true).sin(); },
                         y);
          y = y.tanh().cos();
        }
        y.sum().backward();
        return std::vector<at::Tensor>{x.grad()};
      },
      0.5);
}

TEST_F(MemoryBudgetTest, SeveralStepsUnderOneBudgetDoNotGrow) {
  torch::manual_seed(1);
  torch::nn::Sequential net;
  for (int i = 0; i < 10; ++i) {
    net->push_back(torch::nn::Linear(64, 64));
    net->push_back(torch::nn::BatchNorm1d(64));
    net->push_back(torch::nn::GELU());
  }
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(1e-3));
  at::Tensor carried = torch::zeros({256, 64});
  const auto step = [&] {
    optimizer.zero_grad();
    auto y = net->forward(torch::randn({256, 64}) + carried);
    y.pow(2).mean().backward();
    optimizer.step();
    carried = y.detach() * 0.5;
  };
  step();
  tracker.reset_peak();
  const auto live = tracker.live().total();
  step();
  const auto plain = tracker.peak().total() - live;
  const MemoryBudget budget({.limit_bytes = live + plain / 2});
  std::int64_t after = 0;
  for (int i = 0; i < 12; ++i) {
    step();
    if (i == 2) after = tracker.live().total();
    if (i > 2) EXPECT_EQ(tracker.live().total(), after) << i;
  }
  EXPECT_GT(budget.statistics().evicted, 0);
}

TEST_F(MemoryBudgetTest, AnInPlaceStepAfterBackwardCopiesNoWeight) {
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 12; ++i) weights.push_back(torch::randn({64, 64}));
  const auto live = tracker.live().total();
  const MemoryBudget budget({.limit_bytes = live + 150000});  // less than the weights' 196608
  at::_foreach_mul_(weights, 0.5);
  for (auto& w : weights) w.add_(1);
  // The values made before still serve as inputs afterwards.
  auto x = torch::randn({64, 64}).requires_grad_();
  auto scale = torch::full({64, 64}, 2.0);
  auto scaled = scale.sin();
  scale.mul_(3);
  auto y = x;
  for (int i = 0; i < 12; ++i) y = (y * scaled).tanh();
  y.sum().backward();
  EXPECT_GT(budget.statistics().evicted, 0);
  EXPECT_TRUE(x.grad().defined());
}

TEST_F(MemoryBudgetTest, AGraphThatIsDroppedLeaksNothing) {
  auto w = torch::randn({100, 100}).requires_grad_();
  const auto live = tracker.live().total();
  {
    const MemoryBudget budget({.limit_bytes = live + 200000});
    for (int i = 0; i < 5; ++i) {
      auto y = w;
      for (int k = 0; k < 20; ++k) y = y.tanh();
    }
  }
  EXPECT_EQ(tracker.live().total(), live);
}

TEST_F(MemoryBudgetTest, ATensorChangedInPlaceAfterItsUseIsReplayedAsItWas) {
  expect_equal_down_to(
      [] {
        torch::manual_seed(1);
        auto w = torch::randn({64, 64}).requires_grad_();
        auto bias = torch::randn({64, 64});
        auto y = w;
        for (int i = 0; i < 20; ++i) y = (y + bias).tanh().sin();
        auto loss = y.sum();
        y.reset();
        bias.mul_(2);
        loss.backward();
        return std::vector<at::Tensor>{w.grad(), bias};
      },
      0.5);
}

TEST_F(MemoryBudgetTest, AnOutsideTensorChangedBehindTheBudgetsBackIsAnErrorThatNamesIt) {
  auto w = torch::randn({64, 64}).requires_grad_();
  auto bias = torch::randn({64, 64});
  const base::NamedTensors names({{"bias", bias}});
  const MemoryBudget budget({.limit_bytes = tracker.live().total() + 200000});
  auto y = w;
  for (int i = 0; i < 20; ++i) y = (y + bias).tanh().sin();
  auto loss = y.sum();
  y.reset();
  ASSERT_GT(budget.statistics().evicted, 0);
  std::thread([&] { bias.mul_(2); }).join();
  try {
    loss.backward();
    FAIL() << "no error";
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr("bias (Float [64, 64])"));
  }
}

TEST_F(MemoryBudgetTest, ABudgetBelowWhatOneOperatorNeedsIsAClearErrorAndTheProgramGoesOn) {
  auto w = torch::randn({100, 100}).requires_grad_();
  {
    const MemoryBudget budget({.limit_bytes = tracker.live().total() + 1000});
    EXPECT_THROW(at::mm(w, w), MemoryLimitError);
  }
  at::mm(w, w).sum().backward();
  EXPECT_TRUE(w.grad().defined());
  EXPECT_THROW(MemoryBudget({.limit_bytes = -1}), UserError);
}

TEST_F(MemoryBudgetTest, RandomProgramsEqualPlainAtRandomBudgets) {
  std::mt19937 random(3);
  int refused = 0;
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    const Step step = [&] { return random_program(seed); };
    const Outcome plain = run(step);
    const double share = 0.3 + 0.6 * static_cast<double>(random() % 1000) / 1000.0;
    Outcome limited;
    try {
      limited = run(step, static_cast<std::int64_t>(share * static_cast<double>(plain.peak)));
    } catch (const MemoryLimitError&) {
      ++refused;  // below the least this program needs: not wrong
      continue;
    }
    for (std::size_t i = 0; i < plain.results.size(); ++i) {
      ASSERT_TRUE(plain.results[i].defined() == limited.results[i].defined());
      if (plain.results[i].defined())
        ASSERT_TRUE(same_bits(plain.results[i], limited.results[i])) << i;
    }
    ASSERT_TRUE(limited.next_random.equal(plain.next_random));
  }
  EXPECT_LT(refused, 50);
}

}  // namespace
}  // namespace gradus::recompute
