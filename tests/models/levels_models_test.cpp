// Transformers at each opt level: dtypes of every tensor, losses close to float32, and training
// under recomputation that is bit for bit that of the level alone.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/amp/levels/levels.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/models/gpt.h>
#include <gradus/models/transformer.h>
#include <gradus/optim/adamw.h>
#include <gradus/recompute/checkpoint.h>
#include <gradus/recompute/memory_budget.h>

namespace gradus {
namespace {

using amp::OptLevel;

constexpr auto kF = at::kFloat;
constexpr auto kH = at::kHalf;
constexpr auto kB = at::kBFloat16;

constexpr models::GptOptions kGpt{
    .vocabulary = 32, .context = 16, .layers = 3, .heads = 2, .width = 32};

// No overflow in the first step.
amp::LevelOptions level_options(OptLevel level) {
  return {.opt_level = level, .max_loss_scale = 1024.0};
}

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& ids) {
  return at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}).to(kF), ids.reshape({-1}));
}

TEST(LevelsModelsTest, EveryTensorOfAGptHasTheDtypeOfTheTable) {
  at::set_num_threads(1);
  struct Row {
    OptLevel level;
    at::ScalarType weight, embedded, block, target, gradient;
  };
  const std::vector<Row> table{
      {OptLevel::O0, kF, kF, kF, kF, kF},   {OptLevel::O1, kF, kF, kF, kF, kF},
      {OptLevel::O2, kH, kH, kH, kF, kH},   {OptLevel::O3, kH, kH, kH, kH, kH},
      {OptLevel::bf16, kB, kB, kB, kF, kB}, {OptLevel::bf16_stochastic, kB, kB, kB, kF, kB},
  };
  const auto ids = at::randint(0, 32, {2, 8}, at::kLong);
  for (const auto& row : table) {
    SCOPED_TRACE(std::string(name(row.level)));
    models::Gpt gpt(kGpt);
    auto amp = amp::initialize(*gpt, level_options(row.level));
    optim::AdamW optimizer(amp.parameters(*gpt), {.lr = 1e-2});
    const auto logits = amp.call(
        [&](const at::Tensor& tokens) {
          EXPECT_EQ(tokens.scalar_type(), at::kLong);  // integers stay
          auto x = gpt->embed(tokens);
          EXPECT_EQ(x.scalar_type(), row.embedded);
          for (const auto& block : gpt->blocks()) {
            x = block->forward(x);
            EXPECT_EQ(x.scalar_type(), row.block);
          }
          return gpt->head(x);
        },
        ids);
    EXPECT_EQ(logits.scalar_type(), row.level == OptLevel::O1 ? kH : kF);
    for (const auto& weight : gpt->parameters()) EXPECT_EQ(weight.scalar_type(), row.weight);
    amp::ScaledLoss scaled(amp, loss_of(logits, ids), {&optimizer});
    scaled.backward();
    for (const auto& weight : gpt->parameters()) {
      EXPECT_EQ(weight.grad().scalar_type(), row.gradient);
    }
    scaled.finish();
    EXPECT_TRUE(amp.step(optimizer));
    for (const auto& state : optimizer.state()) {
      if (state.tensor.dim() > 0) EXPECT_EQ(state.tensor.scalar_type(), row.target);
    }
  }
}

TEST(LevelsModelsTest, AnEncoderDecoderServesAtEachLevel) {
  at::set_num_threads(1);
  const models::TransformerOptions options{.source_vocabulary = 16,
                                           .target_vocabulary = 16,
                                           .context = 8,
                                           .encoder_layers = 1,
                                           .decoder_layers = 1,
                                           .heads = 2,
                                           .width = 8,
                                           .hidden = 16};
  torch::manual_seed(2);
  models::Transformer model(options);
  const auto source = at::randint(0, 16, {2, 5}, at::kLong);
  const auto padding = at::zeros({2, 5}, at::kBool);
  const at::NoGradGuard no_grad;
  const auto exact = model->forward(source, source, padding);
  for (const auto level : {OptLevel::O1, OptLevel::O2, OptLevel::O3, OptLevel::bf16}) {
    torch::manual_seed(2);
    models::Transformer cast(options);
    const auto amp = amp::initialize(*cast, {.opt_level = level, .inference = true});
    const auto out = amp.forward(cast, source, source, padding);
    EXPECT_TRUE(at::allclose(out.to(kF), exact, 0.03, 0.03)) << name(level);
  }
}

enum class Recomputation : std::uint8_t { none, checkpoint, budget };

// Weights and losses after a few steps.
struct Result {
  std::vector<double> losses;
  std::vector<std::pair<std::string, at::Tensor>> weights;
  std::int64_t peak = 0;  // Bytes above those of the model.
};

// @p limit is of a budget, above the model.
Result train(OptLevel level, int steps, Recomputation how = Recomputation::none,
             std::int64_t limit = 0) {
  auto& tracker = base::MemoryTracker::install();
  torch::manual_seed(4);
  models::Gpt gpt(kGpt);
  auto amp = amp::initialize(*gpt, level_options(level));
  optim::AdamW optimizer(amp.parameters(*gpt), {.lr = 3e-3});
  const auto ids = at::randint(0, 32, {8, 16}, at::kLong);
  std::optional<recompute::MemoryBudget> budget;
  if (how == Recomputation::budget) {
    budget.emplace(recompute::MemoryBudgetOptions{.limit_bytes = tracker.live().total() + limit});
  }
  Result result;
  const auto before = tracker.live().total();
  tracker.reset_peak();
  for (int i = 0; i < steps; ++i) {
    amp.zero_grad(optimizer);
    const auto logits = amp.call(
        [&](const at::Tensor& tokens) {
          auto x = gpt->embed(tokens);
          for (const auto& block : gpt->blocks()) {
            x = how == Recomputation::checkpoint
                    ? recompute::checkpoint(
                          {}, [block](const at::Tensor& t) { return block->forward(t); }, x)
                    : block->forward(x);
          }
          return gpt->head(x);
        },
        ids);
    const auto loss = loss_of(logits, ids);
    result.losses.push_back(loss.item<double>());
    amp::ScaledLoss scaled(amp, loss, {&optimizer});
    scaled.backward();
    scaled.finish();
    EXPECT_TRUE(amp.step(optimizer));
  }
  if (budget) EXPECT_GT(budget->statistics().replayed, 0) << name(level);
  result.peak = tracker.peak().total() - before;
  result.weights = amp.model_state(*gpt);
  return result;
}

TEST(LevelsModelsTest, TwentyStepsOfAGptEndCloseToFloat32) {
  at::set_num_threads(1);
  // float16 has 11 bits, bfloat16 8: a loss errs by some of these over the operators of a step.
  const double exact = train(OptLevel::O0, 20).losses.back();
  for (const auto& [level, bound] :
       {std::pair(OptLevel::O1, 0.01), std::pair(OptLevel::O2, 0.01),
        std::pair(OptLevel::bf16, 0.03), std::pair(OptLevel::bf16_stochastic, 0.03)}) {
    EXPECT_NEAR(train(level, 20).losses.back(), exact, bound * exact) << name(level);
  }
}

TEST(LevelsModelsTest, RecomputationChangesNoBit) {
  at::set_num_threads(1);
  for (const auto level : {OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3, OptLevel::bf16,
                           OptLevel::bf16_stochastic}) {
    const auto plain = train(level, 3);
    for (const auto how : {Recomputation::checkpoint, Recomputation::budget}) {
      const auto again = train(level, 3, how, plain.peak * 9 / 10);
      EXPECT_EQ(plain.losses, again.losses) << name(level);
      for (std::size_t i = 0; i < plain.weights.size(); ++i) {
        EXPECT_TRUE(plain.weights[i].second.equal(again.weights[i].second))
            << name(level) << " " << plain.weights[i].first;
      }
    }
  }
}

}  // namespace
}  // namespace gradus
