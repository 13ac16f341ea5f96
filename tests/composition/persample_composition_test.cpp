// Per-sample gradients with what decides about activations and precisions: the same numbers as
// without it.

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/compress/policy.h>
#include <gradus/offload/offload.h>
#include <gradus/persample/engine/sample_gradients.h>
#include <gradus/persample/vmap/loop.h>
#include <gradus/plan/planned_budget.h>
#include <gradus/recompute/checkpoint.h>
#include <gradus/recompute/memory_budget.h>

namespace gradus::persample {
namespace {

using at::Tensor;
namespace nn = torch::nn;

constexpr std::int64_t kExamples = 8, kSteps = 24, kWidth = 32;
constexpr int kBlocks = 6;

enum class Recompute : std::uint8_t { no, checkpoint, reentrant };

struct Block : nn::Module {
  nn::LayerNorm norm{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
  nn::Dropout dropout{nullptr};
  Block() {
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    up = register_module("up", nn::Linear(kWidth, 4 * kWidth));
    down = register_module("down", nn::Linear(4 * kWidth, kWidth));
    dropout = register_module("dropout", nn::Dropout(0.1));
  }
  // Many activations a weight: those alone can be dropped.
  Tensor forward(const Tensor& x) {
    const auto wide = at::gelu(at::tanh(at::sin(at::sigmoid(at::sin(at::gelu(up(norm(x))))))));
    return x + dropout(down(wide));
  }
};

struct Network : nn::Module {
  nn::Embedding tokens{nullptr};
  nn::Conv1d convolution{nullptr};
  std::vector<std::shared_ptr<Block>> blocks{};
  nn::LSTM memory{nullptr};
  nn::Linear head{nullptr};
  Recompute recompute = Recompute::no;

  Network() {
    tokens = register_module("tokens", nn::Embedding(50, kWidth));
    convolution =
        register_module("convolution", nn::Conv1d(nn::Conv1dOptions(kWidth, kWidth, 3).padding(1)));
    for (int i = 0; i < kBlocks; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<Block>()));
    memory = register_module("memory", nn::LSTM(nn::LSTMOptions(kWidth, kWidth).batch_first(true)));
    head = register_module("head", nn::Linear(kWidth, 50));
  }
  Tensor losses(const Batch& batch) {
    auto x = tokens(batch[0]);
    x = x + convolution(x.transpose(1, 2)).transpose(1, 2);
    for (const auto& block : blocks) {
      const auto run = [block](const Tensor& in) { return block->forward(in); };
      if (recompute == Recompute::no) {
        x = run(x);
      } else {
        x = recompute::checkpoint(
            recompute::CheckpointOptions{.reentrant = recompute == Recompute::reentrant}, run, x);
      }
    }
    x = std::get<0>(memory(x));
    return at::cross_entropy_loss(head(x).transpose(1, 2).to(at::kFloat), batch[1], {},
                                  at::Reduction::None)
        .mean(1);
  }
};

struct Outcome {
  std::vector<Tensor> norms{};  // by step
  std::vector<Tensor> weights{};
  std::int64_t peak_bytes = 0;  // of the steps, the first with its examination
  std::int64_t resting_bytes = 0;
  std::vector<std::string> lines{};
};

// A few steps of clipped gradient descent; @p around lives for the whole run.
Outcome run(Recompute recompute, const std::function<std::shared_ptr<void>()>& around = nullptr) {
  auto& tracker = base::MemoryTracker::install();
  torch::manual_seed(3);
  at::set_num_threads(1);
  auto network = std::make_shared<Network>();
  network->recompute = recompute;
  Outcome outcome;
  // Choices by counted operations: two runs are then equal bit for bit.
  SampleOptions options{.graph = {.reproducible = true}};
  options.log = [&](const std::string& line) { outcome.lines.push_back(line); };
  SampleGradients table(network, options);
  const std::shared_ptr<void> held = around ? around() : nullptr;
  for (int step = 0; step < 4; ++step) {
    const Batch batch{at::randint(50, {kExamples, kSteps}), at::randint(50, {kExamples, kSteps})};
    outcome.resting_bytes = std::max(outcome.resting_bytes, tracker.live().total());
    tracker.reset_peak();
    table.backward([&](const Batch& b) { return network->losses(b); }, batch);
    outcome.norms.push_back(table.norms());
    const Tensor weights = (1.0 / table.norms()).clamp_max(1.0) / static_cast<double>(kExamples);
    const auto sums = table.weighted_sums(weights);
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < sums.size(); ++i) table.parameters()[i].tensor.sub_(sums[i], 0.5);
    outcome.peak_bytes = std::max(outcome.peak_bytes, tracker.peak().total());
  }
  for (const auto& each : network->parameters()) outcome.weights.push_back(each.detach().clone());
  return outcome;
}

void expect_same(const Outcome& got, const Outcome& want) {
  EXPECT_TRUE(got.lines.empty()) << got.lines.front();
  for (std::size_t i = 0; i < want.norms.size(); ++i)
    EXPECT_TRUE(got.norms[i].equal(want.norms[i])) << i;
  for (std::size_t i = 0; i < want.weights.size(); ++i)
    EXPECT_TRUE(got.weights[i].equal(want.weights[i])) << i;
}

TEST(PersampleCompositionTest, CheckpointedBlocksAreEqualBitForBit) {  // P23
  const Outcome plain = run(Recompute::no);
  EXPECT_TRUE(plain.lines.empty());
  expect_same(run(Recompute::checkpoint), plain);
}

TEST(PersampleCompositionTest, BlocksThatHideTheirGraphFallBackAndAreRight) {  // P23
  const Outcome plain = run(Recompute::no);
  auto network = std::make_shared<Network>();
  network->eval();
  network->recompute = Recompute::reentrant;
  std::vector<std::string> lines;
  SampleOptions options;
  options.log = [&](const std::string& line) { lines.push_back(line); };
  SampleGradients table(network, options);
  const Batch batch{at::randint(50, {4, kSteps}), at::randint(50, {4, kSteps})};
  const LossFunction loss = [&](const Batch& b) { return network->losses(b); };
  network->recompute = Recompute::no;
  const auto want = loop_gradients(parameters_of(*network), loss, batch);
  network->recompute = Recompute::reentrant;
  try {
    table.backward(loss, batch);
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("reentrant"), std::string::npos) << error.what();
    return;
  }
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double scale = want[i].norm().item<double>() + 1e-3;
    EXPECT_LE((table.gradients(i) - want[i]).norm().item<double>(), 1e-4 * scale)
        << table.parameters()[i].name;
  }
  EXPECT_FALSE(lines.empty());
}

TEST(PersampleCompositionTest, MemoryBudgetsAreEqualBitForBit) {
  const Outcome plain = run(Recompute::no);
  const std::int64_t limit =
      plain.resting_bytes + (plain.peak_bytes - plain.resting_bytes) * 85 / 100;
  {
    SCOPED_TRACE("online");
    const Outcome got = run(Recompute::no, [&] {
      return std::make_shared<recompute::MemoryBudget>(
          recompute::MemoryBudgetOptions{.limit_bytes = limit});
    });
    expect_same(got, plain);
    EXPECT_LE(got.peak_bytes, limit);
  }
  {
    SCOPED_TRACE("planned");
    const Outcome got = run(Recompute::no, [&] {
      return std::make_shared<plan::PlannedBudget>(
          plan::PlannedBudgetOptions{.limit_bytes = limit});
    });
    expect_same(got, plain);
    EXPECT_LE(got.peak_bytes, limit);
  }
}

TEST(PersampleCompositionTest, OffloadAndLosslessCompressionAreEqualBitForBit) {
  const Outcome plain = run(Recompute::no);
  offload::OffloadOptions to_host;
  to_host.target = offload::Target::host;
  expect_same(run(Recompute::no, [&] { return std::make_shared<offload::OffloadGuard>(to_host); }),
              plain);
  expect_same(run(Recompute::no, [] { return std::make_shared<compress::CompressGuard>(); }),
              plain);
}

TEST(PersampleCompositionTest, AutocastKeepsNormsAndSumsInFloat) {  // P16
  const auto run_in = [](std::optional<at::ScalarType> type) {
    torch::manual_seed(5);
    nn::Sequential model(nn::Linear(32, 32), nn::LayerNorm(nn::LayerNormOptions({32})),
                         nn::Linear(32, 10));
    std::vector<std::string> lines;
    SampleOptions options;
    options.log = [&](const std::string& line) { lines.push_back(line); };
    SampleGradients table(model.ptr(), options);
    table.backward(
        [&](const Batch& b) {
          std::optional<amp::AutocastGuard> autocast;
          if (type) autocast.emplace(amp::AutocastOptions{.dtype = type});
          return at::cross_entropy_loss(model->forward(b[0]).to(at::kFloat), b[1], {},
                                        at::Reduction::None);
        },
        {at::randn({16, 32}), at::randint(10, {16})});
    for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(table.gradients(i).scalar_type(), at::kFloat);
    return std::make_pair(table.norms(), lines);
  };
  const auto [exact, none] = run_in(std::nullopt);
  const auto [rounded, lines] = run_in(at::kBFloat16);
  EXPECT_TRUE(none.empty());
  EXPECT_LE(((rounded - exact).norm() / exact.norm()).item<double>(), 1e-2);
}

TEST(PersampleCompositionTest, SumsReadInsideAnAutocastRegionAreInFloat) {
  torch::manual_seed(5);
  nn::Linear layer(64, 64);
  SampleGradients table(layer.ptr());
  table.backward([&](const Batch& b) { return layer(b[0]).square().flatten(1).sum(1); },
                 {at::randn({8, 3, 64})});
  const Tensor weights = at::linspace(0.1, 1, 8);
  const Tensor outside = table.weighted_sum(0, weights);
  const amp::AutocastGuard autocast({.dtype = at::kBFloat16});
  EXPECT_TRUE(table.weighted_sum(0, weights).equal(outside));
}

}  // namespace
}  // namespace gradus::persample
