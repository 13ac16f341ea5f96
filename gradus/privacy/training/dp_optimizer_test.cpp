#include <gradus/privacy/training/dp_optimizer.h>

#include <cmath>
#include <limits>
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/amp/levels/levels.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/optim/adafactor.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/eight_bit.h>
#include <gradus/optim/sgd.h>
#include <gradus/privacy/training/internal/private_problem.h>
#include <gradus/privacy/training/sampling.h>

#include <tests/support/message_of.h>

namespace gradus::privacy {
namespace {

using namespace gradus::privacy::testing;  // NOLINT: a test's own problem
using ::testing::HasSubstr;
using tests::message_of;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::shared_ptr<Accountant> rdp() {
  return std::make_shared<Accountant>(AccountantOptions{.kind = AccountantKind::kRdp});
}

// Plain SGD at rate 1, so that the update is the private gradient.
struct Trial {
  explicit Trial(DPOptimizerOptions options, torch::nn::Sequential a_model = small_model())
      : model(std::move(a_model)),
        sgd(model->parameters(), {.lr = 1.0}),
        accountant(rdp()),
        dp(sgd, model.ptr(), accountant, std::move(options)) {}

  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> result;
    for (const at::Tensor& each : model->parameters()) result.push_back(each.grad().clone());
    return result;
  }

  torch::nn::Sequential model;
  optim::SGD sgd;
  std::shared_ptr<Accountant> accountant;
  DPOptimizer dp;
};

DPOptimizerOptions quiet(double expected = 8.0) {
  return {.noise_multiplier = 0.0, .expected_batch_size = expected, .seed = 1};
}

class DPOptimizerTest : public ::testing::Test {
 protected:
  DPOptimizerTest() { at::set_num_threads(1); }
};

TEST_F(DPOptimizerTest, EveryPolicyEqualsALoopOverExamples) {
  const persample::Batch rows = small_rows(8);
  const std::vector<Clipping> policies{Clipping::flat, Clipping::per_layer, Clipping::adaptive,
                                       Clipping::automatic};
  for (const Clipping policy : policies) {
    SCOPED_TRACE(name(policy));
    DPOptimizerOptions options = quiet(10.0);
    options.clipping = {.policy = policy, .max_norm = 0.7};
    Trial run(options);
    const auto before = copies_of(run.model->parameters());
    const auto examples = gradients_by_loop(run.model, rows);
    std::vector<at::Tensor> expected;
    for (const at::Tensor& each : before) expected.push_back(torch::zeros_like(each));
    std::int64_t clipped = 0;
    for (const auto& gradients : examples) {
      bool shrunk = false;
      for (std::size_t p = 0; p < gradients.size(); ++p) {
        double factor = std::min(1.0, 0.7 / norm_of(gradients));
        if (policy == Clipping::automatic) factor = 0.7 / (norm_of(gradients) + 0.01);
        if (policy == Clipping::per_layer) {
          factor = std::min(
              1.0, 0.7 / std::sqrt(static_cast<double>(before.size())) / norm_of({gradients[p]}));
        }
        shrunk = shrunk || factor < 1.0;
        expected[p] += factor * gradients[p] / 10.0;
      }
      clipped += shrunk ? 1 : 0;
    }
    run.dp.accumulate(loss_of(run.model), rows);
    const DPStep done = run.dp.step();
    EXPECT_LT(difference(run.gradients(), expected), 1e-9);
    for (std::size_t p = 0; p < before.size(); ++p)
      EXPECT_TRUE(
          torch::allclose(run.model->parameters()[p], before[p] - expected[p], 1e-9, 1e-12));
    if (policy != Clipping::automatic) {
      EXPECT_EQ(done.clipped, clipped);
    }
    EXPECT_EQ(done.examples, 8);
    EXPECT_NEAR(done.max_norm, 0.7, 1e-12);
    if (policy == Clipping::adaptive) {
      double below = 0.0;
      for (const auto& gradients : examples) below += norm_of(gradients) <= 0.7 ? 0.5 : -0.5;
      EXPECT_NEAR(run.dp.clipper().adapted_norm(), 0.7 * std::exp(-0.2 * (below / 10.0)), 1e-12);
    }
  }
}

// P17, noise 0: the update does not depend on the micro-batches or on what computes it, and logical
// steps are counted.
TEST_F(DPOptimizerTest, MicroBatchesOfAnySizeGiveTheSameUpdateByEveryEngine) {
  const persample::Batch rows = small_rows(8);
  for (const double noise : {0.0, 1.3}) {
    std::vector<std::vector<at::Tensor>> updates;
    for (const auto engine : {persample::Engine::automatic, persample::Engine::graph,
                              persample::Engine::vmap, persample::Engine::loop}) {
      for (const std::int64_t size : {8, 4, 2, 1}) {
        DPOptimizerOptions options = quiet();
        options.noise_multiplier = noise;
        options.sample.engine = engine;
        Trial run(options);
        for (std::int64_t step = 0; step < 2; ++step) {
          for (std::int64_t begin = 0; begin < 8; begin += size) {
            run.dp.accumulate(loss_of(run.model),
                              {rows[0].narrow(0, begin, size), rows[1].narrow(0, begin, size)});
          }
          EXPECT_EQ(run.dp.examples(), 8);
          run.dp.step();
        }
        EXPECT_EQ(run.accountant->history().steps(), 2);
        EXPECT_EQ(run.dp.last_norms().numel(), 8);
        updates.push_back(copies_of(run.model->parameters()));
      }
    }
    for (const auto& update : updates) EXPECT_LT(difference(update, updates[0]), 1e-12);
  }
}

TEST_F(DPOptimizerTest, NoiseHasTheStatedDeviationWhateverWasAccumulated) {
  torch::nn::Sequential model(torch::nn::Linear(300, 200));
  DPOptimizerOptions options{
      .noise_multiplier = 1.5, .expected_batch_size = 20.0, .clipping = {.max_norm = 0.4}};
  for (const bool secure : {false, true}) {
    options.seed = secure ? std::nullopt : std::optional<std::uint64_t>(5);
    Trial run(options, model);
    for (std::int64_t examples : {0, 5}) {
      run.dp.zero_grad();
      at::Tensor clean = torch::zeros({200, 300});
      if (examples > 0) {
        const persample::Batch rows{torch::randn({examples, 300})};
        Trial silent({.noise_multiplier = 0.0,
                      .expected_batch_size = 20.0,
                      .clipping = {.max_norm = 0.4},
                      .seed = 1},
                     model);
        const auto loss = [model](const persample::Batch& batch) mutable {
          return model->forward(batch[0]).square().sum(1);
        };
        const at::Tensor weight = model->parameters()[0].detach().clone();
        silent.dp.accumulate(loss, rows);
        silent.dp.step();
        clean = model->parameters()[0].grad().clone();
        torch::NoGradGuard no_grad;
        model->parameters()[0].copy_(weight);
        silent.dp.zero_grad();
        run.dp.accumulate(loss, rows);
      }
      const DPStep done = examples > 0 ? run.dp.step() : run.dp.step_empty();
      EXPECT_NEAR(done.noise_deviation, 0.6, 1e-12);
      const at::Tensor noise = (model->parameters()[0].grad() - clean).to(torch::kDouble);
      const double deviation = 0.6 / 20.0, n = 60000.0;
      EXPECT_NEAR(noise.mean().item<double>(), 0.0, 5.0 * deviation / std::sqrt(n));
      EXPECT_NEAR(noise.square().mean().item<double>() / (deviation * deviation), 1.0,
                  5.0 * std::sqrt(2.0 / n));
    }
  }
}

// P15.
TEST_F(DPOptimizerTest, EmptyBatchesGetNoiseAndAreCounted) {
  PoissonSampler sampler({.examples = 40, .sample_rate = 1.0 / 40, .steps = 40, .seed = 2});
  DPOptimizerOptions options{.noise_multiplier = 1.0,
                             .expected_batch_size = sampler.expected_batch_size(),
                             .clipping = {.max_norm = 0.1},
                             .seed = 3,
                             .accounted = [&](double noise) { return sampler.accounted(noise); }};
  Trial run(options);
  const persample::Batch rows = small_rows(40);
  std::int64_t empty = 0;
  while (const auto batch = sampler.next()) {
    const auto before = copies_of(run.model->parameters());
    if (batch->empty()) {
      ++empty;
      EXPECT_EQ(run.dp.step_empty().examples, 0);
    } else {
      run.dp.accumulate(loss_of(run.model), rows_at(rows, *batch));
      run.dp.step();
    }
    const auto now = copies_of(run.model->parameters());
    for (std::size_t p = 0; p < now.size(); ++p) {
      EXPECT_TRUE(now[p].isfinite().all().item<bool>());
      EXPECT_TRUE(now[p].ne(before[p]).all().item<bool>());
    }
  }
  EXPECT_GT(empty, 5);
  EXPECT_EQ(run.accountant->history(),
            History({{.noise_multiplier = 1.0, .sample_rate = 1.0 / 40, .steps = 40}}));
  EXPECT_EQ(run.dp.steps(), 40);
}

TEST_F(DPOptimizerTest, AStepWithoutExamplesMustBeCalledEmpty) {
  Trial run(quiet());
  EXPECT_THAT(message_of([&] { run.dp.step(); }), HasSubstr("nothing was accumulated"));
  run.dp.accumulate(loss_of(run.model), small_rows(2));
  EXPECT_THAT(message_of([&] { run.dp.step_empty(); }), HasSubstr("2 were accumulated"));
  EXPECT_EQ(run.accountant->history().steps(), 0);
}

TEST_F(DPOptimizerTest, ExamplesThatAreNotFiniteAreLeftOutAndCounted) {
  persample::Batch rows = small_rows(6);
  rows[0][1][2] = kNaN;
  rows[0][4][0] = std::numeric_limits<double>::infinity();
  const persample::Batch good = rows_at(rows, {0, 2, 3, 5});
  for (const bool by_losses : {false, true}) {
    Trial run(quiet()), clean(quiet());
    if (by_losses) {
      run.dp.accumulate(loss_of(run.model)(rows));
    } else {
      const at::Tensor losses = run.dp.accumulate(loss_of(run.model), rows);
      EXPECT_EQ(losses.numel(), 6);
      EXPECT_TRUE(losses[1].isnan().item<bool>());
    }
    clean.dp.accumulate(loss_of(clean.model), good);
    const DPStep done = run.dp.step();
    clean.dp.step();
    EXPECT_EQ(done.non_finite, 2);
    EXPECT_EQ(done.examples, 6);
    EXPECT_LT(difference(run.gradients(), clean.gradients()), 1e-12);
  }
  Trial run(quiet());
  run.dp.accumulate(loss_of(run.model), rows_at(rows, {1, 4}));
  EXPECT_EQ(run.dp.step().non_finite, 2);
  for (const at::Tensor& each : run.gradients()) EXPECT_TRUE(each.eq(0).all().item<bool>());
}

TEST_F(DPOptimizerTest, AnExceptionInAMicroBatchLeavesTheLogicalBatchAsItWas) {
  const persample::Batch rows = small_rows(8);
  const persample::Batch first = rows_at(rows, {0, 1, 2, 3}), second = rows_at(rows, {4, 5, 6, 7});
  DPOptimizerOptions options = quiet();
  options.noise_multiplier = 0.8;
  Trial run(options), whole(options);
  const auto before = copies_of(run.model->parameters());
  run.dp.accumulate(loss_of(run.model), first);
  const auto broken = [&](const persample::Batch& batch) -> at::Tensor {
    loss_of(run.model)(batch);
    throw std::runtime_error("the data loader broke");
  };
  EXPECT_THROW(run.dp.accumulate(broken, second), std::runtime_error);
  EXPECT_TRUE(identical(copies_of(run.model->parameters()), before));
  EXPECT_EQ(run.dp.examples(), 4);
  EXPECT_EQ(run.accountant->history().steps(), 0);
  run.dp.accumulate(loss_of(run.model), second);
  run.dp.step();
  for (const auto& piece : {first, second}) whole.dp.accumulate(loss_of(whole.model), piece);
  whole.dp.step();
  EXPECT_TRUE(identical(copies_of(run.model->parameters()), copies_of(whole.model->parameters())));
  // Or the batch is given up.
  run.dp.accumulate(loss_of(run.model), first);
  run.dp.zero_grad();
  EXPECT_EQ(run.dp.examples(), 0);
  EXPECT_EQ(run.accountant->history().steps(), 1);
}

TEST_F(DPOptimizerTest, AFailureWhileReleasingStaysCounted) {
  DPOptimizerOptions options = quiet();
  options.reduction = {.rank = 0, .ranks = 2, .sum = [](const std::vector<at::Tensor>&) -> void {
                         throw std::runtime_error("a peer failed");
                       }};
  Trial run(options);
  const auto before = copies_of(run.model->parameters());
  run.dp.accumulate(loss_of(run.model), small_rows(2));
  EXPECT_THROW(run.dp.step(), std::runtime_error);
  EXPECT_TRUE(identical(copies_of(run.model->parameters()), before));
  EXPECT_EQ(run.accountant->history().steps(), 1);  // others may have seen it
  EXPECT_EQ(run.dp.examples(), 0);
}

TEST_F(DPOptimizerTest, AStepWhoseReleaseFailsIsNotTakenAgain) {
  int calls = 0;
  DPOptimizerOptions options = quiet();
  options.noise_multiplier = 1.0;
  options.noise_schedule = [](std::int64_t step) { return step < 1 ? 1.0 : 3.0; };
  options.reduction = {.rank = 0, .ranks = 2, .sum = [&](const std::vector<at::Tensor>&) {
                         if (++calls <= 2) throw std::runtime_error("a peer failed");
                       }};
  Trial run(options);
  EXPECT_THROW(run.dp.step_empty(), std::runtime_error);
  EXPECT_THROW(run.dp.step_empty(), std::runtime_error);
  EXPECT_EQ(run.dp.step_empty().step, 3);
  EXPECT_EQ(run.accountant->history(),
            History({{.noise_multiplier = 1.0, .sample_rate = 1.0, .steps = 1},
                     {.noise_multiplier = 3.0, .sample_rate = 1.0, .steps = 2}}));
}

// Two ranks in one process: rank 1 steps first and leaves its sums, rank 0 adds them; then rank 1
// goes on with the total, in a second pass over the same run.
struct TwoRanks {
  std::vector<at::Tensor> sums_of_1;
  std::vector<at::Tensor> total;

  Reduction rank0() {
    return {.rank = 0, .ranks = 2, .sum = [this](const std::vector<at::Tensor>& tensors) {
              for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].add_(sums_of_1.at(i));
              total = copies_of(tensors);
            }};
  }
  Reduction recording_rank1() {
    return {.rank = 1, .ranks = 2, .sum = [this](const std::vector<at::Tensor>& tensors) {
              sums_of_1 = copies_of(tensors);
            }};
  }
  Reduction rank1() {
    return {.rank = 1, .ranks = 2, .sum = [this](const std::vector<at::Tensor>& tensors) {
              for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].copy_(total.at(i));
            }};
  }
};

TEST_F(DPOptimizerTest, TwoRanksEqualOneAndCountTheNoiseOnce) {
  const persample::Batch rows = small_rows(9);
  for (const Clipping policy : {Clipping::flat, Clipping::adaptive}) {
    for (const double noise : {0.0, 2.0}) {
      DPOptimizerOptions options{.noise_multiplier = noise,
                                 .expected_batch_size = 9.0,
                                 .clipping = {.policy = policy, .max_norm = 0.5},
                                 .seed = 6};
      TwoRanks ranks;
      Trial one(options);
      options.reduction = ranks.recording_rank1();
      Trial recording(options);
      options.reduction = ranks.rank0();
      Trial zero(options);
      options.reduction = ranks.rank1();
      Trial other(options);
      one.dp.accumulate(loss_of(one.model), rows);
      one.dp.step();
      recording.dp.accumulate(loss_of(recording.model), rows_at(rows, {1, 3, 5, 7}));
      recording.dp.step();
      zero.dp.accumulate(loss_of(zero.model), rows_at(rows, {0, 2, 4, 6, 8}));
      zero.dp.step();
      other.dp.accumulate(loss_of(other.model), rows_at(rows, {1, 3, 5, 7}));
      other.dp.step();
      EXPECT_LT(difference(zero.gradients(), one.gradients()), 1e-12);
      EXPECT_TRUE(identical(other.gradients(), zero.gradients()));
      EXPECT_NEAR(zero.dp.clipper().adapted_norm(), one.dp.clipper().adapted_norm(), 1e-12);
      EXPECT_EQ(other.dp.clipper().adapted_norm(), zero.dp.clipper().adapted_norm());
      EXPECT_EQ(other.accountant->history(), one.accountant->history());
    }
  }
  DPOptimizerOptions lonely = quiet();
  lonely.reduction.ranks = 2;
  EXPECT_THAT(message_of([&] { Trial run(lonely); }), HasSubstr("must have a Reduction::sum"));
}

TEST_F(DPOptimizerTest, SchedulesScaleNoiseAndThresholdsByLogicalStep) {
  DPOptimizerOptions options{.noise_multiplier = 2.0,
                             .expected_batch_size = 4.0,
                             .clipping = {.max_norm = 1.0},
                             .noise_schedule = optim::exponential_schedule(1.0, 0.5),
                             .clip_schedule = optim::step_schedule(1.0, 2, 0.1),
                             .seed = 1};
  Trial run(options);
  const std::vector<double> noise{2.0, 1.0, 0.5}, norm{1.0, 1.0, 0.1};
  for (std::size_t step = 0; step < 3; ++step) {
    run.dp.accumulate(loss_of(run.model), small_rows(4));
    const DPStep done = run.dp.step();
    EXPECT_DOUBLE_EQ(done.noise_multiplier, noise[step]);
    EXPECT_DOUBLE_EQ(done.max_norm, norm[step]);
    EXPECT_DOUBLE_EQ(done.noise_deviation, noise[step] * norm[step]);
  }
  EXPECT_EQ(run.accountant->history().entries().size(), 3U);
}

TEST_F(DPOptimizerTest, FrozenParametersGetNeitherGradientNorNoise) {
  DPOptimizerOptions options = quiet();
  options.noise_multiplier = 1.0;
  auto model = small_model();
  model->parameters()[0].set_requires_grad(false);
  Trial run(options, model);
  const at::Tensor before = model->parameters()[0].clone();
  model->parameters()[0].mutable_grad() = torch::ones_like(before);  // an old, plain gradient
  for (int step = 0; step < 2; ++step) {
    run.dp.accumulate(loss_of(model), small_rows(4));
    run.dp.step();
  }
  EXPECT_TRUE(torch::equal(model->parameters()[0], before));
  EXPECT_FALSE(model->parameters()[0].grad().defined());
  EXPECT_TRUE(model->parameters()[1].grad().defined());
}

TEST_F(DPOptimizerTest, AnUnusedLayerGetsNoiseAlone) {
  DPOptimizerOptions options = quiet();
  auto model = small_model();
  auto unused = torch::nn::Linear(2, 2);
  unused->to(torch::kDouble);
  model->register_module("unused", unused.ptr());
  Trial run(options, model);
  run.dp.accumulate(loss_of(model), small_rows(4));
  run.dp.step();
  EXPECT_TRUE(unused->weight.grad().eq(0).all().item<bool>());
  Trial noisy({.noise_multiplier = 1.0, .expected_batch_size = 1.0, .seed = 1}, model);
  noisy.dp.accumulate(loss_of(model), small_rows(4));
  noisy.dp.step();
  EXPECT_TRUE(unused->weight.grad().ne(0).all().item<bool>());
}

template <typename Optimizer>
void expect_same_step(Optimizer make) {
  auto private_model = small_model(), plain_model = small_model();
  private_model->to(torch::kFloat);
  plain_model->to(torch::kFloat);
  auto private_optimizer = make(private_model->parameters()),
       plain = make(plain_model->parameters());
  DPOptimizer dp(*private_optimizer, private_model.ptr(), rdp(),
                 {.noise_multiplier = 0.5, .expected_batch_size = 4.0, .seed = 1});
  persample::Batch rows = small_rows(4);
  rows[0] = rows[0].to(torch::kFloat);
  for (int step = 0; step < 3; ++step) {
    dp.accumulate(loss_of(private_model), rows);
    dp.step();
    for (std::size_t p = 0; p < plain_model->parameters().size(); ++p)
      plain_model->parameters()[p].mutable_grad() = private_model->parameters()[p].grad().clone();
    plain->step();
    EXPECT_TRUE(
        identical(copies_of(private_model->parameters()), copies_of(plain_model->parameters())));
  }
}

TEST_F(DPOptimizerTest, AnyOptimizerStepsOnThePrivateGradient) {
  expect_same_step([](auto parameters) {
    return std::make_unique<optim::Adafactor>(parameters, optim::AdafactorOptions{});
  });
  expect_same_step([](auto parameters) {
    return std::make_unique<optim::Adam8bit>(parameters, optim::Adam8bitOptions{});
  });
  expect_same_step([](auto parameters) {
    return std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions{});
  });
}

TEST_F(DPOptimizerTest, SixteenBitParametersGetTheirNoiseInFloat32) {
  auto model = small_model();
  model->to(torch::kBFloat16);
  Trial run({.noise_multiplier = 1.0, .expected_batch_size = 3.0, .seed = 8}, model);
  run.dp.step_empty();
  NoiseGenerator noise = NoiseGenerator::seeded(8);
  for (const at::Tensor& each : model->parameters()) {
    at::Tensor expected = torch::zeros(each.sizes());
    noise.add_gaussian_(expected, 1.0);
    EXPECT_EQ(each.grad().scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(torch::equal(each.grad(), expected.div_(3.0).to(torch::kBFloat16)));
  }
}

TEST_F(DPOptimizerTest, StepsOnTheMasterWeightsOfAMixedPrecisionModel) {
  auto model = small_model();
  model->to(torch::kFloat);
  auto amp = amp::initialize(*model,
                             {.opt_level = amp::OptLevel::O2, .cast_model_type = torch::kBFloat16});
  optim::SGD sgd(amp.parameters(*model), {.lr = 1e-3});
  DPOptimizer dp(sgd, model.ptr(), rdp(),
                 {.noise_multiplier = 0.5,
                  .expected_batch_size = 4.0,
                  .seed = 1,
                  .targets = amp.parameters(*model),
                  .apply = [&] {
                    amp.step(sgd);
                    return optim::StepResult{};
                  }});
  persample::Batch rows = small_rows(4);
  const auto loss = [&](const persample::Batch& batch) {
    return cross_entropy_per_example(amp.forward(model, batch[0].to(torch::kFloat)), batch[1]);
  };
  const auto masters = copies_of(amp.parameters(*model));
  for (int step = 0; step < 2; ++step) {
    dp.accumulate(loss, rows);
    dp.step();
  }
  for (std::size_t p = 0; p < masters.size(); ++p) {
    const at::Tensor master = amp.parameters(*model)[p];
    EXPECT_EQ(master.scalar_type(), torch::kFloat);
    EXPECT_FALSE(torch::equal(master, masters[p]));
    EXPECT_TRUE(
        torch::equal(model->parameters()[p], master.to(model->parameters()[p].scalar_type())));
  }
}

TEST_F(DPOptimizerTest, EveryTensorTheOptimizerStepsOnMustBePrivate) {
  auto model = small_model();
  const auto parameters = model->parameters();
  optim::SGD few({parameters[0]}, {.lr = 1.0});
  EXPECT_THAT(message_of([&] { DPOptimizer(few, model.ptr(), rdp(), quiet()); }),
              HasSubstr("parameter '0.bias' wants a gradient, so the optimizer must hold it"));
  auto more = parameters;
  more.push_back(torch::ones({2}, torch::kDouble).requires_grad_());
  optim::SGD many(more, {.lr = 1.0});
  EXPECT_THAT(message_of([&] { DPOptimizer(many, model.ptr(), rdp(), quiet()); }),
              HasSubstr("parameter '6' of the optimizer must be one of the model's"));
  DPOptimizerOptions bad = quiet(0.0);
  EXPECT_THAT(message_of([&] { Trial run(bad); }), HasSubstr("expected_batch_size must be finite"));
}

struct CountingImpl : torch::nn::Module {
  CountingImpl() : linear(6, 3) {
    register_module("linear", linear);
    mean = register_buffer("mean", torch::zeros({6}));
  }
  at::Tensor forward(const at::Tensor& x) {
    torch::NoGradGuard no_grad;
    mean.add_(x.detach().mean(0));
    torch::AutoGradMode grad(true);
    return linear(x);
  }
  torch::nn::Linear linear;
  at::Tensor mean;
};

TEST_F(DPOptimizerTest, RefusesStatisticsThatWouldLeaveWithTheModel) {
  auto module = std::make_shared<CountingImpl>();
  const auto loss = [&](const persample::Batch& batch) {
    return module->forward(batch[0]).square().sum(1);
  };
  const persample::Batch rows{torch::randn({4, 6})};
  optim::SGD sgd(module->parameters(), {.lr = 1.0});
  DPOptimizerOptions options{.noise_multiplier = 1.0, .expected_batch_size = 4.0, .seed = 1};
  DPOptimizer dp(sgd, module, rdp(), options);
  EXPECT_THAT(message_of([&] { dp.accumulate(loss, rows); }),
              HasSubstr("buffer 'mean' must not change in a forward pass"));
  EXPECT_EQ(dp.examples(), 0);
  options.allow_buffer_updates = true;
  DPOptimizer allowed(sgd, module, rdp(), options);
  allowed.accumulate(loss, rows);
  EXPECT_EQ(allowed.examples(), 4);
  torch::nn::Sequential norms(torch::nn::InstanceNorm1d(
      torch::nn::InstanceNorm1dOptions(2).affine(true).track_running_stats(true)));
  Trial run(quiet(), norms);
  EXPECT_THAT(message_of([&] { run.dp.accumulate(loss_of(norms), small_rows(2)); }),
              HasSubstr("layer '0' (torch::nn::InstanceNorm1dImpl) must not keep running"));
}

// How a forward pass may write a buffer.
enum class Write { in_place, by_data, by_set_data };

struct WritingImpl : CountingImpl {
  explicit WritingImpl(Write a_way) : way(a_way) {}
  at::Tensor write(const at::Tensor& x) {
    {
      torch::NoGradGuard no_grad;
      const at::Tensor more = x.mean(0);
      if (way == Write::in_place) mean.add_(more);
      if (way == Write::by_data) mean.data().add_(more);
      if (way == Write::by_set_data) mean.set_data(mean + more);
    }
    return linear(x).square().sum(1);
  }
  Write way;
};

TEST_F(DPOptimizerTest, ABufferThatIsWrittenInAnyWayIsPutBackAndRefused) {
  for (const Write way : {Write::in_place, Write::by_data, Write::by_set_data}) {
    for (const bool by_losses : {false, true}) {
      auto module = std::make_shared<WritingImpl>(way);
      optim::SGD sgd(module->parameters(), {.lr = 1.0});
      DPOptimizer dp(sgd, module, rdp(), quiet());
      const persample::Batch rows{torch::ones({4, 6})};
      const auto loss = [&](const persample::Batch& batch) { return module->write(batch[0]); };
      EXPECT_THAT(message_of([&] {
                    if (by_losses)
                      dp.accumulate(loss(rows));
                    else
                      dp.accumulate(loss, rows);
                  }),
                  HasSubstr("buffer 'mean' must not change in a forward pass"));
      EXPECT_TRUE(module->named_buffers()["mean"].eq(0).all().item<bool>());
      EXPECT_EQ(dp.examples(), 0);
    }
  }
  // Also if the loss throws afterwards.
  auto module = std::make_shared<WritingImpl>(Write::in_place);
  optim::SGD sgd(module->parameters(), {.lr = 1.0});
  DPOptimizer dp(sgd, module, rdp(), quiet());
  const auto broken = [&](const persample::Batch& batch) -> at::Tensor {
    module->write(batch[0]);
    throw std::runtime_error("the loss broke");
  };
  EXPECT_THROW(dp.accumulate(broken, {torch::ones({4, 6})}), std::runtime_error);
  EXPECT_TRUE(module->mean.eq(0).all().item<bool>());
  // What the caller writes between two calls is his, and a NaN is equal to itself.
  {
    torch::NoGradGuard no_grad;
    module->mean.fill_(kNaN);
  }
  dp.accumulate([&](const persample::Batch& batch) { return module->linear(batch[0]).sum(1); },
                {torch::ones({4, 6})});
  dp.accumulate(module->linear(torch::ones({4, 6})).sum(1));
  EXPECT_EQ(dp.examples(), 8);
}

struct RenormImpl : torch::nn::Module {
  RenormImpl() {
    table = register_parameter("table", torch::full({10, 4}, 3.0));
    register_module("linear", linear);
  }
  at::Tensor forward(const at::Tensor& ids) {
    namespace F = torch::nn::functional;
    return linear(F::embedding(ids, table, F::EmbeddingFuncOptions().max_norm(1.0)))
        .squeeze(-1)
        .mean(1);
  }
  at::Tensor table;
  torch::nn::Linear linear{4, 1};
};

TEST_F(DPOptimizerTest, RefusesAForwardPassThatWritesParameters) {
  auto module = std::make_shared<RenormImpl>();
  optim::SGD sgd(module->parameters(), {.lr = 1.0});
  for (const bool allow : {false, true}) {
    torch::NoGradGuard no_grad;
    module->table.fill_(3.0);
    torch::AutoGradMode grad(true);
    DPOptimizerOptions options = quiet();
    options.allow_buffer_updates = allow;
    DPOptimizer dp(sgd, module, rdp(), options);
    EXPECT_THAT(message_of([&] {
                  dp.accumulate(
                      [&](const persample::Batch& batch) { return module->forward(batch[0]); },
                      {torch::arange(8).view({4, 2})});
                }),
                HasSubstr("parameter 'table' must not be written in a forward pass"));
    EXPECT_EQ(dp.examples(), 0);
  }
}

TEST_F(DPOptimizerTest, AStepRefusesParametersThatCameLater) {
  Trial run(quiet());
  run.dp.accumulate(loss_of(run.model), small_rows(2));
  run.sgd.add_group({.parameters = {torch::zeros({3}, torch::requires_grad())}});
  EXPECT_THAT(message_of([&] { run.dp.step(); }),
              HasSubstr("of the optimizer must be one of the model's"));
  EXPECT_EQ(run.accountant->history().steps(), 0);
  Trial grown(quiet());
  grown.dp.accumulate(loss_of(grown.model), small_rows(2));
  grown.model->push_back(torch::nn::Linear(3, 3));
  EXPECT_THAT(message_of([&] { grown.dp.step(); }),
              HasSubstr("parameter '4.weight' must have been the model's"));
  EXPECT_EQ(grown.accountant->history().steps(), 0);
  EXPECT_EQ(grown.dp.examples(), 2);
}

TEST_F(DPOptimizerTest, FrozenParametersTakeNoShareOfPerLayerThresholds) {
  DPOptimizerOptions options = quiet(1.0);
  options.clipping = {.policy = Clipping::per_layer, .max_norm = 1.0};
  auto model = small_model();
  for (std::size_t p = 0; p < 4; ++p) model->parameters()[p].set_requires_grad(false);
  Trial run(options, model);
  const auto loss = [&](const persample::Batch& batch) { return 1e6 * loss_of(model)(batch); };
  run.dp.accumulate(loss, small_rows(1));
  EXPECT_NEAR(run.dp.step().max_norm, 1.0, 1e-12);
  const std::vector<at::Tensor> live{model->parameters()[4].grad(), model->parameters()[5].grad()};
  EXPECT_NEAR(norm_of(live), 1.0, 1e-9);  // all of the sensitivity is used
}

TEST_F(DPOptimizerTest, NoiseIsThatOfTheLargestThresholdOfTheBatch) {
  double factor = 10.0;
  DPOptimizerOptions options = quiet(1.0);
  options.noise_multiplier = 2.0;
  options.clip_schedule = [&](std::int64_t) { return factor; };
  Trial run(options);
  run.dp.accumulate(loss_of(run.model), small_rows(1));
  factor = 1.0;
  run.dp.accumulate(loss_of(run.model), small_rows(1));
  const DPStep done = run.dp.step();
  EXPECT_EQ(done.max_norm, 10.0);
  EXPECT_EQ(done.noise_deviation, 20.0);
  EXPECT_EQ(run.dp.step_empty().max_norm, 1.0);
}

TEST_F(DPOptimizerTest, AnImpossibleCountNoiseFailsAtConstruction) {
  DPOptimizerOptions options = quiet();
  options.noise_multiplier = 2.0;
  options.clipping = {.policy = Clipping::adaptive, .count_noise = 0.9};
  EXPECT_THAT(message_of([&] { Trial run(options); }), HasSubstr("count_noise must be more"));
}

// P16: under autocast the layers compute in bf16; norms, factors and sums stay wider.
TEST_F(DPOptimizerTest, AutocastCostsTheRoundingOfTheLayersAlone) {
  persample::Batch rows = small_rows(6);
  rows[0] = rows[0].to(torch::kFloat);
  DPOptimizerOptions options = quiet();
  options.clipping.max_norm = 0.5;
  const auto model_of = [] {
    auto model = small_model();
    model->to(torch::kFloat);
    return model;
  };
  Trial plain(options, model_of()), cast(options, model_of());
  const auto loss = [&](const persample::Batch& batch) {
    const amp::AutocastGuard autocast({.dtype = at::kBFloat16});
    return cross_entropy_per_example(cast.model->forward(batch[0]).to(torch::kFloat), batch[1]);
  };
  for (std::int64_t begin = 0; begin < 6; begin += 2) {
    const persample::Batch piece{rows[0].narrow(0, begin, 2), rows[1].narrow(0, begin, 2)};
    plain.dp.accumulate(loss_of(plain.model), piece);
    cast.dp.accumulate(loss, piece);
  }
  plain.dp.step();
  cast.dp.step();
  double error = 0.0, size = 0.0;
  for (std::size_t p = 0; p < plain.gradients().size(); ++p) {
    EXPECT_EQ(cast.gradients()[p].scalar_type(), torch::kFloat);
    error += (cast.gradients()[p] - plain.gradients()[p]).square().sum().item<double>();
    size += plain.gradients()[p].square().sum().item<double>();
  }
  EXPECT_GT(error, 0.0);
  EXPECT_LT(std::sqrt(error / size), 0.03);  // a few units of bf16's 2^-8
}

// Virtual steps: 10,000 examples as 200 micro-batches of 50 take the memory of one micro-batch, and
// what the logical batch must keep of them: their clipped sum and one norm an example.
TEST_F(DPOptimizerTest, ALogicalBatchTakesTheMemoryOfItsMicroBatch) {
  constexpr std::int64_t kMicroBatch = 50, kLogicalBatch = 10000;
  auto& tracker = base::MemoryTracker::install();
  std::int64_t sums = 0;
  // Bytes with parameters, gradients and data.
  const auto peak_of = [&](std::int64_t micro_batches) {
    const std::int64_t before = tracker.live().total();
    torch::nn::Sequential model(torch::nn::Linear(128, 256), torch::nn::ReLU(),
                                torch::nn::Linear(256, 64));
    DPOptimizerOptions options{
        .noise_multiplier = 1.0,
        .expected_batch_size = static_cast<double>(kMicroBatch * micro_batches),
        .seed = 1};
    options.sample.graph.reproducible = true;  // counts operations: the same choices in both runs
    Trial run(options, model);
    const persample::Batch rows{torch::randn({kMicroBatch, 16, 128})};
    const auto loss = [&](const persample::Batch& batch) {
      return model->forward(batch[0]).square().sum({1, 2});
    };
    sums = 0;
    for (const at::Tensor& each : model->parameters()) {
      sums += static_cast<std::int64_t>(each.nbytes());
    }
    run.dp.accumulate(loss, rows);  // what only the first batch of a graph takes
    run.dp.zero_grad();
    tracker.reset_peak();
    for (std::int64_t i = 0; i < micro_batches; ++i) run.dp.accumulate(loss, rows);
    EXPECT_EQ(run.dp.step().examples, kMicroBatch * micro_batches);
    return tracker.peak().total() - before;
  };
  const std::int64_t one = peak_of(1), all = peak_of(kLogicalBatch / kMicroBatch);
  EXPECT_LE(all, one + sums + 8 * kLogicalBatch);
}

// P21: through the engine, whatever the layer is.
TEST_F(DPOptimizerTest, RefusesModelsThatMixExamples) {
  Trial run(quiet());
  const auto loss = [&](const persample::Batch& batch) {
    return cross_entropy_per_example(run.model->forward(batch[0].flip(0)), batch[1]);
  };
  EXPECT_THAT(message_of([&] { run.dp.accumulate(loss, small_rows(4)); }),
              HasSubstr("changing example"));
  EXPECT_EQ(run.dp.examples(), 0);
}

TEST_F(DPOptimizerTest, AResumedRunEqualsTheUninterruptedOneBitForBit) {
  for (const Clipping policy : {Clipping::flat, Clipping::adaptive}) {
    const auto run_steps = [&](DPOptimizer& dp, const torch::nn::Sequential& model, int from,
                               int to) {
      for (int step = from; step < to; ++step) {
        dp.accumulate(loss_of(model), small_rows(5, static_cast<std::uint64_t>(20 + step)));
        dp.step();
      }
    };
    DPOptimizerOptions options{.noise_multiplier = 0.7,
                               .expected_batch_size = 5.0,
                               .clipping = {.policy = policy},
                               .seed = 3};
    auto whole = small_model(), first = small_model(), second = small_model(99);
    optim::AdamW a(whole->parameters(), {}), b(first->parameters(), {}),
        c(second->parameters(), {});
    DPOptimizer straight(a, whole.ptr(), rdp(), options), killed(b, first.ptr(), rdp(), options),
        resumed(c, second.ptr(), rdp(), options);
    run_steps(straight, whole, 0, 6);
    run_steps(killed, first, 0, 4);
    {
      torch::NoGradGuard no_grad;
      for (std::size_t p = 0; p < first->parameters().size(); ++p)
        second->parameters()[p].copy_(first->parameters()[p]);
    }
    resumed.load_state(killed.state());
    run_steps(resumed, second, 4, 6);
    EXPECT_TRUE(identical(copies_of(whole->parameters()), copies_of(second->parameters())));
    EXPECT_EQ(resumed.accountant().history(), straight.accountant().history());
    EXPECT_EQ(resumed.clipper().adapted_norm(), straight.clipper().adapted_norm());
  }
}

TEST_F(DPOptimizerTest, RefusesTheStateOfOtherSettingsByNameAndChangesNothing) {
  DPOptimizerOptions options = quiet();
  options.noise_multiplier = 1.0;
  Trial run(options);
  const auto refusal = [&](DPOptimizerOptions other) {
    Trial made(std::move(other));
    made.dp.accumulate(loss_of(made.model), small_rows(2));
    made.dp.step();
    return message_of([&] { run.dp.load_state(made.dp.state()); });
  };
  DPOptimizerOptions other = options;
  other.noise_multiplier = 1.5;
  EXPECT_THAT(refusal(other),
              HasSubstr("the noise multiplier of the state must be that of this run, "
                        "1; got 1.5"));
  other = options;
  other.expected_batch_size = 9.0;
  EXPECT_THAT(refusal(other), HasSubstr("the expected batch size of the state"));
  other = options;
  other.clipping.max_norm = 3.0;
  EXPECT_THAT(refusal(other), HasSubstr("the clipping norm of the state"));
  other = options;
  other.clipping.policy = Clipping::automatic;
  EXPECT_THAT(refusal(other), HasSubstr("the clipping (0 flat"));
  other = options;
  other.seed.reset();
  EXPECT_THAT(refusal(other), HasSubstr("'noise' must be secure"));
  EXPECT_EQ(run.dp.steps(), 0);
  EXPECT_EQ(run.accountant->history().steps(), 0);
  run.dp.accumulate(loss_of(run.model), small_rows(2));
  EXPECT_THAT(message_of([&] { (void)run.dp.state(); }), HasSubstr("between logical steps"));
}

TEST_F(DPOptimizerTest, RefusesTheStateOfOtherClippingOptions) {
  using Change = std::function<void(ClippingOptions&)>;
  const auto refusal = [](ClippingOptions clipping, const Change& change) {
    DPOptimizerOptions options = quiet();
    options.clipping = std::move(clipping);
    Trial run(options);
    change(options.clipping);
    Trial made(options);
    return message_of([&] { run.dp.load_state(made.dp.state()); });
  };
  const ClippingOptions adaptive{.policy = Clipping::adaptive};
  EXPECT_THAT(refusal(adaptive, [](auto& o) { o.target_quantile = 0.3; }),
              HasSubstr("the target_quantile of clipping of the state must be"));
  EXPECT_THAT(refusal(adaptive, [](auto& o) { o.adaptation_rate = 0.3; }),
              HasSubstr("the adaptation_rate of clipping"));
  EXPECT_THAT(refusal(adaptive, [](auto& o) { o.count_noise = 3.0; }),
              HasSubstr("the count_noise of clipping"));
  EXPECT_THAT(refusal(adaptive, [](auto& o) { o.least_norm = 0.1; }),
              HasSubstr("the least_norm of clipping"));
  EXPECT_THAT(refusal(adaptive, [](auto& o) { o.greatest_norm = 9.0; }),
              HasSubstr("the greatest_norm of clipping"));
  EXPECT_THAT(refusal({.policy = Clipping::automatic}, [](auto& o) { o.stability = 5.0; }),
              HasSubstr("the stability of clipping"));
  const ClippingOptions layers{.policy = Clipping::per_layer,
                               .layers = {{.names = {"0", "2"}}, {.names = {"3"}}}};
  EXPECT_THAT(refusal(layers, [](auto& o) { o.layers[1].max_norm = 50.0; }),
              HasSubstr("the clipped layers of the state"));
  EXPECT_THAT(
      refusal(layers, [](auto& o) { o.layers = {{.names = {"0"}}, {.names = {"2", "3"}}}; }),
      HasSubstr("the clipped layers of the state"));
  EXPECT_THAT(refusal(layers, [](auto& o) { o.layers.clear(); }),
              HasSubstr("state 'clipping.layers' must be"));
  EXPECT_EQ(refusal(layers, [](auto&) {}), "no UserError");
}

TEST_F(DPOptimizerTest, RefusesAStateThatNoRunCouldHaveSaved) {
  auto model = small_model();
  optim::AdamW adam(model->parameters(), {});
  DPOptimizerOptions options = quiet();
  options.clipping = {.policy = Clipping::adaptive, .greatest_norm = 4.0};
  DPOptimizer dp(adam, model.ptr(), rdp(), options);
  dp.accumulate(loss_of(model), small_rows(2));
  dp.step();
  const StateEntries saved = dp.state();
  StateEntries wide = saved, nan = saved;
  for (auto& [name, tensor] : wide) {
    if (name == "adapted_norm") tensor = torch::full({}, 5.0, torch::kDouble);
  }
  bool poisoned = false;
  for (auto& [name, tensor] : nan) {
    if (poisoned || !name.starts_with("optimizer.") || !tensor.is_floating_point()) continue;
    tensor = torch::full_like(tensor, kNaN);
    poisoned = true;
  }
  EXPECT_THAT(message_of([&] { dp.load_state(wide); }), HasSubstr("state 'adapted_norm' must be"));
  ASSERT_TRUE(poisoned);
  EXPECT_THAT(message_of([&] { dp.load_state(nan); }), HasSubstr("must be finite; it holds NaN"));
  dp.load_state(saved);
}

TEST_F(DPOptimizerTest, LoadingAStateForgetsNoRelease) {
  DPOptimizerOptions options = quiet();
  options.noise_multiplier = 1.0;
  Trial run(options);
  for (int step = 0; step < 2; ++step) run.dp.step_empty();
  const StateEntries early = run.dp.state();
  for (int step = 0; step < 3; ++step) run.dp.step_empty();
  const double spent = run.accountant->epsilon(1e-5);
  run.dp.load_state(early);
  EXPECT_EQ(run.dp.steps(), 2);
  EXPECT_EQ(run.accountant->epsilon(1e-5), spent);
  run.dp.step_empty();
  EXPECT_EQ(run.accountant->history().steps(), 6);
  // What was spent before the run is in no state of another one.
  Trial other(options);
  other.accountant->add({.noise_multiplier = 0.8, .sample_rate = 0.2, .steps = 100});
  other.dp.load_state(early);
  EXPECT_EQ(other.accountant->history(),
            History({{.noise_multiplier = 1.0, .sample_rate = 1.0, .steps = 2},
                     {.noise_multiplier = 0.8, .sample_rate = 0.2, .steps = 100}}));
}

TEST_F(DPOptimizerTest, EpsilonIsTheAccountantsAfterEachStep) {
  PoissonSampler sampler({.examples = 100, .sample_rate = 0.08, .steps = 5, .seed = 1});
  DPOptimizerOptions options{.noise_multiplier = 1.1,
                             .expected_batch_size = 8.0,
                             .seed = 1,
                             .accounted = [&](double noise) { return sampler.accounted(noise); }};
  Trial run(options);
  for (std::int64_t step = 1; step <= 4; ++step) {
    run.dp.accumulate(loss_of(run.model), small_rows(3));
    run.dp.step();
    const History expected({{.noise_multiplier = 1.1, .sample_rate = 0.08, .steps = step}});
    EXPECT_EQ(run.dp.accountant().epsilon(1e-5),
              epsilon_of(expected, 1e-5, {.kind = AccountantKind::kRdp}));
  }
}

}  // namespace
}  // namespace gradus::privacy
