#include <gradus/optim/in_backward.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/accumulate/local_steps.h>
#include <gradus/accumulate/window.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/optim/adafactor.h>
#include <gradus/optim/adam.h>
#include <gradus/optim/adam_mini.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/came.h>
#include <gradus/optim/clip.h>
#include <gradus/optim/eight_bit.h>
#include <gradus/optim/lamb.h>
#include <gradus/optim/lars.h>
#include <gradus/optim/muon.h>
#include <gradus/optim/sgd.h>
#include <gradus/recompute/checkpoint.h>

#include <tests/support/message_of.h>

namespace gradus::optim {
namespace {

using testing::HasSubstr;
using tests::message_of;

using Factory = std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor>)>;

std::vector<std::pair<std::string, Factory>> every_optimizer() {
  return {
      {"adamw", [](auto p) { return std::make_unique<AdamW>(p, AdamWOptions{.lr = 0.01}); }},
      {"sgd",
       [](auto p) { return std::make_unique<SGD>(p, SGDOptions{.lr = 0.01, .momentum = 0.9}); }},
      {"lamb", [](auto p) { return std::make_unique<Lamb>(p, LambOptions{.lr = 0.01}); }},
      {"lars", [](auto p) { return std::make_unique<Lars>(p, LarsOptions{.lr = 0.1}); }},
      {"came", [](auto p) { return std::make_unique<Came>(p, CameOptions{.lr = 0.01}); }},
      {"adam_mini", [](auto p) { return std::make_unique<AdamMini>(p, AdamMiniOptions{}); }},
      {"adam", [](auto p) { return std::make_unique<Adam>(p, AdamOptions{}); }},
      {"adafactor", [](auto p) { return std::make_unique<Adafactor>(p, AdafactorOptions{}); }},
      {"adam8bit",
       [](auto p) { return std::make_unique<Adam8bit>(p, Adam8bitOptions{.min_values = 8}); }},
      {"sgd8bit",
       [](auto p) { return std::make_unique<SGD8bit>(p, SGD8bitOptions{.min_values = 8}); }},
      {"muon_with_adamw", [](auto p) {
         return std::make_unique<MuonWithAdamW>(
             muon_groups({{"a", p[0]}, {"b", p[1]}, {"c", p[2]}}));
       }}};
}

// Two layers, the second used twice, and a parameter that only odd batches use.
struct Net {
  at::Tensor first, shared, rare;

  explicit Net(int seed) {
    torch::manual_seed(seed);
    first = (torch::randn({6, 5}) * 0.5).requires_grad_();
    shared = (torch::randn({6, 6}) * 0.5).requires_grad_();
    rare = torch::randn({6}).requires_grad_();
  }
  std::vector<at::Tensor> parameters() const { return {first, shared, rare}; }

  at::Tensor loss(int batch) const {
    const auto x = torch::linspace(-1, 1, 20).view({4, 5}) * (batch + 1);
    auto h = torch::mm(x, first.t()).tanh();
    h = torch::mm(torch::mm(h, shared).tanh(), shared);
    if (batch % 2 == 1) h = h * rare;
    return h.square().mean();
  }
};

void expect_equal(const Net& a, const Net& b) {
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(torch::equal(a.parameters()[i], b.parameters()[i])) << "parameter " << i;
  }
}

void expect_equal_state(const Optimizer& a, const Optimizer& b) {
  const auto one = a.state();
  const auto two = b.state();
  ASSERT_EQ(one.size(), two.size());
  for (std::size_t i = 0; i < one.size(); ++i) {
    EXPECT_EQ(one[i].name, two[i].name);
    EXPECT_TRUE(torch::equal(one[i].tensor, two[i].tensor)) << one[i].name;
  }
}

TEST(InBackwardTest, EveryOptimizerEndsBitwiseWhereItDoesAfterBackward) {
  for (const auto& [name, make] : every_optimizer()) {
    SCOPED_TRACE(name);
    const Net plain(1), fused(1);
    const auto after = make(plain.parameters());
    const auto during = make(fused.parameters());
    OptimizerInBackward in_backward(*during);
    for (int batch = 0; batch < 4; ++batch) {
      for (auto* optimizer : {after.get(), during.get()}) {
        optimizer->set_learning_rate(0.01 * (batch + 1));
      }
      plain.loss(batch).backward();
      after->step();
      after->zero_grad();
      fused.loss(batch).backward();
      for (const auto& parameter : fused.parameters()) EXPECT_FALSE(parameter.grad().defined());
      const auto result = in_backward.step();
      EXPECT_EQ(result.updated, batch % 2 == 1 ? 3 : 2);
      EXPECT_EQ(result.in_backward, result.updated);
    }
    expect_equal(plain, fused);
    expect_equal_state(*after, *during);
  }
}

TEST(InBackwardTest, SharedParameterStepsOnceAfterTheWholeSum) {
  const Net net(2);
  SGD optimizer({net.shared}, {.lr = 1.0});
  OptimizerInBackward in_backward(optimizer);
  const auto before = net.shared.detach().clone();
  const auto gradient = torch::autograd::grad({net.loss(0)}, {net.shared})[0];
  net.loss(0).backward();
  EXPECT_TRUE(torch::equal(net.shared.detach(), before - gradient));
  EXPECT_EQ(in_backward.step().in_backward, 1);
}

TEST(InBackwardTest, GradientsNeverExistAllAtOnce) {
  auto& tracker = base::MemoryTracker::install();
  constexpr int kLayers = 24;
  constexpr std::int64_t kWidth = 128;
  constexpr std::int64_t kLayerBytes = kWidth * kWidth * 4;
  const auto peak_over_start = [&](bool in_backward) {
    torch::manual_seed(3);
    std::vector<at::Tensor> layers;
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back((torch::randn({kWidth, kWidth}) * 0.05).requires_grad_());
    }
    SGD optimizer(layers, {.lr = 0.1});
    std::optional<OptimizerInBackward> wrapper;
    if (in_backward) wrapper.emplace(optimizer);
    auto h = torch::randn({2, kWidth});  // activations are small beside a layer
    for (const auto& layer : layers) h = torch::mm(h, layer).tanh();
    const auto loss = h.square().mean();
    const auto start = tracker.live().total();
    tracker.reset_peak();
    loss.backward();
    const auto peak = tracker.peak().total() - start;
    if (in_backward) {
      EXPECT_EQ(wrapper->step().in_backward, kLayers);
    } else {
      optimizer.step();
    }
    return peak;
  };
  // Less than all of them only by the activations that backward frees meanwhile.
  EXPECT_GE(peak_over_start(false), (kLayers - 1) * kLayerBytes);
  // The gradient at hand, and one more for whatever is made of it.
  EXPECT_LE(peak_over_start(true), 2 * kLayerBytes);
}

TEST(InBackwardTest, UndeclaredAccumulationIsAnErrorAndNotASecondStep) {
  const Net net(4);
  SGD optimizer(net.parameters(), {.lr = 0.1});
  OptimizerInBackward in_backward(optimizer);
  net.loss(1).backward();
  std::vector<at::Tensor> once;
  for (const auto& parameter : net.parameters()) once.push_back(parameter.detach().clone());
  EXPECT_THAT(
      message_of([&] { net.loss(1).backward(); }),
      HasSubstr("must get one gradient a step; got another after it was updated. Call step() "
                "after each backward pass; to accumulate over several, set accumulation"));
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(torch::equal(net.parameters()[i].detach(), once[i]));
  }
  EXPECT_THAT(message_of([&] { in_backward.step(); }), HasSubstr("Call reset()"));
  in_backward.reset();
  net.loss(1).backward();
  EXPECT_EQ(in_backward.step().updated, 3);
}

TEST(InBackwardTest, DeclaredAccumulationStepsInTheLastPassOnly) {
  const Net plain(5), fused(5);
  AdamW after(plain.parameters(), {.lr = 0.1});
  AdamW during(fused.parameters(), {.lr = 0.1});
  OptimizerInBackward in_backward(during, {.accumulation = true});
  for (int window = 0; window < 2; ++window) {
    for (int micro = 0; micro < 3; ++micro) {
      // Batch 1 is the only one that uses `rare`: it is left for step().
      plain.loss(micro).backward();
      if (micro == 2) in_backward.begin_last_pass();
      fused.loss(micro).backward();
      if (micro < 2) EXPECT_EQ(during.state().size(), window == 0 ? 0 : 9);
      EXPECT_EQ(fused.first.grad().defined(), micro < 2);
    }
    after.step();
    after.zero_grad();
    const auto result = in_backward.step();
    EXPECT_EQ(result.updated, 3);
    EXPECT_EQ(result.in_backward, 2);
    EXPECT_FALSE(fused.rare.grad().defined());
  }
  expect_equal(plain, fused);
}

TEST(InBackwardTest, WindowWhoseLastPassWasNotDeclaredIsSteppedAtItsEnd) {
  const Net plain(6), fused(6);
  AdamW after(plain.parameters());
  AdamW during(fused.parameters());
  OptimizerInBackward in_backward(during, {.accumulation = true});
  for (int micro = 0; micro < 2; ++micro) {
    plain.loss(micro).backward();
    fused.loss(micro).backward();
  }
  after.step();
  const auto result = in_backward.step();
  EXPECT_EQ(result.updated, 3);
  EXPECT_EQ(result.in_backward, 0);
  expect_equal(plain, fused);
}

TEST(InBackwardTest, ClippingByValueAndAConstantLossScaleCompose) {
  const Net plain(7), fused(7);
  SGD after(plain.parameters(), {.lr = 0.1});
  SGD during(fused.parameters(), {.lr = 0.1});
  OptimizerInBackward in_backward(during,
                                  {.clip_value = 0.01, .loss_scale = 64.0, .measure_norm = true});
  for (int batch = 0; batch < 3; ++batch) {
    (plain.loss(batch) * 64.0).backward();
    scale_gradients(plain.parameters(), 1.0 / 64.0);
    const double norm = gradient_norm(plain.parameters());
    clip_gradient_value(plain.parameters(), 0.01);
    after.step();
    after.zero_grad();
    (fused.loss(batch) * 64.0).backward();
    EXPECT_NEAR(in_backward.step().gradient_norm.value(), norm, 1e-6 * norm);
  }
  expect_equal(plain, fused);
}

TEST(InBackwardTest, ClippingByNormTakesTwoPassesAndEqualsThePlainLoop) {
  const Net plain(8), fused(8);
  AdamW after(plain.parameters(), {.lr = 0.1});
  AdamW during(fused.parameters(), {.lr = 0.1});
  OptimizerInBackward in_backward(during, {.clip_norm = 0.1});
  const auto other = torch::ones({1}, torch::requires_grad());  // a leaf of somebody else
  for (int batch = 0; batch < 4; ++batch) {
    (plain.loss(batch) * 20).backward();
    const double norm = clip_gradient_norm(plain.parameters(), 0.1);
    EXPECT_GT(norm, 0.1);
    after.step();
    after.zero_grad();
    in_backward.backward(fused.loss(batch) * 20 + other.sum());
    const auto result = in_backward.step();
    EXPECT_EQ(result.in_backward, batch % 2 == 1 ? 3 : 2);
    EXPECT_NEAR(result.gradient_norm.value(), norm, 1e-6 * norm);
  }
  expect_equal(plain, fused);
  EXPECT_EQ(other.grad().item<float>(), 4.0F);  // once a batch, although backward ran twice
  const auto before = fused.first.detach().clone();
  EXPECT_THAT(message_of([&] { fused.loss(0).backward(); }),
              HasSubstr("must be run by OptimizerInBackward::backward(loss)"));
  EXPECT_TRUE(torch::equal(fused.first.detach(), before));
}

TEST(InBackwardTest, WhatCannotWorkIsRefusedByNameBeforeTraining) {
  const Net net(9);
  SGD optimizer(net.parameters(), {.lr = 0.1});
  const auto refused = [&](const InBackwardOptions& options) {
    return message_of([&] { const OptimizerInBackward wrapper(optimizer, options); });
  };
  EXPECT_THAT(refused({.accumulation = true, .clip_norm = 1.0}),
              HasSubstr("clip_norm must not be combined with accumulation"));
  EXPECT_THAT(refused({.clip_norm = -1.0}), HasSubstr("clip_norm must be >= 0; got -1"));
  EXPECT_THAT(refused({.clip_value = -1.0}),
              HasSubstr("clip_value must be finite and >= 0; got -1"));
  EXPECT_THAT(refused({.loss_scale = 0.0}), HasSubstr("loss_scale must be finite and > 0; got 0"));
  optimizer.set_non_finite_policy(NonFinitePolicy::skip);
  EXPECT_THAT(refused({}), HasSubstr("the optimizer 'sgd' must not have NonFinitePolicy::skip"));
  optimizer.set_non_finite_policy(NonFinitePolicy::pass);
  net.loss(0).backward();
  EXPECT_THAT(refused({}), HasSubstr("parameter '0' must not have a gradient yet"));
  optimizer.zero_grad();

  SGD other({net.shared}, {.lr = 0.1});
  const OptimizerInBackward wrapper(optimizer);
  EXPECT_THAT(refused({}), HasSubstr("must be held by one OptimizerInBackward"));
  EXPECT_THAT(message_of([&] { const OptimizerInBackward second(other); }),
              HasSubstr("parameter '0' must be stepped in backward by one optimizer"));
  EXPECT_FALSE(other.steps_in_backward());
}

TEST(InBackwardTest, WhatNeedsGradientsAfterBackwardIsRefusedWhileItLives) {
  const Net net(10);
  SGD optimizer(net.parameters(), {.lr = 0.1});
  {
    const OptimizerInBackward wrapper(optimizer);
    EXPECT_TRUE(optimizer.steps_in_backward());
    EXPECT_TRUE(steps_in_backward(net.first));
    const std::string clip = "parameter 0 must keep its gradient until after backward";
    EXPECT_THAT(message_of([&] { clip_gradient_norm(net.parameters(), 1.0); }), HasSubstr(clip));
    EXPECT_THAT(message_of([&] { clip_gradient_value(net.parameters(), 1.0); }), HasSubstr(clip));
    EXPECT_THAT(message_of([&] { gradient_norm(net.parameters()); }), HasSubstr(clip));
    EXPECT_THAT(message_of([&] { optimizer.step(); }),
                HasSubstr("call the OptimizerInBackward's step()"));
    EXPECT_THAT(message_of([&] { optimizer.set_non_finite_policy(NonFinitePolicy::skip); }),
                HasSubstr("cannot skip a step in backward"));
    EXPECT_THAT(message_of([&] {
                  optimizer.add_group({.parameters = {torch::ones({1}, torch::requires_grad())}});
                }),
                HasSubstr("groups must be added before"));
  }
  EXPECT_FALSE(optimizer.steps_in_backward());
  EXPECT_FALSE(steps_in_backward(net.first));
  net.loss(0).backward();
  EXPECT_TRUE(net.first.grad().defined());
  EXPECT_GT(clip_gradient_norm(net.parameters(), 1.0), 0.0);
  EXPECT_EQ(optimizer.step().updated, 2);
}

TEST(InBackwardTest, GradientThatIsNotFiniteIsRefusedByNameIfAskedFor) {
  for (const bool two_passes : {false, true}) {
    SCOPED_TRACE(two_passes);
    const Net net(11);
    SGD optimizer(net.parameters(), {.lr = 0.1});
    optimizer.set_non_finite_policy(NonFinitePolicy::refuse);
    OptimizerInBackward in_backward(
        optimizer, {.clip_norm = two_passes ? std::optional<double>(1.0) : std::nullopt});
    const auto before = net.shared.detach().clone();
    const auto bad = net.loss(0) * std::numeric_limits<double>::quiet_NaN();
    EXPECT_THAT(message_of([&] { in_backward.backward(bad); }), HasSubstr("must be finite"));
    EXPECT_TRUE(torch::equal(net.shared.detach(), before));
    in_backward.reset();
    in_backward.backward(net.loss(0));
    EXPECT_EQ(in_backward.step().updated, 2);
  }
}

TEST(InBackwardTest, FrozenParameterThatIsThawedLaterIsUpdatedAtTheEndOfTheStep) {
  Net net(12);
  net.first.requires_grad_(false);
  SGD optimizer(net.parameters(), {.lr = 0.1});
  OptimizerInBackward in_backward(optimizer);
  net.loss(0).backward();
  EXPECT_EQ(in_backward.step().updated, 1);
  net.first.requires_grad_(true);
  net.loss(0).backward();
  const auto result = in_backward.step();
  EXPECT_EQ(result.updated, 2);
  EXPECT_EQ(result.in_backward, 1);
}

TEST(InBackwardTest, StateIsSavedAndLoadedThroughTheOptimizer) {
  const Net plain(13), fused(13);
  AdamW after(plain.parameters());
  plain.loss(1).backward();
  after.step();
  after.zero_grad();
  std::vector<NamedState> saved;
  for (const auto& entry : after.state()) saved.push_back({entry.name, entry.tensor.clone()});
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < 3; ++i) fused.parameters()[i].copy_(plain.parameters()[i]);
  }
  AdamW during(fused.parameters());
  OptimizerInBackward in_backward(during);
  during.load_state(saved);
  plain.loss(0).backward();
  after.step();
  fused.loss(0).backward();
  in_backward.step();
  expect_equal(plain, fused);
  expect_equal_state(after, during);
}

TEST(InBackwardTest, AccumulationWindowAnnouncesItsLastPass) {
  const Net plain(14), fused(14);
  AdamW after(plain.parameters());
  AdamW during(fused.parameters());
  OptimizerInBackward in_backward(during, {.accumulation = true});
  using accumulate::GradientWindow;
  const auto options = [](std::function<void(bool)> before) {
    return accumulate::WindowOptions{.micro_batches = 3,
                                     .normalisation = accumulate::Normalisation::mean,
                                     .hooks = {.before_backward = std::move(before)}};
  };
  GradientWindow plain_window(plain.parameters(), options({}));
  GradientWindow fused_window(fused.parameters(), options([&](bool last) {
                                if (last) in_backward.begin_last_pass();
                              }));
  for (int window = 0; window < 2; ++window) {
    for (int micro = 0; micro < 3; ++micro) {
      plain_window.backward(plain.loss(micro));
      fused_window.backward(fused.loss(micro));
    }
    plain_window.finish();
    after.step();
    after.zero_grad();
    fused_window.finish();
    EXPECT_EQ(in_backward.step().in_backward, 2);
  }
  expect_equal(plain, fused);
}

// The parameter after a window whose optimizer steps in backward, or after it.
struct WindowRun {
  accumulate::WindowOptions options{};
  std::vector<std::pair<double, double>> losses{};  // slope and weight
  bool announced = true;                            // that the last one is
};

double stepped(const WindowRun& run, bool in_backward, bool window_first, bool two_parameters) {
  const auto w = torch::zeros({}, at::kDouble).requires_grad_();
  const auto rare = torch::zeros({}, at::kDouble).requires_grad_();  // not in the last pass
  SGD optimizer({w, rare}, {.lr = 1.0});
  std::optional<accumulate::GradientWindow> window;
  std::optional<OptimizerInBackward> wrapper;
  if (window_first) window.emplace(std::vector<at::Tensor>{w, rare}, run.options);
  if (in_backward) wrapper.emplace(optimizer, InBackwardOptions{.accumulation = true});
  if (!window_first) window.emplace(std::vector<at::Tensor>{w, rare}, run.options);
  for (int round = 0; round < 2; ++round) {
    for (std::size_t i = 0; i < run.losses.size(); ++i) {
      const bool last = i + 1 == run.losses.size();
      const auto [slope, weight] = run.losses[i];
      auto loss = w * slope;
      if (two_parameters && !last) loss = loss + rare * slope;
      window->backward(loss, weight, {.last = last && run.announced});
    }
    if (in_backward) {
      EXPECT_THAT(message_of([&] { wrapper->step(); }), HasSubstr("must come after finish()"));
    }
    window->finish();
    if (in_backward) {
      EXPECT_EQ(wrapper->step().updated, two_parameters ? 2 : 1);
    } else {
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  return w.item<double>() + 1000 * rare.item<double>();
}

TEST(InBackwardTest, WindowsOfEveryNormalisationStepAsAfterBackward) {
  using accumulate::Normalisation;
  const std::vector<WindowRun> runs{
      {{.micro_batches = 2, .normalisation = Normalisation::mean}, {{2, 1}, {6, 1}}},
      {{.micro_batches = 2, .normalisation = Normalisation::sum}, {{2, 1}, {6, 1}}},
      // A window of one, of two that hold four: partial, announced and not.
      {{.micro_batches = 2, .normalisation = Normalisation::mean}, {{5, 1}}},
      {{.micro_batches = 2, .normalisation = Normalisation::mean}, {{5, 1}}, false},
      {{.micro_batches = 4, .normalisation = Normalisation::mean}, {{5, 1}, {3, 1}}, false},
      {{.micro_batches = 2}, {{1, 4}, {5, 1}}},
      {{.micro_batches = 3}, {{1, 4}, {5, 1}}, false},
      {{.micro_batches = 1}, {{5, 3}}},
      {{.micro_batches = 2, .total_weight = 5.0}, {{1, 4}, {5, 1}}},
      {{.micro_batches = 2, .total_weight = 7.0}, {{1, 4}, {5, 1}}},
      {{.micro_batches = 3}, {{1, 1}, {5, 1000}, {2, 7}}},
      {{.normalisation = Normalisation::examples, .effective_batch = 5}, {{1, 4}, {5, 1}}},
      {{.normalisation = Normalisation::examples, .effective_batch = 9}, {{1, 4}, {5, 1}}, false}};
  for (std::size_t i = 0; i < runs.size(); ++i) {
    for (const bool window_first : {false, true}) {
      for (const bool two : {false, true}) {
        if (two && runs[i].losses.size() == 1) continue;
        SCOPED_TRACE(testing::Message() << "run " << i << " two parameters " << two);
        EXPECT_DOUBLE_EQ(stepped(runs[i], true, window_first, two),
                         stepped(runs[i], false, window_first, two));
      }
    }
  }
  // Token losses of slope 1 (four) and 5 (one): 9 / 5 a round.
  EXPECT_DOUBLE_EQ(stepped(runs[5], true, true, false), -2 * 1.8);
  EXPECT_DOUBLE_EQ(stepped(runs[2], true, true, false), -2 * 5.0);
}

TEST(InBackwardTest, WindowsThatNeedGradientsAfterBackwardAreRefusedByNameBeforeTraining) {
  using accumulate::GradientWindow;
  const auto w = torch::ones({1}, torch::requires_grad());
  SGD optimizer({w}, {.lr = 1.0});
  {
    const GradientWindow window({w}, {.micro_batches = 2});
    for (const InBackwardOptions& options : {InBackwardOptions{}, {.clip_norm = 1.0}}) {
      EXPECT_THAT(message_of([&] { const OptimizerInBackward wrapper(optimizer, options); }),
                  HasSubstr("several micro-batches, each of which would step"));
    }
    EXPECT_FALSE(optimizer.steps_in_backward());
    EXPECT_FALSE(steps_in_backward(w));
  }
  {
    const OptimizerInBackward wrapper(optimizer);
    EXPECT_THAT(message_of([&] { const GradientWindow window({w}, {.micro_batches = 2}); }),
                HasSubstr("several micro-batches, each of which would step"));
    EXPECT_THAT(message_of([&] {
                  const accumulate::LocalSteps steps({w}, {.steps = 2, .learning_rate = 0.1});
                }),
                HasSubstr("LocalSteps sums up gradients after backward"));
  }
  const OptimizerInBackward wrapper(optimizer, {.accumulation = true});
  EXPECT_THAT(message_of([&] { const GradientWindow window({w}, {.fp32_gradients = true}); }),
              HasSubstr("fp32_gradients"));
  EXPECT_THAT(message_of([&] { const GradientWindow window({w}, {.skip_non_finite = true}); }),
              HasSubstr("skip_non_finite"));
}

TEST(InBackwardTest, StepThatTheWindowDoesNotExpectIsRefusedWithNothingUpdated) {
  const auto w = torch::zeros({}, at::kDouble).requires_grad_();
  SGD optimizer({w}, {.lr = 1.0});
  OptimizerInBackward wrapper(optimizer, {.accumulation = true});
  accumulate::GradientWindow window({w}, {.micro_batches = 3});
  const std::string refusal = "must step in the last backward pass of its GradientWindow";
  window.backward(w * 5);
  wrapper.begin_last_pass();
  EXPECT_THAT(message_of([&] { window.backward(w * 5); }), HasSubstr(refusal));
  window.reset();
  wrapper.reset();
  window.backward(w * 5);
  wrapper.begin_last_pass();
  EXPECT_THAT(message_of([&] { (w * 5).backward(); }), HasSubstr(refusal)) << "outside the window";
  EXPECT_EQ(w.item<double>(), 0.0);
  window.reset();
  wrapper.reset();
  window.backward(w * 5, 1.0, {.last = true});
  window.finish();
  EXPECT_EQ(wrapper.step().in_backward, 1);
  EXPECT_EQ(w.item<double>(), -5.0);
}

// A block of two matrices, the second of which is updated before the gradient of the first is made.
at::Tensor block(const at::Tensor& h, const at::Tensor& first, const at::Tensor& second) {
  return torch::mm(torch::mm(h, first).tanh(), second).tanh();
}

TEST(InBackwardTest, RecomputedBlocksStepAsPlainOnes) {
  for (const bool reentrant : {false, true}) {
    SCOPED_TRACE(reentrant);
    const auto train = [&](bool special) {
      torch::manual_seed(15);
      std::vector<at::Tensor> layers;
      for (int i = 0; i < 6; ++i) layers.push_back(torch::randn({5, 5}).requires_grad_());
      AdamW optimizer(layers, {.lr = 0.05});
      std::optional<OptimizerInBackward> wrapper;
      if (special) wrapper.emplace(optimizer);
      for (int step = 0; step < 3; ++step) {
        auto h = torch::linspace(-1, 1, 15).view({3, 5}).requires_grad_();
        for (std::size_t i = 0; i < layers.size(); i += 2) {
          if (special) {
            h = recompute::checkpoint(
                {.reentrant = reentrant},
                [a = layers[i], b = layers[i + 1]](const at::Tensor& x) { return block(x, a, b); },
                h);
          } else {
            h = block(h, layers[i], layers[i + 1]);
          }
        }
        h.square().mean().backward();
        if (special) {
          EXPECT_EQ(wrapper->step().in_backward, 6);
        } else {
          optimizer.step();
          optimizer.zero_grad();
        }
      }
      return layers;
    };
    const auto plain = train(false);
    const auto special = train(true);
    for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(torch::equal(plain[i], special[i]));
  }
}

TEST(InBackwardTest, ParameterThatTwoReentrantBlocksShareIsAnErrorAndNotTwoSteps) {
  torch::manual_seed(16);
  auto w = torch::randn({5, 5}).requires_grad_();
  auto h = torch::randn({3, 5}).requires_grad_();
  const auto loss = [&] {
    const auto run = [&](const at::Tensor& x) {
      return recompute::checkpoint(
          {.reentrant = true}, [w](const at::Tensor& y) { return torch::mm(y, w).tanh(); }, x);
    };
    return run(run(h)).sum();
  };
  SGD optimizer({w}, {.lr = 0.1});
  {
    // The first block's second run would read the weight that the second block's gradient changed.
    const OptimizerInBackward in_backward(optimizer);
    EXPECT_THAT(message_of([&] { loss().backward(); }),
                HasSubstr("what a checkpointed region reads must not change before backward"));
  }
  optimizer.zero_grad();
  const auto before = w.detach().clone();
  OptimizerInBackward in_backward(optimizer, {.clip_norm = 1.0});
  EXPECT_THAT(message_of([&] { in_backward.backward(loss()); }),
              HasSubstr("parameter '0' must get its gradient in one part"));
  EXPECT_TRUE(torch::equal(w.detach(), before));
}

}  // namespace
}  // namespace gradus::optim
