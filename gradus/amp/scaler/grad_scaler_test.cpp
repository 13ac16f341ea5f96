#include <gradus/amp/scaler/grad_scaler.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/accumulate/window.h>
#include <gradus/amp/autocast/autocast.h>
#include <gradus/base/error.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/clip.h>
#include <gradus/optim/sgd.h>

#include <tests/support/message_of.h>

namespace gradus::amp {
namespace {

using optim::SGD;
using testing::ElementsAre;
using testing::HasSubstr;
using tests::message_of;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

at::Tensor parameter(std::vector<double> values, at::ScalarType dtype = at::kFloat) {
  return torch::tensor(values, dtype).requires_grad_();
}

std::vector<double> values(const at::Tensor& tensor) {
  const auto flat = tensor.detach().to(at::kDouble).contiguous();
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

// One parameter with its SGD of rate 1.
struct Single {
  explicit Single(std::vector<double> start = {1.0})
      : p(parameter(std::move(start))), optimizer({p}, {.lr = 1.0}) {}
  void backward(GradScaler& scaler, double slope) { scaler.scale((p * slope).sum()).backward(); }
  at::Tensor p;
  SGD optimizer;
};

TEST(GradScalerTest, TwoLossesOverTwoModelsWithOneOptimizerUnscaledByHand) {
  const auto w0 = parameter({1.0});
  const auto w1 = parameter({3.0});
  SGD first({w0}, {.lr = 0.25});
  SGD second({w1}, {.lr = 0.25});
  GradScaler scaler({.init_scale = 1024.0, .growth_interval = 2});
  const auto o0 = w0 * 2.0;
  const auto o1 = w1 * 1.0;
  // Loss 0: (2*2 + 3*3)^2, slopes 52 and 78. Loss 1: (3*2 - 5*3)^2, slopes -54 and 90.
  scaler.scale((2 * o0 + 3 * o1).square().sum()).backward({}, true);
  scaler.scale((3 * o0 - 5 * o1).square().sum()).backward();
  scaler.unscale(first);
  EXPECT_THAT(values(w0.grad()), ElementsAre(-4.0));
  EXPECT_THAT(values(w1.grad()), ElementsAre(168.0 * 1024.0));
  EXPECT_TRUE(scaler.step(first));
  EXPECT_TRUE(scaler.step(second));
  scaler.update();
  EXPECT_THAT(values(w0), ElementsAre(2.0));
  EXPECT_THAT(values(w1), ElementsAre(-39.0));
  EXPECT_EQ(scaler.get_scale(), 1024.0);
  EXPECT_EQ(scaler.growth_tracker(), 1);
}

TEST(GradScalerTest, TheScaleStopsAtItsFloorAndParametersStayFinite) {
  Single model;
  GradScaler scaler;
  std::int64_t errors = 0;
  for (int i = 0; i < 200; ++i) {
    model.optimizer.zero_grad();
    model.backward(scaler, kNan);
    EXPECT_FALSE(scaler.step(model.optimizer));
    const auto message = message_of([&] { scaler.update(); });
    if (message == "no UserError") continue;
    ++errors;
    EXPECT_THAT(message, HasSubstr("reached its floor 1.52588e-05"));
    EXPECT_THAT(message, HasSubstr("the loss is NaN or infinite in every step"));
  }
  EXPECT_EQ(errors, 200 - 32);  // 65536 halved 32 times is 1 / 65536.
  EXPECT_EQ(scaler.get_scale(), 1.0 / 65536.0);
  EXPECT_THAT(values(model.p), ElementsAre(1.0));
  model.optimizer.zero_grad();
  model.backward(scaler, 0.5);
  EXPECT_TRUE(scaler.step(model.optimizer));
  scaler.update();
  EXPECT_THAT(values(model.p), ElementsAre(0.5));
}

TEST(GradScalerTest, AnOverflowSkipsItsOwnOptimizerOnly) {
  for (const double bad : {kInfinity, -kInfinity, kNan}) {
    Single good;
    Single overflowing;
    GradScaler scaler({.init_scale = 8.0});
    good.backward(scaler, 1.0);
    overflowing.backward(scaler, bad);
    EXPECT_TRUE(scaler.step(good.optimizer));
    EXPECT_FALSE(scaler.step(overflowing.optimizer));
    scaler.update();
    EXPECT_THAT(values(good.p), ElementsAre(0.0));
    EXPECT_THAT(values(overflowing.p), ElementsAre(1.0));
    EXPECT_EQ(scaler.get_scale(), 4.0);
    EXPECT_EQ(scaler.counts(good.optimizer).skipped, 0);
    EXPECT_EQ(scaler.counts(overflowing.optimizer).skip_rate(), 1.0);
    EXPECT_EQ(scaler.counts().skip_rate(), 0.5);
  }
}

TEST(GradScalerTest, SkipTogetherSkipsAllWhicheverOverflows) {
  for (const bool one_call : {true, false}) {
    for (const bool first_overflows : {true, false}) {
      Single a;
      Single b;
      GradScaler scaler({.init_scale = 8.0, .skip_together = true});
      a.backward(scaler, first_overflows ? kInfinity : 1.0);
      b.backward(scaler, first_overflows ? 1.0 : kInfinity);
      if (one_call) {
        const std::array<optim::Optimizer*, 2> both{&a.optimizer, &b.optimizer};
        EXPECT_THAT(scaler.step(both), ElementsAre(false, false));
      } else {
        scaler.unscale(a.optimizer);
        scaler.unscale(b.optimizer);
        EXPECT_FALSE(scaler.step(a.optimizer));
        EXPECT_FALSE(scaler.step(b.optimizer));
      }
      scaler.update();
      EXPECT_THAT(values(a.p), ElementsAre(1.0));
      EXPECT_THAT(values(b.p), ElementsAre(1.0));
      EXPECT_EQ(scaler.get_scale(), 4.0);
    }
  }
}

TEST(GradScalerTest, SkipTogetherRefusesAStepBeforeTheOthersAreUnscaled) {
  Single a;
  Single b;
  GradScaler scaler({.skip_together = true});
  a.backward(scaler, 1.0);
  b.backward(scaler, 1.0);
  scaler.step(a.optimizer);
  EXPECT_THAT(message_of([&] { scaler.step(b.optimizer); }),
              HasSubstr("with skip_together, optimizer 1"));
}

TEST(GradScalerTest, ClippingAfterUnscaleIsExact) {
  Single model({0.0, 0.0});
  GradScaler scaler({.init_scale = 1024.0});
  scaler.scale((model.p * torch::tensor({3.0F, 4.0F})).sum()).backward();
  scaler.unscale(model.optimizer);
  EXPECT_EQ(optim::clip_gradient_norm({model.p}, 1.0), 5.0);
  scaler.step(model.optimizer);
  scaler.update();
  EXPECT_NEAR(values(model.p)[0], -0.6, 1e-6);
  EXPECT_NEAR(values(model.p)[1], -0.8, 1e-6);
}

TEST(GradScalerTest, ClippingCannotHideAnOverflow) {
  Single model;
  GradScaler scaler;
  model.backward(scaler, kInfinity);
  scaler.unscale(model.optimizer);
  optim::clip_gradient_value({model.p}, 1.0);
  EXPECT_FALSE(scaler.step(model.optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 32768.0);
}

TEST(GradScalerTest, UnscalingMultipliesByTheInverseRoundedToFloat32) {
  auto gradients = std::vector{torch::tensor({1.0F, 999.0F, -5.5F})};
  const auto before = gradients.front().clone();
  EXPECT_EQ(unscale_gradients(gradients, 333.0).item<float>(), 0.0F);
  const auto inverse = torch::tensor(static_cast<float>(1.0 / 333.0));
  EXPECT_TRUE(torch::equal(gradients.front(), before * inverse));
}

TEST(GradScalerTest, MisuseIsOneClearErrorEach) {
  Single model;
  GradScaler scaler;
  EXPECT_THAT(message_of([&] { scaler.step(model.optimizer); }), HasSubstr("must have a gradient"));
  EXPECT_THAT(message_of([&] { scaler.update(); }), HasSubstr("update() must follow a step"));
  model.backward(scaler, 1.0);
  EXPECT_THAT(message_of([&] { scaler.update(); }), HasSubstr("inside an accumulation window"));
  EXPECT_THAT(message_of([&] { scaler.update(64.0); }), HasSubstr("inside an accumulation window"));
  scaler.unscale(model.optimizer);
  EXPECT_THAT(message_of([&] { scaler.unscale(model.optimizer); }),
              HasSubstr("must be unscaled once an iteration"));
  EXPECT_THAT(values(model.p.grad()), ElementsAre(1.0));
  scaler.step(model.optimizer);
  EXPECT_THAT(message_of([&] { scaler.step(model.optimizer); }),
              HasSubstr("must step once an iteration"));
  EXPECT_THAT(message_of([&] { scaler.unscale(model.optimizer); }),
              HasSubstr("must be unscaled before its step"));
  const std::array<optim::Optimizer*, 2> twice{&model.optimizer, &model.optimizer};
  scaler.update();
  EXPECT_THAT(message_of([&] { scaler.step(twice); }), HasSubstr("must be given once to a step"));
  EXPECT_THAT(message_of([&] { scaler.update(1e-9); }), HasSubstr("the scale must be within"));
  EXPECT_THAT(message_of([&] { scaler.scale(at::Tensor()); }), HasSubstr("an undefined one"));
  EXPECT_THAT(message_of([&] { scaler.scale(torch::ones({}, at::kLong)); }), HasSubstr("Long"));
  EXPECT_THAT(values(model.p), ElementsAre(0.0));
  EXPECT_EQ(scaler.get_scale(), 65536.0);
}

TEST(GradScalerTest, OptionsOutOfRangeAreRefused) {
  EXPECT_THAT(message_of([] { const GradScaler scaler({.warn_skip_rate = 1.5}); }),
              HasSubstr("warn_skip_rate"));
  EXPECT_THAT(message_of([] { const GradScaler scaler({.skip_window = 0}); }),
              HasSubstr("skip_window"));
  EXPECT_THAT(message_of([] { const GradScaler scaler({.growth_factor = 0.5}); }),
              HasSubstr("growth_factor"));
}

TEST(GradScalerTest, AFloat16GradientIsRefusedByNameAndOthersAreUnscaled) {
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    const auto before = parameter({1.0});
    const auto odd = parameter({2.0}, dtype);
    std::vector<optim::ParameterGroup> groups{
        {.parameters = {before, odd}, .lr = 1.0, .names = {"body", "head.weight"}}};
    SGD optimizer(groups, {});
    GradScaler scaler({.init_scale = 8.0});
    (scaler.scale(before * 1.0).sum() + scaler.scale(odd * 0.5).sum()).backward();
    if (dtype == at::kHalf) {
      EXPECT_THAT(message_of([&] { scaler.unscale(optimizer); }),
                  HasSubstr("gradient of parameter 'head.weight' must not be float16"));
      EXPECT_THAT(values(before.grad()), ElementsAre(8.0));  // Nothing was changed.
      continue;
    }
    EXPECT_TRUE(scaler.step(optimizer));
    EXPECT_THAT(values(before), ElementsAre(0.0));
    EXPECT_THAT(values(odd), ElementsAre(1.5));
  }
}

TEST(GradScalerTest, AParameterOfTwoOptimizersIsUnscaledOnce) {
  const auto shared = parameter({0.0});
  SGD first({shared}, {.lr = 1.0});
  SGD second({shared}, {.lr = 1.0});
  GradScaler scaler({.init_scale = 8.0});
  scaler.scale(shared.sum()).backward();
  EXPECT_TRUE(scaler.step(first));
  EXPECT_TRUE(scaler.step(second));
  scaler.update();
  EXPECT_THAT(values(shared), ElementsAre(-2.0));  // torch.amp: -1.125.
}

TEST(GradScalerTest, ASharedOverflowSkipsBothAndAnotherOnlyItsOwner) {
  for (const int where : {0, 1, 2}) {
    SCOPED_TRACE(where);
    const auto own = parameter({0.0});
    const auto shared = parameter({0.0});
    const auto other = parameter({0.0});
    SGD first({own, shared}, {.lr = 1.0});
    SGD second({shared, other}, {.lr = 1.0});
    GradScaler scaler({.init_scale = 8.0});
    scaler
        .scale(own.sum() * (where == 0 ? kInfinity : 1.0) +
               shared.sum() * (where == 1 ? kInfinity : 1.0) +
               other.sum() * (where == 2 ? kInfinity : 1.0))
        .backward();
    EXPECT_EQ(scaler.step(first), where == 2);
    EXPECT_EQ(scaler.step(second), where == 0);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 4.0);
  }
}

TEST(GradScalerTest, AClippedSharedGradientKeepsTheVerdictOfItsUnscale) {
  for (const bool overflow : {true, false}) {
    for (const bool step_between : {true, false}) {
      const auto shared = parameter({0.0});
      SGD first({shared}, {.lr = 1.0});
      SGD second({shared}, {.lr = 1.0});
      GradScaler scaler({.init_scale = 8.0});
      scaler.scale(shared.sum() * (overflow ? kInfinity : 1.0)).backward();
      scaler.unscale(first);
      optim::clip_gradient_value({shared}, 0.5);
      if (step_between) EXPECT_EQ(scaler.step(first), !overflow);
      EXPECT_EQ(scaler.step(second), !overflow);
      EXPECT_THAT(values(shared), ElementsAre(overflow ? 0.0 : (step_between ? -1.0 : -0.5)));
    }
  }
}

TEST(GradScalerTest, ASharedGradientMadeAnewIsUnscaledAnew) {
  const auto shared = parameter({0.0});
  SGD first({shared}, {.lr = 1.0});
  SGD second({shared}, {.lr = 1.0});
  GradScaler scaler({.init_scale = 8.0});
  scaler.scale(shared.sum()).backward();
  EXPECT_TRUE(scaler.step(first));
  first.zero_grad();
  scaler.scale(3 * shared.sum()).backward();
  EXPECT_TRUE(scaler.step(second));
  EXPECT_THAT(values(shared), ElementsAre(-4.0));
}

TEST(GradScalerTest, ASharedGradientThatAnotherLossMayHaveAddedToIsAnError) {
  const auto shared = parameter({0.0});
  SGD first({shared}, {.lr = 1.0});
  SGD second({shared}, {.lr = 1.0});
  GradScaler scaler({.init_scale = 8.0});
  scaler.scale(shared.sum()).backward();
  scaler.step(first);
  scaler.scale(shared.sum()).backward();
  EXPECT_THAT(message_of([&] { scaler.step(second); }),
              HasSubstr("changed after another loss was scaled"));
}

TEST(GradScalerTest, AGradientFromBeforeTheScaleChangedIsAnError) {
  Single prompt;
  Single late;
  GradScaler scaler({.init_scale = 8.0, .growth_interval = 1});
  const auto iterate = [&] {
    prompt.backward(scaler, 1.0);
    late.backward(scaler, 1.0);
    EXPECT_TRUE(scaler.step(prompt.optimizer));
  };
  iterate();
  EXPECT_TRUE(scaler.step(late.optimizer));
  scaler.update();
  prompt.optimizer.zero_grad();
  late.optimizer.zero_grad();
  iterate();
  scaler.update();  // From 16 to 32, and `late` holds a gradient made at 16.
  EXPECT_THAT(message_of([&] { scaler.step(late.optimizer); }),
              HasSubstr("made at the scale 16, and the scale is 32 now"));
  for (const bool set_to_none : {true, false}) {
    prompt.optimizer.zero_grad();
    late.optimizer.zero_grad(set_to_none);
    const double before = values(late.p).front();
    iterate();
    EXPECT_TRUE(scaler.step(late.optimizer));
    EXPECT_EQ(values(late.p).front(), before - 1.0);
    scaler.update();
  }
}

TEST(GradScalerTest, AnOverflowInOneMicroBatchSkipsTheWindowOnceAndHalvesOnce) {
  Single model({4.0});
  GradScaler scaler({.init_scale = 1024.0});
  accumulate::GradientWindow window(
      {model.p}, {.micro_batches = 4,
                  .normalisation = accumulate::Normalisation::mean,
                  .scale_loss = [&](const at::Tensor& loss) { return scaler.scale(loss); }});
  std::vector<bool> stepped;
  for (int batch = 0; batch < 12; ++batch) {
    const bool overflow = batch == 1;
    window.backward((model.p * (overflow ? kInfinity : 0.25 * (batch % 4 + 1))).sum());
    if (!window.full()) {
      EXPECT_THAT(message_of([&] { scaler.update(); }), HasSubstr("inside an accumulation window"));
      continue;
    }
    window.finish();
    stepped.push_back(scaler.step(model.optimizer));
    scaler.update();
    model.optimizer.zero_grad();
  }
  EXPECT_THAT(stepped, ElementsAre(false, true, true));
  EXPECT_EQ(scaler.get_scale(), 512.0);
  EXPECT_EQ(scaler.growth_tracker(), 2);
  EXPECT_EQ(scaler.counts(model.optimizer).skipped, 1);
  // The mean slope of a window is 0.625.
  EXPECT_THAT(values(model.p), ElementsAre(4.0 - 2 * 0.625));
}

TEST(GradScalerTest, AWindowGivenScaledLossesEqualsOneLossOverAll) {
  Single windowed({4.0});
  GradScaler scaler({.init_scale = 1024.0});
  accumulate::GradientWindow window({windowed.p}, {.micro_batches = 2});
  window.backward(scaler.scale((windowed.p * 1.0).sum()), 3.0);
  window.backward(scaler.scale((windowed.p * 2.0).sum()), 1.0);
  EXPECT_DOUBLE_EQ(window.finish().loss / scaler.get_scale(), (3 * 4.0 + 1 * 8.0) / 4);
  scaler.step(windowed.optimizer);
  EXPECT_THAT(values(windowed.p), ElementsAre(4.0 - 1.25));
}

struct Net {
  Net() {
    torch::manual_seed(5);
    net = torch::nn::Sequential(torch::nn::Linear(8, 16),
                                torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})),
                                torch::nn::Tanh(), torch::nn::Linear(16, 4));
    x = torch::randn({12, 8});
    y = torch::randn({12, 4});
  }
  at::Tensor loss() { return torch::mse_loss(net->forward(x).to(at::kFloat), y); }
  std::vector<at::Tensor> flat() const {
    std::vector<at::Tensor> result;
    for (const auto& p : net->parameters()) result.push_back(p.detach().clone());
    return result;
  }
  torch::nn::Sequential net;
  at::Tensor x;
  at::Tensor y;
};

// Parameters after five steps, each with or without autocast and with or without the scale.
std::vector<at::Tensor> train(bool autocast, bool scaled) {
  Net net;
  optim::AdamW optimizer(net.net->parameters(), {.lr = 1e-2});
  GradScaler scaler({.enabled = scaled});
  for (int i = 0; i < 5; ++i) {
    at::Tensor loss;
    {
      const AutocastGuard guard({.dtype = at::kBFloat16, .enabled = autocast});
      loss = net.loss();
    }
    scaler.scale(loss).backward();
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
    optimizer.zero_grad();
  }
  return net.flat();
}

TEST(GradScalerTest, ScalingChangesNoBitWithAutocastOrWithout) {
  at::set_num_threads(1);
  const auto plain = train(false, false);
  const auto cast = train(true, false);
  EXPECT_FALSE(torch::equal(plain.front(), cast.front()));
  // A power of two moves no mantissa bit.
  const auto scaled = train(false, true);
  const auto both = train(true, true);
  for (std::size_t i = 0; i < plain.size(); ++i) {
    EXPECT_TRUE(torch::equal(plain[i], scaled[i])) << i;
    EXPECT_TRUE(torch::equal(cast[i], both[i])) << i;
  }
}

// Gradients of the loss plus the norm of its gradient, by the documented loop.
std::vector<at::Tensor> penalty_gradients(bool autocast, bool scaled) {
  Net net;
  const auto parameters = net.net->parameters();
  SGD optimizer(parameters, {.lr = 1.0});
  GradScaler scaler({.enabled = scaled});
  at::Tensor total;
  {
    const AutocastGuard guard({.dtype = at::kBFloat16, .enabled = autocast});
    const auto loss = net.loss();
    const auto scaled_gradients =
        torch::autograd::grad({scaler.scale(loss)}, parameters, {}, true, /*create_graph=*/true);
    auto squares = torch::zeros({});
    for (const auto& gradient : scaled_gradients) {
      squares = squares + (gradient / scaler.get_scale()).square().sum();
    }
    total = loss + squares.sqrt();
  }
  scaler.scale(total).backward();
  scaler.unscale(optimizer);
  std::vector<at::Tensor> result;
  for (const auto& p : parameters) result.push_back(p.grad().clone());
  EXPECT_TRUE(scaler.step(optimizer));
  scaler.update();
  return result;
}

at::Tensor flat(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> pieces;
  for (const auto& tensor : tensors) pieces.push_back(tensor.reshape(-1).to(at::kDouble));
  return torch::cat(pieces);
}

TEST(GradScalerTest, AGradientPenaltyGoesThroughTheScale) {
  at::set_num_threads(1);
  const auto exact = flat(penalty_gradients(false, false));
  const auto scaled = flat(penalty_gradients(false, true));
  EXPECT_LE((scaled - exact).norm().item<double>(), 1e-6 * exact.norm().item<double>());
  const auto half = flat(penalty_gradients(true, true));
  EXPECT_FALSE(torch::equal(half, exact));
  EXPECT_LE((half - exact).norm().item<double>(), 1e-2 * exact.norm().item<double>());
}

TEST(GradScalerTest, BackwardThroughAnUnscaledGradientIsAnError) {
  Single model({2.0});
  GradScaler scaler({.init_scale = 8.0});
  scaler.scale(model.p.pow(3).sum()).backward({}, std::nullopt, /*create_graph=*/true);
  const auto penalty = model.p.grad().square().sum();  // Saves the scaled gradient.
  scaler.unscale(model.optimizer);
  EXPECT_THROW(penalty.backward(), c10::Error);
}

at::Tensor sparse(std::vector<std::int64_t> rows, std::vector<float> entries) {
  const auto count = static_cast<std::int64_t>(rows.size());
  return torch::sparse_coo_tensor(torch::tensor(rows).view({1, count}),
                                  torch::tensor(entries).view({count, 1}), {4, 1});
}

TEST(GradScalerTest, SparseGradientsAreCoalescedUnscaledAndChecked) {
  const auto p = torch::zeros({4, 1}).requires_grad_();
  SGD optimizer({p}, {.lr = 1.0});
  GradScaler scaler({.init_scale = 8.0});
  p.mutable_grad() = sparse({2, 0, 2}, {8.0F, 16.0F, 24.0F});
  scaler.unscale(optimizer);
  EXPECT_TRUE(p.grad().is_coalesced());
  EXPECT_THAT(values(p.grad().to_dense()), ElementsAre(2.0, 0.0, 4.0, 0.0));
  // Our optimizers take dense gradients only; the scaler leaves the step to be done.
  EXPECT_THAT(message_of([&] { scaler.step(optimizer); }), HasSubstr("must be dense"));
  p.mutable_grad() = p.grad().to_dense();
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_THAT(values(p), ElementsAre(-2.0, 0.0, -4.0, 0.0));
  scaler.update();
  // Each value is finite, their sum is not.
  p.mutable_grad() = sparse({1, 1}, {3e38F, 3e38F});
  EXPECT_FALSE(scaler.step(optimizer));
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 4.0);
}

TEST(GradScalerTest, AnEmbeddingTrainsThroughTheScaleWithSparseGradients) {
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(5, 2).sparse(true));
  SGD optimizer(embedding->parameters(), {.lr = 1.0});
  GradScaler scaler({.init_scale = 64.0});
  scaler.scale(embedding->forward(torch::tensor({1, 3, 1})).sum()).backward();
  scaler.unscale(optimizer);
  EXPECT_THAT(values(embedding->weight.grad().to_dense().select(1, 0)),
              ElementsAre(0.0, 2.0, 0.0, 1.0, 0.0));
}

TEST(GradScalerTest, AFloat16ScalarLossDoesNotOverflowByTheScale) {
  const auto p = parameter({1.0}, at::kHalf);
  GradScaler scaler({.init_scale = 0x1p20});
  const auto scaled = scaler.scale(p.sum());
  EXPECT_EQ(scaled.scalar_type(), at::kFloat);
  EXPECT_EQ(scaled.item<double>(), 0x1p20);
  EXPECT_EQ(scaler.scale(torch::ones({}, at::kDouble)).scalar_type(), at::kDouble);
}

TEST(GradScalerTest, AListOfOutputsIsScaledEach) {
  GradScaler scaler({.init_scale = 4.0});
  const auto scaled = scaler.scale({torch::tensor({1.0F, 2.0F}), torch::tensor(3.0)});
  ASSERT_EQ(scaled.size(), 2);
  EXPECT_THAT(values(scaled[0]), ElementsAre(4.0, 8.0));
  EXPECT_EQ(scaled[1].item<double>(), 12.0);
}

TEST(GradScalerTest, AStaticScaleSkipsOverflowsAndStays) {
  Single model;
  GradScaler scaler({.init_scale = 128.0, .growth_interval = 1, .dynamic = false});
  for (const double slope : {kInfinity, 0.25, kNan, 0.25}) {
    model.optimizer.zero_grad();
    model.backward(scaler, slope);
    EXPECT_EQ(scaler.step(model.optimizer), std::isfinite(slope));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 128.0);
  }
  EXPECT_THAT(values(model.p), ElementsAre(0.5));
  scaler.update(64.0);
  EXPECT_EQ(scaler.get_scale(), 64.0);
}

TEST(GradScalerTest, HysteresisToleratesAnOverflowButSkipsItsStep) {
  Single model;
  GradScaler scaler({.init_scale = 16.0, .hysteresis = 2});
  std::vector<double> scales;
  for (int i = 0; i < 2; ++i) {
    model.optimizer.zero_grad();
    model.backward(scaler, kInfinity);
    EXPECT_FALSE(scaler.step(model.optimizer));
    scaler.update();
    scales.push_back(scaler.get_scale());
  }
  EXPECT_THAT(scales, ElementsAre(16.0, 8.0));
}

TEST(GradScalerTest, ADisabledScalerIsAPlainStep) {
  Single model;
  GradScaler scaler({.enabled = false});
  const auto loss = (model.p * kInfinity).sum();
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  scaler.scale(loss).backward();
  scaler.unscale(model.optimizer);
  scaler.unscale(model.optimizer);
  EXPECT_TRUE(scaler.step(model.optimizer));
  scaler.update();
  EXPECT_THAT(values(model.p), ElementsAre(-kInfinity));
  EXPECT_EQ(scaler.get_scale(), 1.0);
  EXPECT_TRUE(scaler.state().empty());
  scaler.load_state({});
}

TEST(GradScalerTest, OptimizersThatWereUnscaledOnlyStillMoveTheScale) {
  Single model;
  GradScaler scaler({.init_scale = 8.0});
  model.backward(scaler, kInfinity);
  scaler.unscale(model.optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 4.0);
}

TEST(GradScalerTest, RanksAgreeThroughTheReduction) {
  Single a;
  Single b;
  Single idle;
  std::vector<std::vector<double>> seen;
  double other_rank = 0.0;
  GradScaler scaler({.init_scale = 8.0, .reduce_found_inf = [&](at::Tensor& found) {
                       EXPECT_EQ(found.scalar_type(), at::kFloat);
                       seen.push_back(values(found));
                       found[0] += other_rank;
                     }});
  a.backward(scaler, 1.0);
  b.backward(scaler, kInfinity);
  other_rank = 1.0;
  const std::array<optim::Optimizer*, 3> all{&a.optimizer, &b.optimizer, &idle.optimizer};
  // The third has no gradient here; another rank may have.
  EXPECT_THAT(scaler.step(all), ElementsAre(false, false, true));
  scaler.update();
  EXPECT_THAT(seen, ElementsAre(ElementsAre(0.0, 1.0, 0.0)));
  EXPECT_EQ(scaler.get_scale(), 4.0);
  EXPECT_THAT(values(a.p), ElementsAre(1.0));

  // Unscaled, never stepped: the verdict is reduced by update().
  seen.clear();
  a.optimizer.zero_grad();
  a.backward(scaler, 1.0);
  scaler.unscale(a.optimizer);
  EXPECT_TRUE(seen.empty());
  scaler.update();
  EXPECT_EQ(seen.size(), 1);
  EXPECT_EQ(scaler.get_scale(), 2.0);
}

TEST(GradScalerTest, AReductionThatLosesAnOptimizerIsAnError) {
  Single model;
  GradScaler scaler({.reduce_found_inf = [](at::Tensor& found) { found = torch::zeros({2}); }});
  model.backward(scaler, 1.0);
  EXPECT_THAT(message_of([&] { scaler.step(model.optimizer); }),
              HasSubstr("reduce_found_inf must keep one element an optimizer, 1; it left 2"));
}

TEST(GradScalerTest, AHighSkipRateWarnsOnceAnOptimizer) {
  Single calm;
  Single wild;
  std::vector<SkipWarning> warnings;
  GradScaler scaler({.warn_skip_rate = 0.2,
                     .skip_window = 10,
                     .warn = [&](const SkipWarning& warning) { warnings.push_back(warning); }});
  for (int i = 0; i < 40; ++i) {
    calm.optimizer.zero_grad();
    wild.optimizer.zero_grad();
    calm.backward(scaler, i % 7 == 0 ? kInfinity : 0.0);  // At most two of ten: not above the rate.
    wild.backward(scaler, i >= 13 && i % 3 == 0 ? kInfinity : 0.0);
    scaler.step(calm.optimizer);
    scaler.step(wild.optimizer);
    scaler.update();
    // Steps 15, 18 and 21 are three of the last ten.
    EXPECT_EQ(warnings.size(), i < 21 ? 0 : 1) << i;
  }
  ASSERT_EQ(warnings.size(), 1);
  EXPECT_EQ(warnings[0].optimizer, 1);
  EXPECT_DOUBLE_EQ(warnings[0].rate, 0.3);
  EXPECT_THAT(warnings[0].message, HasSubstr("skipped 3 of its last 10 steps, more than 20%"));
}

TEST(GradScalerTest, TheFirstOverflowsWarnWhenAWholeWindowHasPassed) {
  Single model;
  std::int64_t warnings = 0;
  GradScaler scaler(
      {.warn_skip_rate = 0.2, .skip_window = 10, .warn = [&](const SkipWarning&) { ++warnings; }});
  for (int i = 0; i < 12; ++i) {
    model.optimizer.zero_grad();
    model.backward(scaler, i < 3 ? kInfinity : 0.0);
    scaler.step(model.optimizer);
    scaler.update();
    EXPECT_EQ(warnings, i < 9 ? 0 : 1) << i;
  }
}

TEST(GradScalerTest, ItsStateIsTorchsAndGoesOnWhereItWasTaken) {
  Single model;
  GradScaler first({.init_scale = 32.0, .growth_interval = 3});
  const auto iterate = [&](GradScaler& scaler) {
    model.optimizer.zero_grad();
    model.backward(scaler, 0.0);
    scaler.step(model.optimizer);
    scaler.update();
  };
  iterate(first);
  iterate(first);
  const std::map<std::string, double> expected{{"scale", 32.0},
                                               {"growth_factor", 2.0},
                                               {"backoff_factor", 0.5},
                                               {"growth_interval", 3.0},
                                               {"_growth_tracker", 2.0}};
  EXPECT_EQ(first.state(), expected);
  GradScaler second;
  second.load_state(first.state());
  iterate(second);
  EXPECT_EQ(second.get_scale(), 64.0);
  EXPECT_EQ(second.growth_tracker(), 0);
}

TEST(GradScalerTest, AStateThatIsNoneIsRefusedAndChangesNothing) {
  GradScaler scaler({.init_scale = 8.0});
  const auto good = scaler.state();
  const auto refused = [&](const std::string& key, std::optional<double> value) {
    auto state = good;
    state.erase(key);
    if (value.has_value()) state[key] = *value;
    return message_of([&] { scaler.load_state(state); });
  };
  EXPECT_THAT(message_of([&] { scaler.load_state({}); }), HasSubstr("that was not enabled"));
  EXPECT_THAT(refused("_growth_tracker", std::nullopt), HasSubstr("must have '_growth_tracker'"));
  EXPECT_THAT(refused("growht", 1.0), HasSubstr("an entry 'growht'"));
  EXPECT_THAT(refused("scale", 0.0), HasSubstr("the scale must be within"));  // torch's collapse.
  EXPECT_THAT(refused("scale", kNan), HasSubstr("finite"));
  EXPECT_THAT(refused("growth_interval", 2.5), HasSubstr("whole number"));
  EXPECT_THAT(refused("_growth_tracker", -1.0), HasSubstr("whole number"));
  EXPECT_THAT(refused("backoff_factor", 1.0), HasSubstr("backoff_factor"));
  EXPECT_EQ(scaler.state(), good);
}

TEST(GradScalerTest, LoadingAbandonsTheIteration) {
  Single model;
  GradScaler scaler({.init_scale = 8.0});
  model.backward(scaler, kInfinity);
  scaler.unscale(model.optimizer);
  scaler.load_state(GradScaler({.init_scale = 16.0}).state());
  EXPECT_THAT(message_of([&] { scaler.update(); }), HasSubstr("must follow a step"));
  model.optimizer.zero_grad();
  model.backward(scaler, 1.0);
  EXPECT_TRUE(scaler.step(model.optimizer));
  EXPECT_THAT(values(model.p), ElementsAre(0.0));
}

TEST(GradScalerTest, MasterWeightsAreUnscaledByTheirOwner) {
  const auto half = parameter({1.0}, at::kHalf);
  const auto master = parameter({1.0});
  SGD optimizer({master}, {.lr = 1.0});
  GradScaler scaler({.init_scale = 1024.0});
  const std::vector<bool> overflows{false, true};
  for (const bool overflow : overflows) {
    half.mutable_grad().reset();
    scaler.scale((half * (overflow ? kInfinity : 0x1p-20)).sum()).backward();
    master.mutable_grad() = half.grad().to(at::kFloat);
    scaler.set_unscaled(optimizer,
                        unscale_gradients(std::array{master.grad(), at::Tensor()}, 1024.0));
    EXPECT_THAT(message_of([&] { scaler.unscale(optimizer); }), HasSubstr("once an iteration"));
    EXPECT_EQ(scaler.step(optimizer), !overflow);
    scaler.update();
  }
  EXPECT_THAT(values(master), ElementsAre(1.0 - 0x1p-20));
  EXPECT_EQ(scaler.get_scale(), 512.0);
}

TEST(GradScalerTest, UnscaleGradientsTakesMixedDtypesAndRefusesOthers) {
  const std::vector<at::Tensor> mixed{
      torch::full({3}, 8.0, at::kHalf), torch::full({2, 2}, 8.0, at::kDouble).t(),
      torch::full({6}, 8.0, at::kFloat).slice(0, 0, 6, 2), torch::empty({0})};
  EXPECT_EQ(unscale_gradients(mixed, 8.0).item<float>(), 0.0F);
  for (const auto& gradient : mixed) EXPECT_TRUE(torch::all(gradient == 1).item<bool>());
  EXPECT_EQ(mixed[0]._version(), 1);
  mixed[1][0][1].fill_(kNan);
  EXPECT_NE(unscale_gradients(mixed, 8.0).item<float>(), 0.0F);
  EXPECT_EQ(unscale_gradients({}, 8.0).item<float>(), 0.0F);
  EXPECT_THAT(message_of([] { unscale_gradients(std::array{sparse({0}, {1.0F})}, 2.0); }),
              HasSubstr("must be dense"));
  EXPECT_THAT(
      message_of([] { unscale_gradients(std::array{torch::ones({1}, at::kComplexFloat)}, 2.0); }),
      HasSubstr("ComplexFloat"));
  EXPECT_THAT(message_of([] { unscale_gradients({}, 0.0); }), HasSubstr("the scale must be > 0"));
}

TEST(GradScalerTest, AnOptimizerInThePlaceOfAnotherStartsItsOwnCount) {
  const auto p = parameter({1.0});
  const auto q = parameter({1.0});
  GradScaler scaler;
  std::optional<SGD> optimizer;
  for (const auto& owned : {p, q}) {
    optimizer.emplace(std::vector<at::Tensor>{owned}, optim::SGDOptions{.lr = 1.0});
    scaler.scale(owned.sum()).backward();
    EXPECT_TRUE(scaler.step(*optimizer));  // In one iteration: no second step of the first.
    EXPECT_EQ(scaler.counts(*optimizer).steps, 1);
  }
  scaler.update();
}

TEST(GradScalerTest, AMovedScalerGoesOn) {
  Single model;
  GradScaler first({.init_scale = 8.0});
  model.backward(first, kInfinity);
  first.unscale(model.optimizer);
  GradScaler second = std::move(first);
  EXPECT_FALSE(second.step(model.optimizer));
  second.update();
  EXPECT_EQ(second.get_scale(), 4.0);
}

TEST(GradScalerTest, EveryOptimizerKernelStepsOnUnscaledGradients) {
  for (const bool fused : {true, false}) {
    const auto plain = parameter({1.0, 2.0, 3.0});
    const auto scaled = parameter({1.0, 2.0, 3.0});
    optim::AdamW first({plain}, {.lr = 0.1, .fused = fused});
    optim::AdamW second({scaled}, {.lr = 0.1, .fused = fused});
    GradScaler scaler;
    for (int i = 0; i < 3; ++i) {
      first.zero_grad();
      second.zero_grad();
      plain.pow(3).sum().backward();
      scaler.scale(scaled.pow(3).sum()).backward();
      first.step();
      EXPECT_TRUE(scaler.step(second));
      scaler.update();
    }
    EXPECT_TRUE(torch::equal(plain, scaled));
  }
}

TEST(GradScalerTest, ABackwardBetweenUnscaleAndStepIsRefused) {
  Single model;
  GradScaler scaler({.init_scale = 1024.0});
  model.backward(scaler, 1.0);
  scaler.unscale(model.optimizer);
  model.backward(scaler, 1.0);
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(message_of([&] { scaler.step(model.optimizer); }),
                HasSubstr("gradient of parameter '0' must not change after its unscale"));
  }
  EXPECT_THAT(values(model.p), ElementsAre(1.0));
  EXPECT_EQ(scaler.counts().steps, 0);
  // A gradient of its own after zero_grad is no better: it is scaled.
  model.optimizer.zero_grad();
  model.backward(scaler, 1.0);
  EXPECT_THAT(message_of([&] { scaler.step(model.optimizer); }), HasSubstr("after its unscale"));
  EXPECT_THAT(values(model.p), ElementsAre(1.0));
  // As the message says.
  model.optimizer.zero_grad();
  scaler.load_state(scaler.state());
  model.backward(scaler, 1.0);
  EXPECT_TRUE(scaler.step(model.optimizer));
  scaler.update();
  EXPECT_THAT(values(model.p), ElementsAre(0.0));
}

TEST(GradScalerTest, ClippingAndOthersBackwardsMayComeBetweenUnscaleAndStep) {
  Single first;
  Single second;
  GradScaler scaler({.init_scale = 1024.0});
  first.backward(scaler, 4.0);
  scaler.unscale(first.optimizer);
  optim::clip_gradient_norm(std::vector<at::Tensor>{first.p}, 1.0);
  second.backward(scaler, 4.0);
  scaler.unscale(second.optimizer);
  optim::clip_gradient_norm(std::vector<at::Tensor>{first.p, second.p}, 1.0);
  EXPECT_TRUE(scaler.step(first.optimizer));
  EXPECT_TRUE(scaler.step(second.optimizer));
  scaler.update();
  EXPECT_NEAR(values(first.p)[0], 0.75, 0.02);
  EXPECT_NEAR(values(second.p)[0], 0.03, 0.02);
}

TEST(GradScalerTest, AGradientOfTwoParametersIsDividedOnce) {
  const auto a = parameter({1.0});
  const auto b = parameter({1.0});
  SGD optimizer({a, b}, {.lr = 1.0});
  GradScaler scaler({.init_scale = 8.0});
  scaler.scale(torch::ones({1}));
  a.mutable_grad() = torch::full({1}, 8.0);
  b.mutable_grad() = a.grad();
  EXPECT_TRUE(scaler.step(optimizer));
  EXPECT_THAT(values(a), ElementsAre(0.0));
  EXPECT_THAT(values(b), ElementsAre(0.0));
  const auto gradient = torch::full({1}, 8.0);
  unscale_gradients(std::array{gradient, gradient}, 8.0);
  EXPECT_THAT(values(gradient), ElementsAre(1.0));
}

TEST(GradScalerTest, AnExpandedGradientIsRefusedByName) {
  const auto p = parameter({1.0, 1.0});
  SGD optimizer(std::vector<optim::ParameterGroup>{{.parameters = {p}, .names = {"bias"}}}, {});
  GradScaler scaler({.init_scale = 8.0});
  scaler.scale(torch::ones({1}));
  p.mutable_grad() = torch::full({1}, 8.0).expand({2});
  EXPECT_THAT(message_of([&] { scaler.step(optimizer); }),
              HasSubstr("gradient of parameter 'bias' must not be an expanded tensor"));
  EXPECT_THAT(values(p.grad()), ElementsAre(8.0, 8.0));
  EXPECT_THAT(message_of([&] { unscale_gradients(std::array{p.grad()}, 8.0); }),
              HasSubstr("must not be expanded tensors"));
}

}  // namespace
}  // namespace gradus::amp
