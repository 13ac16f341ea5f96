#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/amp/levels/levels.h>
#include <gradus/base/error.h>
#include <gradus/optim/adamw.h>

#include <tests/support/message_of.h>

namespace gradus::amp {
namespace {

using testing::HasSubstr;
using tests::message_of;
namespace nn = torch::nn;

// A run that can be saved and begun again.
struct Training {
  nn::Sequential net{nn::Linear(6, 16), nn::BatchNorm1d(16), nn::ReLU(), nn::Linear(16, 3)};
  Amp amp;
  optim::AdamW optimizer;

  explicit Training(const LevelOptions& options)
      : amp(initialize(*net, options)), optimizer(amp.parameters(*net), {.lr = 1e-2}) {}

  bool step(int number) {
    amp.zero_grad(optimizer);
    torch::manual_seed(static_cast<std::uint64_t>(number));
    const auto loss = at::cross_entropy_loss(amp.forward(net, at::randn({8, 6})).to(at::kFloat),
                                             at::arange(8).remainder(3));
    ScaledLoss scaled(amp, loss, {&optimizer});
    scaled.backward();
    scaled.finish();
    return amp.step(optimizer);
  }
};

TEST(StateTest, ASavedRunGoesOnBitForBitAtEveryLevel) {
  at::set_num_threads(1);
  for (const auto level : {OptLevel::O0, OptLevel::O1, OptLevel::O2, OptLevel::O3, OptLevel::bf16,
                           OptLevel::bf16_stochastic}) {
    SCOPED_TRACE(std::string(name(level)));
    const LevelOptions options{.opt_level = level, .rounding_seed = 3};
    Training run(options);
    for (int i = 0; i < 4; ++i) run.step(i);
    const auto weights = run.amp.model_state(*run.net);
    const auto state = run.amp.state();
    std::vector<optim::NamedState> moments;
    for (const auto& each : run.optimizer.state()) {
      moments.push_back({each.name, each.tensor.clone()});
    }

    Training again({.opt_level = level, .rounding_seed = 99});  // other weights, another stream
    again.step(77);
    again.amp.load_model_state(*again.net, weights);
    again.amp.load_state(state);
    again.optimizer.load_state(moments);
    for (int i = 4; i < 7; ++i) {
      EXPECT_EQ(run.step(i), again.step(i));
      const auto expected = run.amp.model_state(*run.net);
      const auto got = again.amp.model_state(*again.net);
      for (std::size_t k = 0; k < expected.size(); ++k) {
        EXPECT_EQ(expected[k].first, got[k].first);
        EXPECT_TRUE(expected[k].second.equal(got[k].second)) << expected[k].first << " step " << i;
      }
      EXPECT_EQ(run.amp.loss_scale(), again.amp.loss_scale());
    }
  }
}

TEST(StateTest, MastersAreSavedNotTheirRoundedCopies) {
  Training run({.opt_level = OptLevel::O2});
  while (!run.step(0)) {
  }
  const auto weights = run.amp.model_state(*run.net);
  const auto& first = weights.front();
  EXPECT_EQ(first.first, "0.weight");
  EXPECT_EQ(first.second.scalar_type(), at::kFloat);
  EXPECT_TRUE(first.second.equal(run.amp.parameters(*run.net).front()));
  EXPECT_FALSE(first.second.equal(run.net->parameters().front().to(at::kFloat)));
  EXPECT_TRUE(first.second.to(at::kHalf).equal(run.net->parameters().front()));
}

TEST(StateTest, WeightsMoveBetweenLevels) {
  Training plain({.opt_level = OptLevel::O0});
  plain.step(0);
  Training half({.opt_level = OptLevel::O2});
  half.amp.load_model_state(*half.net, plain.amp.model_state(*plain.net));
  EXPECT_TRUE(half.amp.parameters(*half.net).front().equal(plain.net->parameters().front()));
  EXPECT_TRUE(half.net->parameters().front().equal(plain.net->parameters().front().to(at::kHalf)));
  // And masters that another hand changed reach the model.
  {
    const at::NoGradGuard no_grad;
    half.amp.parameters(*half.net).front().zero_();
  }
  half.amp.copy_masters_to_models();
  EXPECT_EQ(half.net->parameters().front().abs().sum().item<float>(), 0.0F);
}

TEST(StateTest, AStateThatDoesNotFitChangesNothing) {
  Training run({.opt_level = OptLevel::O2, .num_losses = 2});
  const auto weights = run.amp.model_state(*run.net);
  auto wrong = weights;
  wrong.front().second = at::zeros({1});
  EXPECT_THAT(message_of([&] { run.amp.load_model_state(*run.net, wrong); }),
              HasSubstr("state '0.weight' must have shape [16, 6]; got [1]"));
  wrong = weights;
  wrong.pop_back();
  EXPECT_THAT(message_of([&] { run.amp.load_model_state(*run.net, wrong); }),
              HasSubstr("got none"));
  wrong = weights;
  wrong.emplace_back("other", at::zeros({1}));
  EXPECT_THAT(message_of([&] { run.amp.load_model_state(*run.net, wrong); }),
              HasSubstr("state 'other' must belong to this model"));

  auto scales = run.amp.state();
  EXPECT_EQ(scales.front().second.scalar_type(), at::kDouble);
  for (auto& [name, tensor] : scales) {
    if (name == "loss_scaler0.scale") tensor.fill_(256.0);
    if (name == "loss_scaler1.scale") tensor.fill_(-1.0);
  }
  EXPECT_THROW(run.amp.load_state(scales), UserError);
  EXPECT_EQ(run.amp.loss_scale(0), 65536.0);
  EXPECT_THROW(run.amp.load_state({}), UserError);
}

TEST(StateTest, IsRefusedWhileGradientsWaitForAStep) {
  Training run({.opt_level = OptLevel::O2});
  ScaledLoss scaled(run.amp, run.amp.forward(run.net, at::randn({8, 6})).sum(), {&run.optimizer},
                    {.delay_unscale = true});
  scaled.backward();
  scaled.finish();
  EXPECT_THAT(message_of([&] { (void)run.amp.state(); }),
              HasSubstr("between a step and the next backward"));
}

TEST(StateTest, AnAbandonedStepCanBeSavedAndItsScalesComeBack) {
  for (const auto level : {OptLevel::O1, OptLevel::O2}) {
    Training run({.opt_level = level});
    const auto begin = run.amp.state();
    {
      const auto loss = run.amp.forward(run.net, at::randn({8, 6})).sum().to(at::kFloat) * INFINITY;
      ScaledLoss scaled(run.amp, loss, {&run.optimizer});
      scaled.backward();
      EXPECT_FALSE(scaled.finish());
    }
    EXPECT_THAT(message_of([&] { (void)run.amp.state(); }), HasSubstr("zero_grad"));
    run.amp.zero_grad(run.optimizer);
    EXPECT_EQ(run.amp.loss_scale(), 32768.0);
    run.amp.load_state(begin);
    EXPECT_EQ(run.amp.loss_scale(), 65536.0);
    const auto after = run.amp.state();
    ASSERT_EQ(after.size(), begin.size());
    for (std::size_t i = 0; i < begin.size(); ++i) {
      EXPECT_TRUE(after[i].second.equal(begin[i].second)) << begin[i].first;
    }
  }
}

}  // namespace
}  // namespace gradus::amp
