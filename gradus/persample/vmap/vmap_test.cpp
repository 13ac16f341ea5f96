#include <gradus/persample/vmap/vmap.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/memory_tracker.h>
#include <gradus/persample/vmap/internal/compare.h>
#include <gradus/persample/vmap/internal/layers.h>
#include <gradus/persample/vmap/loop.h>
#include <gradus/persample/vmap/rows.h>
#include <gradus/plane/op/op_plane.h>
#include <gradus/recompute/checkpoint.h>

#include <tests/support/message_of.h>

namespace gradus::persample {
namespace {

namespace nn = torch::nn;
using gradus::tests::message_of;
using testing::HasSubstr;
using tests::any_nonzero;
using tests::gap;
using tests::named;

class VmapTest : public testing::Test {
 protected:
  void SetUp() override {
    base::MemoryTracker::install();
    at::set_num_threads(1);
    torch::manual_seed(1);
    net_ = nn::Sequential(nn::Linear(6, 8), nn::Tanh(), nn::Linear(8, 3));
    net_->to(torch::kDouble);
    x_ = torch::randn({5, 6}, torch::kDouble);
  }
  void TearDown() override {
    EXPECT_FALSE(internal::transform_active());
    EXPECT_FALSE(plane::op::active());
  }
  LossFunction squares() {
    return [this](const Batch& b) { return net_->forward(b[0]).pow(2).sum(1); };
  }
  std::vector<at::Tensor> plain_step() {
    net_->zero_grad();
    squares()({x_}).sum().backward();
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : net_->parameters()) {
      gradients.push_back(parameter.grad().clone());
    }
    net_->zero_grad();
    return gradients;
  }

  nn::Sequential net_{nullptr};
  at::Tensor x_;
};

TEST_F(VmapTest, EqualsTheLoopOnRandomShapes) {
  const auto size = [](std::int64_t low, std::int64_t high) {
    return torch::randint(low, high + 1, {1}).item<std::int64_t>();
  };
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(round);
    torch::manual_seed(100 + round);
    const std::int64_t examples = size(1, 6), in = size(1, 5), out = size(1, 5), steps = size(1, 4);
    nn::AnyModule any;
    at::Tensor x;
    switch (round % 4) {
      case 0:
        any = nn::AnyModule(nn::Linear(nn::LinearOptions(in, out).bias(round % 3 != 0)));
        x = torch::randn({examples, steps, in});
        break;
      case 1: {
        const std::int64_t groups = size(1, 2), kernel = size(1, 3);
        any = nn::AnyModule(nn::Conv2d(nn::Conv2dOptions(in * groups, out * groups, kernel)
                                           .groups(groups)
                                           .stride(size(1, 2))
                                           .padding(size(0, 2))
                                           .dilation(size(1, 2))));
        x = torch::randn({examples, in * groups, size(5, 8), size(5, 8)});
        break;
      }
      case 2:
        any = nn::AnyModule(nn::Embedding(7, out));
        x = torch::randint(0, 7, {examples, steps}, torch::kLong);
        break;
      default:
        any = nn::AnyModule(nn::LayerNorm(nn::LayerNormOptions({in + 1})));
        x = torch::randn({examples, steps, in + 1});
    }
    any.ptr()->to(torch::kDouble);
    if (x.is_floating_point()) x = x.to(torch::kDouble);
    const LossFunction loss = [&](const Batch& b) {
      return any.forward<at::Tensor>(b[0]).pow(3).flatten(1).sum(1);
    };
    const auto parameters = named(*any.ptr());
    EXPECT_EQ(gap(vmap_gradients(parameters, loss, {x}), loop_gradients(parameters, loss, {x})),
              "");
  }
}

// A random recurrent layer of any kind, its states given or not, on whole or packed sequences.
struct Recurrent {
  std::vector<NamedParameter> parameters{};
  LossFunction loss = nullptr;
  Batch batch{};  // x [B, T, D], lengths [B], states [B, layers, H] and [B, layers, H of the cells]
};

template <typename Holder>
Recurrent random_call(Holder layer, std::int64_t states, std::int64_t hidden, std::int64_t cells,
                      bool batch_first) {
  constexpr bool kLstm = std::is_same_v<Holder, nn::LSTM>;
  const auto coin = [] { return torch::rand({1}).item<double>() < 0.5; };
  layer->to(torch::kDouble);
  const std::int64_t examples = torch::randint(1, 5, {1}).item<std::int64_t>();
  const std::int64_t steps = torch::randint(1, 5, {1}).item<std::int64_t>();
  const bool packed = coin(), given = coin();
  const auto loss = [=](const Batch& b) mutable {
    const at::Tensor x = batch_first ? b[0] : b[0].transpose(0, 1);
    const at::Tensor h = given ? b[2].transpose(0, 1) : at::Tensor();
    const auto run = [&](const auto& call) {
      if constexpr (kLstm) {
        return call(
            given ? torch::optional<std::tuple<at::Tensor, at::Tensor>>({h, b[3].transpose(0, 1)})
                  : torch::nullopt);
      } else {
        return call(h);
      }
    };
    at::Tensor y;
    if (packed) {
      const auto sequence = nn::utils::rnn::pack_padded_sequence(x, b[1], batch_first, false);
      const auto out = std::get<0>(run(
          [&](const auto& state) { return layer->forward_with_packed_input(sequence, state); }));
      y = std::get<0>(nn::utils::rnn::pad_packed_sequence(out, batch_first, 0.0, steps));
    } else {
      y = std::get<0>(run([&](const auto& state) { return layer->forward(x, state); }));
    }
    return (batch_first ? y : y.transpose(0, 1)).sin().square().flatten(1).sum(1);
  };
  return {.parameters = named(*layer),
          .loss = loss,
          .batch = {torch::randn({examples, steps, 3}, torch::kDouble),
                    torch::randint(1, steps + 1, {examples}, torch::kLong),
                    torch::randn({examples, states, hidden}, torch::kDouble),
                    torch::randn({examples, states, cells}, torch::kDouble)}};
}

Recurrent random_recurrent(int kind) {
  const auto size = [](std::int64_t low, std::int64_t high) {
    return torch::randint(low, high + 1, {1}).item<std::int64_t>();
  };
  const std::int64_t layers = size(1, 2), hidden = size(2, 5), both = size(1, 2);
  const bool first = size(0, 1) == 1;
  const auto with = [&](auto options) {
    return options.num_layers(layers).bidirectional(both == 2).batch_first(first).bias(size(0, 3) >
                                                                                       0);
  };
  if (kind == 0) {
    const std::int64_t projected = size(0, 1) * (hidden - 1);
    return random_call(nn::LSTM(with(nn::LSTMOptions(3, hidden)).proj_size(projected)),
                       layers * both, projected > 0 ? projected : hidden, hidden, first);
  }
  if (kind == 1) {
    return random_call(nn::GRU(with(nn::GRUOptions(3, hidden))), layers * both, hidden, 1, first);
  }
  auto options = with(nn::RNNOptions(3, hidden));
  if (kind == 3) options.nonlinearity(torch::kReLU);
  return random_call(nn::RNN(options), layers * both, hidden, 1, first);
}

TEST_F(VmapTest, EqualsTheLoopOnRandomRecurrentNets) {
  const int rounds = std::getenv("GRADUS_LONG_TESTS") != nullptr ? 2000 : 120;
  for (int round = 0; round < rounds; ++round) {
    SCOPED_TRACE(round);
    torch::manual_seed(200 + round);
    const Recurrent made = random_recurrent(round % 4);
    const auto want = loop_gradients(made.parameters, made.loss, made.batch);
    ASSERT_EQ(gap(vmap_gradients(made.parameters, made.loss, made.batch), want), "");
    ASSERT_EQ(gap(row_gradients(made.loss(made.batch), made.parameters), want), "");
  }
}

TEST_F(VmapTest, TheFusedFloatLstmIsWithinRounding) {
  nn::LSTM lstm(nn::LSTMOptions(6, 7).batch_first(true));
  const at::Tensor x = torch::randn({4, 5, 6});
  const LossFunction loss = [&](const Batch& b) {
    return std::get<0>(lstm->forward(b[0])).pow(2).sum({1, 2});
  };
  EXPECT_EQ(
      gap(vmap_gradients(named(*lstm), loss, {x}), loop_gradients(named(*lstm), loss, {x}), 1e-5),
      "");
}

TEST_F(VmapTest, LeavesThePlainStepAndGradAsTheyWere) {
  const auto before = plain_step();
  net_->parameters()[0].mutable_grad() = torch::ones_like(net_->parameters()[0]);
  const auto got = vmap_gradients(named(*net_), squares(), {x_});
  EXPECT_EQ(net_->parameters()[0].grad().sum().item<double>(), 48.0);
  EXPECT_FALSE(net_->parameters()[1].grad().defined());
  EXPECT_EQ(gap(plain_step(), before, 0), "");
  for (std::size_t k = 0; k < got.size(); ++k) {
    EXPECT_EQ(gap({got[k].sum(0)}, {before[k]}), "");
    EXPECT_FALSE(got[k].requires_grad());
  }
}

TEST_F(VmapTest, NothingIsLeftAfterAThrowInTheMiddle) {
  const auto before = plain_step();
  const auto want = loop_gradients(named(*net_), squares(), {x_});
  const std::vector<LossFunction> failing{
      [](const Batch&) -> at::Tensor { throw std::runtime_error("user"); },
      [this](const Batch& b) -> at::Tensor {
        const at::Tensor y = net_->forward(b[0]);
        throw std::runtime_error(std::to_string(y.dim()));
      },
      [this](const Batch& b) { return net_->forward(b[0].narrow(1, 0, 2)).sum(1); },
      [this](const Batch& b) {
        at::Tensor y = net_->forward(b[0]);
        y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("hook"); });
        return y.sum(1);
      },
      [this](const Batch& b) { return net_->forward(b[0]); },  // no loss
      [this](const Batch& b) {
        const at::Tensor y = net_->forward(b[0]);
        return y.sum(1) + y.data_ptr<double>()[0];
      }};
  for (std::size_t i = 0; i < failing.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_THROW(vmap_gradients(named(*net_), failing[i], {x_}), std::exception);
    EXPECT_FALSE(internal::transform_active());
    EXPECT_FALSE(plane::op::active());
    EXPECT_EQ(gap(vmap_gradients(named(*net_), squares(), {x_}), want), "");
    EXPECT_EQ(gap(plain_step(), before, 0), "");
  }
}

TEST_F(VmapTest, APassingErrorOfTheProgramIsNotRenamed) {
  const LossFunction loss = [](const Batch&) -> at::Tensor { throw std::out_of_range("mine"); };
  EXPECT_THROW(vmap_gradients(named(*net_), loss, {x_}), std::out_of_range);
  const LossFunction wrong = [this](const Batch& b) { return net_->forward(b[0]); };
  EXPECT_THAT(message_of([&] { vmap_gradients(named(*net_), wrong, {x_}); }),
              HasSubstr("one loss an example, shape [1]; got shape [1, 3]"));
}

TEST_F(VmapTest, TakesAScalarLossOfOneExample) {
  const LossFunction loss = [this](const Batch& b) { return net_->forward(b[0]).pow(2).sum(); };
  EXPECT_EQ(
      gap(vmap_gradients(named(*net_), loss, {x_}), loop_gradients(named(*net_), squares(), {x_})),
      "");
}

TEST_F(VmapTest, TakesOneExampleFrozenAndNoParameters) {
  net_->parameters()[0].requires_grad_(false);
  for (const std::int64_t examples : {1, 5}) {
    const Batch batch{x_.narrow(0, 0, examples)};
    const auto got = vmap_gradients(named(*net_), squares(), batch);
    EXPECT_FALSE(got[0].defined());
    EXPECT_EQ(gap(got, loop_gradients(named(*net_), squares(), batch)), "");
  }
  EXPECT_TRUE(vmap_gradients({}, squares(), {x_}).empty());
  for (const at::Tensor& parameter : net_->parameters()) parameter.requires_grad_(false);
  for (const at::Tensor& gradient : vmap_gradients(named(*net_), squares(), {x_})) {
    EXPECT_FALSE(gradient.defined());
  }
}

TEST_F(VmapTest, AParameterNamedTwiceIsGivenTwice) {
  const at::Tensor w = net_->parameters()[0];
  const auto got = vmap_gradients({{"a", w}, {"b", w}}, squares(), {x_});
  EXPECT_EQ(gap(got, loop_gradients({{"a", w}, {"b", w}}, squares(), {x_})), "");
  EXPECT_EQ(gap({got[0]}, {got[1]}, 0), "");
}

TEST_F(VmapTest, ALossWithoutParametersGivesZeros) {
  const LossFunction loss = [](const Batch& b) { return b[0].sum(1); };
  EXPECT_FALSE(any_nonzero(vmap_gradients(named(*net_), loss, {x_})));
}

TEST_F(VmapTest, RunsUnderNoGradAndOnOtherThreads) {
  const auto want = loop_gradients(named(*net_), squares(), {x_});
  {
    const at::NoGradGuard no_grad;
    EXPECT_EQ(gap(vmap_gradients(named(*net_), squares(), {x_}), want), "");
    EXPECT_FALSE(at::GradMode::is_enabled());
  }
  std::vector<std::vector<at::Tensor>> got(3);
  std::vector<std::thread> threads;
  for (auto& mine : got) {
    threads.emplace_back([&] { mine = vmap_gradients(named(*net_), squares(), {x_}); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& mine : got) EXPECT_EQ(gap(mine, want), "");
}

TEST_F(VmapTest, ChunksGiveTheSameValues) {
  const auto want = loop_gradients(named(*net_), squares(), {x_});
  for (const std::int64_t chunk : {1, 2, 3, 5, 9}) {
    SCOPED_TRACE(chunk);
    VmapReport report;
    const auto got =
        vmap_gradients(named(*net_), squares(), {x_}, {.chunk = chunk, .report = &report});
    EXPECT_EQ(gap(got, want), "");
    EXPECT_EQ(report.passes, (5 + chunk - 1) / chunk);
    EXPECT_EQ(report.largest_chunk, std::min<std::int64_t>(chunk, 5));
  }
}

TEST_F(VmapTest, KeepsToTheMemoryLimit) {
  nn::Sequential wide(nn::Conv2d(nn::Conv2dOptions(2, 8, 3).padding(1)), nn::Tanh(), nn::Flatten(),
                      nn::Linear(8 * 16 * 16, 2));
  wide->to(torch::kDouble);
  const at::Tensor x = torch::randn({24, 2, 16, 16}, torch::kDouble);
  const LossFunction loss = [&](const Batch& b) { return wide->forward(b[0]).pow(2).sum(1); };
  base::MemoryTracker& tracker = base::MemoryTracker::install();
  const auto want = vmap_gradients(named(*wide), loss, {x});
  std::int64_t result_bytes = 0;
  for (const at::Tensor& gradient : want) {
    result_bytes += static_cast<std::int64_t>(gradient.nbytes());
  }
  const auto peak_of = [&](std::int64_t limit, VmapReport& report) {
    const std::int64_t live = tracker.live().total();
    tracker.lap_peak();
    const auto got =
        vmap_gradients(named(*wide), loss, {x}, {.memory_bytes = limit, .report = &report});
    const std::int64_t peak = tracker.lap_peak();
    EXPECT_EQ(gap(got, want), "");
    return peak - live - result_bytes;
  };
  VmapReport all, some;
  peak_of(std::int64_t{1} << 40, all);
  EXPECT_EQ(all.largest_chunk, 23);  // the first pass, of one example, measures
  const std::int64_t limit = all.peak_bytes / 3;
  EXPECT_LE(peak_of(limit, some), limit);
  EXPECT_LE(some.peak_bytes, limit);
  EXPECT_GT(some.largest_chunk, 3);
  EXPECT_LT(some.largest_chunk, 12);
  EXPECT_THAT(message_of([&] { vmap_gradients(named(*wide), loss, {x}, {.memory_bytes = 1000}); }),
              HasSubstr("memory_bytes must hold at least one example, which takes"));
}

TEST_F(VmapTest, ANarrowerLimitOfTheProgramMakesSmallerPasses) {
  nn::Linear wide(64, 64);
  wide->to(torch::kDouble);
  const at::Tensor x = torch::randn({32, 64}, torch::kDouble);
  const LossFunction loss = [&](const Batch& b) { return wide->forward(b[0]).pow(2).sum(1); };
  const auto want = vmap_gradients(named(*wide), loss, {x});
  const std::int64_t live = base::MemoryTracker::install().live().total();
  VmapReport report;
  std::vector<at::Tensor> got;
  {
    const base::MemoryLimit limit({.device_bytes = live + (3 << 19)});  // results take 1 MiB
    got = vmap_gradients(named(*wide), loss, {x},
                         {.memory_bytes = std::int64_t{1} << 40, .report = &report});
  }
  EXPECT_EQ(gap(got, want), "");
  EXPECT_LT(report.largest_chunk, 31);
}

TEST_F(VmapTest, DropoutDrawsTheLoopsMasks) {
  const LossFunction loss = [this](const Batch& b) {
    const at::Tensor h = at::dropout(net_->forward(b[0]), 0.4, true);
    return (h * torch::rand_like(h) + torch::randn({1, 3}, h.options()) * h +
            at::bernoulli(h.sigmoid()) * h + at::normal(h.detach(), 0.5) * h)
        .sum(1);
  };
  const auto want = loop_gradients(named(*net_), loss, {x_}, {.seed = 3});
  EXPECT_EQ(gap(vmap_gradients(named(*net_), loss, {x_}, {.seed = 3}), want), "");
  EXPECT_EQ(gap(vmap_gradients(named(*net_), loss, {x_}, {.chunk = 2, .seed = 3}), want), "");
  EXPECT_NE(gap(vmap_gradients(named(*net_), loss, {x_}, {.seed = 4}), want), "");
}

TEST_F(VmapTest, MasksDifferFromExampleToExampleAndFollowTheDefaultGenerator) {
  const at::Tensor w = torch::ones({400}, torch::kDouble).requires_grad_();
  const at::Tensor ones = torch::ones({6, 400}, torch::kDouble);
  const LossFunction loss = [&](const Batch& b) {
    return at::dropout(b[0] * w, 0.25, true).sum(1);
  };
  torch::manual_seed(8);
  const at::Tensor first = vmap_gradients({{"w", w}}, loss, {ones})[0];
  const at::Tensor second = vmap_gradients({{"w", w}}, loss, {ones})[0];
  torch::manual_seed(8);
  EXPECT_TRUE(at::equal(vmap_gradients({{"w", w}}, loss, {ones})[0], first));
  EXPECT_FALSE(at::equal(first, second));
  for (std::int64_t i = 0; i < 6; ++i) {
    const double kept = (first[i] > 0).to(torch::kDouble).mean().item<double>();
    EXPECT_NEAR(kept, 0.75, 0.1);
    for (std::int64_t j = 0; j < i; ++j) EXPECT_FALSE(at::equal(first[i], first[j]));
  }
}

TEST_F(VmapTest, BranchesOnRandomNumbersAsTheLoopDoes) {
  // Groups are run again: an example must meet its own numbers again, or a branch on them would
  // bias the draw.
  const LossFunction loss = [this](const Batch& b) {
    const double coin = torch::rand({1}).item<double>();
    at::Tensor y = net_->forward(b[0]).pow(2).sum(1);
    if (coin < 0.3) y = y * 5;
    return y * torch::rand({1}, torch::kDouble);
  };
  VmapReport report;
  const auto got = vmap_gradients(named(*net_), loss, {x_}, {.seed = 21, .report = &report});
  EXPECT_EQ(gap(got, loop_gradients(named(*net_), loss, {x_}, {.seed = 21})), "");
  EXPECT_GT(report.splits, 0);
  EXPECT_EQ(report.first_split, "aten::_local_scalar_dense");
}

TEST_F(VmapTest, RefusesWhatWouldBeSilentlyWrong) {
  const at::Tensor outside = net_->parameters()[0] * 2;  // has a history that vmap cannot follow
  const LossFunction captured = [&](const Batch& b) { return (b[0] * outside.sum(0)).sum(1); };
  EXPECT_THAT(message_of([&] { vmap_gradients(named(*net_), captured, {x_}); }),
              HasSubstr("was computed outside the loss function"));

  at::Tensor kept;
  const LossFunction keeps = [&](const Batch& b) {
    at::Tensor y = net_->forward(b[0]);
    if (kept.defined()) y = y + kept;
    kept = y;
    return y.sum(1);
  };
  vmap_gradients(named(*net_), keeps, {x_});
  EXPECT_THAT(message_of([&] { vmap_gradients(named(*net_), keeps, {x_}); }),
              HasSubstr("kept from an earlier call"));

  const at::Tensor buffer = torch::zeros({1, 3}, torch::kDouble);
  for (const bool view : {false, true}) {
    const LossFunction writes = [&](const Batch& b) {
      at::Tensor target = view ? buffer.view({3}) : buffer;
      target.add_(1);
      return net_->forward(b[0]).sum(1);
    };
    EXPECT_THAT(message_of([&] { vmap_gradients(named(*net_), writes, {x_}); }),
                HasSubstr("aten::add_ for several examples at once: it writes to a tensor made "
                          "outside the loss function"));
  }
  EXPECT_EQ(buffer.sum().item<double>(), 0.0);

  const LossFunction mutates = [&](const Batch& b) {
    net_->parameters()[0].detach().mul_(2);
    return net_->forward(b[0]).sum(1);
  };
  const at::Tensor before = net_->parameters()[0].detach().clone();
  EXPECT_THROW(vmap_gradients(named(*net_), mutates, {x_}), Unsupported);
  EXPECT_TRUE(at::equal(before, net_->parameters()[0]));
}

TEST_F(VmapTest, NeverShowsTheLossTheCallersBatch) {
  const at::Tensor kept = x_.clone();
  const LossFunction loss = [this](const Batch& b) {
    b[0].mul_(3);
    return net_->forward(b[0]).sum(1);
  };
  const auto got = vmap_gradients(named(*net_), loss, {x_});
  EXPECT_TRUE(at::equal(x_, kept));
  EXPECT_EQ(gap(got, loop_gradients(named(*net_), loss, {x_})), "");
}

TEST_F(VmapTest, RefusesToRunInsideItself) {
  const LossFunction loss = [this](const Batch& b) {
    vmap_gradients(named(*net_), squares(), {torch::ones({2, 6}, torch::kDouble)});
    return squares()(b);
  };
  EXPECT_THAT(message_of([&] { vmap_gradients(named(*net_), loss, {x_}); }),
              HasSubstr("must not run inside"));
}

TEST_F(VmapTest, EqualsTheLoopThroughACheckpoint) {  // P23
  for (const bool reentrant : {false, true}) {
    SCOPED_TRACE(reentrant);
    const LossFunction loss = [&](const Batch& b) {
      const at::Tensor h = recompute::checkpoint(
          recompute::CheckpointOptions{.reentrant = reentrant},
          [this](const at::Tensor& in) { return at::dropout(net_->forward(in), 0.3, true); },
          b[0] * 2);
      return h.pow(2).sum(1);
    };
    const auto want = loop_gradients(named(*net_), loss, {x_}, {.seed = 2});
    EXPECT_EQ(gap(vmap_gradients(named(*net_), loss, {x_}, {.seed = 2}), want), "");
  }
}

TEST_F(VmapTest, ALossThatSeedsTheGeneratorDrawsAlikeForAllExamples) {
  const LossFunction loss = [this](const Batch& b) {
    const at::Tensor first = at::dropout(net_->forward(b[0]), 0.3, true);
    torch::manual_seed(17);
    return (at::dropout(first, 0.3, true) * torch::rand_like(first)).sum(1);
  };
  EXPECT_EQ(gap(vmap_gradients(named(*net_), loss, {x_}, {.seed = 2}),
                loop_gradients(named(*net_), loss, {x_}, {.seed = 2})),
            "");
}

TEST_F(VmapTest, RefusesBadOptions) {
  const auto call = [&](const VmapOptions& options) {
    return message_of([&] { vmap_gradients(named(*net_), squares(), {x_}, options); });
  };
  EXPECT_THAT(call({.chunk = -1}), HasSubstr("chunk must be at least 0 examples; got -1"));
  EXPECT_THAT(call({.memory_bytes = -1}), HasSubstr("memory_bytes must be at least 0; got -1"));
  EXPECT_THAT(message_of([&] { vmap_gradients(named(*net_), nullptr, {x_}); }),
              HasSubstr("a loss function is required"));
}

TEST_F(VmapTest, AutocastGivesWhatTheLoopGivesWithinItsRounding) {  // P16
  nn::Sequential net(nn::Linear(6, 8), nn::LayerNorm(nn::LayerNormOptions({8})), nn::Linear(8, 3));
  const at::Tensor x = torch::randn({4, 6});
  const LossFunction loss = [&](const Batch& b) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    const at::Tensor y = net->forward(b[0]);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return y.to(at::kFloat).pow(2).sum(1);
  };
  const auto want = loop_gradients(named(*net), loss, {x});
  for (int twice = 0; twice < 2; ++twice) {
    const auto got = vmap_gradients(named(*net), loss, {x});
    EXPECT_EQ(got[0].scalar_type(), at::kFloat);
    EXPECT_EQ(gap(got, want, 2e-2), "");
  }
}

}  // namespace
}  // namespace gradus::persample
