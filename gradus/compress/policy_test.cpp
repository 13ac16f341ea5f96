#include <gradus/compress/policy.h>

#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>

#include <ATen/core/ivalue.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>
#include <gradus/recompute/checkpoint.h>

namespace gradus::compress {
namespace {

using plane::saved::Packed;
using plane::saved::Value;
using testing::HasSubstr;
using Module = torch::nn::Sequential;
namespace nn = torch::nn;

class PolicyTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
  void TearDown() override { EXPECT_FALSE(plane::op::active()); }
};

nn::Conv2d conv(int in, int out) { return nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1)); }
nn::MaxPool2d pool() { return nn::MaxPool2d(2); }
nn::ReLU relu_in_place() { return nn::ReLU(nn::ReLUOptions(true)); }

// Convolutions in pairs, each pair followed by pooling: VGG (Simonyan and Zisserman 2014), narrow.
Module vgg() {
  return Module(conv(3, 16), relu_in_place(), conv(16, 16), relu_in_place(), pool(),  //
                conv(16, 32), relu_in_place(), conv(32, 32), relu_in_place(), pool(), conv(32, 64),
                relu_in_place(), conv(64, 64), relu_in_place(), pool(),  //
                nn::Flatten(), nn::Linear(64 * 16, 64), nn::ReLU(), nn::Dropout(0.5),
                nn::Linear(64, 10));
}

Module conv_net() {
  return Module(conv(3, 8), nn::BatchNorm2d(8), nn::ReLU(), nn::Dropout(0.3), conv(8, 8),
                nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.1)), nn::AvgPool2d(2),
                conv(8, 8), nn::ReLU(), nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1)),
                conv(8, 8), nn::BatchNorm2d(8), nn::GELU(), nn::AdaptiveMaxPool2d(4), nn::ReLU6(),
                nn::AdaptiveAvgPool2d(2), nn::Flatten(), nn::Linear(32, 10));
}

Module mlp() {
  return Module(nn::Linear(48, 200), nn::ReLU(), nn::Dropout(0.2), nn::Linear(200, 200),
                nn::LayerNorm(nn::LayerNormOptions({200})), nn::ReLU(), nn::Linear(200, 200),
                nn::Tanh(), nn::Linear(200, 10));
}

struct TransformerImpl : nn::Module {
  TransformerImpl() {
    layers = register_module(
        "layers",
        nn::TransformerEncoder(nn::TransformerEncoderOptions(
            nn::TransformerEncoderLayerOptions(32, 4).dim_feedforward(64).dropout(0.1), 2)));
    head = register_module("head", nn::Linear(32, 10));
  }
  at::Tensor forward(at::Tensor x) { return head(layers(x).mean(0)); }
  nn::TransformerEncoder layers{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Transformer);

struct Case {
  const char* name;
  std::function<std::pair<std::function<at::Tensor(at::Tensor)>, std::vector<at::Tensor>>()> make;
  std::vector<std::int64_t> shape;
};

template <typename Holder>
auto maker(std::function<Holder()> make) {
  return [make] {
    Holder model = make();
    model->train();
    return std::pair<std::function<at::Tensor(at::Tensor)>, std::vector<at::Tensor>>{
        [model](at::Tensor x) mutable { return model->forward(x); }, model->parameters()};
  };
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all{
      {"vgg", maker<Module>(vgg), {4, 3, 32, 32}},
      {"conv_net", maker<Module>(conv_net), {4, 3, 24, 24}},
      {"mlp", maker<Module>(mlp), {64, 48}},
      {"transformer", maker<Transformer>([] { return Transformer(); }), {12, 8, 32}},
  };
  return all;
}

// Small tensors too.
CompressOptions lossless() { return {.min_bytes = 0}; }
CompressOptions lossy(Lossy method) {
  return {.allow_lossy = true, .lossy = method, .min_bytes = 0};
}

// Gradients of one step: of the input, then of the parameters.
std::vector<at::Tensor> gradients(const Case& c, const CompressOptions* options,
                                  bool channels_last = false, bool retain = false) {
  torch::manual_seed(5);
  auto [forward, parameters] = c.make();
  auto x = torch::randn(c.shape);
  if (channels_last) x = x.contiguous(at::MemoryFormat::ChannelsLast);
  x.requires_grad_();
  std::vector<at::Tensor> of{x};
  of.insert(of.end(), parameters.begin(), parameters.end());
  at::Tensor loss;
  {
    std::optional<CompressGuard> guard;
    if (options != nullptr) guard.emplace(*options);
    loss = forward(x * 1).log_softmax(-1).select(-1, 3).mean();
  }
  if (retain) loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  std::vector<at::Tensor> result;
  for (const auto& t : of) result.push_back(t.grad());
  return result;
}

std::string difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return "another number of gradients";
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!a[i].defined() || !b[i].defined() || !a[i].equal(b[i])) {
      return base::join("gradient ", i, " differs");
    }
  }
  return "";
}

TEST_F(PolicyTest, LosslessCompressionGivesPlainGradientsBitForBit) {
  for (const Case& c : cases()) {
    for (const bool retain : {false, true}) {
      SCOPED_TRACE(testing::Message() << c.name << retain);
      const auto options = lossless();
      EXPECT_EQ(
          difference(gradients(c, &options, false, retain), gradients(c, nullptr, false, retain)),
          "");
      if (c.shape.size() == 4) {
        EXPECT_EQ(
            difference(gradients(c, &options, true, retain), gradients(c, nullptr, true, retain)),
            "");
      }
    }
  }
}

TEST_F(PolicyTest, EveryPoolingWhoseInputIsDroppedGivesPlainGradients) {
  const std::vector<std::pair<const char*, std::function<at::Tensor(at::Tensor)>>> programs{
      {"max1d", [](at::Tensor x) { return at::max_pool1d(x.select(0, 0).select(0, 0), {3}, {2}); }},
      {"max2d",
       [](at::Tensor x) { return at::max_pool2d(x.select(0, 0), {3}, {2}, {1}, {1}, true); }},
      {"max2d dilated",
       [](at::Tensor x) { return at::max_pool2d(x.select(0, 0), {2}, {1}, {0}, {2}); }},
      {"max3d", [](at::Tensor x) { return at::max_pool3d(x, {2}); }},
      {"avg2d", [](at::Tensor x) { return at::avg_pool2d(x.select(0, 0), {3}, {2}, {1}); }},
      {"avg3d", [](at::Tensor x) { return at::avg_pool3d(x, {2}); }},
      {"adaptive max2d",
       [](at::Tensor x) { return std::get<0>(at::adaptive_max_pool2d(x.select(0, 0), {3, 5})); }},
      {"adaptive max3d",
       [](at::Tensor x) { return std::get<0>(at::adaptive_max_pool3d(x, {3, 2, 5})); }},
      {"adaptive avg2d",
       [](at::Tensor x) { return at::adaptive_avg_pool2d(x.select(0, 0), {3, 5}); }},
      {"adaptive avg3d", [](at::Tensor x) { return at::adaptive_avg_pool3d(x, {3, 2, 5}); }},
  };
  for (const auto& [name, program] : programs) {
    for (const bool last : {false, true}) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
        SCOPED_TRACE(testing::Message() << name << last << dtype);
        if (std::string_view(name) == "avg3d" && dtype == at::kBFloat16) continue;  // no kernel
        const auto x0 = torch::randn({2, 3, 8, 12, 10}).to(dtype);
        const auto run = [&](bool on, std::int64_t* dropped) {
          auto x = (last ? x0.contiguous(at::MemoryFormat::ChannelsLast3d) : x0.clone())
                       .requires_grad_();
          std::optional<CompressGuard> guard;
          if (on) guard.emplace(lossless());
          auto y = program(x.mul(2));
          auto [first] = std::tuple{torch::autograd::grad({y.pow(2).sum()}, {x}, {}, true, true)};
          auto second = torch::autograd::grad({first[0].pow(3).sum()}, {x}, {}, false, false);
          if (on) *dropped = guard->statistics()[Method::shape].tensors;
          return std::vector{y.detach(), first[0].detach(), second[0]};
        };
        std::int64_t dropped = 0;
        EXPECT_EQ(difference(run(true, &dropped), run(false, nullptr)), "");
        // A row of a channels-last tensor has gaps, and is left alone.
        EXPECT_EQ(dropped > 0, !(std::string_view(name) == "max1d" && last));
      }
    }
  }
}

TEST_F(PolicyTest, TheSameReluResultIsSignsForReluAndValuesForTheConvolution) {
  nn::Conv2d next = conv(4, 4);
  auto x = torch::randn({2, 4, 16, 16}).requires_grad_();
  const CompressGuard guard(lossless());
  auto h = next(x.mul(1).relu());
  auto s = guard.statistics();
  EXPECT_EQ(s[Method::binarize].tensors, 1);
  EXPECT_EQ(s[Method::binarize].bytes_before, 2 * 4 * 256 * 4);
  EXPECT_EQ(s[Method::binarize].bytes_after, 2 * 4 * 256 / 8);
  EXPECT_EQ(s[Method::sparse].tensors, 1);
  EXPECT_LT(s[Method::sparse].bytes_after, 0.6 * s[Method::sparse].bytes_before);
  h.sum().backward();
  s = guard.statistics();
  EXPECT_EQ(s.total().restores, 2);
}

TEST_F(PolicyTest, LossyMethodsAreNeverChosenUnlessAllowed) {
  for (const Case& c : cases()) {
    torch::manual_seed(5);
    auto [forward, parameters] = c.make();
    const CompressGuard guard(lossless());
    forward(torch::randn(c.shape)).sum().backward();
    const auto s = guard.statistics();
    for (const Method m : {Method::reduced, Method::quantised, Method::sparse_lossy}) {
      EXPECT_EQ(s[m].tensors, 0) << c.name;
    }
    EXPECT_GT(s.total().tensors, 0) << c.name;
  }
  try {
    const CompressGuard guard({.lossy = Lossy::int4});
    FAIL() << "no error";
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr("Set allow_lossy = true"));
  }
  EXPECT_THROW(CompressGuard({.min_bytes = -1}), UserError);
  EXPECT_THROW(CompressGuard({.max_ratio = 0}), UserError);
  EXPECT_THROW(CompressGuard({.clock = nullptr}), UserError);
}

// Live bytes that one forward pass adds.
std::int64_t stashed_bytes(const CompressOptions* options) {
  auto& tracker = base::MemoryTracker::install();
  torch::manual_seed(5);
  Module model = vgg();
  const auto x = torch::randn({8, 3, 32, 32});
  const auto before = tracker.live().total();
  std::optional<CompressGuard> guard;
  if (options != nullptr) guard.emplace(*options);
  const auto loss = model->forward(x).sum();
  const auto bytes = tracker.live().total() - before;
  guard.reset();
  loss.backward();
  return bytes;
}

TEST_F(PolicyTest, LosslessEncodingsCutAVggsActivationsByAtLeast1Point4AndDprBy1Point8) {
  const auto plain = static_cast<double>(stashed_bytes(nullptr));
  const CompressOptions exact;
  const double exact_ratio = plain / static_cast<double>(stashed_bytes(&exact));
  EXPECT_GE(exact_ratio, 1.4);
  RecordProperty("lossless_ratio", std::to_string(exact_ratio));
  // The more is lost, the less is kept.
  double previous = exact_ratio;
  for (const Lossy method : {Lossy::fp16, Lossy::fp10, Lossy::fp8, Lossy::int4, Lossy::int2}) {
    const CompressOptions options{.allow_lossy = true, .lossy = method};
    const double ratio = plain / static_cast<double>(stashed_bytes(&options));
    EXPECT_GT(ratio, previous) << static_cast<int>(method);
    EXPECT_GE(ratio, 1.8) << static_cast<int>(method);
    RecordProperty("ratio_" + std::to_string(static_cast<int>(method)), std::to_string(ratio));
    previous = ratio;
  }
}

TEST_F(PolicyTest, ATensorThatSeveralOperatorsSaveIsEncodedOnce) {
  nn::Linear q(64, 64);
  nn::Linear k(64, 64);
  nn::Linear v(64, 64);
  auto& tracker = base::MemoryTracker::install();
  const auto run = [&](Lossy method) {
    auto x = torch::randn({256, 64}).requires_grad_();
    const CompressGuard guard(method == Lossy::none ? lossless() : lossy(method));
    auto h = x.mul(1).relu();
    const auto before = tracker.live().total();
    auto sum = q(h) + k(h) + v(h);
    h.reset();
    const auto s = guard.statistics().total();
    EXPECT_EQ(s.shared, 2);
    // Three saves, one payload: h itself is gone, and less than half of it came.
    EXPECT_LT(tracker.live().total() - before - 256 * 64 * 4, -256 * 64 * 4 * 0.4);
    sum.sum().backward();
    return x.grad();
  };
  run(Lossy::none);
  run(Lossy::int8);
  // An in-place change makes another tensor.
  auto x = torch::randn({256, 64}).requires_grad_();
  const CompressGuard guard(lossless());
  auto h = x.mul(1).relu();
  q(h);
  h.mul_(2);
  k(h);
  EXPECT_EQ(guard.statistics().total().shared, 0);
}

TEST_F(PolicyTest, WeightsBuffersAndTheBatchAreLeftAloneWithoutNamesToo) {
  nn::Linear linear(128, 128);
  nn::BatchNorm1d norm(128);
  std::mutex mutex;
  std::vector<const void*> seen;
  std::vector<at::Tensor> alive;  // so that no address comes twice
  auto options = lossy(Lossy::int8);
  options.keep = [&](const Value& value) {
    const std::lock_guard lock(mutex);
    alive.push_back(value.tensor);
    seen.push_back(value.tensor.const_data_ptr());
    return false;
  };
  const auto x = torch::randn({64, 128});
  {
    const CompressGuard guard(options);
    auto h = norm(linear(x));
    // The weight's transpose, a weight tied by a view, and a cast of a weight.
    h = at::mm(h, linear->weight) + at::mm(h, linear->weight.view({128, 128}).t());
    auto half = linear->weight.to(at::kBFloat16);
    h = at::mm(h.to(at::kBFloat16), half).to(at::kFloat);
    h.pow(2).mean().backward();
    EXPECT_THAT(seen, testing::Not(testing::Contains(half.const_data_ptr())));
  }
  for (const auto& t :
       {linear->weight, linear->bias, norm->weight, norm->running_mean, norm->running_var, x}) {
    EXPECT_THAT(seen, testing::Not(testing::Contains(t.const_data_ptr())));
  }
  EXPECT_FALSE(seen.empty());
}

TEST_F(PolicyTest, NamesThresholdAndPredicateKeepTensorsAsTheyAre) {
  auto x = torch::randn({64, 64}).requires_grad_();
  const auto encoded = [&](CompressOptions options, bool named) {
    const CompressGuard guard(options);
    auto h = x.mul(2);
    std::optional<base::NamedTensors> names;
    if (named) names.emplace(std::vector<std::pair<std::string, at::Tensor>>{{"state", h}});
    h.tanh().mm(h).sum().backward();
    return guard.statistics().total().tensors;
  };
  auto options = lossy(Lossy::int8);
  EXPECT_EQ(encoded(options, false), 3);  // tanh's result, mm's operands
  EXPECT_EQ(encoded(options, true), 2);
  options.keep = [](const Value& value) { return value.maker == "aten::mm"; };
  EXPECT_EQ(encoded(options, false), 1);
  options.keep = nullptr;
  options.may_lose = [](const Value& value) { return value.maker == "aten::tanh"; };
  EXPECT_EQ(encoded(options, false), 1);
  options.may_lose = nullptr;
  options.min_bytes = 64 * 64 * 4 + 1;
  EXPECT_EQ(encoded(options, false), 0);
}

TEST_F(PolicyTest, LossyStaysAwayFromOperatorsThatDivideOrExponentiateAndFromStatistics) {
  auto x = (torch::rand({64, 64}) + 1).requires_grad_();
  const CompressGuard guard(lossy(Lossy::int4));
  at::Tensor h = x.mul(1);
  (h.log() + h.sqrt() + h.reciprocal() + h.div(h + 1) + h.log_softmax(1) + h.clamp(1.2, 1.5))
      .sum()
      .backward();
  EXPECT_EQ(guard.statistics()[Method::quantised].tensors, 0);
  const auto stats = torch::ones({8, 16, 1});
  EXPECT_FALSE(lossy_by_default({stats, "aten::native_layer_norm"}));
  EXPECT_FALSE(lossy_by_default({torch::ones({8, 32}), "aten::native_group_norm"}));
  EXPECT_FALSE(lossy_by_default(
      {torch::ones({8, 4, 32}), "aten::_scaled_dot_product_flash_attention_for_cpu"}));
  EXPECT_FALSE(lossy_by_default({torch::ones({8, 4}), ""}));
}

TEST_F(PolicyTest, LossyGradientsAreNearPlainOnesAndNearerWithMoreBits) {
  for (const Case& c : cases()) {
    const auto plain = gradients(c, nullptr);
    const auto error = [&](Lossy method) {
      const auto options = lossy(method);
      const auto got = gradients(c, &options);
      double error = 0;
      double norm = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        error += (got[i] - plain[i]).pow(2).sum().item<double>();
        norm += plain[i].pow(2).sum().item<double>();
      }
      return std::sqrt(error / norm);
    };
    SCOPED_TRACE(c.name);
    const double eight = error(Lossy::int8);
    const double four = error(Lossy::int4);
    const double two = error(Lossy::int2);
    EXPECT_GT(eight, 0);
    EXPECT_LT(eight, 0.02);
    EXPECT_LT(four, 0.3);
    EXPECT_LT(eight, four);
    EXPECT_LT(four, two);
    EXPECT_LT(error(Lossy::fp16), 1e-3);
    EXPECT_LT(error(Lossy::bf16), 1e-2);
    EXPECT_LT(error(Lossy::fp10), 0.08);
    EXPECT_LT(error(Lossy::fp8), 0.15);
  }
}

TEST_F(PolicyTest, ASmallNetStillLearnsUnderEveryLossyMethod) {
  const auto x = torch::randn({256, 16});
  const auto y = (x.slice(1, 0, 4).sum(1).sin() + x.select(1, 5)).unsqueeze(1);
  const auto final_loss = [&](std::optional<CompressOptions> options) {
    torch::manual_seed(3);
    Module model(nn::Linear(16, 128), nn::ReLU(), nn::Linear(128, 128), nn::GELU(),
                 nn::Linear(128, 1));
    torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(3e-3));
    std::optional<CompressGuard> guard;
    if (options) guard.emplace(*options);
    double loss_value = 0;
    for (int step = 0; step < 150; ++step) {
      adam.zero_grad();
      auto loss = at::mse_loss(model->forward(x), y);
      loss.backward();
      adam.step();
      loss_value = loss.item<double>();
    }
    return loss_value;
  };
  const double plain = final_loss(std::nullopt);
  const double variance = y.var().item<double>();
  ASSERT_LT(plain, 0.05 * variance);
  EXPECT_EQ(final_loss(lossless()), plain);
  for (const Lossy method :
       {Lossy::bf16, Lossy::fp16, Lossy::fp10, Lossy::fp8, Lossy::int8, Lossy::int4, Lossy::int2}) {
    EXPECT_LT(final_loss(lossy(method)), 0.1 * variance) << static_cast<int>(method);
  }
}

TEST_F(PolicyTest, EqualRoundingStatesGiveEqualGradientsAndResumeGoesOn) {
  const Case& c = cases()[2];
  auto options = lossy(Lossy::int4);
  options.rounding.seed = 9;
  const auto a = gradients(c, &options);
  EXPECT_EQ(difference(gradients(c, &options), a), "");
  options.rounding.seed = 10;
  EXPECT_NE(difference(gradients(c, &options), a), "");
  const CompressGuard guard(options);
  auto x = torch::randn({64, 64}).requires_grad_();
  x.mul(1).tanh();
  EXPECT_EQ(guard.rounding(), (RoundingState{10, 1}));
}

TEST_F(PolicyTest, DoubleBackwardIsPlainsBitForBit) {
  for (const Case& c : {cases()[1], cases()[2]}) {
    const auto penalty = [&](bool on) {
      torch::manual_seed(5);
      auto [forward, parameters] = c.make();
      auto x = torch::randn(c.shape).requires_grad_();
      std::optional<CompressGuard> guard;
      if (on) guard.emplace(lossless());
      auto y = forward(x * 1).sum();
      auto g = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      (y + g.pow(2).sum()).backward();
      std::vector<at::Tensor> result;
      for (const auto& p : parameters) {
        result.push_back(p.grad().defined() ? p.grad() : torch::zeros({}));
      }
      return result;
    };
    EXPECT_EQ(difference(penalty(true), penalty(false)), "") << c.name;
  }
}

class Elsewhere final : public plane::saved::Hooks {
 public:
  std::optional<Packed> pack(const Value& value) override {
    bytes += static_cast<std::int64_t>(value.tensor.nbytes());
    return Packed{{value.tensor.clone()},
                  [](std::vector<at::Tensor> p) { return p.at(0).clone(); }};
  }
  std::int64_t bytes = 0;
};

TEST_F(PolicyTest, OffloadGetsTheCompressedFormWhicheverGuardCameFirst) {
  for (const bool offload_first : {true, false}) {
    const auto run = [&](bool compress, std::int64_t* bytes) {
      torch::manual_seed(5);
      Module model = vgg();
      const auto x = torch::randn({4, 3, 32, 32});
      const auto moved = std::make_shared<Elsewhere>();
      std::optional<CompressGuard> guard;
      if (compress && !offload_first) guard.emplace(lossless());
      const auto outer = plane::saved::push(plane::saved::Order::offload, moved);
      if (compress && offload_first) guard.emplace(lossless());
      model->forward(x).sum().backward();
      *bytes = moved->bytes;
      std::vector<at::Tensor> result;
      for (const auto& p : model->parameters()) result.push_back(p.grad());
      guard.reset();
      return result;
    };
    std::int64_t with = 0;
    std::int64_t without = 0;
    EXPECT_EQ(difference(run(true, &with), run(false, &without)), "");
    EXPECT_LT(with, without / 2);
  }
}

// Drops what is saved and keeps a way to get it, as a checkpoint frame does.
class Dropping final : public plane::saved::Hooks {
 public:
  std::optional<Packed> pack(const Value& value) override {
    return Packed{{}, [tensor = value.tensor](auto) { return tensor; }};
  }
};

TEST_F(PolicyTest, WhatAnInnerCheckpointDropsIsNotCompressedAndItsInputsAreExact) {
  auto x = torch::randn({64, 64}).requires_grad_();
  auto options = lossy(Lossy::int2);
  const CompressGuard guard(options);
  at::Tensor h = x.mul(1);
  {
    const auto frame =
        plane::saved::push(plane::saved::Order::checkpoint, std::make_shared<Dropping>());
    h.tanh().mm(h).relu();
  }
  EXPECT_EQ(guard.statistics().total().tensors, 0);
  const plane::saved::Held held(h);
  EXPECT_TRUE(held.get().equal(h.detach()));
}

// Keeps what it is given, by way of later hooks: a part of it, not what the maker saved.
class PassingOn final : public plane::saved::Hooks {
 public:
  std::optional<Packed> pack(const Value& value) override {
    return Packed{{value.tensor}, [](std::vector<at::Tensor> p) { return p.at(0); }};
  }
};

TEST_F(PolicyTest, WhatAnotherTechniqueKeepsOfAReluResultStaysExact) {
  auto x = torch::randn({64, 64}).requires_grad_();
  const CompressGuard guard(lossy(Lossy::int2));
  const auto inner =
      plane::saved::push(plane::saved::Order::checkpoint, std::make_shared<PassingOn>());
  auto loss = x.mul(1).relu().sum();
  const auto s = guard.statistics();
  EXPECT_EQ(s[Method::binarize].tensors, 0);
  EXPECT_EQ(s[Method::sparse].tensors, 1);
  loss.backward();
}

// Holds a result inside the operator that made it, as selective checkpoints do.
class Holding final : public plane::op::Handler {
 public:
  void call(plane::op::Call& call) override {
    call.proceed();
    if (call.name() == "aten::relu" && call.frame() == plane::op::Frame::autograd) {
      result = call.results()[0].toTensor().detach();
      held = plane::saved::Held(result);
    }
  }
  at::Tensor result;
  plane::saved::Held held;
};

TEST_F(PolicyTest, AResultHeldInsideItsOperatorStaysExact) {
  auto x = torch::randn({64, 64}).requires_grad_();
  const CompressGuard guard(lossy(Lossy::int2));
  const auto holding = std::make_shared<Holding>();
  const auto watch = plane::op::push(plane::op::Order::record, holding);
  x.mul(1).relu();
  EXPECT_TRUE(holding->held.get().equal(holding->result));
}

TEST_F(PolicyTest, CheckpointedRegionsKeepPlainGradientsUnderLosslessAndLossyCompression) {
  for (const bool nested : {false, true}) {
    for (const Case& c : {cases()[1], cases()[2]}) {
      const auto run = [&](std::optional<CompressOptions> options, bool checkpointed) {
        torch::manual_seed(5);
        auto [forward, parameters] = c.make();
        const auto x = torch::randn(c.shape);
        std::optional<CompressGuard> guard;
        if (options) guard.emplace(*options);
        const auto region = [forward = forward](at::Tensor v) { return forward(v).tanh(); };
        const auto outer = [region](at::Tensor v) {
          return recompute::checkpoint(region, v * 2) * 0.5;
        };
        // Plain: the same operators, without the frames.
        const auto plain = [region, nested](at::Tensor v) {
          return nested ? region(v * 2) * 0.5 : region(v);
        };
        at::Tensor y;
        if (!checkpointed) {
          y = plain(x);
        } else if (nested) {
          y = recompute::checkpoint(outer, x);
        } else {
          y = recompute::checkpoint(region, x);
        }
        y.pow(2).sum().backward();
        std::vector<at::Tensor> result;
        for (const auto& p : parameters) result.push_back(p.grad());
        return result;
      };
      SCOPED_TRACE(testing::Message() << c.name << nested);
      const auto plain = run(std::nullopt, false);
      EXPECT_EQ(difference(run(lossless(), true), plain), "");
      // What a region recomputes is held by its frame, which compression does not reach.
      EXPECT_EQ(difference(run(lossy(Lossy::int2), true), run(lossy(Lossy::int2), true)), "");
    }
  }
}

TEST_F(PolicyTest, WhatWasEncodedOutlivesTheGuardAndNothingLeaks) {
  auto& tracker = base::MemoryTracker::install();
  Module model = mlp();
  const auto x = torch::randn({64, 48});
  model->forward(x).sum().backward();  // gradients exist from here on
  const auto before = tracker.live().total();
  for (int i = 0; i < 4; ++i) {
    at::Tensor loss;
    {
      CompressGuard guard(i % 2 == 0 ? lossless() : lossy(Lossy::int4));
      CompressGuard moved = std::move(guard);
      guard = std::move(moved);
      loss = model->forward(x).sum();
      EXPECT_GT(guard.statistics().total().tensors, 0);
    }
    EXPECT_FALSE(plane::op::active());
    if (i < 2) loss.backward();
  }
  EXPECT_EQ(tracker.live().total(), before);
}

TEST_F(PolicyTest, AnExceptionInForwardLeavesNothingBehind) {
  auto& tracker = base::MemoryTracker::install();
  auto x = torch::randn({64, 64}).requires_grad_();
  const auto before = tracker.live().total();
  EXPECT_THROW(
      {
        const CompressGuard guard(lossless());
        auto h = x.mul(1).relu().mm(x);
        throw std::runtime_error("stop");
      },
      std::runtime_error);
  EXPECT_FALSE(plane::op::active());
  EXPECT_EQ(tracker.live().total(), before);
  // A predicate that throws comes out of the operator that saves.
  auto options = lossless();
  options.keep = [](const Value&) -> bool { throw std::runtime_error("predicate"); };
  {
    const CompressGuard guard(options);
    EXPECT_THROW(x.mul(1).relu(), std::runtime_error);
  }
  EXPECT_EQ(tracker.live().total(), before);
}

TEST_F(PolicyTest, AChangeInPlaceAfterTheSaveIsStillAnError) {
  auto x = torch::randn({64, 64}).requires_grad_();
  const CompressGuard guard(lossless());
  auto h = x.mul(1).relu();
  auto loss = h.mm(h).sum();
  h.detach().add_(1);
  EXPECT_THROW(loss.backward(), UserError);
}

TEST_F(PolicyTest, ThreadsCompressOnTheirOwnAndBackwardRunsOnAny) {
  const auto plain = gradients(cases()[2], nullptr);
  std::vector<std::thread> threads;
  std::vector<std::string> results(4);
  // Models are made and run one at a time, as the random generator is shared; backward runs at
  // once.
  std::mutex mutex;
  for (std::size_t t = 0; t < results.size(); ++t) {
    threads.emplace_back([&, t] {
      std::unique_lock lock(mutex);
      torch::manual_seed(5);
      auto [forward, parameters] = cases()[2].make();
      auto x = torch::randn(cases()[2].shape).requires_grad_();
      const CompressGuard guard(lossless());
      auto loss = forward(x * 1).log_softmax(-1).select(-1, 3).mean();
      lock.unlock();
      loss.backward();
      std::vector<at::Tensor> got{x.grad()};
      for (const auto& p : parameters) got.push_back(p.grad());
      results[t] = difference(got, plain);
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_EQ(result, "");
}

TEST_F(PolicyTest, AProbeTellsWhatTheGuardThenDoesAndLeavesNoTrace) {
  base::MemoryTracker& memory = base::MemoryTracker::install();
  for (const Lossy lossy : {Lossy::none, Lossy::int8, Lossy::fp8}) {
    SCOPED_TRACE(static_cast<int>(lossy));
    const CompressGuard* probing = nullptr;
    std::array<MethodStatistics, kMethodCount> told{};
    std::int64_t asked = 0, same_layout = 0;
    CompressOptions options{.allow_lossy = true, .lossy = lossy};
    options.keep = [&](const Value& value) {
      ++asked;
      memory.reset_peak();
      const auto before = memory.live();
      const RoundingState state = probing->rounding();
      const std::optional<Probe> probe = probing->probe(value);
      EXPECT_EQ(memory.peak().total(), before.total());  // of the device arena
      EXPECT_TRUE(probing->rounding() == state);
      if (!probe) return false;
      EXPECT_GE(probe->encode_s, 0.0);
      EXPECT_GE(probe->restore_s, 0.0);
      same_layout += probe->by_layout ? 1 : 0;
      MethodStatistics& method = told[static_cast<std::size_t>(probe->method)];
      ++method.tensors;
      method.bytes_after += probe->bytes;
      return false;
    };
    const CompressGuard guard(options);
    probing = &guard;
    Module net = vgg();
    const auto x = torch::randn({2, 3, 32, 32});
    const at::Tensor loss = net->forward(x).sum();
    const CompressStatistics statistics = guard.statistics();
    EXPECT_GT(asked, 0);
    EXPECT_EQ(same_layout,
              statistics[Method::shape].tensors + statistics[Method::binarize].tensors);
    for (std::size_t m = 0; m < kMethodCount; ++m) {
      SCOPED_TRACE(kMethodNames[m]);
      EXPECT_EQ(told[m].tensors, statistics.methods[m].tensors);
      if (statistics.methods[m].shared == 0)
        EXPECT_EQ(told[m].bytes_after, statistics.methods[m].bytes_after);
      EXPECT_EQ(statistics.methods[m].restores, 0);
    }
    EXPECT_FALSE(guard.probe({x, "aten::relu", true}));  // from outside
    EXPECT_FALSE(guard.probe({}));
  }
}

TEST_F(PolicyTest, StatisticsCountBytesAndTheClocksSeconds) {
  auto now = std::make_shared<double>(0);
  auto options = lossless();
  options.clock = [now] { return *now += 0.5; };
  const CompressGuard guard(options);
  auto x = torch::randn({64, 64}).requires_grad_();
  auto loss = x.mul(1).relu().sum();
  auto s = guard.statistics()[Method::binarize];
  EXPECT_EQ(s.tensors, 1);
  EXPECT_EQ(s.bytes_before, 64 * 64 * 4);
  EXPECT_EQ(s.bytes_after, 64 * 64 / 8);
  EXPECT_EQ(s.encode_s, 0.5);
  loss.backward();
  s = guard.statistics()[Method::binarize];
  EXPECT_EQ(s.restores, 1);
  EXPECT_EQ(s.restore_s, 0.5);
}

TEST_F(PolicyTest, EncodesForOthersWhatItIsGivenAndNothingElse) {
  const CompressGuard guard({.on_save = false});
  at::Tensor made, y;
  {
    const at::Tensor x = torch::randn({64, 1024}).requires_grad_();
    made = (x * 2).relu();
    y = made.sum();
  }
  EXPECT_EQ(guard.statistics().total().tensors, 0);
  const Value value{made.detach(), "aten::relu", true};
  const std::optional<Packed> small = guard.encode(value, 0.5);
  ASSERT_TRUE(small.has_value());
  EXPECT_TRUE(small->restore(small->payload).gt(0).equal(made.gt(0)));
  EXPECT_EQ(guard.statistics()[Method::binarize].tensors, 1);
  // Half of its values are zero: not so small for who reads all of them.
  EXPECT_FALSE(guard.encode({made.detach(), "aten::mm", true}, 0.5).has_value());
  EXPECT_TRUE(guard.encode({made.detach(), "aten::mm", true}, 0.9).has_value());
  EXPECT_EQ(guard.statistics().total().tensors, 2);
}

}  // namespace
}  // namespace gradus::compress
