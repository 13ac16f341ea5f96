#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/amp/levels/levels.h>
#include <gradus/base/error.h>
#include <gradus/optim/clip.h>
#include <gradus/optim/sgd.h>
#include <gradus/plane/op/op_plane.h>
#include <gradus/recompute/checkpoint.h>

#include <tests/support/message_of.h>

namespace gradus::amp {
namespace {

using testing::HasSubstr;
using tests::message_of;
namespace nn = torch::nn;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// y = x . w, so that a gradient of w is the input: exact in every dtype for small integers.
struct Dot : nn::Module {
  at::Tensor weight;
  explicit Dot(std::vector<float> values) {
    weight = register_parameter("weight", at::tensor(values));
  }
  at::Tensor forward(const at::Tensor& x) { return (x * weight).sum(); }
};

class ScaledLossTest : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    torch::manual_seed(0);
  }
  void TearDown() override { EXPECT_FALSE(plane::op::active()); }
};

// Of the scale, for losses whose own gradient is 1: at 65536 it would not fit float16.
constexpr double kFirst = 1024.0;

// Levels with a dynamic scale, with masters and without.
const std::vector<LevelOptions> kTrained{
    {.opt_level = OptLevel::O1, .max_loss_scale = kFirst},
    {.opt_level = OptLevel::O2, .max_loss_scale = kFirst},
    {.opt_level = OptLevel::O2, .master_weights = false, .max_loss_scale = kFirst},
    {.opt_level = OptLevel::O3, .loss_scale = kDynamicLossScale, .max_loss_scale = kFirst},
    {.opt_level = OptLevel::O0, .loss_scale = kDynamicLossScale, .max_loss_scale = kFirst}};

std::string title(const LevelOptions& options) {
  return std::string(name(options.opt_level)) + (options.master_weights ? " no masters" : "");
}

TEST_F(ScaledLossTest, AnOverflowSkipsTheStepAndHalvesTheScale) {
  for (auto options : kTrained) {
    SCOPED_TRACE(title(options));
    std::string said;
    options.report = [&](const std::string& line) { said = line; };
    Dot model({1, 2});
    auto amp = initialize(model, options);
    optim::SGD optimizer(amp.parameters(model), {.lr = 1.0});
    const auto step = [&](float last) {
      amp.zero_grad(optimizer);
      ScaledLoss scaled(amp, amp.forward(model, at::tensor({1.0F, last})), {&optimizer});
      scaled.backward();
      return scaled.finish();
    };
    EXPECT_EQ(amp.loss_scale(), kFirst);
    EXPECT_FALSE(step(kInfinity));
    EXPECT_EQ(amp.loss_scale(), kFirst / 2);
    EXPECT_THAT(said, HasSubstr("loss scale was 1024 and is now 512"));
    EXPECT_FALSE(amp.step(optimizer));
    EXPECT_TRUE(model.weight.to(at::kFloat).equal(at::tensor({1.0F, 2.0F})));
    EXPECT_TRUE(step(0.5F));
    EXPECT_TRUE(amp.step(optimizer));
    EXPECT_TRUE(model.weight.to(at::kFloat).equal(at::tensor({0.0F, 1.5F})));
    EXPECT_EQ(amp.counts(optimizer).steps, 2);
    EXPECT_EQ(amp.counts(optimizer).skipped, 1);
  }
}

TEST_F(ScaledLossTest, TheDestructorEndsIt) {
  Dot model({1, 2});
  auto amp = initialize(model, {.opt_level = OptLevel::O2, .max_loss_scale = kFirst});
  optim::SGD optimizer(amp.parameters(model), {.lr = 1.0});
  {
    ScaledLoss scaled(amp, amp.forward(model, at::tensor({0.5F, 0.25F})), {&optimizer});
    EXPECT_EQ(scaled.loss().item<float>(), kFirst);  // (0.5 + 2 * 0.25) times the scale
    scaled.loss().backward();
  }
  EXPECT_FALSE(model.weight.grad().defined());
  EXPECT_TRUE(amp.master_params(optimizer)[0].grad().equal(at::tensor({0.5F, 0.25F})));
  const auto version = model.weight._version();
  EXPECT_TRUE(amp.step(optimizer));
  EXPECT_GT(model.weight._version(), version);
  EXPECT_TRUE(model.weight.equal(at::tensor({0.5F, 1.75F}).to(at::kHalf)));
}

TEST_F(ScaledLossTest, ClippingActsOnUnscaledMasters) {
  for (const auto level : {OptLevel::O1, OptLevel::O2, OptLevel::bf16}) {
    Dot model({0, 0});
    const bool half = level != OptLevel::bf16;
    auto amp =
        initialize(model, {.opt_level = level,
                           .loss_scale = half ? std::optional<LossScaling>(1024.0) : std::nullopt});
    optim::SGD optimizer(amp.parameters(model), {.lr = 1.0});
    {
      ScaledLoss scaled(amp, amp.forward(model, at::tensor({3.0F, 4.0F})), {&optimizer});
      scaled.backward();
    }
    EXPECT_NEAR(optim::clip_gradient_norm(amp.master_params(optimizer), 1.0), 5.0, 1e-5);
    amp.step(optimizer);
    EXPECT_TRUE(at::allclose(model.weight.to(at::kFloat), at::tensor({-0.6F, -0.8F}), 4e-3));
  }
}

TEST_F(ScaledLossTest, TwoModelsTwoOptimizersThreeLosses) {
  for (const auto& base : kTrained) {
    SCOPED_TRACE(title(base));
    Dot first({1, 1}), second({2, 2});
    auto options = base;
    options.num_losses = 3;
    auto amp = initialize({first, second}, options);
    optim::SGD one(amp.parameters(first), {.lr = 1.0}), two(amp.parameters(second), {.lr = 1.0});
    // Scales that differ, as after overflows of their own.
    auto scales = amp.state();
    for (auto& [name, tensor] : scales) {
      if (name == "loss_scaler1.scale") tensor.fill_(128.0);
      if (name == "loss_scaler2.scale") tensor.fill_(8.0);
    }
    amp.load_state(scales);
    const auto a = at::tensor({0.5F, 0.25F}), b = at::tensor({0.125F, 0.5F});
    const auto o1 = amp.forward(first, a), o2 = amp.forward(second, b);
    // 2 o1 + 3 o2 for both, 3 o1 - 5 o2 for both, o2 for the second alone.
    {
      ScaledLoss scaled(amp, 0.5 * o1 + 0.25 * o2, {&one, &two}, {.loss_id = 0});
      scaled.backward(/*retain_graph=*/true);
    }
    {
      ScaledLoss scaled(amp, 3 * o1 - 5 * o2, {&one, &two}, {.loss_id = 1});
      scaled.backward(/*retain_graph=*/true);
    }
    {
      ScaledLoss scaled(amp, o2 * kInfinity, {&two}, {.loss_id = 2});
      scaled.backward();
    }
    EXPECT_TRUE(amp.step(one));
    EXPECT_FALSE(amp.step(two));  // its third loss overflowed
    EXPECT_EQ(amp.loss_scale(0), kFirst);
    EXPECT_EQ(amp.loss_scale(1), 128.0);
    EXPECT_EQ(amp.loss_scale(2), 4.0);
    EXPECT_TRUE(at::allclose(first.weight.to(at::kFloat), 1 - 3.5 * a, 2e-3));
    EXPECT_TRUE(second.weight.to(at::kFloat).equal(at::tensor({2.0F, 2.0F})));
  }
}

TEST_F(ScaledLossTest, GradientsOfSeveralLossesAddUpUnscaled) {
  for (const bool delay : {false, true}) {
    for (const auto& options : kTrained) {
      SCOPED_TRACE(title(options) + (delay ? " delayed" : ""));
      Dot model({0, 0});
      auto amp = initialize(model, options);
      optim::SGD optimizer(amp.parameters(model), {.lr = 1.0});
      for (int i = 1; i <= 4; ++i) {
        const auto x = at::tensor({0.0625F * static_cast<float>(i), 0.03125F});
        ScaledLoss scaled(amp, amp.forward(model, x), {&optimizer},
                          {.delay_unscale = delay && i < 4});
        scaled.backward();
        EXPECT_TRUE(scaled.finish());
        if (delay && i < 4) {
          EXPECT_THAT(message_of([&] { amp.step(optimizer); }), HasSubstr("were unscaled"));
        }
      }
      EXPECT_TRUE(amp.master_params(optimizer)[0]
                      .grad()
                      .to(at::kFloat)
                      .equal(at::tensor({0.625F, 0.125F})));
      EXPECT_EQ(amp.loss_scale(), kFirst);
      EXPECT_TRUE(amp.step(optimizer));
    }
  }
}

TEST_F(ScaledLossTest, ADelayedWindowThatOverflowsSkipsAndHalvesOnce) {
  for (const auto& options : kTrained) {
    SCOPED_TRACE(title(options));
    Dot model({1, 1});
    auto amp = initialize(model, options);
    optim::SGD optimizer(amp.parameters(model), {.lr = 1.0});
    for (int i = 1; i <= 4; ++i) {
      const auto x = at::tensor({i == 2 ? kInfinity : 0.25F, 0.125F});
      ScaledLoss scaled(amp, amp.forward(model, x), {&optimizer}, {.delay_unscale = i < 4});
      scaled.backward();
    }
    EXPECT_EQ(amp.loss_scale(), kFirst / 2);
    EXPECT_FALSE(amp.step(optimizer));
    EXPECT_EQ(amp.counts(optimizer).skipped, 1);
    EXPECT_TRUE(model.weight.to(at::kFloat).equal(at::tensor({1.0F, 1.0F})));
  }
}

TEST_F(ScaledLossTest, ADelayedOverflowCheckIsMadeByTheNextOneOfItsLoss) {
  Dot model({1, 1});
  auto amp = initialize(model, {.opt_level = OptLevel::O2, .max_loss_scale = kFirst});
  optim::SGD optimizer(amp.parameters(model), {.lr = 1.0});
  const auto run = [&](float value, bool delay) {
    ScaledLoss scaled(amp, amp.forward(model, at::tensor({value, 0.0F})), {&optimizer},
                      {.delay_overflow_check = delay});
    scaled.backward();
    return scaled.finish();
  };
  EXPECT_TRUE(run(kInfinity, true));
  EXPECT_EQ(amp.loss_scale(), kFirst);
  EXPECT_FALSE(run(0.5F, false));
  EXPECT_EQ(amp.loss_scale(), kFirst / 2);
  EXPECT_FALSE(amp.step(optimizer));
}

TEST_F(ScaledLossTest, AnExceptionDropsTheGradientsOfItsLossOnly) {
  for (const auto& options : kTrained) {
    SCOPED_TRACE(title(options));
    Dot model({0, 0});
    auto amp = initialize(model, options);
    optim::SGD optimizer(amp.parameters(model), {.lr = 1.0});
    const auto run = [&](float value, bool fail) {
      ScaledLoss scaled(amp, amp.forward(model, at::tensor({value, 0.0F})), {&optimizer});
      scaled.backward();
      if (fail) throw std::runtime_error("a batch that fails");
    };
    run(0.25F, false);
    EXPECT_THROW(run(kInfinity, true), std::runtime_error);
    EXPECT_EQ(amp.loss_scale(), kFirst);
    run(0.5F, false);
    EXPECT_TRUE(
        amp.master_params(optimizer)[0].grad().to(at::kFloat).equal(at::tensor({0.75F, 0.0F})));
    EXPECT_TRUE(amp.step(optimizer));
  }
}

TEST_F(ScaledLossTest, AParameterOfTwoOptimizersIsUnscaledOnce) {
  for (const auto& options : kTrained) {
    SCOPED_TRACE(title(options));
    Dot model({0, 0});
    auto amp = initialize(model, options);
    optim::SGD one(amp.parameters(model), {.lr = 1.0}), two(amp.parameters(model), {.lr = 1.0});
    for (int i = 0; i < 2; ++i) {  // The second finds gradients of the first.
      ScaledLoss scaled(amp, amp.forward(model, at::tensor({0.5F, 0.25F})), {&one, &two});
      scaled.backward();
    }
    EXPECT_TRUE(amp.step(one));
    EXPECT_TRUE(amp.step(two));
    EXPECT_TRUE(model.weight.to(at::kFloat).equal(at::tensor({-2.0F, -1.0F})));
  }
}

TEST_F(ScaledLossTest, AGroupAddedAfterAnOverflowSkipsToo) {
  Dot model({1, 1}), late({1, 1});
  auto amp = initialize({model, late}, {.opt_level = OptLevel::O2, .max_loss_scale = kFirst});
  optim::SGD optimizer(amp.parameters(model), {.lr = 1.0});
  {
    ScaledLoss scaled(amp, amp.forward(model, at::tensor({kInfinity, 0.0F})), {&optimizer});
    scaled.backward();
  }
  optimizer.add_group({.parameters = amp.parameters(late), .lr = 1.0});
  EXPECT_FALSE(amp.step(optimizer));
  amp.zero_grad(optimizer);
  {
    ScaledLoss scaled(amp, amp.forward(late, at::tensor({0.5F, 0.25F})), {&optimizer});
    scaled.backward();
  }
  EXPECT_TRUE(amp.step(optimizer));
  EXPECT_TRUE(late.weight.to(at::kFloat).equal(at::tensor({0.5F, 0.75F})));
}

TEST_F(ScaledLossTest, AGeneratorsGradientsDoNotReachItsCritic) {
  Dot generator({1, 1}), critic({1, 1});
  auto amp = initialize({generator, critic}, {.opt_level = OptLevel::O2, .max_loss_scale = kFirst});
  optim::SGD own(amp.parameters(generator), {.lr = 1.0}),
      other(amp.parameters(critic), {.lr = 1.0});
  const auto x = at::tensor({0.25F, 0.125F});
  {
    ScaledLoss scaled(amp, amp.forward(generator, x) * amp.forward(critic, x), {&own});
    scaled.backward();
  }
  EXPECT_TRUE(amp.step(own));
  EXPECT_THAT(message_of([&] { ScaledLoss(amp, amp.forward(critic, x), {&other}).backward(); }),
              HasSubstr("'models.1.weight' must have no gradient before its ScaledLoss"));
  amp.zero_grad(other);
  {
    ScaledLoss scaled(amp, amp.forward(critic, x), {&other});
    scaled.backward();
  }
  EXPECT_TRUE(amp.master_params(other)[0].grad().equal(x));
}

TEST_F(ScaledLossTest, TheScaleGrowsToItsBoundAndFallsToItsFloorWithAnError) {
  Dot model({1, 1});
  auto amp = initialize(
      model, {.opt_level = OptLevel::O2, .min_loss_scale = 1024.0, .max_loss_scale = 2048.0});
  optim::SGD optimizer(amp.parameters(model), {.lr = 1e-3});
  EXPECT_EQ(amp.loss_scale(), 2048.0);
  const auto run = [&](float value) {
    amp.zero_grad(optimizer);
    ScaledLoss scaled(amp, amp.forward(model, at::tensor({value, 0.0F})), {&optimizer});
    scaled.backward();
  };
  run(kInfinity);
  EXPECT_FALSE(amp.step(optimizer));
  EXPECT_EQ(amp.loss_scale(), 1024.0);
  run(kInfinity);  // the destructor cannot throw
  EXPECT_THAT(message_of([&] { amp.step(optimizer); }), HasSubstr("floor 1024"));
  EXPECT_FALSE(amp.step(optimizer));
  run(0.5F);
  EXPECT_TRUE(amp.step(optimizer));
}

TEST_F(ScaledLossTest, MisuseIsRefusedByName) {
  Dot model({1, 1});
  auto amp =
      initialize(model, {.opt_level = OptLevel::O2, .num_losses = 2, .max_loss_scale = kFirst});
  optim::SGD optimizer(amp.parameters(model), {.lr = 1.0});
  const auto x = at::tensor({0.5F, 0.5F});
  const auto loss = [&] { return amp.forward(model, x); };
  EXPECT_THAT(message_of([&] { ScaledLoss(amp, loss(), {&optimizer}).finish(); }),
              HasSubstr("no parameter of its optimizers has a gradient"));
  EXPECT_THAT(message_of([&] { ScaledLoss(amp, loss(), {}).backward(); }), HasSubstr("got none"));
  EXPECT_THAT(message_of([&] { ScaledLoss(amp, loss(), {&optimizer}, {.loss_id = 2}).backward(); }),
              HasSubstr("loss_id must be below num_losses, 2; got 2"));
  EXPECT_THAT(message_of([&] { ScaledLoss(amp, loss(), {&optimizer, &optimizer}).backward(); }),
              HasSubstr("given once"));
  {
    ScaledLoss scaled(amp, loss(), {&optimizer}, {.delay_unscale = true});
    EXPECT_THAT(message_of([&] { ScaledLoss(amp, loss(), {&optimizer}).backward(); }),
                HasSubstr("must end before the next one begins"));
    EXPECT_THAT(message_of([&] { amp.step(optimizer); }), HasSubstr("has ended"));
    scaled.backward();
  }
  EXPECT_THAT(message_of([&] { ScaledLoss(amp, loss(), {&optimizer}, {.loss_id = 1}).backward(); }),
              HasSubstr("same loss_id; got 1"));
  amp.zero_grad(optimizer);
  loss().backward();
  EXPECT_THAT(message_of([&] { amp.step(optimizer); }),
              HasSubstr("from a backward outside a ScaledLoss"));
  amp.zero_grad(optimizer);
  {
    ScaledLoss scaled(amp, loss(), {&optimizer});
    scaled.backward();
  }
  EXPECT_TRUE(amp.step(optimizer));
  EXPECT_TRUE(model.weight.to(at::kFloat).equal(at::tensor({0.5F, 0.5F})));
}

TEST_F(ScaledLossTest, ARegionAroundItKeepsNoCasts) {
  nn::Linear linear(4, 4);
  auto amp = initialize(*linear, {.opt_level = OptLevel::O1});
  optim::SGD optimizer(amp.parameters(*linear), {.lr = 1e-2});
  const Region region = amp.region();
  const auto loss = amp.forward(linear, at::ones({2, 4})).sum();
  EXPECT_EQ(cast_cache_size(), 2U);
  ScaledLoss scaled(amp, loss, {&optimizer});
  scaled.backward();
  scaled.finish();
  EXPECT_EQ(cast_cache_size(), 0U);
}

TEST_F(ScaledLossTest, ZeroGradForgetsWhatWasFound) {
  for (const auto& options : kTrained) {
    for (const bool delay : {false, true}) {
      SCOPED_TRACE(title(options) + (delay ? " delayed" : ""));
      Dot model({1, 1});
      auto amp = initialize(model, options);
      optim::SGD optimizer(amp.parameters(model), {.lr = 1.0});
      const auto run = [&](float value, bool delayed) {
        ScaledLoss scaled(amp, amp.forward(model, at::tensor({value, 0.0F})), {&optimizer},
                          {.delay_overflow_check = delayed});
        scaled.backward();
        return scaled.finish();
      };
      EXPECT_EQ(run(kInfinity, delay), delay);
      amp.zero_grad(optimizer);
      EXPECT_FALSE(amp.state().empty());
      const double before = amp.loss_scale();
      EXPECT_TRUE(run(0.5F, false));
      EXPECT_EQ(amp.loss_scale(), before);
      EXPECT_TRUE(amp.step(optimizer));
      EXPECT_TRUE(model.weight.to(at::kFloat).equal(at::tensor({0.5F, 1.0F})));
      EXPECT_EQ(amp.counts(optimizer).skipped, 0);
    }
  }
}

TEST_F(ScaledLossTest, ZeroGradKeepsWhatWasFoundForOthers) {
  Dot first({1, 1}), second({1, 1});
  auto amp = initialize({first, second}, {.opt_level = OptLevel::O2, .max_loss_scale = kFirst});
  optim::SGD one(amp.parameters(first), {.lr = 1.0}), two(amp.parameters(second), {.lr = 1.0});
  const auto run = [&](float a, float b, bool delayed) {
    ScaledLoss scaled(
        amp, amp.forward(first, at::tensor({a, 0.0F})) + amp.forward(second, at::tensor({b, 0.0F})),
        {&one, &two}, {.delay_overflow_check = delayed});
    scaled.backward();
    return scaled.finish();
  };
  EXPECT_TRUE(run(0.5F, kInfinity, true));
  amp.zero_grad(one);
  EXPECT_FALSE(run(0.5F, 0.5F, false));
  EXPECT_FALSE(amp.step(two));
}

TEST_F(ScaledLossTest, AParameterThatIsUnfrozenLaterIsRefused) {
  for (const auto level : {OptLevel::O2, OptLevel::bf16_stochastic}) {
    Dot model({1, 1}), other({1, 1});
    model.weight.set_requires_grad(false);
    auto amp = initialize({model, other}, {.opt_level = level});
    optim::SGD optimizer({model.weight, amp.parameters(other)[0]}, {.lr = 1.0});
    model.weight.set_requires_grad(true);
    const auto x = at::tensor({0.5F, 0.5F});
    EXPECT_THAT(
        message_of([&] { ScaledLoss(amp, amp.forward(model, x), {&optimizer}).backward(); }),
        HasSubstr("'models.0.weight' must have wanted a gradient at initialize()"));
    EXPECT_THAT(message_of([&] { amp.step(optimizer); }), HasSubstr("Unfreeze it before"));
  }
}

TEST_F(ScaledLossTest, GradientsOfAnotherOptimizersLossAreRefusedAtO1) {
  Dot first({1, 1}), second({1, 1});
  auto amp = initialize({first, second}, {.opt_level = OptLevel::O1, .loss_scale = 1024.0});
  optim::SGD one(amp.parameters(first), {.lr = 1.0}), two(amp.parameters(second), {.lr = 1.0});
  const auto x = at::tensor({0.5F, 0.25F});
  const auto run = [&](optim::Optimizer& optimizer, bool both) {
    const auto loss =
        amp.forward(optimizer.groups()[0].parameters[0].is_same(first.weight) ? first : second, x);
    ScaledLoss scaled(amp, both ? amp.forward(first, x) + amp.forward(second, x) : loss,
                      {&optimizer});
    scaled.backward();
    scaled.finish();
  };
  run(one, false);
  run(two, true);
  EXPECT_THAT(message_of([&] { amp.step(one); }),
              HasSubstr("'models.0.weight' must get its gradients from ScaledLosses that have"));
  EXPECT_THAT(message_of([&] { run(one, false); }), HasSubstr("the backward of loss 0"));
  EXPECT_TRUE(first.weight.equal(at::tensor({1.0F, 1.0F})));
  EXPECT_TRUE(amp.step(two));
  // However its gradients go, it may go on.
  for (int i = 0; i < 3; ++i) {
    run(two, true);
    if (i == 0) amp.zero_grad(one);
    if (i == 1) one.zero_grad(/*set_to_none=*/true);
    if (i == 2) one.zero_grad(/*set_to_none=*/false);
    run(one, false);
    EXPECT_TRUE(first.weight.grad().equal(x));
    EXPECT_TRUE(amp.step(one));
    amp.zero_grad(one);
  }
}

TEST_F(ScaledLossTest, AGradientThatCannotBeUnscaledIsRefusedBeforeAnyIs) {
  for (const auto& options : kTrained) {
    SCOPED_TRACE(title(options));
    Dot model({1, 1});
    nn::Embedding embedding(nn::EmbeddingOptions(4, 2).sparse(true));
    auto amp = initialize({model, *embedding}, options);
    auto parameters = amp.parameters(model);
    parameters.push_back(amp.parameters(*embedding)[0]);
    optim::SGD optimizer(parameters, {.lr = 1.0});
    const auto x = at::tensor({0.5F, 0.25F});
    {
      ScaledLoss scaled(amp, amp.forward(model, x), {&optimizer});
      scaled.backward();
    }
    {
      const auto loss =
          amp.forward(model, x) + amp.forward(embedding, at::arange(2)).to(at::kFloat).sum();
      ScaledLoss scaled(amp, loss, {&optimizer});
      scaled.backward();
      EXPECT_THAT(message_of([&] { scaled.finish(); }),
                  HasSubstr("gradient of parameter 'models.1.weight' must be dense"));
    }
    EXPECT_TRUE(amp.step(optimizer));  // With what the first one left.
    EXPECT_TRUE(model.weight.to(at::kFloat).equal(at::tensor({0.5F, 0.75F})));
  }
}

TEST_F(ScaledLossTest, ARunThatOnlySkipsAtAFixedScaleWarnsOnce) {
  Dot model({1, 1});
  std::vector<std::string> warnings;
  auto amp = initialize(
      model,
      {.opt_level = OptLevel::O2, .loss_scale = 128.0, .report = [&](const std::string& line) {
         if (line.find("of its last") != std::string::npos) {
           warnings.push_back(line);
         }
       }});
  optim::SGD optimizer(amp.parameters(model), {.lr = 1.0});
  for (int i = 0; i < 250; ++i) {
    EXPECT_EQ(warnings.size(), i < 200 ? 0U : 1U);
    {
      ScaledLoss scaled(amp, amp.forward(model, at::tensor({kInfinity, 0.0F})), {&optimizer});
      scaled.backward();
    }
    EXPECT_FALSE(amp.step(optimizer));
    amp.zero_grad(optimizer);
  }
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_THAT(warnings[0], HasSubstr("an optimizer skipped 200 of its last 200 steps"));
  EXPECT_THAT(warnings[0], HasSubstr("The loss scale is 128 and fixed"));
}

TEST_F(ScaledLossTest, ACheckpointsSecondRunOutsideAScaledLossWantsARegion) {
  for (const auto level : {OptLevel::O2, OptLevel::bf16}) {
    const auto gradients = [&](bool checkpointed) {
      torch::manual_seed(2);
      nn::Linear linear(8, 8);
      nn::LayerNorm norm(nn::LayerNormOptions({8}));
      nn::Sequential both(linear, norm);
      auto amp = initialize(*both, {.opt_level = level, .max_loss_scale = kFirst});
      optim::SGD optimizer(amp.parameters(*both), {.lr = 0.1});
      const auto x = at::randn({4, 8}).requires_grad_();
      const auto block = [&](const at::Tensor& in) {
        return norm->forward(at::softmax(linear->forward(in), -1, at::kFloat) + in);
      };
      const auto loss = amp.call(
                               [&](const at::Tensor& in) {
                                 return checkpointed ? recompute::checkpoint(block, in) : block(in);
                               },
                               x)
                            .square()
                            .mean();
      at::Tensor of_x;
      {
        const Region region = amp.region();
        of_x = torch::autograd::grad({loss}, {x}, {}, true, true)[0];
      }
      {
        ScaledLoss scaled(amp, loss + of_x.square().sum(), {&optimizer});
        scaled.backward();
        EXPECT_TRUE(scaled.finish());
      }
      return amp.master_params(optimizer)[0].grad().clone();
    };
    EXPECT_TRUE(gradients(true).equal(gradients(false)));
  }
}

}  // namespace
}  // namespace gradus::amp
