#include <gradus/amp/levels/levels.h>

#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/base/error.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/sgd.h>
#include <gradus/plane/op/op_plane.h>
#include <gradus/recompute/checkpoint.h>

#include <tests/support/message_of.h>

namespace gradus::amp {
namespace {

using testing::HasSubstr;
using tests::message_of;
namespace nn = torch::nn;

constexpr auto kF = at::kFloat;
constexpr auto kH = at::kHalf;
constexpr auto kB = at::kBFloat16;

// Convolution, BatchNorm with and without parameters, and a constant of its own that is no buffer.
struct ConvNetImpl : nn::Module {
  nn::Conv2d conv{nn::Conv2dOptions(3, 8, 3).padding(1)};
  nn::BatchNorm2d norm{8};
  nn::BatchNorm1d plain_norm{nn::BatchNorm1dOptions(8).affine(false)};
  nn::Linear head{8, 5};
  at::Tensor tilt = at::linspace(0.9, 1.1, 8);
  std::map<std::string, at::ScalarType> seen;

  ConvNetImpl() {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("plain_norm", plain_norm);
    register_module("head", head);
  }
  at::Tensor note(const char* where, const at::Tensor& x) {
    seen[where] = x.scalar_type();
    return x;
  }
  at::Tensor forward(const at::Tensor& x) {
    auto h = note("conv", conv(note("input", x)));
    h = note("norm", norm(h)).relu();
    h = note("plain_norm", plain_norm(note("mean", h.mean({2, 3}))));
    return note("head", head(h * tilt));  // float32 by promotion, unless the head casts it
  }
};
TORCH_MODULE(ConvNet);

at::Tensor images() { return at::randn({6, 3, 8, 8}); }
at::Tensor labels() { return at::arange(6).remainder(5); }

class LevelsTest : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    torch::manual_seed(0);
  }
  void TearDown() override { EXPECT_FALSE(plane::op::active()); }
};

TEST_F(LevelsTest, EveryTensorOfAConvolutionalNetHasTheDtypeOfTheTable) {
  struct Row {
    LevelOptions options;
    at::ScalarType weight, norm, plain_statistics;
    at::ScalarType conv, norm_result, mean, head;
    at::ScalarType weight_gradient, norm_gradient, target, target_gradient;
  };
  // O1's operator lists give a mean in float32.
  const std::vector<Row> table{
      {{.opt_level = OptLevel::O0}, kF, kF, kF, kF, kF, kF, kF, kF, kF, kF, kF},
      {{.opt_level = OptLevel::O1}, kF, kF, kF, kH, kH, kF, kH, kF, kF, kF, kF},
      {{.opt_level = OptLevel::O2}, kH, kF, kH, kH, kH, kH, kH, kH, kF, kF, kF},
      {{.opt_level = OptLevel::O3}, kH, kH, kH, kH, kH, kH, kH, kH, kH, kH, kH},
      {{.opt_level = OptLevel::O3, .keep_batchnorm_fp32 = true},
       kH,
       kF,
       kH,
       kH,
       kH,
       kH,
       kH,
       kH,
       kF,
       kH,
       kH},
      {{.opt_level = OptLevel::bf16}, kB, kF, kB, kB, kB, kB, kB, kB, kF, kF, kF},
      {{.opt_level = OptLevel::bf16_stochastic}, kB, kF, kB, kB, kB, kB, kB, kB, kF, kF, kF},
  };
  for (const auto& row : table) {
    SCOPED_TRACE(std::string(name(row.options.opt_level)) +
                 (row.options.keep_batchnorm_fp32 ? " keep" : ""));
    ConvNet net;
    auto options = row.options;
    options.max_loss_scale = 1024.0;  // no overflow in the first step
    auto amp = initialize(*net, options);
    optim::SGD optimizer(amp.parameters(*net), {.lr = 0.1, .momentum = 0.9});
    const auto out = amp.forward(net, images());
    EXPECT_EQ(out.scalar_type(), row.options.opt_level == OptLevel::O1 ? kH : kF);
    EXPECT_EQ(net->seen.at("conv"), row.conv);
    EXPECT_EQ(net->seen.at("norm"), row.norm_result);
    EXPECT_EQ(net->seen.at("mean"), row.mean);
    EXPECT_EQ(net->seen.at("head"), row.head);
    EXPECT_EQ(net->conv->weight.scalar_type(), row.weight);
    EXPECT_EQ(net->head->bias.scalar_type(), row.weight);
    EXPECT_EQ(net->norm->weight.scalar_type(), row.norm);
    EXPECT_EQ(net->norm->running_mean.scalar_type(), row.norm);
    EXPECT_EQ(net->norm->num_batches_tracked.scalar_type(), at::kLong);
    EXPECT_EQ(net->plain_norm->running_var.scalar_type(), row.plain_statistics);
    {
      ScaledLoss scaled(amp, at::cross_entropy_loss(out, labels()), {&optimizer});
      EXPECT_EQ(scaled.loss().scalar_type(), kF);
      scaled.backward();
      EXPECT_EQ(net->conv->weight.grad().scalar_type(), row.weight_gradient);
      EXPECT_EQ(net->norm->weight.grad().scalar_type(), row.norm_gradient);
      scaled.finish();
    }
    for (const auto& parameter : amp.master_params(optimizer)) {
      ASSERT_TRUE(parameter.grad().defined());
      EXPECT_EQ(parameter.grad().scalar_type(), parameter.scalar_type());
    }
    const auto target = amp.parameters(*net).front();
    EXPECT_EQ(target.scalar_type(), row.target);
    EXPECT_EQ(target.grad().scalar_type(), row.target_gradient);
    const auto before = net->conv->weight.detach().clone();
    EXPECT_TRUE(amp.step(optimizer));
    EXPECT_FALSE(net->conv->weight.equal(before));
    EXPECT_EQ(net->conv->weight.scalar_type(), row.weight);
    for (const auto& each : amp.model_state(*net)) {
      EXPECT_TRUE(!at::isFloatingType(each.second.scalar_type()) || each.second.scalar_type() == kF)
          << each.first;
    }
  }
}

TEST_F(LevelsTest, O0IsPlainTrainingBitForBit) {
  const auto train = [](bool with_amp) {
    torch::manual_seed(1);
    ConvNet net;
    std::optional<Amp> amp;
    if (with_amp) amp.emplace(initialize(*net, {.opt_level = OptLevel::O0}));
    optim::AdamW optimizer(amp ? amp->parameters(*net) : net->parameters(), {.lr = 1e-2});
    for (int i = 0; i < 5; ++i) {
      optimizer.zero_grad();
      const auto x = images();
      const auto loss =
          at::cross_entropy_loss(amp ? amp->forward(net, x) : net->forward(x), labels());
      if (amp) {
        ScaledLoss scaled(*amp, loss, {&optimizer});
        scaled.backward();
        scaled.finish();
        EXPECT_TRUE(amp->step(optimizer));
      } else {
        loss.backward();
        optimizer.step();
      }
    }
    return net;
  };
  const auto plain = train(false), levels = train(true);
  for (std::size_t i = 0; i < plain->parameters().size(); ++i) {
    EXPECT_TRUE(plain->parameters()[i].equal(levels->parameters()[i]));
  }
  EXPECT_TRUE(plain->norm->running_var.equal(levels->norm->running_var));
}

// Final loss of a few steps on one batch, skipped ones not counted.
double final_loss(const LevelOptions& options, int steps) {
  torch::manual_seed(3);
  ConvNet net;
  auto amp = initialize(*net, options);
  optim::AdamW optimizer(amp.parameters(*net), {.lr = 3e-3});
  const auto x = images();
  double last = 0;
  for (int taken = 0, tries = 0; taken < steps && tries < steps + 20; ++tries) {
    amp.zero_grad(optimizer);
    const auto loss = at::cross_entropy_loss(amp.forward(net, x).to(kF), labels());
    last = loss.item<double>();
    ScaledLoss scaled(amp, loss, {&optimizer});
    scaled.backward();
    scaled.finish();
    taken += amp.step(optimizer) ? 1 : 0;
  }
  return last;
}

TEST_F(LevelsTest, TwentyStepsEndCloseToFloat32) {
  // float16 has 11 bits, bfloat16 8: a loss errs by some of these over the operators of a step.
  const double exact = final_loss({.opt_level = OptLevel::O0}, 20);
  for (const auto& [level, bound] :
       {std::pair(OptLevel::O1, 0.01), std::pair(OptLevel::O2, 0.01),
        std::pair(OptLevel::bf16, 0.04), std::pair(OptLevel::bf16_stochastic, 0.04)}) {
    EXPECT_NEAR(final_loss({.opt_level = level}, 20), exact, bound * exact) << name(level);
  }
}

TEST_F(LevelsTest, ACheckpointComputesTheSameAgain) {
  // The second run is in backward, where forward's region is gone.
  for (const auto level : {OptLevel::O1, OptLevel::O2, OptLevel::O3, OptLevel::bf16}) {
    for (const bool reentrant : {false, true}) {
      const auto train = [&](bool checkpointed) {
        torch::manual_seed(5);
        ConvNet net;
        auto amp = initialize(*net, {.opt_level = level, .max_loss_scale = 1024.0});
        optim::SGD optimizer(amp.parameters(*net), {.lr = 0.1});
        const auto x = images().requires_grad_();
        const auto out = amp.call(
            [&](const at::Tensor& cast) {
              if (!checkpointed) return net->forward(cast);
              return recompute::checkpoint(
                  {.reentrant = reentrant},
                  [net](const at::Tensor& t) mutable { return net->forward(t); }, cast);
            },
            x);
        ScaledLoss scaled(amp, at::cross_entropy_loss(out.to(kF), labels()), {&optimizer});
        scaled.backward();
        scaled.finish();
        EXPECT_TRUE(amp.step(optimizer));
        return amp.model_state(*net);
      };
      const auto plain = train(false), again = train(true);
      for (std::size_t i = 0; i < plain.size(); ++i) {
        EXPECT_TRUE(plain[i].second.equal(again[i].second)) << name(level) << plain[i].first;
      }
    }
  }
}

TEST_F(LevelsTest, AnUpdateBelowBfloat16sResolutionStillMovesOnAverage) {
  // Weights of 1 with steps of 2^-12, a sixteenth of what bfloat16 holds above 1.
  const double lr = std::ldexp(1.0, -12);
  const auto train = [&](std::optional<bool> stochastic) {
    nn::Linear linear(nn::LinearOptions(4000, 1).bias(false));
    {
      const at::NoGradGuard no_grad;
      linear->weight.fill_(1.0);
    }
    auto amp = initialize(*linear, {.opt_level = OptLevel::bf16_stochastic,
                                    .stochastic_rounding = stochastic,
                                    .rounding_seed = 11});
    optim::SGD optimizer(amp.parameters(*linear), {.lr = lr, .maximize = true});
    for (int i = 0; i < 32; ++i) {
      optimizer.zero_grad();
      ScaledLoss scaled(amp, amp.forward(linear, at::ones({1, 4000})).sum(), {&optimizer});
      scaled.backward();
      scaled.finish();
      amp.step(optimizer);
    }
    EXPECT_EQ(linear->weight.scalar_type(), kB);
    return linear->weight.to(at::kDouble).mean().item<double>();
  };
  EXPECT_EQ(train(false), 1.0);  // rounded to nearest, nothing ever moves
  // The mean of 4000 weights, each with a deviation of sqrt(32 / 16) steps of 2^-7 at most.
  EXPECT_NEAR(train(std::nullopt), 1.0 + 32 * lr, 4 * std::sqrt(2.0 / 4000) * std::ldexp(1.0, -7));
}

TEST_F(LevelsTest, StandInsHoldWeightsDuringAStepOnly) {
  nn::Linear linear(3, 2);
  auto amp = initialize(*linear, {.opt_level = OptLevel::bf16_stochastic});
  const auto stand_ins = amp.parameters(*linear);
  EXPECT_EQ(stand_ins[0].sizes(), linear->weight.sizes());
  EXPECT_TRUE(stand_ins[0].isnan().all().item<bool>());
  EXPECT_LE(stand_ins[0].storage().nbytes(), 4U);
}

struct Batch {
  at::Tensor ids, values;
  double scale = 1.0;
};
template <typename Visit>
void for_each_tensor(Batch& batch, Visit&& visit) {
  visit(batch.ids);
  visit(batch.values);
}

TEST_F(LevelsTest, FloatingTensorsInContainersAreCastAndAllElseStays) {
  nn::Linear linear(2, 2);
  const auto amp = initialize(*linear, {.opt_level = OptLevel::bf16});
  const auto f = at::ones({2, 2});
  const Batch batch{at::ones({2}, at::kLong), f, 2.0};
  const at::Tensor undefined;
  int calls = 0;
  const auto result = amp.call(
      [&](const Batch& b, std::vector<at::Tensor> list, std::tuple<at::Tensor, int> pair,
          std::optional<at::Tensor> maybe, const std::map<std::string, at::Tensor>& by_name,
          const at::Tensor& none, at::TensorList tensors, int& counter, const std::string& text) {
        ++counter;
        EXPECT_EQ(b.ids.scalar_type(), at::kLong);
        EXPECT_EQ(b.values.scalar_type(), kB);
        EXPECT_EQ(b.scale, 2.0);
        EXPECT_EQ(list[0].scalar_type(), kB);
        EXPECT_EQ(list[1].scalar_type(), at::kBool);
        EXPECT_EQ(std::get<0>(pair).scalar_type(), kB);
        EXPECT_EQ(maybe->scalar_type(), kB);
        EXPECT_EQ(by_name.at("x").scalar_type(), kB);
        EXPECT_FALSE(none.defined());
        EXPECT_EQ(tensors[0].scalar_type(), kB);
        EXPECT_EQ(text, "text");
        return std::tuple(linear(list[0]), b.ids, std::vector<at::Tensor>{list[0]});
      },
      batch, std::vector<at::Tensor>{f, f > 0}, std::tuple(f, 1), std::optional(f),
      std::map<std::string, at::Tensor>{{"x", f}}, undefined, at::TensorList(f), calls, "text");
  EXPECT_EQ(calls, 1);  // what holds no tensor goes by reference
  EXPECT_EQ(batch.values.scalar_type(), kF);
  EXPECT_EQ(std::get<0>(result).scalar_type(), kF);
  EXPECT_EQ(std::get<1>(result).scalar_type(), at::kLong);
  EXPECT_EQ(std::get<2>(result)[0].scalar_type(), kF);
}

TEST_F(LevelsTest, OutputsHaveTheDtypeAskedFor) {
  for (const auto level : {OptLevel::O1, OptLevel::O2}) {
    nn::Sequential net(nn::Linear(4, 4), nn::ReLU());
    const auto amp = initialize(*net, {.opt_level = level, .cast_model_outputs = kB});
    EXPECT_EQ(amp.forward(net, at::ones({2, 4})).scalar_type(), kB);
  }
}

TEST_F(LevelsTest, Float16ProductsAreComputedInFloat32AndRounded) {
  if (!rounds(kH)) GTEST_SKIP() << "this processor has float16 arithmetic";
  nn::Linear linear(33, 7);
  nn::Conv2d conv(3, 4, 3);
  const auto amp =
      initialize({*linear, *conv}, {.opt_level = OptLevel::O3, .cast_model_outputs = kH});
  const auto x = at::randn({5, 33}).to(kH).requires_grad_();
  const auto y = amp.forward(linear, x);
  const auto w = linear->weight.to(kF), b = linear->bias.to(kF);
  EXPECT_TRUE(y.equal(at::linear(x.to(kF), w, b).to(kH)));
  const auto cotangent = at::randn({5, 7}).to(kH);
  y.backward(cotangent);
  EXPECT_EQ(linear->weight.grad().scalar_type(), kH);
  EXPECT_TRUE(x.grad().equal(at::mm(cotangent.to(kF), w).to(kH)));
  const auto image = at::randn({2, 3, 6, 6}).to(kH);
  EXPECT_TRUE(amp.forward(conv, image)
                  .equal(at::conv2d(image.to(kF), conv->weight.to(kF), conv->bias.to(kF)).to(kH)));
}

TEST_F(LevelsTest, ACastParameterMeetsItsArgumentsInItsDtype) {
  nn::LayerNorm norm(nn::LayerNormOptions({8}));
  const auto amp = initialize(*norm, {.opt_level = OptLevel::O3});
  const Region region = amp.region();
  // float32 values that were made inside: no caller saw them.
  EXPECT_EQ(norm(at::randn({2, 8})).scalar_type(), kH);
  EXPECT_EQ((at::randn({2, 8}) * norm->weight).scalar_type(), kH);
  EXPECT_EQ(at::stack({norm->weight, at::ones({8})}).scalar_type(), kH);
  EXPECT_EQ((at::randn({8}) + at::ones({8}).to(kH)).scalar_type(),
            kF);  // no parameter: torch's rule
  auto written = at::zeros({8});
  written.add_(norm->weight);
  EXPECT_EQ(written.scalar_type(), kF);
}

TEST_F(LevelsTest, AModelAloneServesForInference) {
  ConvNet net;
  net->eval();
  const auto x = images();
  const auto exact = net->forward(x);
  auto amp = initialize(*net, {.opt_level = OptLevel::O2, .inference = true});
  const at::NoGradGuard no_grad;
  const auto out = amp.forward(net, x);
  EXPECT_EQ(out.scalar_type(), kF);
  EXPECT_EQ(net->seen.at("norm"), kH);
  EXPECT_TRUE(at::allclose(out, exact, 1e-2, 1e-2));
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(amp.forward(net, x).equal(out));
  }
  EXPECT_THAT(message_of([&] { (void)amp.parameters(*net); }), HasSubstr("for inference"));
}

TEST_F(LevelsTest, NotEnabledIsAsIfItWereNotThere) {
  nn::Linear linear(4, 2);
  auto amp = initialize(*linear, {.enabled = false, .opt_level = OptLevel::O2});
  EXPECT_EQ(linear->weight.scalar_type(), kF);
  EXPECT_TRUE(amp.parameters(*linear)[0].is_same(linear->weight));
  optim::SGD optimizer(amp.parameters(*linear), {.lr = 1.0});
  const auto loss = amp.forward(linear, at::ones({1, 4})).sum();
  ScaledLoss scaled(amp, loss, {&optimizer});
  EXPECT_TRUE(scaled.loss().is_same(loss));
  scaled.backward();
  scaled.finish();
  EXPECT_TRUE(amp.step(optimizer));
  EXPECT_EQ(amp.loss_scale(), 1.0);
  EXPECT_TRUE(amp.state().empty());
}

TEST_F(LevelsTest, MisuseIsRefusedByName) {
  nn::Linear half(2, 2);
  half->to(kH);
  EXPECT_THAT(message_of([&] { (void)initialize(*half); }),
              HasSubstr("parameter 'weight' must be float32 at initialize(); got Half"));
  nn::Linear a(2, 2), b(2, 2);
  b->bias.requires_grad_(false);
  EXPECT_THAT(
      message_of([&] { (void)initialize(std::vector<std::reference_wrapper<nn::Module>>{}); }),
      HasSubstr("at least one model"));
  auto amp = initialize({*a, *b}, {.opt_level = OptLevel::O2});
  EXPECT_TRUE(amp.parameters(*b)[1].is_same(b->bias));  // frozen: no master
  b->bias.requires_grad_(true);
  EXPECT_THAT(message_of([&] { (void)amp.parameters(*b); }),
              HasSubstr("'models.1.bias' must have wanted a gradient"));
  nn::Linear stranger(2, 2);
  EXPECT_THAT(message_of([&] { (void)amp.parameters(*stranger); }), HasSubstr("must belong to"));
  optim::SGD wrong(a->parameters(), {});
  EXPECT_THAT(message_of([&] {
                ScaledLoss(amp, amp.forward(a, at::ones({1, 2})).sum(), {&wrong}).backward();
              }),
              HasSubstr("the optimizer must step on the float32 weights of 'models.0.weight'"));
}

TEST_F(LevelsTest, GroupsKeepTheirSettings) {
  nn::Linear linear(2, 2);
  const auto amp = initialize(*linear, {.opt_level = OptLevel::O2});
  const auto groups = amp.groups({{.parameters = {linear->bias}, .lr = 0.5, .names = {"b"}},
                                  {.parameters = {linear->weight}, .weight_decay = 0.1}});
  EXPECT_TRUE(groups[0].parameters[0].is_same(amp.parameters(*linear)[1]));
  EXPECT_EQ(groups[0].lr, 0.5);
  EXPECT_EQ(groups[0].names[0], "b");
  EXPECT_EQ(groups[1].weight_decay, 0.1);
}

}  // namespace
}  // namespace gradus::amp
