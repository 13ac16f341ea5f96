// Precision levels and optimizers with recomputation, memory budgets and accumulation: a run with
// both equals the run without the second, bit for bit.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/accumulate/window.h>
#include <gradus/amp/levels/levels.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/optim/clip.h>
#include <gradus/plan/planned_budget.h>
#include <gradus/recompute/memory_budget.h>
#include <gradus/train/language_model.h>
#include <gradus/train/optimizers.h>
#include <gradus/train/precision.h>

namespace gradus::train {
namespace {

constexpr std::int64_t kBatch = 8;
constexpr std::int64_t kVocabulary = 64;
constexpr int kSteps = 4;

enum class Technique : std::uint8_t { plain, checkpoint, online_budget, planned_budget };

TrainConfig small_gpt(const std::string& precision, const std::string& optimizer) {
  TrainConfig config;
  config.model.layers = 3;
  config.model.heads = 2;
  config.model.width = 32;
  config.model.context = 24;
  config.model.dropout = 0.1;
  config.train.precision = precision;
  config.optimizer.kind = optimizer;
  return config;
}

struct Outcome {
  std::vector<std::pair<std::string, at::Tensor>> weights{};
  std::vector<double> losses{};
  std::vector<bool> stepped{};
  std::int64_t peak_bytes = 0;     // of the passes
  std::int64_t resting_bytes = 0;  // before a step, with the optimizer's state
  std::int64_t dropped = 0;        // values that the technique made again
};

// Trains a fresh GPT on the same random tokens. @p limit_bytes: of the budget techniques.
Outcome run(const TrainConfig& config, Technique technique, std::int64_t micro_batches,
            std::int64_t limit_bytes = 0) {
  auto& tracker = base::MemoryTracker::install();
  torch::manual_seed(11);
  models::Gpt gpt = make_gpt(config, kVocabulary);
  amp::Amp amp = amp::initialize(*gpt, precision_options(config));
  const auto optimizer = make_optimizer(config, amp, *gpt, 0.01);
  accumulate::WindowOptions options{.micro_batches = micro_batches};
  options.scale_loss = [&](const at::Tensor& seed) { return seed * amp.loss_scale(); };
  accumulate::GradientWindow window(amp.parameters(*gpt), options);
  const auto tokens = torch::randint(kVocabulary, {kSteps, kBatch, config.model.context + 1});

  std::optional<recompute::MemoryBudget> online;
  std::optional<plan::PlannedBudget> planned;
  if (technique == Technique::online_budget)
    online.emplace(recompute::MemoryBudgetOptions{.limit_bytes = limit_bytes});
  if (technique == Technique::planned_budget)
    planned.emplace(plan::PlannedBudgetOptions{.limit_bytes = limit_bytes});

  Outcome outcome;
  const std::int64_t size = kBatch / micro_batches;
  for (int step = 0; step < kSteps; ++step) {
    outcome.resting_bytes = std::max(outcome.resting_bytes, tracker.live().total());
    tracker.reset_peak();
    for (std::int64_t i = 0; i < micro_batches; ++i) {
      const auto rows = tokens[step].narrow(0, i * size, size);
      const at::Tensor loss = [&] {
        const amp::Region region = amp.region();
        return language_model_loss(*gpt, rows.slice(1, 0, -1), rows.slice(1, 1),
                                   technique == Technique::checkpoint ? config.model.layers : 0);
      }();
      amp::ScaledLoss scaled(amp, loss, {optimizer.get()},
                             {.delay_overflow_check = i + 1 < micro_batches});
      window.backward(loss, static_cast<double>(size));
      scaled.finish();
    }
    outcome.peak_bytes = std::max(outcome.peak_bytes, tracker.peak().total());
    outcome.losses.push_back(window.finish().loss);
    optim::clip_gradient_norm(amp.master_params(*optimizer), 1.0);
    outcome.stepped.push_back(amp.step(*optimizer));
    amp.zero_grad(*optimizer);
  }
  if (online) outcome.dropped = online->statistics().replayed;
  if (planned) outcome.dropped = planned->statistics().replayed;
  outcome.weights = amp.model_state(*gpt);
  return outcome;
}

void expect_same(const Outcome& expected, const Outcome& got) {
  EXPECT_EQ(got.losses, expected.losses);
  EXPECT_EQ(got.stepped, expected.stepped);
  ASSERT_EQ(got.weights.size(), expected.weights.size());
  for (std::size_t i = 0; i < expected.weights.size(); ++i) {
    EXPECT_TRUE(got.weights[i].second.equal(expected.weights[i].second))
        << expected.weights[i].first;
  }
}

// Every technique against plain, at one and at two micro-batches.
void expect_techniques_equal_plain(const TrainConfig& config) {
  for (const std::int64_t micro_batches : {1, 2}) {
    SCOPED_TRACE(testing::Message() << micro_batches << " micro-batches");
    const Outcome plain = run(config, Technique::plain, micro_batches);
    EXPECT_TRUE(plain.stepped.back()) << "the run must train";
    {
      SCOPED_TRACE("checkpoint");
      const Outcome got = run(config, Technique::checkpoint, micro_batches);
      expect_same(plain, got);
      EXPECT_LT(got.peak_bytes, plain.peak_bytes);
    }
    // Where weights have 16 bits, less of a step is activations, which alone can be dropped.
    const std::int64_t percent = config.train.precision.starts_with("bf16-") ? 85 : 70;
    const std::int64_t limit =
        plain.resting_bytes + (plain.peak_bytes - plain.resting_bytes) * percent / 100;
    for (const Technique technique : {Technique::online_budget, Technique::planned_budget}) {
      SCOPED_TRACE(technique == Technique::online_budget ? "online budget" : "planned budget");
      const Outcome got = run(config, technique, micro_batches, limit);
      expect_same(plain, got);
      EXPECT_LE(got.peak_bytes, limit);
      EXPECT_GT(got.dropped, 0);
    }
  }
}

class PrecisionCompositionTest : public testing::TestWithParam<std::string> {
 protected:
  PrecisionCompositionTest() { at::set_num_threads(1); }
};

TEST_P(PrecisionCompositionTest, EqualsItselfWhateverIsDroppedAndAccumulated) {
  expect_techniques_equal_plain(small_gpt(GetParam(), "adamw"));
}

std::string test_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  for (char& c : name) c = c == '-' ? '_' : c;
  return name;
}

INSTANTIATE_TEST_SUITE_P(All, PrecisionCompositionTest, testing::ValuesIn(precision_names()),
                         test_name);

class OptimizerCompositionTest : public PrecisionCompositionTest {};

TEST_P(OptimizerCompositionTest, EqualsItselfWhateverIsDroppedAndAccumulated) {
  expect_techniques_equal_plain(small_gpt("fp32", GetParam()));
}

// Master weights in float32 take any optimizer.
TEST_P(OptimizerCompositionTest, TrainsOnMasterWeights) {
  const Outcome got = run(small_gpt("O2", GetParam()), Technique::plain, 2);
  ASSERT_TRUE(got.stepped.back());
  const Outcome single = run(small_gpt("fp32", GetParam()), Technique::plain, 2);
  for (int step = 0; step < kSteps; ++step) {
    // Float16 rounds to 5e-4 of a value; four steps of 0.01 carry it through three blocks.
    EXPECT_NEAR(got.losses[step], single.losses[step], 2e-2 * single.losses[step]) << step;
  }
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerCompositionTest, testing::ValuesIn(optimizer_kinds()),
                         test_name);

// float32 sums in another order: two micro-batches against one, to rounding.
TEST(AccumulationCompositionTest, MicroBatchesEqualTheWholeBatchAtEachPrecision) {
  at::set_num_threads(1);
  for (const std::string& precision : precision_names()) {
    SCOPED_TRACE(precision);
    TrainConfig config = small_gpt(precision, "sgd");
    config.model.dropout = 0.0;
    const Outcome whole = run(config, Technique::plain, 1);
    const Outcome parts = run(config, Technique::plain, 4);
    // 16 bits: the gradient of each micro-batch is rounded by itself.
    const double bound = precision == "fp32" || precision == "O0" ? 1e-5 : 2e-2;
    EXPECT_EQ(parts.stepped, whole.stepped);
    for (int step = 0; step < kSteps; ++step)
      EXPECT_NEAR(parts.losses[step], whole.losses[step], bound * whole.losses[step]) << step;
  }
}

}  // namespace
}  // namespace gradus::train
