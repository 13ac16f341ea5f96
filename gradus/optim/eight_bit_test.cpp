#include <gradus/optim/eight_bit.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/internal/block_quantise.h>
#include <gradus/optim/sgd.h>

#include <tests/support/message_of.h>

namespace gradus::optim {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using tests::message_of;

// The published map, built as its authors' create_dynamic_map does: equal steps between 0.1 and 1,
// their middles, times powers of ten.
std::vector<double> published_map(bool is_signed) {
  std::vector<double> values{0.0, 1.0};
  for (int i = 0; i < 7; ++i) {
    const int items = (1 << (is_signed ? i : i + 1)) + 1;
    std::vector<double> boundaries(items);
    for (int k = 0; k < items; ++k) boundaries[k] = 0.1 + 0.9 * k / (items - 1);
    for (int k = 0; k + 1 < items; ++k) {
      const double value = std::pow(10.0, i - 6) * (boundaries[k] + boundaries[k + 1]) / 2.0;
      values.push_back(value);
      if (is_signed) values.push_back(-value);
    }
  }
  std::sort(values.begin(), values.end());
  return values;
}

// Brute force over all 256: the distance to the nearest entry.
double nearest_distance(const std::vector<double>& map, double x) {
  double best = std::numeric_limits<double>::infinity();
  for (const double value : map) best = std::min(best, std::abs(x - value));
  return best;
}

struct Quantised {
  at::Tensor codes, absmax;
  internal::BlockState state() const {
    return {.codes = codes.mutable_data_ptr<std::uint8_t>(),
            .absmax = absmax.mutable_data_ptr<float>()};
  }
};

Quantised quantise(const at::Tensor& x, bool is_signed, bool widest = true) {
  Quantised result{torch::zeros({x.numel()}, at::kByte),
                   torch::zeros({internal::block_count(x.numel())})};
  internal::code_loops(widest).quantise(x.const_data_ptr<float>(), x.numel(),
                                        internal::dynamic_map(is_signed), result.state());
  return result;
}

at::Tensor dequantise(const Quantised& q, bool is_signed, bool widest = true) {
  auto x = torch::empty({q.codes.numel()});
  internal::code_loops(widest).dequantise(
      q.state(), q.codes.numel(), internal::dynamic_map(is_signed), x.mutable_data_ptr<float>());
  return x;
}

// Over many magnitudes, with exact zeros, in blocks of which the last is short.
at::Tensor sample(bool is_signed, std::int64_t n = 5000) {
  auto x = torch::randn({n}).mul_(torch::randn({n}).mul_(4.0).exp_());
  x.index_put_({torch::arange(0, n, 97)}, 0.0F);
  return is_signed ? x : x.abs();
}

TEST(EightBitTest, TheMapIsThePublishedOne) {
  for (const bool is_signed : {true, false}) {
    const auto expected = published_map(is_signed);
    const auto& values = internal::dynamic_map(is_signed).values;
    ASSERT_EQ(expected.size(), std::size(values));
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(values[i], expected[i], 2e-7 * std::abs(expected[i])) << i;
  }
}

TEST(EightBitTest, EveryCodeIsTheNearestOfTheMapByBruteForce) {
  for (const bool is_signed : {true, false}) {
    torch::manual_seed(1);
    const auto map = published_map(is_signed);
    const auto x = sample(is_signed);
    const auto q = quantise(x, is_signed);
    for (std::int64_t first = 0; first < x.numel(); first += 256) {
      const auto block = x.slice(0, first, std::min<std::int64_t>(first + 256, x.numel()));
      const float absmax = block.abs().max().item<float>();
      EXPECT_EQ(q.absmax[first / 256].item<float>(), absmax);
      for (std::int64_t i = 0; i < block.numel(); ++i) {
        const double share = double{block[i].item<float>()} / absmax;
        const auto code = q.codes[first + i].item<std::int64_t>();
        if (!is_signed && share > 0.0 && share < map[1]) {
          EXPECT_EQ(code, 1) << "what is positive stays so";
          continue;
        }
        // 3e-7: a share and its place are rounded to float32, which decides between two nearly as
        // near.
        EXPECT_LE(std::abs(share - map[code]),
                  nearest_distance(map, share) + 3e-7 * std::abs(share))
            << share;
      }
    }
  }
}

TEST(EightBitTest, EveryCodeComesBackAsItself) {
  for (const bool is_signed : {true, false}) {
    const auto& values = internal::dynamic_map(is_signed).values;
    std::vector<float> scaled(std::begin(values), std::end(values));
    for (float& v : scaled) v *= 8.0F;  // a power of two: exact
    const auto x = at::tensor(scaled);
    const auto q = quantise(x, is_signed);
    EXPECT_TRUE(at::equal(q.codes, torch::arange(256).to(at::kByte)));
    EXPECT_TRUE(at::equal(dequantise(q, is_signed), x));
  }
}

TEST(EightBitTest, InstructionSetsAndTensorOperationsAgree) {
  for (const bool is_signed : {true, false}) {
    torch::manual_seed(2);
    const auto x = sample(is_signed);
    const auto widest = quantise(x, is_signed), baseline = quantise(x, is_signed, false);
    EXPECT_TRUE(at::equal(widest.codes, baseline.codes));
    EXPECT_TRUE(at::equal(widest.absmax, baseline.absmax));
    Quantised by_operations{torch::zeros_like(widest.codes), torch::zeros_like(widest.absmax)};
    internal::quantise_by_operations(x, is_signed, by_operations.codes, by_operations.absmax);
    EXPECT_TRUE(at::equal(widest.codes, by_operations.codes));
    EXPECT_TRUE(at::equal(widest.absmax, by_operations.absmax));
    const auto back = dequantise(widest, is_signed);
    EXPECT_TRUE(at::equal(back, dequantise(widest, is_signed, false)));
    EXPECT_TRUE(at::equal(
        back, internal::dequantise_by_operations(widest.codes, is_signed, widest.absmax)));
  }
}

TEST(EightBitTest, ExtremeBlocksAreSafe) {
  const float denormal = std::numeric_limits<float>::denorm_min();
  const float largest = std::numeric_limits<float>::max();
  const float nan = std::nanf("");
  for (const bool widest : {true, false}) {
    auto x = torch::zeros({256 * 4});
    x[256] = denormal;
    x[257] = 3 * denormal;
    x[512] = largest;
    x[513] = -largest;
    x[768] = nan;
    x[769] = 1.0F;
    const auto back = dequantise(quantise(x, true, widest), true, widest);
    EXPECT_TRUE(at::equal(back.slice(0, 0, 256), torch::zeros({256})));
    EXPECT_EQ(back[257].item<float>(), 3 * denormal);
    EXPECT_EQ(back[512].item<float>(), largest);
    EXPECT_NEAR(back[513].item<float>() / largest, -1.0, 0.01);
    // NaN takes its block with it rather than being lost.
    EXPECT_TRUE(back.slice(0, 768, 1024).isnan().all().item<bool>());
  }
}

double state_ratio(const Optimizer& optimizer, const Optimizer& reference) {
  const auto bytes = [](const Optimizer& o) {
    double sum = 0.0;
    for (const auto& tensor : o.state_tensors())
      sum += static_cast<double>(tensor.storage().nbytes());
    return sum;
  };
  return bytes(optimizer) / bytes(reference);
}

TEST(EightBitTest, StateTakesAQuarterOfAdamsBytes) {
  std::vector<at::Tensor> parameters;
  // Those of a transformer block of width 256; its vectors keep float32 state.
  for (const auto& shape : std::vector<std::vector<std::int64_t>>{{768, 256},
                                                                  {768},
                                                                  {256, 256},
                                                                  {256},
                                                                  {1024, 256},
                                                                  {1024},
                                                                  {256, 1024},
                                                                  {256},
                                                                  {256},
                                                                  {256},
                                                                  {256},
                                                                  {256}}) {
    parameters.push_back(torch::ones(shape, torch::requires_grad()));
    parameters.back().mutable_grad() = torch::ones(shape);
  }
  Adam8bit eight(parameters);
  AdamW full(parameters);
  SGD8bit eight_sgd(parameters);
  SGD full_sgd(parameters, {.momentum = 0.9});
  for (Optimizer* o : {static_cast<Optimizer*>(&eight), static_cast<Optimizer*>(&full),
                       static_cast<Optimizer*>(&eight_sgd), static_cast<Optimizer*>(&full_sgd)})
    o->step();
  EXPECT_LE(state_ratio(eight, full), 0.27);
  EXPECT_LE(state_ratio(eight_sgd, full_sgd), 0.27);
}

std::vector<double> numbers(const at::Tensor& x) {
  const auto flat = x.detach().to(at::kDouble).contiguous().view(-1);
  return {flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()};
}

// Adam or SGD with momentum in float64, from one decoded state to the next that is not encoded yet.
struct Oracle {
  bool adam = true;
  double lr = 0.0, beta1 = 0.0, beta2 = 0.0, eps = 0.0, decoupled = 0.0, l2 = 0.0, sign = 1.0;
  double momentum = 0.0, dampening = 0.0;
  bool nesterov = false;
  std::vector<std::vector<double>> moments = {};
  int t = 0;

  void step(std::vector<double>& w, const std::vector<double>& gradients) {
    ++t;
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double g = sign * gradients[i] + l2 * w[i];
      double& first = moments[0][i];
      if (adam) {
        double& second = moments[1][i];
        first = beta1 * first + (1.0 - beta1) * g;
        second = beta2 * second + (1.0 - beta2) * g * g;
        const double root = std::sqrt(second / (1.0 - std::pow(beta2, t))) + eps;
        w[i] = w[i] * (1.0 - lr * decoupled) - lr / (1.0 - std::pow(beta1, t)) * first / root;
      } else {
        first = t == 1 ? g : momentum * first + (1.0 - dampening) * g;
        w[i] -= lr * (nesterov ? g + momentum * first : first);
      }
    }
  }
};

// The moments that an optimizer of one parameter keeps, decoded by the published map.
std::vector<std::vector<double>> decoded(const Optimizer& optimizer, bool adam) {
  std::vector<std::vector<double>> result;
  const auto state = optimizer.state();
  for (std::size_t i = adam ? 1 : 0; i < state.size(); i += 2) {
    const auto map = published_map(result.empty());
    const auto codes = numbers(state[i].tensor), absmax = numbers(state[i + 1].tensor);
    std::vector<double> values(codes.size());
    for (std::size_t k = 0; k < codes.size(); ++k)
      values[k] = map[static_cast<std::size_t>(codes[k])] * absmax[k / 256];
    result.push_back(std::move(values));
  }
  return result;
}

void expect_encoded(const std::vector<double>& moment, const std::vector<double>& kept,
                    const std::vector<double>& map, bool is_signed) {
  for (std::size_t begin = 0; begin < moment.size(); begin += 256) {
    const std::size_t end = std::min(begin + 256, moment.size());
    double absmax = 0.0;
    for (std::size_t i = begin; i < end; ++i) absmax = std::max(absmax, std::abs(moment[i]));
    ASSERT_GT(absmax, 0.0);
    for (std::size_t i = begin; i < end; ++i) {
      const double share = moment[i] / absmax;
      // A positive mean square below the first code takes it, although zero may be nearer.
      const double distance = !is_signed && share > 0.0 && share < map[1]
                                  ? map[1] - share
                                  : nearest_distance(map, share);
      // 2e-6: the moment is float32, which decides between two codes nearly as near.
      EXPECT_LE(std::abs(share - kept[i] / absmax), distance + 2e-6) << i;
    }
  }
}

// Each step starts from what the optimizer keeps, so that one code that may be either of two does
// not set the two apart for good.
void expect_oracle(Optimizer& optimizer, at::Tensor& w, Oracle oracle) {
  oracle.moments.assign(2, std::vector<double>(static_cast<std::size_t>(w.numel())));
  for (int step = 0; step < 6; ++step) {
    SCOPED_TRACE(step);
    auto expected = numbers(w);
    w.mutable_grad() = torch::randn(w.sizes());
    optimizer.step();
    oracle.step(expected, numbers(w.grad()));
    const auto got = numbers(w);
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 2e-6) << i;
    const auto kept = decoded(optimizer, oracle.adam);
    for (std::size_t k = 0; k < kept.size(); ++k)
      expect_encoded(oracle.moments[k], kept[k], published_map(k == 0), k == 0);
    for (std::size_t k = 0; k < kept.size(); ++k) oracle.moments[k] = kept[k];
  }
}

TEST(EightBitTest, AdamEqualsABruteForceOracleThatEncodesBetweenSteps) {
  const std::vector<Adam8bitOptions> cases{
      {.lr = 1e-2},
      {.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-4, .weight_decay = 0.3},
      {.lr = 1e-2, .weight_decay = 0.3, .decoupled_weight_decay = false, .maximize = true}};
  for (std::size_t c = 0; c < cases.size(); ++c) {
    SCOPED_TRACE(c);
    torch::manual_seed(7);
    const auto& o = cases[c];
    auto w = torch::randn({41, 101}).requires_grad_();
    Adam8bit optimizer({w}, o);
    expect_oracle(optimizer, w,
                  {.lr = o.lr,
                   .beta1 = o.beta1,
                   .beta2 = o.beta2,
                   .eps = o.eps,
                   .decoupled = o.decoupled_weight_decay ? o.weight_decay : 0.0,
                   .l2 = o.decoupled_weight_decay ? 0.0 : o.weight_decay,
                   .sign = o.maximize ? -1.0 : 1.0});
  }
}

TEST(EightBitTest, SGDEqualsABruteForceOracleThatEncodesBetweenSteps) {
  const std::vector<SGD8bitOptions> cases{
      {.lr = 1e-2},
      {.lr = 1e-2, .momentum = 0.8, .dampening = 0.3, .weight_decay = 0.3, .maximize = true},
      {.lr = 1e-2, .nesterov = true}};
  for (std::size_t c = 0; c < cases.size(); ++c) {
    SCOPED_TRACE(c);
    torch::manual_seed(7);
    const auto& o = cases[c];
    auto w = torch::randn({41, 101}).requires_grad_();
    SGD8bit optimizer({w}, o);
    expect_oracle(optimizer, w,
                  {.adam = false,
                   .lr = o.lr,
                   .l2 = o.weight_decay,
                   .sign = o.maximize ? -1.0 : 1.0,
                   .momentum = o.momentum,
                   .dampening = o.dampening,
                   .nesterov = o.nesterov});
  }
}

TEST(EightBitTest, SmallParametersKeepFloat32StateAndFollowTheFullOptimizers) {
  for (const bool adam : {true, false}) {
    torch::manual_seed(8);
    auto a = torch::randn({4095}).requires_grad_();
    auto b = a.detach().clone().requires_grad_();
    std::unique_ptr<Optimizer> eight, full;
    if (adam) {
      eight = std::make_unique<Adam8bit>(std::vector{a}, Adam8bitOptions{.lr = 1e-2});
      full = std::make_unique<AdamW>(std::vector{b}, AdamWOptions{.lr = 1e-2});
    } else {
      eight = std::make_unique<SGD8bit>(std::vector{a}, SGD8bitOptions{.lr = 1e-2});
      full = std::make_unique<SGD>(std::vector{b}, SGDOptions{.lr = 1e-2, .momentum = 0.9});
    }
    for (int step = 0; step < 20; ++step) {
      a.mutable_grad() = torch::randn({4095});
      b.mutable_grad() = a.grad().clone();
      eight->step();
      full->step();
    }
    EXPECT_LE((a - b).abs().max().item<double>(), 1e-6);
    ASSERT_EQ(eight->state().size(), full->state().size());
    for (std::size_t i = 0; i < full->state().size(); ++i) {
      EXPECT_EQ(eight->state()[i].name, full->state()[i].name);
      EXPECT_EQ(eight->state()[i].tensor.scalar_type(), at::kFloat);
    }
  }
}

std::vector<std::string> names_of(const Optimizer& optimizer) {
  std::vector<std::string> names;
  for (const auto& entry : optimizer.state()) names.push_back(entry.name);
  return names;
}

TEST(EightBitTest, AReloadedStateContinuesBitForBitAndKeepsNoFloat32Copy) {
  for (const bool adam : {true, false}) {
    const auto make = [adam](const at::Tensor& w) -> std::unique_ptr<Optimizer> {
      if (adam) return std::make_unique<Adam8bit>(std::vector{w});
      return std::make_unique<SGD8bit>(std::vector{w});
    };
    const auto run = [](Optimizer& optimizer, at::Tensor& w, int begin, int end) {
      for (int step = begin; step < end; ++step) {
        torch::manual_seed(step);
        w.mutable_grad() = torch::randn({70, 70});
        optimizer.step();
      }
    };
    auto straight = torch::ones({70, 70}, torch::requires_grad());
    const auto whole = make(straight);
    run(*whole, straight, 0, 6);
    auto first = torch::ones({70, 70}, torch::requires_grad());
    const auto before = make(first);
    run(*before, first, 0, 3);
    auto second = first.detach().clone().requires_grad_();
    const auto after = make(second);
    after->load_state(before->state());
    run(*after, second, 3, 6);
    EXPECT_TRUE(at::equal(second.detach(), straight.detach()));
    if (adam) {
      EXPECT_THAT(names_of(*after), ElementsAre("0.step", "0.exp_avg", "0.exp_avg_absmax",
                                                "0.exp_avg_sq", "0.exp_avg_sq_absmax"));
    } else {
      EXPECT_THAT(names_of(*after), ElementsAre("0.momentum_buffer", "0.momentum_buffer_absmax"));
    }
  }
}

TEST(EightBitTest, ThreadsStridesAndGapsDoNotChangeABit) {
  const auto run = [](bool adam, int threads,
                      const std::function<at::Tensor(const at::Tensor&)>& lay_out) {
    at::set_num_threads(threads);
    torch::manual_seed(9);
    auto w = lay_out(torch::randn({300, 401})).requires_grad_();
    std::unique_ptr<Optimizer> optimizer;
    if (adam) {
      optimizer = std::make_unique<Adam8bit>(std::vector{w});
    } else {
      optimizer = std::make_unique<SGD8bit>(std::vector{w});
    }
    for (int step = 0; step < 3; ++step) {
      w.mutable_grad() = torch::randn({300, 401});
      optimizer->step();
    }
    at::set_num_threads(1);
    return w.detach().contiguous();
  };
  const auto same = [](const at::Tensor& x) { return x; };
  const auto gaps = [](const at::Tensor& x) { return torch::stack({x, x}, -1).select(-1, 0); };
  for (const bool adam : {true, false}) {
    const auto expected = run(adam, 1, same);
    EXPECT_TRUE(at::equal(run(adam, 2, same), expected));
    EXPECT_TRUE(at::equal(run(adam, 1, gaps), expected));
    // Blocks follow memory, so a transposed parameter has other blocks: near, not equal.
    const auto turned = [](const at::Tensor& x) { return x.t().contiguous().t(); };
    EXPECT_TRUE(at::allclose(run(adam, 1, turned), expected, 0.0, 2e-3));
  }
}

TEST(EightBitTest, SixteenBitParametersAreComputedInFloat32) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    torch::manual_seed(10);
    auto w = torch::randn({80, 80}).to(dtype).requires_grad_();
    auto wide = w.detach().to(at::kFloat).requires_grad_();
    Adam8bit optimizer({w}, {.lr = 0.1}), reference({wide}, {.lr = 0.1});
    for (int step = 0; step < 4; ++step) {
      w.mutable_grad() = torch::randn({80, 80}).to(dtype);
      wide.mutable_grad() = w.grad().to(at::kFloat);
      {
        const at::NoGradGuard no_grad;
        wide.copy_(w);
      }
      optimizer.step();
      reference.step();
      EXPECT_TRUE(at::equal(w.detach(), wide.detach().to(dtype)));
    }
  }
}

// The short form of bench/compare.py adam8bit-loss: a student learns a teacher's noisy answers.
double final_loss(bool adam, bool eight) {
  torch::manual_seed(11);
  const auto teacher = torch::randn({64, 16}).div_(8.0);
  auto first = torch::randn({64, 128}).div_(8.0).requires_grad_();
  auto second = torch::randn({128, 64}).div_(11.0).requires_grad_();
  auto third = torch::randn({64, 16}).div_(8.0).requires_grad_();
  const std::vector<at::Tensor> parameters{first, second, third};
  std::unique_ptr<Optimizer> optimizer;
  if (adam && eight) {
    optimizer = std::make_unique<Adam8bit>(parameters, Adam8bitOptions{.min_values = 0});
  } else if (adam) {
    optimizer = std::make_unique<AdamW>(parameters);
  } else if (eight) {
    optimizer = std::make_unique<SGD8bit>(parameters, SGD8bitOptions{.lr = 0.1, .min_values = 0});
  } else {
    optimizer = std::make_unique<SGD>(parameters, SGDOptions{.lr = 0.1, .momentum = 0.9});
  }
  double sum = 0.0;
  for (int step = 0; step < 300; ++step) {
    const auto x = torch::randn({64, 64});
    const auto answers = x.matmul(teacher).tanh() + 0.3 * torch::randn({64, 16});
    optimizer->zero_grad();
    const auto hidden = x.matmul(first).relu().matmul(second).relu();
    const auto loss = (hidden.matmul(third) - answers).square().mean();
    loss.backward();
    optimizer->step();
    if (step >= 270) sum += loss.item<double>();
  }
  return sum / 30.0;
}

TEST(EightBitTest, TrainingEndsWithinOnePercentOfTheLossWithFloat32State) {
  for (const bool adam : {true, false}) {
    const double eight = final_loss(adam, true), full = final_loss(adam, false);
    EXPECT_LE(full, 0.3);  // untrained: about 0.5
    EXPECT_NEAR(eight / full, 1.0, 0.01) << eight << " and " << full;
  }
}

TEST(EightBitTest, AMeanSquareNeverVanishesBesideALargeOne) {
  // One large gradient in the block, then none: a mean square encoded as zero would leave eps alone
  // in the denominator, and a small value would jump by thousands of steps.
  auto w = torch::zeros({4096}, torch::requires_grad());
  Adam8bit optimizer({w}, {.lr = 1e-3, .weight_decay = 0.0});
  for (int step = 0; step < 10; ++step) {
    auto gradient = torch::full({4096}, step == 0 ? 2e-4 : 0.0);
    gradient[0] = 1.0;
    w.mutable_grad() = gradient;
    optimizer.step();
  }
  EXPECT_LE(w.abs().max().item<double>(), 10 * 1e-3 * 1.01);
}

TEST(EightBitTest, WhatCannotBeDoneIsRefusedByName) {
  const auto w = torch::ones({4}, torch::requires_grad());
  const auto wide = torch::ones({4}, torch::requires_grad().dtype(at::kDouble));
  EXPECT_THAT(message_of([&] { Adam8bit({{.parameters = {w, wide}, .names = {"a", "b"}}}, {}); }),
              HasSubstr("parameter 'b' must be float32, float16 or bfloat16"));
  EXPECT_THAT(message_of([&] { SGD8bit({wide}); }), HasSubstr("parameter '0' must be float32"));
  EXPECT_THAT(message_of([&] { Adam8bit({w}, {.beta1 = 1.0}); }), HasSubstr("beta1 must be in"));
  EXPECT_THAT(message_of([&] { Adam8bit({w}, {.beta2 = -1.0}); }), HasSubstr("beta2 must be in"));
  EXPECT_THAT(message_of([&] { Adam8bit({w}, {.eps = -1.0}); }), HasSubstr("eps must be"));
  EXPECT_THAT(message_of([&] { Adam8bit({w}, {.min_values = -1}); }), HasSubstr("min_values"));
  EXPECT_THAT(message_of([&] { SGD8bit({w}, {.momentum = 0.0}); }), HasSubstr("so use SGD"));
  EXPECT_THAT(message_of([&] { SGD8bit({w}, {.dampening = 0.1, .nesterov = true}); }),
              HasSubstr("nesterov needs dampening 0"));
}

// torch's fused Adam has (rest2 * g) * g: a number up to 5.8e20. Beyond, the root is infinite and
// the parameter stays, here and there.
TEST(EightBitTest, HugeGradientsLeaveParameterAndStateFinite) {
  for (const std::int64_t min_values : {0, 4096}) {
    for (const double huge : {1e19, 3e19, 5e20, 1e25, 1e38}) {
      SCOPED_TRACE(testing::Message() << min_values << " " << huge);
      auto w = torch::ones({300}, torch::requires_grad());
      auto reference = torch::ones({300}, torch::requires_grad());
      Adam8bit optimizer({w}, {.lr = 0.1, .weight_decay = 0.0, .min_values = min_values});
      AdamW full({reference}, {.lr = 0.1, .weight_decay = 0.0, .fused = true});
      for (int step = 0; step < 3; ++step) {
        auto gradient = torch::ones({300});
        if (step == 0) gradient[7] = huge;
        w.mutable_grad() = gradient.clone();
        reference.mutable_grad() = gradient.clone();
        optimizer.step();
        full.step();
        ASSERT_TRUE(torch::isfinite(reference).all().item<bool>());
        EXPECT_TRUE(torch::isfinite(w).all().item<bool>());
        if (step == 0) {
          EXPECT_TRUE(at::allclose(w.detach(), reference.detach(), 1e-5, 1e-5));
        }
      }
    }
  }
}

}  // namespace
}  // namespace gradus::optim
