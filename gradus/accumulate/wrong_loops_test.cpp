// The loops of docs/wrong_loops.md: what each wrong one gives, and the right one.

#include <cmath>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/accumulate/window.h>
#include <gradus/base/memory_tracker.h>

namespace gradus::accumulate {
namespace {

at::Tensor leaf(double value) { return torch::full({}, value, at::kDouble).requires_grad_(); }

// One weight w. A token's loss is value * w, so that its gradient is its value.
at::Tensor mean_loss(const at::Tensor& w, const std::vector<double>& tokens) {
  return (w * torch::tensor(tokens, at::kDouble)).mean();
}

double gradient_of(const at::Tensor& w) { return w.grad().item<double>(); }

// --- loss += loss / k ----------------------------------------------------------------------------

const std::vector<std::vector<double>> kFour{{1, 3}, {5, 7}, {2, 4}, {8, 10}};  // mean 5

TEST(WrongLoopsTest, UndividedLossesStepKTimesAsFar) {
  const auto w = leaf(1.0);
  for (const auto& tokens : kFour) mean_loss(w, tokens).backward();
  EXPECT_DOUBLE_EQ(gradient_of(w), 20.0) << "4 x 5";
}

TEST(WrongLoopsTest, BackwardOnTheRunningSumCountsEarlyMicroBatchesAgain) {
  // total += loss / k; total.backward(retain) in each turn: the first is counted four times.
  const auto w = leaf(1.0);
  at::Tensor total = torch::zeros({}, at::kDouble);
  for (const auto& tokens : kFour) {
    total = total + mean_loss(w, tokens) / 4.0;
    total.backward({}, /*retain_graph=*/true);
  }
  EXPECT_DOUBLE_EQ(gradient_of(w), (4 * 2.0 + 3 * 6.0 + 2 * 3.0 + 1 * 9.0) / 4.0);  // 10.25
}

TEST(WrongLoopsTest, OneBackwardOnTheSummedLossIsRightAndKeepsEveryGraph) {
  // loss += loss / k, backward once: the right number, and the memory of the whole batch.
  base::MemoryTracker& tracker = base::MemoryTracker::install();
  torch::manual_seed(1);
  auto w = torch::randn({16, 16}, at::kDouble).requires_grad_();
  const auto x = torch::randn({4096, 16}, at::kDouble);
  const auto loss = [&](std::int64_t part) {
    return x.narrow(0, 256 * part, 256).matmul(w).tanh().pow(2).mean();
  };
  const auto peak_of = [&](const auto& loop) {
    w.mutable_grad().reset();
    const std::int64_t before = tracker.live().total();
    tracker.reset_peak();
    loop();
    return tracker.peak().total() - before;
  };
  const auto summed = [&] {
    at::Tensor total = torch::zeros({}, at::kDouble);
    for (int part = 0; part < 16; ++part) total = total + loss(part) / 16.0;
    total.backward();
  };
  GradientWindow window({w}, {.micro_batches = 16, .normalisation = Normalisation::mean});
  const auto windowed = [&] {
    for (int part = 0; part < 16; ++part) window.backward(loss(part));
    window.finish();
  };
  const std::int64_t of_sum = peak_of(summed);
  const at::Tensor expected = w.grad().clone();
  const std::int64_t of_window = peak_of(windowed);
  EXPECT_LE((w.grad() - expected).abs().max().item<double>(), 1e-15);
  EXPECT_GT(static_cast<double>(of_sum), 3.0 * static_cast<double>(of_window))
      << of_sum << " against " << of_window;
}

TEST(WrongLoopsTest, WindowOfFourIsTheFullBatch) {
  const auto w = leaf(1.0);
  GradientWindow window({w}, {.micro_batches = 4});
  for (const auto& tokens : kFour) window.backward(mean_loss(w, tokens), 2);
  EXPECT_DOUBLE_EQ(window.finish().loss, 5.0);
  EXPECT_DOUBLE_EQ(gradient_of(w), 5.0);
}

// --- means of unequal micro-batches --------------------------------------------------------------

const std::vector<std::vector<double>> kUnequal{{1, 1, 1, 1}, {5}};

TEST(WrongLoopsTest, MeanOfMeansGivesTheShortMicroBatchFourTimesItsWeight) {
  const auto w = leaf(1.0);
  for (const auto& tokens : kUnequal) (mean_loss(w, tokens) / 2.0).backward();
  EXPECT_DOUBLE_EQ(gradient_of(w), 3.0);
}

TEST(WrongLoopsTest, WeightedByTokensItIsTheFullBatch) {
  const auto whole = leaf(1.0), w = leaf(1.0);
  mean_loss(whole, {1, 1, 1, 1, 5}).backward();
  GradientWindow window({w}, {.micro_batches = 2});
  for (const auto& tokens : kUnequal)
    window.backward(mean_loss(w, tokens), static_cast<double>(tokens.size()));
  window.finish();
  EXPECT_DOUBLE_EQ(gradient_of(w), 1.8);
  EXPECT_DOUBLE_EQ(gradient_of(w), gradient_of(whole));
}

// --- the partial window at an epoch's end --------------------------------------------------------

const std::vector<double> kEpoch{1, 3, 2, 4, 5};  // five micro-batches, windows of two

// One epoch after another with what the textbook loop does, a step on (i + 1) % 2 == 0; returns the
// gradients that it stepped with.
std::vector<double> leaking_epochs(int epochs) {
  const auto w = leaf(1.0);
  std::vector<double> steps;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (std::size_t i = 0; i < kEpoch.size(); ++i) {
      (mean_loss(w, {kEpoch[i]}) / 2.0).backward();
      if ((i + 1) % 2 != 0) continue;
      steps.push_back(gradient_of(w));
      w.mutable_grad().reset();
    }
  }
  return steps;
}

TEST(WrongLoopsTest, LeftoverOfAnEpochLeaksIntoTheNext) {
  // The next epoch's first step: (1 + 3) / 2, and half of the 5 that was left.
  EXPECT_THAT(leaking_epochs(2), testing::ElementsAre(2.0, 3.0, 4.5, 3.0));
}

TEST(WrongLoopsTest, SteppingOnTheLeftoverAsIfItWereFullHalvesIt) {
  const auto w = leaf(1.0);
  (mean_loss(w, {kEpoch.back()}) / 2.0).backward();
  EXPECT_DOUBLE_EQ(gradient_of(w), 2.5);
}

TEST(WrongLoopsTest, FinishingThePartialWindowStepsWithWhatItHolds) {
  const auto w = leaf(1.0);
  GradientWindow window({w}, {.micro_batches = 2});
  std::vector<double> steps;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (std::size_t i = 0; i < kEpoch.size(); ++i) {
      window.backward(mean_loss(w, {kEpoch[i]}), 1, {.last = i + 1 == kEpoch.size()});
      if (!window.full()) continue;
      window.finish();
      steps.push_back(gradient_of(w));
      w.mutable_grad().reset();
    }
  }
  EXPECT_THAT(steps, testing::ElementsAre(2.0, 3.0, 5.0, 2.0, 3.0, 5.0));
}

// --- clipping before unscaling -------------------------------------------------------------------

constexpr double kScale = 1024.0;

// The step of SGD with rate 1 from 0 on a gradient of (3, 4), clipped to norm 1.
template <typename Fn>
std::vector<double> step_with(const Fn& prepare) {
  auto p = torch::zeros({2}, at::kDouble).requires_grad_();
  torch::optim::SGD sgd({p}, torch::optim::SGDOptions(1.0));
  GradientWindow window({p}, {.micro_batches = 2,
                              .normalisation = Normalisation::mean,
                              .scale_loss = [](const at::Tensor& t) { return t * kScale; }});
  const auto slope = torch::tensor({3.0, 4.0}, at::kDouble);
  for (int i = 0; i < 2; ++i) window.backward((p * slope).sum());
  window.finish();
  prepare(p);
  sgd.step();
  return {p[0].item<double>(), p[1].item<double>()};
}

void unscale(const at::Tensor& p) { p.mutable_grad().mul_(1.0 / kScale); }
void clip_to_one(const at::Tensor& p) { torch::nn::utils::clip_grad_norm_({p}, 1.0); }

TEST(WrongLoopsTest, ClippingScaledGradientsAndUnscalingThemShrinksTheStepByTheScale) {
  const auto step = step_with([](const at::Tensor& p) {
    clip_to_one(p);
    unscale(p);
  });
  EXPECT_NEAR(step[0], -0.6 / kScale, 1e-8);
  EXPECT_NEAR(step[1], -0.8 / kScale, 1e-8);
}

TEST(WrongLoopsTest, ClippingInEachMicroBatchChangesTheDirection) {
  // Clipped one by one, (3, 4) and (0.3, -0.4) lose their proportion.
  const auto sum_of = [](bool each) {
    auto p = torch::zeros({2}, at::kDouble).requires_grad_();
    GradientWindow window({p}, {.micro_batches = 2, .normalisation = Normalisation::mean});
    auto total = torch::zeros({2}, at::kDouble);
    for (const auto& slope : {std::vector<double>{3.0, 4.0}, std::vector<double>{0.3, -0.4}}) {
      const auto loss = (p * torch::tensor(slope, at::kDouble)).sum();
      if (each) {
        loss.backward();
        clip_to_one(p);
        total += p.grad() / 2.0;
        p.mutable_grad().reset();
      } else {
        window.backward(loss);
      }
    }
    if (each) return total;
    window.finish();
    clip_to_one(p);
    return p.grad().clone();
  };
  const auto wrong = sum_of(true), right = sum_of(false);
  EXPECT_NEAR(wrong[0].item<double>(), 0.45, 1e-6);
  EXPECT_NEAR(wrong[1].item<double>(), 0.2, 1e-6);
  EXPECT_NEAR(right[0].item<double>(), 1.65 / std::hypot(1.65, 1.8), 1e-6);
  EXPECT_NEAR(right[1].item<double>(), 1.8 / std::hypot(1.65, 1.8), 1e-6);
}

TEST(WrongLoopsTest, UnscalingFirstClipsTheTrueGradient) {
  const auto step = step_with([](const at::Tensor& p) {
    unscale(p);
    clip_to_one(p);
  });
  EXPECT_NEAR(step[0], -0.6, 1e-6);
  EXPECT_NEAR(step[1], -0.8, 1e-6);
}

}  // namespace
}  // namespace gradus::accumulate
