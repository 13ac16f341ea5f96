// float16 computed in float32 and rounded.

#include <cmath>
#include <functional>
#include <map>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/base/error.h>
#include <gradus/plane/saved/saved_plane.h>

namespace gradus::amp {
namespace {

const AutocastOptions kRounded{.dtype = at::kHalf, .arithmetic = Arithmetic::rounded};

class RoundedTest : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    torch::manual_seed(0);
  }
};

// Bytes of distinct storages that autograd keeps, weights and their casts left out.
class SavedBytes final : public plane::saved::Hooks {
 public:
  std::optional<plane::saved::Packed> pack(const plane::saved::Value& value) override {
    const auto& storage = value.tensor.storage();
    if (value.tensor.size(0) != kWeightRows)
      bytes_[storage.unsafeGetStorageImpl()] = storage.nbytes();
    kept_.push_back(value.tensor);
    return std::nullopt;
  }
  std::size_t bytes() const {
    std::size_t sum = 0;
    for (const auto& entry : bytes_) sum += entry.second;
    return sum;
  }
  static constexpr std::int64_t kWeightRows = 64;

 private:
  std::map<const void*, std::size_t> bytes_;
  std::vector<at::Tensor> kept_;  // so that no address is used twice
};

TEST_F(RoundedTest, OperatorsEqualTheRoundedFloat32ResultOfRoundedArgumentsBitForBit) {
  const auto x = torch::randn({2, 6, 16}) * 3, m = torch::randn({6, 16}),
             w = torch::randn({16, 16}), b = torch::randn({16});
  const auto image = torch::randn({2, 4, 9, 9}), kernel = torch::randn({6, 4, 3, 3});
  const auto q = torch::randn({2, 2, 6, 8});
  using Fn = std::function<at::Tensor(const std::vector<at::Tensor>&)>;
  const std::vector<std::tuple<std::string, std::vector<at::Tensor>, Fn>> cases{
      {"linear", {x, w, b}, [](auto& a) { return at::linear(a[0], a[1], a[2]); }},
      {"matmul", {x, w}, [](auto& a) { return at::matmul(a[0], a[1]); }},
      {"mm", {m, w}, [](auto& a) { return at::mm(a[0], a[1]); }},
      {"addmm", {b, m, w}, [](auto& a) { return at::addmm(a[0], a[1], a[2]); }},
      {"bmm", {x, x}, [](auto& a) { return at::bmm(a[0], a[1].transpose(1, 2)); }},
      {"conv2d", {image, kernel}, [](auto& a) { return at::conv2d(a[0], a[1]); }},
      {"conv_transpose2d",
       {image, kernel},
       [](auto& a) { return at::conv_transpose2d(a[0], a[1].transpose(0, 1)); }},
      {"attention",
       {q, q * 2, q + 1},
       [](auto& a) { return at::scaled_dot_product_attention(a[0], a[1], a[2], {}, 0, true); }},
      {"prelu", {m, torch::tensor({0.3})}, [](auto& a) { return at::prelu(a[0], a[1]); }},
  };
  for (const auto& [name, arguments, fn] : cases) {
    for (const auto& [dtype, half_arguments] :
         {std::pair(at::kHalf, false), std::pair(at::kHalf, true),
          std::pair(at::kBFloat16, false)}) {
      SCOPED_TRACE(base::join(name, " ", dtype, half_arguments ? " of its own type" : ""));
      std::vector<at::Tensor> given, rounded;
      for (const auto& argument : arguments) {
        given.push_back(half_arguments ? argument.to(dtype) : argument);
        rounded.push_back(argument.to(dtype).to(at::kFloat));
      }
      const auto expected = fn(rounded).to(dtype);
      const AutocastGuard guard({.dtype = dtype, .arithmetic = Arithmetic::rounded});
      const auto got = fn(given);
      EXPECT_EQ(got.scalar_type(), dtype);
      EXPECT_TRUE(at::equal(got, expected));
    }
  }
}

TEST_F(RoundedTest, GradientsPassThroughTheTypeTheyWouldHave) {
  auto x = torch::randn({4, 8}).requires_grad_(), w = torch::randn({8, 8}).requires_grad_();
  at::Tensor y;
  {
    const AutocastGuard guard(kRounded);
    y = at::linear(x, w);
  }
  const auto g = torch::randn({4, 8}, at::kHalf);
  y.backward(g);
  const auto half = [](const at::Tensor& t) { return t.detach().to(at::kHalf).to(at::kFloat); };
  EXPECT_TRUE(at::equal(x.grad(), half(at::mm(g.to(at::kFloat), half(w)))));
  EXPECT_TRUE(at::equal(w.grad(), half(at::mm(g.to(at::kFloat).t(), half(x)))));
  // Out of range, it overflows: this is float16.
  x.mutable_grad() = at::Tensor();
  {
    const AutocastGuard guard(kRounded);
    y = at::linear(x * 1000, w);
  }
  y.backward(torch::full({4, 8}, 6e4, at::kHalf));
  EXPECT_FALSE(x.grad().isfinite().all().item<bool>());
}

// A block of a GPT and its loss.
at::Tensor block(const std::map<std::string, at::Tensor>& w, const at::Tensor& x) {
  const auto B = x.size(0), T = x.size(1), C = x.size(2);
  auto h = at::linear(x, w.at("qkv")).view({B, T, 3, 4, C / 4}).permute({2, 0, 3, 1, 4});
  h = at::scaled_dot_product_attention(h[0], h[1], h[2], {}, 0, true);
  h = at::linear(h.transpose(1, 2).reshape({B, T, C}), w.at("proj"));
  h = at::linear(at::gelu(at::linear(h, w.at("up"))), w.at("down"));
  return h;
}

std::map<std::string, at::Tensor> weights(std::int64_t C) {
  std::map<std::string, at::Tensor> w;
  for (const auto& [name, rows, columns] :
       {std::tuple("qkv", 3 * C, C), std::tuple("proj", C, C), std::tuple("up", 4 * C, C),
        std::tuple("down", C, 4 * C)}) {
    w[name] = (torch::randn({rows, columns}) / 6).requires_grad_();
  }
  return w;
}

TEST_F(RoundedTest, SavedActivationsTakeTwoBytes) {
  const auto saved = [](const AutocastOptions& options) {
    torch::manual_seed(0);
    const auto w = weights(16);
    const auto x = torch::randn({2, 8, 16}).requires_grad_();
    const auto bytes = std::make_shared<SavedBytes>();
    std::vector<at::Tensor> results;
    {
      const auto watch = plane::saved::push(plane::saved::Order::observe, bytes);
      const AutocastGuard guard(options);
      results.push_back(block(w, x));
    }
    results[0].backward(torch::ones_like(results[0]));
    for (const auto& [name, weight] : w) {
      EXPECT_TRUE(weight.grad().defined() && weight.grad().isfinite().all().item<bool>()) << name;
    }
    return bytes->bytes();
  };
  const auto fp32 = saved({.enabled = false});
  const auto native = saved({.dtype = at::kBFloat16, .arithmetic = Arithmetic::native});
  const auto rounded = saved(kRounded);
  EXPECT_LT(native, 0.6 * fp32);
  // Equal but for one copy: LibTorch's attention shares its saved result with the program.
  constexpr std::size_t kAttentionResult = 2 * 8 * 16 * 2;
  EXPECT_LE(rounded, native + kAttentionResult);
}

TEST_F(RoundedTest, WhatIsKeptGivesTheGradientsOfKeepingTheFloat32Copies) {
  // The operators but attention save their arguments, which float16 holds without loss.
  const auto gradients = [](bool autocast) {
    torch::manual_seed(0);
    const auto half = [&](const at::Tensor& t) {
      return autocast ? t : t.to(at::kHalf).to(at::kFloat);
    };
    auto w = (torch::randn({8, 8}) / 3).requires_grad_(), x = torch::randn({4, 8}).requires_grad_();
    auto k = torch::randn({2, 1, 3, 3}).requires_grad_();
    std::optional<AutocastGuard> guard;
    if (autocast) guard.emplace(kRounded);
    const auto weight = half(w);
    auto h = half(at::linear(half(x), weight));
    h = half(at::mm(h, weight.t()));
    h = half(at::conv2d(h.view({1, 1, 4, 8}), half(k)));
    h.to(at::kFloat).pow(2).sum().backward();
    return std::vector<at::Tensor>{x.grad(), w.grad(), k.grad()};
  };
  const auto ours = gradients(true), plain = gradients(false);
  for (std::size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::equal(ours[i], plain[i])) << i;
}

TEST_F(RoundedTest, AGradientPenaltyIsNearFloat32s) {  // M19
  const auto gradients = [](const std::optional<AutocastOptions>& options) {
    torch::manual_seed(0);
    torch::nn::Sequential net(torch::nn::Linear(8, 32),
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})),
                              torch::nn::GELU(), torch::nn::Linear(32, 1));
    auto x = torch::randn({16, 8}).requires_grad_();
    at::Tensor y;
    {
      std::optional<AutocastGuard> guard;
      if (options) guard.emplace(*options);
      y = net->forward(x).to(at::kFloat).sum();
    }
    const auto g = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
    const auto penalty = (g.norm(2, -1) - 1).pow(2).mean();
    penalty.backward();
    return std::pair(penalty.item<double>(), net->parameters()[0].grad().norm().item<double>());
  };
  const auto [penalty, norm] = gradients(std::nullopt);
  for (const auto& options :
       {AutocastOptions{.dtype = at::kBFloat16}, AutocastOptions{.dtype = at::kHalf}, kRounded}) {
    SCOPED_TRACE(c10::toString(*options.dtype));
    const auto [lower_penalty, lower_norm] = gradients(options);
    EXPECT_NEAR(lower_penalty, penalty, 0.01 * penalty);
    EXPECT_NEAR(lower_norm, norm, 0.02 * norm);
  }
}

TEST_F(RoundedTest, AKeptTensorThatChangesBeforeBackwardIsAnError) {
  auto x = torch::randn({4, 8}).requires_grad_(), w = torch::randn({8, 8}).requires_grad_();
  at::Tensor y;
  {
    const AutocastGuard guard(kRounded);
    auto h = at::linear(x, w);
    y = at::linear(h, w);
    const at::NoGradGuard no_grad;
    h.mul_(2);
  }
  EXPECT_THROW(y.sum().backward(), UserError);
}

TEST_F(RoundedTest, IsChosenByWhatTheProcessorCan) {
  const auto op =
      c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_fp16_supported", ""});
  ASSERT_TRUE(op.has_value());
  EXPECT_EQ(rounds(at::kHalf), !op->typed<bool()>().call());
  EXPECT_FALSE(rounds(at::kBFloat16));
  const auto x = torch::randn({64, 64}), w = torch::randn({64, 64});
  at::Tensor automatic, native, rounded;
  {
    const AutocastGuard guard({.dtype = at::kHalf});
    automatic = at::mm(x, w);
  }
  {
    const AutocastGuard guard(kRounded);
    rounded = at::mm(x, w);
  }
  {
    const AutocastGuard guard({.dtype = at::kHalf, .arithmetic = Arithmetic::native});
    native = at::mm(x, w);
  }
  EXPECT_TRUE(at::equal(automatic, rounds(at::kHalf) ? rounded : native));
  // LibTorch's fallback product may add up in float16.
  EXPECT_LE((native - rounded).abs().max().item<double>(), 0.25);
  EXPECT_THROW(
      AutocastGuard({.device = at::kCUDA, .dtype = at::kHalf, .arithmetic = Arithmetic::rounded}),
      UserError);
}

TEST_F(RoundedTest, ListsOfResultsAreRoundedToo) {
  const auto x = torch::randn({4, 4}).requires_grad_();
  using Fn = std::function<std::vector<at::Tensor>(const at::Tensor&)>;
  const std::vector<std::pair<std::string, Fn>> cases{
      {"split", [](const at::Tensor& t) { return at::split(t, 2); }},
      {"unsafe_split", [](const at::Tensor& t) { return at::unsafe_split(t, 2); }},
      {"chunk", [](const at::Tensor& t) { return at::chunk(t, 2); }},
      {"unbind", [](const at::Tensor& t) { return at::unbind(t); }}};
  for (const auto& [name, fn] : cases) {
    SCOPED_TRACE(name);
    auto options = kRounded;
    options.lists = OperatorLists::defaults(at::kCPU, at::kHalf).set(name, Policy::lower_precision);
    const AutocastGuard guard(options);
    x.mutable_grad() = at::Tensor();
    const auto parts = fn(x);
    for (const auto& part : parts) EXPECT_EQ(part.scalar_type(), at::kHalf);
    EXPECT_TRUE(at::equal(parts[0], fn(x.detach().to(at::kHalf))[0]));
    parts[0].sum().backward();
    EXPECT_TRUE(x.grad().defined());
  }
}

TEST_F(RoundedTest, AListedBatchNormUpdatesItsStatistics) {
  for (const auto policy : {Policy::lower_precision, Policy::widest, Policy::fp32}) {
    for (const auto dtype : {at::kHalf, at::kBFloat16}) {
      SCOPED_TRACE(base::join(policy_name(policy), " ", dtype));
      const AutocastGuard guard(
          {.dtype = dtype,
           .lists = OperatorLists::defaults(at::kCPU, dtype).set("batch_norm", policy)});
      torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(4).momentum(0.5));
      if (policy == Policy::fp32) norm->to(dtype);
      const auto y = norm(torch::ones({4, 4}, policy == Policy::fp32 ? dtype : at::kFloat));
      EXPECT_TRUE(at::equal(norm->running_mean.to(at::kFloat), torch::full({4}, 0.5)));
      y.sum().backward();
      EXPECT_TRUE(norm->weight.grad().defined());
      EXPECT_EQ(y.scalar_type(), policy == Policy::lower_precision ? dtype : at::kFloat);
    }
  }
}

TEST_F(RoundedTest, NumbersBeyondFloat16sRangeAreTheLargestItHas) {  // M17
  using Fn = std::function<at::Tensor(const at::Tensor&)>;
  const auto mask = torch::ones({2, 4}, at::kBool);
  const auto rows = torch::arange(2), columns = torch::zeros({2, 1}, at::kLong);
  const auto number = torch::tensor(-1e9);
  const std::vector<std::pair<std::string, Fn>> cases{
      {"masked_fill_", [&](auto& s) { return s.masked_fill_(mask, -1e9); }},
      {"masked_fill_.Tensor", [&](auto& s) { return s.masked_fill_(mask, number); }},
      {"index_fill_", [&](auto& s) { return s.index_fill_(0, rows, -1e9); }},
      {"index_fill_.Tensor", [&](auto& s) { return s.index_fill_(0, rows, number); }},
      {"fill_", [](auto& s) { return s.fill_(-1e9); }},
      {"fill", [](auto& s) { return at::fill(s, -1e9); }},
      {"fill_diagonal_", [](auto& s) { return s.fill_diagonal_(-1e9); }},
      {"full_like", [](auto& s) { return at::full_like(s, -1e9); }},
      {"new_full", [](auto& s) { return s.new_full({2, 4}, -1e9); }},
      {"scatter", [&](auto& s) { return s.scatter(1, columns, -1e9); }},
      {"scatter_", [&](auto& s) { return s.scatter_(1, columns, -1e9); }},
      {"pad", [](auto& s) { return at::constant_pad_nd(s, {1, 0}, -1e9); }},
      {"clamp", [](auto& s) { return s.clamp(-1e9, -1e8); }},
      {"clamp_max_", [](auto& s) { return s.clamp_max_(-1e9); }},
      {"hardtanh", [](auto& s) { return at::hardtanh(s, -1e9, -1e8); }},
      {"threshold", [](auto& s) { return at::threshold(s, 1e9, -1e9); }},
      {"where", [&](auto& s) { return at::where(mask, at::Scalar(-1e9), s); }},
      {"where.other", [&](auto& s) { return at::where(~mask, s, at::Scalar(-1e9)); }},
  };
  const AutocastGuard guard({.dtype = at::kHalf});
  for (const auto& [name, fn] : cases) {
    SCOPED_TRACE(name);
    auto s = torch::randn({2, 4}, at::kHalf);
    const auto y = fn(s);
    EXPECT_EQ(y.scalar_type(), at::kHalf);
    EXPECT_EQ(y[0][0].template item<double>(), -65504.0);
    EXPECT_TRUE(at::softmax(y, -1).isfinite().all().template item<bool>());
  }
  // What becomes float32, what is float32, and infinities stay.
  const auto half = torch::randn({2, 4}, at::kHalf), full = torch::randn({2, 4});
  EXPECT_EQ(at::full_like(half, -1e9, at::kFloat)[0][0].item<double>(), -1e9);
  EXPECT_EQ(half.new_full({1}, -1e9, at::kFloat)[0].item<double>(), -1e9);
  EXPECT_EQ(full.clone().fill_(-1e9)[0][0].item<double>(), -1e9);
  EXPECT_EQ(at::where(mask, at::Scalar(-1e9), full)[0][0].item<double>(), -1e9);
  EXPECT_EQ(half.clone().masked_fill_(mask, torch::tensor(-INFINITY))[0][0].item<double>(),
            -INFINITY);
  EXPECT_EQ(at::full_like(half, -INFINITY)[0][0].item<double>(), -INFINITY);
  EXPECT_EQ(half.masked_fill(mask, -1e9)[0][0].item<double>(), -1e9);
}

TEST_F(RoundedTest, WeightsAreRoundedOnceARegion) {
  torch::nn::Linear linear(8, 8);
  const AutocastGuard guard(kRounded);
  auto h = torch::randn({4, 8});
  for (int i = 0; i < 4; ++i) h = linear(h);
  EXPECT_EQ(cast_cache_size(), 2);
  h.sum().backward();
  EXPECT_EQ(cast_cache_size(), 0);
  EXPECT_TRUE(linear->weight.grad().defined());
}

}  // namespace
}  // namespace gradus::amp
