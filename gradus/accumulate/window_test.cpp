#include <gradus/accumulate/window.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/accumulate/backward_steps.h>
#include <gradus/base/error.h>
#include <gradus/plane/grad/grad_plane.h>

#include <tests/support/message_of.h>

namespace gradus::accumulate {
namespace {

// Of the whole binary: sums that are compared exactly are made on one thread.
class OneThread final : public testing::Environment {
 public:
  void SetUp() override { at::set_num_threads(1); }
};
const testing::Environment* const one_thread = testing::AddGlobalTestEnvironment(new OneThread);

using testing::HasSubstr;
using tests::message_of;

at::Tensor leaf(double value = 1.0) { return torch::full({}, value, at::kDouble).requires_grad_(); }

// A loss of the given value whose gradient with respect to w is the given slope.
at::Tensor loss_of(const at::Tensor& w, double value, double slope) {
  return (w - w.detach()) * slope + value;
}

TEST(GradientWindowTest, TokensWeighTheSameWhateverMicroBatchTheyAreIn) {
  // Token losses [1, 1, 1, 1] and [5]: 9 / 5. The mean of the means would be 3.
  for (const bool known : {false, true}) {
    SCOPED_TRACE(known);
    const auto w = leaf();
    WindowOptions options{.micro_batches = 2, .normalisation = Normalisation::tokens};
    if (known) options.total_weight = 5.0;
    GradientWindow window({w}, options);
    window.backward(loss_of(w, 1.0, 1.0), 4);
    window.backward(loss_of(w, 5.0, 5.0), 1);
    EXPECT_TRUE(window.full());
    const auto result = window.finish();
    EXPECT_DOUBLE_EQ(result.loss, 1.8);
    EXPECT_DOUBLE_EQ(w.grad().item<double>(), 1.8);
    EXPECT_EQ(result.weight, 5.0);
    EXPECT_EQ(result.micro_batches, 2);
  }
}

TEST(GradientWindowTest, PartialLastWindowIsDividedByWhatItHolds) {
  for (const auto normalisation : {Normalisation::mean, Normalisation::tokens}) {
    const auto w = leaf();
    GradientWindow window({w}, {.micro_batches = 2, .normalisation = normalisation});
    WindowResult last;
    for (int batch = 1; batch <= 5; ++batch) {
      window.backward(loss_of(w, batch, batch));
      if (!window.full() && batch < 5) continue;
      last = window.finish();
      if (batch < 5) {
        EXPECT_DOUBLE_EQ(w.grad().item<double>(), batch - 0.5);
        w.mutable_grad().reset();
      }
    }
    EXPECT_EQ(w.grad().item<double>(), 5.0);
    EXPECT_EQ(last.loss, 5.0);
    EXPECT_EQ(last.micro_batches, 1);
  }
}

TEST(GradientWindowTest, PartialWindowOfKnownTotalIsDividedByWhatItHolds) {
  const auto w = leaf();
  GradientWindow window({w}, {.micro_batches = 4, .total_weight = 100.0});
  window.backward(loss_of(w, 2.0, 2.0), 30);
  window.backward(loss_of(w, 4.0, 4.0), 10);
  EXPECT_DOUBLE_EQ(window.finish().loss, 2.5);
  EXPECT_DOUBLE_EQ(w.grad().item<double>(), 2.5);
}

TEST(GradientWindowTest, ExpectedWeightHoldsForOneWindow) {
  const auto w = leaf();
  GradientWindow window({w}, {.micro_batches = 1});
  window.expect_total_weight(8.0);
  window.backward(loss_of(w, 1.0, 3.0), 8.0);
  // Scaled as it came: the gradient is right before finish() touches it.
  EXPECT_EQ(w.grad().item<double>(), 3.0);
  const auto version = w.grad()._version();
  window.finish();
  EXPECT_EQ(w.grad()._version(), version);
  w.mutable_grad().reset();
  // Unknown: divided by a power of two near the total, and by the rest at the end.
  window.backward(loss_of(w, 1.0, 3.0), 6.0);
  EXPECT_EQ(w.grad().item<double>(), 3.0 * 6.0 / 8.0);
  window.finish();
  EXPECT_EQ(w.grad().item<double>(), 3.0);
}

TEST(GradientWindowTest, SumAddsUp) {
  const auto w = leaf();
  GradientWindow window({w}, {.micro_batches = 3, .normalisation = Normalisation::sum});
  window.backward(loss_of(w, 1.0, 1.0), 7);
  window.backward(loss_of(w, 2.0, 4.0), 9);
  const auto result = window.finish();
  EXPECT_DOUBLE_EQ(result.loss, 3.0);
  EXPECT_DOUBLE_EQ(w.grad().item<double>(), 5.0);
  EXPECT_EQ(result.weight, 16.0);
}

TEST(GradientWindowTest, WindowOfFourTrainsAsTheFullBatchUnderSgd) {
  torch::manual_seed(1);
  const auto x = torch::randn({16, 6}, at::kDouble);
  const auto y = torch::randn({16, 1}, at::kDouble);
  const auto make = [] {
    torch::manual_seed(2);
    torch::nn::Sequential model(torch::nn::Linear(6, 8), torch::nn::Tanh(),
                                torch::nn::Linear(8, 1));
    model->to(at::kDouble);
    return model;
  };
  auto whole = make();
  auto windowed = make();
  torch::optim::SGD whole_sgd(whole->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::SGD windowed_sgd(windowed->parameters(),
                                 torch::optim::SGDOptions(0.1).momentum(0.9));
  GradientWindow window(windowed->parameters(),
                        {.micro_batches = 4, .normalisation = Normalisation::mean});
  for (int step = 0; step < 5; ++step) {
    whole_sgd.zero_grad();
    const auto loss = torch::mse_loss(whole->forward(x), y);
    loss.backward();
    whole_sgd.step();
    windowed_sgd.zero_grad();
    for (int part = 0; part < 4; ++part) {
      window.backward(
          torch::mse_loss(windowed->forward(x.narrow(0, 4 * part, 4)), y.narrow(0, 4 * part, 4)));
    }
    EXPECT_NEAR(window.finish().loss, loss.item<double>(), 1e-12);
    windowed_sgd.step();
  }
  for (std::size_t i = 0; i < whole->parameters().size(); ++i) {
    EXPECT_TRUE(torch::allclose(whole->parameters()[i], windowed->parameters()[i], 0.0, 1e-12));
  }
}

TEST(GradientWindowTest, RandomWindowsEqualTheFullBatch) {
  std::mt19937 random(3);
  const auto between = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  for (int trial = 0; trial < 200; ++trial) {
    SCOPED_TRACE(trial);
    torch::manual_seed(trial);
    const int micro_batches = between(1, 6);
    const int used = between(1, micro_batches);
    std::vector<int64_t> sizes;
    for (int i = 0; i < used; ++i) sizes.push_back(between(1, 9));
    const auto total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    const auto x = torch::randn({total, 3}, at::kDouble);
    auto w = torch::randn({3, 2}, at::kDouble).requires_grad_();
    auto unused = torch::ones({2}, at::kDouble).requires_grad_();
    const auto example_losses = [&](const at::Tensor& rows) {
      return torch::tanh(rows.matmul(w)).pow(2).sum(1);
    };

    WindowOptions options{.micro_batches = micro_batches, .normalisation = Normalisation::tokens};
    const int kind = between(0, 3);
    if (kind == 1) options.total_weight = total;
    if (kind == 2)
      options.total_weight = total + between(1, 5);  // wrong beforehand, right after finish()
    GradientWindow window({w, unused, w}, options);
    for (int64_t i = 0, begin = 0; i < used; begin += sizes[i++]) {
      EXPECT_FALSE(window.full());
      window.backward(example_losses(x.narrow(0, begin, sizes[i])).mean(),
                      static_cast<double>(sizes[i]));
    }
    EXPECT_EQ(window.full(), used == micro_batches);
    const auto result = window.finish();
    const auto whole = example_losses(x).mean();
    const auto expected = torch::autograd::grad({whole}, {w})[0];
    EXPECT_NEAR(result.loss, whole.item<double>(), 1e-12);
    EXPECT_LE((w.grad() - expected).abs().max().item<double>(), 1e-12);
    EXPECT_FALSE(unused.grad().defined());
    EXPECT_TRUE(window.empty());
  }
}

TEST(GradientWindowTest, SparseGradientsAreDividedToo) {
  auto table = torch::ones({4, 2}, at::kDouble).requires_grad_();
  const auto lookup = [&] {
    return torch::embedding(table, torch::tensor({1}), -1, false, true).sum();
  };
  GradientWindow window({table}, {.micro_batches = 2});
  window.backward(lookup(), 3);
  window.backward(lookup(), 1);
  window.finish();
  EXPECT_TRUE(table.grad().is_sparse());
  EXPECT_TRUE(torch::allclose(table.grad().to_dense()[1], torch::ones({2}, at::kDouble)));
}

TEST(GradientWindowTest, NanLossIsReportedAndNotHidden) {
  const auto w = leaf();
  GradientWindow window({w}, {.micro_batches = 2});
  window.backward(loss_of(w, 1.0, 1.0));
  window.backward(loss_of(w, std::nan(""), std::nan("")));
  EXPECT_TRUE(std::isnan(window.finish().loss));
  EXPECT_TRUE(w.grad().isnan().item<bool>());
}

TEST(GradientWindowTest, MisuseIsRefusedByName) {
  const auto w = leaf();
  GradientWindow window({w}, {.micro_batches = 1});
  const auto good = [&] { return loss_of(w, 1.0, 1.0); };
  EXPECT_THAT(message_of([&] { window.finish(); }), HasSubstr("it is empty"));
  for (const double weight : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(message_of([&] { window.backward(good(), weight); }),
                HasSubstr("weight must be finite and > 0; got "));
  }
  EXPECT_THAT(message_of([&] { window.backward(good().reshape({1})); }),
              HasSubstr("loss must be a scalar; got shape [1]"));
  EXPECT_THAT(message_of([&] { window.backward(good().detach()); }),
              HasSubstr("loss must require a gradient"));
  EXPECT_THAT(message_of([&] { window.backward(at::Tensor()); }),
              HasSubstr("loss must be a defined tensor"));
  EXPECT_FALSE(w.grad().defined()) << "a refused call must not have run backward";
  window.backward(good());
  EXPECT_THAT(message_of([&] { window.backward(good()); }), HasSubstr("it holds 1 of 1"));
  EXPECT_THAT(message_of([&] { window.expect_total_weight(1.0); }),
              HasSubstr("before the window's first micro-batch"));
  EXPECT_EQ(w.grad().item<double>(), 1.0);
}

TEST(GradientWindowTest, GradientsLeftFromBeforeAreRefused) {
  const auto w = leaf();
  GradientWindow window({w}, {.micro_batches = 1});
  window.backward(loss_of(w, 1.0, 1.0));
  window.finish();
  EXPECT_THAT(message_of([&] { window.backward(loss_of(w, 1.0, 1.0)); }),
              HasSubstr("gradients must be cleared before a window begins; parameter 0"));
  EXPECT_EQ(w.grad().item<double>(), 1.0);
  w.mutable_grad().reset();
  EXPECT_NO_THROW(window.backward(loss_of(w, 1.0, 1.0)));
}

TEST(GradientWindowTest, WindowAbandonedByAnExceptionMustBeResetAndThenIsClean) {
  const auto w = leaf();
  GradientWindow window({w}, {.micro_batches = 2});
  window.backward(loss_of(w, 1.0, 1.0));
  auto failing = loss_of(w, 1.0, 1.0);
  auto middle = w * 2.0;
  middle.register_hook(
      [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("out of memory, say"); });
  EXPECT_THROW(window.backward(middle + failing), std::exception);
  EXPECT_THAT(message_of([&] { window.backward(loss_of(w, 1.0, 1.0)); }),
              HasSubstr("must be reset()"));
  EXPECT_THAT(message_of([&] { window.finish(); }), HasSubstr("must be reset()"));
  window.reset();
  EXPECT_TRUE(window.empty());
  EXPECT_FALSE(w.grad().defined());
  window.backward(loss_of(w, 3.0, 3.0));
  window.backward(loss_of(w, 5.0, 5.0));
  EXPECT_EQ(window.finish().loss, 4.0);
  EXPECT_EQ(w.grad().item<double>(), 4.0);
}

TEST(GradientWindowTest, ConstructionRefusesOptionsOutOfRange) {
  const auto w = leaf();
  const auto refused = [&](std::vector<at::Tensor> parameters, WindowOptions options) {
    return message_of([&] { GradientWindow window(std::move(parameters), options); });
  };
  EXPECT_THAT(refused({}, {}), HasSubstr("at least one parameter"));
  EXPECT_THAT(refused({at::Tensor()}, {}), HasSubstr("defined tensors"));
  EXPECT_THAT(refused({w}, {.micro_batches = 0}), HasSubstr("micro_batches must be >= 1; got 0"));
  EXPECT_THAT(refused({w}, {.normalisation = Normalisation::mean, .total_weight = 1.0}),
              HasSubstr("Normalisation::tokens or examples only"));
  EXPECT_THAT(refused({w}, {.micro_batches = 2, .effective_batch = 8}),
              HasSubstr("leave micro_batches out; got 2"));
  EXPECT_THAT(refused({w}, {.normalisation = Normalisation::mean, .effective_batch = 8}),
              HasSubstr("use examples"));
  EXPECT_THAT(refused({w}, {.effective_batch = 0}), HasSubstr("effective_batch must be >= 1"));
  EXPECT_THAT(
      refused({w}, {.scale_loss = [](const at::Tensor& t) { return t; }, .skip_non_finite = true}),
      HasSubstr("would hide overflows from the loss scaler"));
  EXPECT_THAT(refused({w}, {.fp32_gradients = true, .hooks = {.before_backward = [](bool) {}}}),
              HasSubstr("give hooks.reduce"));
  EXPECT_THAT(refused({w}, {.total_weight = 0.0}),
              HasSubstr("total_weight must be finite and > 0; got 0"));
}

// Mean squared error of a linear model over rows [begin, begin + size) of fixed data.
struct Regression {
  at::Tensor x{}, y{};
  torch::nn::Linear model{nullptr};
  explicit Regression(std::int64_t rows) {
    torch::manual_seed(5);
    x = torch::randn({rows, 3}, at::kDouble);
    y = torch::randn({rows, 1}, at::kDouble);
    model = torch::nn::Linear(3, 1);
    model->to(at::kDouble);
  }
  at::Tensor loss(std::int64_t begin, std::int64_t size) {
    return torch::mse_loss(model(x.narrow(0, begin, size)), y.narrow(0, begin, size));
  }
  std::vector<at::Tensor> gradients_of(const at::Tensor& of) {
    return torch::autograd::grad({of}, model->parameters());
  }
  double distance(const std::vector<at::Tensor>& expected) {
    double largest = 0.0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      largest = std::max(largest,
                         (model->parameters()[i].grad() - expected[i]).abs().max().item<double>());
    }
    return largest;
  }
};

TEST(GradientWindowTest, TheEffectiveBatchIsTheUsersWhateverTheMicroBatch) {
  Regression task(12);
  const auto expected = task.gradients_of(task.loss(0, 12));
  for (std::int64_t micro_batch = 1; micro_batch <= 15; ++micro_batch) {
    SCOPED_TRACE(micro_batch);
    GradientWindow window(task.model->parameters(),
                          {.normalisation = Normalisation::examples, .effective_batch = 12});
    std::int64_t begin = 0;
    for (const auto size : split_batch(12, micro_batch)) {
      EXPECT_LE(size, micro_batch);
      EXPECT_EQ(window.is_last_micro_batch(size), begin + size == 12);
      window.backward(task.loss(begin, size), static_cast<double>(size));
      begin += size;
      EXPECT_EQ(window.full(), begin == 12);
    }
    const auto result = window.finish();
    EXPECT_EQ(result.examples, 12);
    EXPECT_FALSE(result.partial);
    EXPECT_THAT(describe(result), HasSubstr("effective batch 12 examples"));
    EXPECT_LE(task.distance(expected), 1e-12);
    task.model->zero_grad();
  }
  GradientWindow window(task.model->parameters(),
                        {.normalisation = Normalisation::examples, .effective_batch = 12});
  EXPECT_EQ(window.describe(),
            "effective batch 12 examples a step, whatever the micro-batch, mean over examples");
  window.backward(task.loss(0, 8), 8);
  EXPECT_THAT(message_of([&] { window.backward(task.loss(0, 8), 8); }),
              HasSubstr("effective_batch = 12 examples, of which 4 are left; got 8"));
  EXPECT_THAT(message_of([&] { window.backward(task.loss(0, 3), 2.5); }),
              HasSubstr("give MicroBatch::examples"));
  const auto result = window.finish();
  EXPECT_TRUE(result.partial);
  EXPECT_THAT(describe(result), HasSubstr("1 micro-batch, effective batch 8 examples"));
  EXPECT_THAT(describe(result), HasSubstr("(partial window)"));
  EXPECT_LE(task.distance(task.gradients_of(task.loss(0, 8))), 1e-12);
}

TEST(GradientWindowTest, EffectiveBatchOfTokensCountsExamplesAndWeighsTokens) {
  const auto w = leaf();
  GradientWindow window({w}, {.effective_batch = 3});
  window.backward(loss_of(w, 1.0, 1.0), 4, {.examples = 2});
  EXPECT_FALSE(window.full());
  window.backward(loss_of(w, 5.0, 5.0), 1, {.examples = 1});
  EXPECT_TRUE(window.full());
  const auto result = window.finish();
  EXPECT_EQ(describe(result), "2 micro-batches, effective batch 3 examples, 5 tokens, loss 1.8");
  EXPECT_DOUBLE_EQ(w.grad().item<double>(), 1.8);
}

TEST(GradientWindowTest, SplitBatchCoversTheBatchEvenly) {
  EXPECT_EQ(split_batch(32, 6), (std::vector<std::int64_t>{6, 6, 5, 5, 5, 5}));
  EXPECT_EQ(split_batch(4, 9), (std::vector<std::int64_t>{4}));
  EXPECT_THAT(message_of([] { split_batch(0, 1); }), HasSubstr("effective_batch must be >= 1"));
  EXPECT_THAT(message_of([] { split_batch(1, 0); }), HasSubstr("micro_batch must be >= 1"));
}

TEST(GradientWindowTest, SumStepsByTheSumOfGradients) {
  // theta - lr * (g1 + g2 + g3), written out.
  const auto w = leaf(2.0);
  torch::optim::SGD sgd({w}, torch::optim::SGDOptions(0.5));
  GradientWindow window({w}, {.micro_batches = 3, .normalisation = Normalisation::sum});
  for (const double slope : {1.0, -4.0, 0.5}) window.backward(loss_of(w, 0.0, slope));
  window.finish();
  sgd.step();
  EXPECT_DOUBLE_EQ(w.item<double>(), 2.0 - 0.5 * (1.0 - 4.0 + 0.5));
}

TEST(GradientWindowTest, SquaredLossOfFourMicroBatchesUnderSgdEqualsTheFullBatch) {
  // Oracle by hand: d/dw of the mean of (x w - y)^2 is 2/n X'(X w - y).
  torch::manual_seed(11);
  const auto x = torch::randn({8, 3}, at::kDouble), y = torch::randn({8, 1}, at::kDouble);
  auto w = torch::randn({3, 1}, at::kDouble).requires_grad_();
  auto by_hand = w.detach().clone();
  torch::optim::SGD sgd({w}, torch::optim::SGDOptions(0.1));
  GradientWindow window({w}, {.micro_batches = 4, .normalisation = Normalisation::mean});
  for (int step = 0; step < 10; ++step) {
    by_hand -= 0.1 * (2.0 / 8.0) * x.t().matmul(x.matmul(by_hand) - y);
    for (int part = 0; part < 4; ++part) {
      const auto error = x.narrow(0, 2 * part, 2).matmul(w) - y.narrow(0, 2 * part, 2);
      window.backward(error.pow(2).mean());
    }
    window.finish();
    sgd.step();
    sgd.zero_grad();
  }
  EXPECT_LE((w.detach() - by_hand).abs().max().item<double>(), 1e-12);
}

TEST(GradientWindowTest, LossScaleIsInTheGradientsAndNotInTheLoss) {
  for (const auto normalisation :
       {Normalisation::mean, Normalisation::tokens, Normalisation::sum, Normalisation::examples}) {
    const auto w = leaf(), plain = leaf();
    WindowOptions options{.micro_batches = 2, .normalisation = normalisation};
    GradientWindow expected({plain}, options);
    options.scale_loss = [](const at::Tensor& t) {
      EXPECT_TRUE(at::GradMode::is_enabled()) << "a scaler tells by it that gradients will follow";
      return t * 1024.0;
    };
    GradientWindow window({w}, options);
    for (const double slope : {1.0, 5.0}) {
      expected.backward(loss_of(plain, slope, slope), 3);
      window.backward(loss_of(w, slope, slope), 3);
    }
    const auto result = window.finish();
    EXPECT_EQ(result.loss, expected.finish().loss);
    EXPECT_EQ(result.loss_scale, 1024.0);
    EXPECT_EQ(w.grad().item<double>(), 1024.0 * plain.grad().item<double>());
    EXPECT_THAT(describe(result), HasSubstr("loss scale 1024"));
  }
}

TEST(GradientWindowTest, LossScaleThatChangesWithinAWindowIsRefused) {
  const auto w = leaf();
  double scale = 8.0;
  GradientWindow window(
      {w}, {.micro_batches = 2, .scale_loss = [&](const at::Tensor& t) { return t * scale; }});
  window.backward(loss_of(w, 1.0, 1.0));
  scale = 4.0;
  window.backward(loss_of(w, 1.0, 1.0));
  EXPECT_THAT(message_of([&] { window.finish(); }),
              HasSubstr("must stay the same within a window; it changed from 8 to 4"));
  window.reset();
  window.backward(loss_of(w, 1.0, 1.0));
  EXPECT_EQ(window.finish().loss_scale, 4.0);
}

TEST(GradientWindowTest, OverflowInOneMicroBatchSkipsTheWindowOnceAndHalvesTheScaleOnce) {
  // A gradient scaler reduced to what a window touches.
  const auto w = leaf(1.0);
  double scale = 65536.0;
  int skipped = 0, steps = 0;
  torch::optim::SGD sgd({w}, torch::optim::SGDOptions(1.0));
  GradientWindow window({w}, {.micro_batches = 4,
                              .normalisation = Normalisation::mean,
                              .scale_loss = [&](const at::Tensor& t) { return t * scale; }});
  for (int batch = 0; batch < 12; ++batch) {
    const double slope = batch == 5 ? std::numeric_limits<double>::infinity() : 1.0;
    window.backward(loss_of(w, 1.0, slope));
    if (!window.full()) continue;
    window.finish();
    const bool finite = w.grad().isfinite().item<bool>();
    w.mutable_grad().mul_(1.0 / scale);
    finite ? (sgd.step(), ++steps) : ++skipped;
    if (!finite) scale /= 2.0;
    sgd.zero_grad();
  }
  EXPECT_EQ(skipped, 1);
  EXPECT_EQ(steps, 2);
  EXPECT_EQ(scale, 32768.0);
  EXPECT_EQ(w.item<double>(), -1.0);
}

TEST(GradientWindowTest, WindowThatIsNotFiniteIsDroppedOnceIfAsked) {
  auto w = torch::ones({2}, at::kDouble).requires_grad_();
  torch::optim::SGD sgd({w}, torch::optim::SGDOptions(1.0));
  GradientWindow window({w}, {.micro_batches = 2, .skip_non_finite = true});
  int skipped = 0;
  for (int batch = 0; batch < 6; ++batch) {
    window.backward((w * (batch == 2 ? std::nan("") : 1.0)).sum());
    if (!window.full()) continue;
    const auto result = window.finish();
    if (result.skipped) {
      ++skipped;
      EXPECT_FALSE(w.grad().defined());
      EXPECT_THAT(describe(result), HasSubstr("(skipped: a gradient was not finite)"));
    }
    sgd.step();
    sgd.zero_grad();
  }
  EXPECT_EQ(skipped, 1);
  EXPECT_TRUE(at::equal(w.detach(), torch::full({2}, -1.0, at::kDouble)));
}

TEST(GradientWindowTest, ManyTokensDoNotCarryFp16GradientsOverTheirRange) {
  auto w = torch::ones({1}, at::kHalf).requires_grad_();
  GradientWindow window({w}, {.micro_batches = 4});
  for (int i = 0; i < 4; ++i) {
    // 4096 tokens times a gradient of 30 is beyond 65504.
    window.backward((w.to(at::kFloat) * 30.0).sum(), 4096);
    ASSERT_TRUE(w.grad().isfinite().all().item<bool>());
  }
  window.finish();
  EXPECT_EQ(w.grad().item<double>(), 30.0);
}

TEST(GradientWindowTest, HooksLearnWhichBackwardIsTheLast) {
  const auto w = leaf();
  std::vector<bool> last;
  GradientWindow window({w}, {.micro_batches = 3, .hooks = {.before_backward = [&](bool value) {
                                                    last.push_back(value);
                                                  }}});
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(window.is_last_micro_batch(), i == 2);
    window.backward(loss_of(w, 1.0, 1.0));
  }
  window.finish();
  EXPECT_EQ(last, (std::vector<bool>{false, false, true}));
  w.mutable_grad().reset();

  // A partial window, announced: its end is the last, and nothing may follow.
  last.clear();
  window.backward(loss_of(w, 1.0, 1.0));
  window.backward(loss_of(w, 1.0, 1.0), 1.0, {.last = true});
  EXPECT_TRUE(window.full());
  EXPECT_THAT(message_of([&] { window.backward(loss_of(w, 1.0, 1.0)); }),
              HasSubstr("it holds 2 of 3, the last of which was announced as its end"));
  EXPECT_TRUE(window.finish().partial);
  EXPECT_EQ(last, (std::vector<bool>{false, true}));
  EXPECT_DOUBLE_EQ(w.grad().item<double>(), 1.0);
  w.mutable_grad().reset();

  // Not announced: gradients would have been exchanged never.
  window.backward(loss_of(w, 1.0, 1.0));
  EXPECT_THAT(message_of([&] { window.finish(); }),
              HasSubstr("give MicroBatch{.last = true} with the last one, or hooks.reduce"));
}

TEST(GradientWindowTest, TwoProcessesOfUnequalTokensAndWindowsEqualOneBatch) {
  // Rows 0-4 in three micro-batches on one process, 5-11 in a partial window on the other.
  Regression task(12);
  const auto expected = task.gradients_of(task.loss(0, 12));
  std::vector<at::Tensor> other;
  int sums = 0, reductions = 0;
  {
    GradientWindow window(task.model->parameters(),
                          {.micro_batches = 3,
                           .hooks = {.reduce =
                                         [&](const std::vector<at::Tensor>& gradients) {
                                           for (const auto& gradient : gradients)
                                             other.push_back(gradient.clone());
                                         },
                                     .sum_weights = [](double weight) { return 5.0 + weight; }}});
    window.backward(task.loss(5, 6), 6);
    window.backward(task.loss(11, 1), 1);
    window.finish();
    task.model->zero_grad();
  }
  GradientWindow window(task.model->parameters(),
                        {.micro_batches = 3,
                         .hooks = {.reduce =
                                       [&](const std::vector<at::Tensor>& gradients) {
                                         ++reductions;
                                         for (std::size_t i = 0; i < gradients.size(); ++i)
                                           gradients[i].add_(other[i]);
                                       },
                                   .sum_weights =
                                       [&](double weight) {
                                         ++sums;
                                         return weight + 7.0;
                                       }}});
  window.backward(task.loss(0, 2), 2);
  window.backward(task.loss(2, 2), 2);
  window.backward(task.loss(4, 1), 1);
  EXPECT_EQ(window.finish().weight, 5.0);
  EXPECT_EQ(reductions, 1);
  EXPECT_EQ(sums, 1);
  EXPECT_LE(task.distance(expected), 1e-12);
}

TEST(GradientWindowTest, OpenWindowTellsOptimizersWhenTheyMayStep) {
  const auto w = leaf(), elsewhere = leaf();
  EXPECT_FALSE(open_window({w}));
  {
    const GradientWindow one({w}, {.micro_batches = 1});
    EXPECT_FALSE(open_window({w})) << "steps after each backward are right";
    GradientWindow window({w}, {.micro_batches = 3});
    ASSERT_TRUE(open_window({elsewhere, w}));
    EXPECT_FALSE(open_window({elsewhere}));
    EXPECT_EQ(open_window({w})->micro_batches, 3);
    EXPECT_EQ(open_window({w})->held, 0);
    std::vector<bool> last;
    double stepped = 0.0;
    w.register_hook([&](const at::Tensor&) { last.push_back(open_window({w})->in_last_backward); });
    const auto hook = plane::grad::on_accumulated(w, [&](const at::Tensor& leaf) {
      const auto open = open_window({leaf});
      if (open->in_last_backward) stepped = leaf.grad().item<double>() * open->remaining_factor;
    });
    window.backward(loss_of(w, 1.0, 2.0), 6);
    EXPECT_EQ(open_window({w})->held, 1);
    window.backward(loss_of(w, 1.0, 4.0), 2, {.last = true});
    EXPECT_EQ(last, (std::vector<bool>{false, true}));
    window.finish();
    EXPECT_DOUBLE_EQ(w.grad().item<double>(), 2.5);
    EXPECT_DOUBLE_EQ(stepped, 2.5) << "what finish() gives is known in the last backward";
    GradientWindow moved = std::move(window);
    EXPECT_TRUE(open_window({w}));
  }
  EXPECT_FALSE(open_window({w}));
}

TEST(GradientWindowTest, WeightsThatGrowDoNotCarryFp16GradientsOverTheirRange) {
  struct Case {
    std::vector<double> weights;
    std::optional<double> total = std::nullopt;
  };
  for (const Case& c : {Case{{1, 1e5}}, Case{{1e5, 1}}, Case{{1, 1, 1e5, 1e7}}, Case{{1e8, 1}},
                        Case{{1, 1e5}, 2.0}}) {
    SCOPED_TRACE(testing::PrintToString(c.weights));
    auto w = torch::ones({1}, at::kHalf).requires_grad_();
    GradientWindow window({w}, {.micro_batches = static_cast<std::int64_t>(c.weights.size()),
                                .total_weight = c.total});
    for (const double weight : c.weights) window.backward((w * 4).sum(), weight);
    window.finish();
    EXPECT_NEAR(w.grad().item<double>(), 4.0, 0.004);
  }
  // Each seed is in range, their sum would not be.
  auto w = torch::ones({1}, at::kHalf).requires_grad_();
  GradientWindow window({w}, {.micro_batches = 4});
  for (const double weight : {16, 64, 64, 64}) window.backward((w * 3e4).sum(), weight);
  window.finish();
  EXPECT_NEAR(w.grad().item<double>(), 3e4, 32);
}

TEST(GradientWindowTest, WeightsThatGrowLeaveTheResultOfFloat32BitForBit) {
  const auto train = [](std::optional<double> total) {
    auto w = torch::ones({8}).requires_grad_();
    GradientWindow window({w}, {.micro_batches = 3, .total_weight = total});
    torch::manual_seed(1);
    for (const double weight : {3, 70, 1000})
      window.backward((w * torch::randn({8})).sum(), weight);
    window.finish();
    return w.grad();
  };
  EXPECT_TRUE(torch::equal(train({}), train(2048.0)));
}

TEST(GradientWindowTest, LossesOf16BitsDoNotRoundTheirWeights) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    SCOPED_TRACE(dtype);
    const auto gradient = [&](const WindowOptions& options, const std::vector<double>& weights,
                              const std::vector<double>& slopes) {
      const auto w = leaf();
      GradientWindow window({w}, options);
      for (std::size_t i = 0; i < weights.size(); ++i)
        window.backward((w * slopes[i]).to(dtype), weights[i]);
      window.finish();
      return w.grad().item<double>();
    };
    EXPECT_DOUBLE_EQ(
        gradient({.micro_batches = 3, .normalisation = Normalisation::mean}, {1, 1, 1}, {5, 5, 5}),
        5.0);
    EXPECT_DOUBLE_EQ(
        gradient({.micro_batches = 3, .normalisation = Normalisation::mean}, {1, 1}, {4, 6}), 5.0);
    EXPECT_DOUBLE_EQ(gradient({.micro_batches = 2}, {4099, 5003}, {1, 2}),
                     (4099.0 + 2 * 5003.0) / (4099.0 + 5003.0));
    EXPECT_DOUBLE_EQ(
        gradient({.micro_batches = 3, .total_weight = 9102.0 + 9}, {4099, 5003, 9}, {1, 2, 7}),
        (4099.0 + 2 * 5003.0 + 63) / 9111.0);
    EXPECT_DOUBLE_EQ(
        gradient({.normalisation = Normalisation::examples, .effective_batch = 7}, {3, 4}, {1, 2}),
        11.0 / 7);
  }
}

TEST(GradientWindowTest, LossesOf16BitsThatHooksForbidToWeighExactlyAreRefused) {
  const auto w = leaf();
  GradientWindow window(
      {w}, {.micro_batches = 2, .hooks = {.reduce = [](const std::vector<at::Tensor>&) {}}});
  EXPECT_THAT(message_of([&] { window.backward(w.to(at::kBFloat16), 4099); }),
              HasSubstr("a BFloat16 loss would round its weight, 4099 of 1"));
  EXPECT_TRUE(window.empty());
  window.backward(w.to(at::kBFloat16), 4096);
  window.backward(w.to(at::kFloat), 4099);
  window.finish();
  // mean needs no other weight than all processes can take.
  w.mutable_grad().reset();
  GradientWindow mean({w}, {.micro_batches = 3,
                            .normalisation = Normalisation::mean,
                            .hooks = {.reduce = [](const std::vector<at::Tensor>&) {}}});
  for (int i = 0; i < 3; ++i) mean.backward((w * 5).to(at::kBFloat16));
  mean.finish();
  EXPECT_DOUBLE_EQ(w.grad().item<double>(), 5.0);
}

TEST(GradientWindowTest, ScaledGradientsAreScaledInBothWidths) {
  auto narrow = torch::ones({2}, at::kBFloat16).requires_grad_();
  auto wide = torch::ones({2}).requires_grad_();
  GradientWindow window({narrow, wide},
                        {.normalisation = Normalisation::mean, .fp32_gradients = true});
  const auto run = [&] {
    narrow.mutable_grad().reset();
    wide.mutable_grad().reset();
    window.backward((narrow * 3).sum().to(at::kFloat) + (wide * 4).sum());
    EXPECT_THAT(message_of([&] { window.scale_gradients(0.5); }), HasSubstr("after finish()"));
    window.finish();
  };
  run();
  window.scale_gradients(0.5);
  EXPECT_EQ(narrow.grad()[0].item<double>(), 1.5);
  EXPECT_EQ(window.wide_gradient(narrow)[0].item<double>(), 1.5);
  EXPECT_EQ(wide.grad()[0].item<double>(), 2.0);
  // Clipped by other hands, .grad is no longer what the sum would be.
  narrow.grad().mul_(0.5);
  EXPECT_THAT(message_of([&] { window.wide_gradient(narrow); }),
              HasSubstr(".grad of parameter 0 was. To clip or unscale both"));
  run();
  EXPECT_EQ(window.wide_gradient(narrow)[0].item<double>(), 3.0);
}

TEST(GradientWindowTest, WhatNeedsGradientsAfterBackwardRefusesAnOptimizerThatStepsThere) {
  const auto w = torch::ones({1}, torch::requires_grad());
  struct Case {
    WindowOptions options;
    const char* text;
  };
  const std::vector<Case> cases{
      {{.fp32_gradients = true}, "fp32_gradients"},
      {{.skip_non_finite = true}, "skip_non_finite"},
      {{.scale_loss = [](const at::Tensor& t) { return t; }}, "scale_loss"},
      {{.hooks = {.reduce = [](const std::vector<at::Tensor>&) {}}}, "hooks.reduce"},
      {{.hooks = {.sum_weights = [](double weight) { return weight; }}}, "sum_weights"}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    for (const bool accumulates : {false, true}) {
      {
        const BackwardSteps steps({w}, accumulates);
        EXPECT_THAT(message_of([&] { const GradientWindow window({w}, c.options); }),
                    HasSubstr(c.text));
      }
      const GradientWindow window({w}, c.options);
      EXPECT_THAT(message_of([&] { const BackwardSteps steps({w}, accumulates); }),
                  HasSubstr(c.text));
    }
    const BackwardSteps nothing_left({w}, true);
  }
  const WindowOptions several{.micro_batches = 2};
  {
    const BackwardSteps steps({w}, false);
    EXPECT_THAT(message_of([&] { const GradientWindow window({w}, several); }),
                HasSubstr("several micro-batches, each of which would step"));
    const GradientWindow one({w}, {});
  }
  const GradientWindow window({w}, several);
  EXPECT_THAT(message_of([&] { const BackwardSteps steps({w}, false); }),
              HasSubstr("several micro-batches, each of which would step"));
  const BackwardSteps steps({w}, true);
}

TEST(GradientWindowTest, WindowPassTellsTheFactorOfTheRunningPass) {
  const auto w = leaf();
  GradientWindow window({w}, {.micro_batches = 3, .normalisation = Normalisation::mean});
  EXPECT_FALSE(window_pass({w}));
  std::vector<WindowPass> seen;
  const auto hook = plane::grad::on_accumulated(
      w, [&](const at::Tensor& leaf) { seen.push_back(window_pass({leaf}).value()); });
  window.backward(w * 2);
  ASSERT_TRUE(window_pass({w}));
  EXPECT_FALSE(window_pass({w})->running);
  EXPECT_FALSE(window_pass({leaf()}));
  window.backward(w * 2, 1.0, {.last = true});
  ASSERT_EQ(seen.size(), 2);
  EXPECT_TRUE(seen[0].running && !seen[0].last);
  EXPECT_TRUE(seen[1].running && seen[1].last);
  EXPECT_EQ(seen[1].factor, 1.5);
  EXPECT_EQ(seen[0].factor, 1.0);
  window.finish();
  EXPECT_FALSE(window_pass({w}));
}

TEST(WideGradientsTest, ParameterThatIsThawedLaterIsSummedUpInFp32Too) {
  auto w = torch::zeros({1}, at::kBFloat16);
  GradientWindow window(
      {w}, {.micro_batches = 512, .normalisation = Normalisation::sum, .fp32_gradients = true});
  w.set_requires_grad(true);
  for (int i = 0; i < 512; ++i) window.backward(w.sum());
  window.finish();
  EXPECT_EQ(w.grad().item<double>(), 512.0) << "bf16 stops at 256";
  EXPECT_EQ(window.wide_gradient(w).item<double>(), 512.0);
}

TEST(WideGradientsTest, SumBeyondFp16IsSkippedAndNotWrittenAsInfinity) {
  auto w = torch::zeros({1}, at::kHalf).requires_grad_();
  GradientWindow window({w}, {.micro_batches = 2,
                              .normalisation = Normalisation::sum,
                              .fp32_gradients = true,
                              .skip_non_finite = true});
  for (const double slope : {4e4, 3e4}) {
    for (int i = 0; i < 2; ++i) window.backward((w * slope).sum());
    const auto result = window.finish();
    EXPECT_EQ(result.skipped, slope > 32752);
    EXPECT_EQ(w.grad().defined(), !result.skipped);
    EXPECT_EQ(window.wide_gradient(w).defined(), !result.skipped);
    if (w.grad().defined()) EXPECT_TRUE(at::isfinite(w.grad()).all().item<bool>());
  }
}

TEST(WideGradientsTest, Fp32SumsKeepWhatBf16Loses) {
  // 1 + 255 * 2^-9: each addend is under half a unit in the last place of a bf16 one.
  for (const bool wide : {false, true}) {
    auto w = torch::ones({4}, at::kBFloat16).requires_grad_();
    GradientWindow window(
        {w}, {.micro_batches = 256, .normalisation = Normalisation::sum, .fp32_gradients = wide});
    for (int i = 0; i < 256; ++i) {
      window.backward((w.to(at::kFloat) * (i == 0 ? 1.0 : 1.0 / 512.0)).sum());
      EXPECT_EQ(w.grad().defined(), !wide);
    }
    window.finish();
    EXPECT_EQ(w.grad().scalar_type(), at::kBFloat16);
    if (wide) {
      EXPECT_EQ(window.wide_gradient(w).scalar_type(), at::kFloat);
      EXPECT_EQ(window.wide_gradient(w)[0].item<double>(), 1.0 + 255.0 / 512.0);
      EXPECT_EQ(w.grad()[0].item<double>(), 1.5);  // rounded once
    } else {
      EXPECT_EQ(w.grad()[0].item<double>(), 1.0);
      EXPECT_THAT(message_of([&] { window.wide_gradient(w); }),
                  HasSubstr("WindowOptions::fp32_gradients only"));
    }
  }
}

TEST(WideGradientsTest, TinyFp16GradientsBesideLargerOnesAreKept) {
  // 2^-24 is the least an fp16 holds, and nothing beside a sum of 2^-11 and more.
  for (const bool wide : {false, true}) {
    auto w = torch::ones({1}, at::kHalf).requires_grad_();
    GradientWindow window({w}, {.micro_batches = 256,
                                .normalisation = Normalisation::mean,
                                .scale_loss = [](const at::Tensor& t) { return t * 256.0; },
                                .fp32_gradients = wide});
    for (int i = 0; i < 256; ++i)
      window.backward((w.to(at::kFloat) * (i % 2 == 0 ? std::exp2(-11) : std::exp2(-24))).sum());
    window.finish();
    const double expected = 128.0 * (std::exp2(-11) + std::exp2(-24));
    if (wide) {
      EXPECT_EQ(window.wide_gradient(w).item<double>(), expected);
    } else {
      EXPECT_NE(w.grad().item<double>(), expected);
    }
  }
}

TEST(WideGradientsTest, MixedModelIsNormalisedAsOne) {
  auto narrow = torch::ones({2}, at::kBFloat16).requires_grad_();
  auto full = torch::ones({2}, at::kFloat).requires_grad_();
  GradientWindow window({narrow, full, narrow}, {.micro_batches = 4, .fp32_gradients = true});
  window.backward((narrow.to(at::kFloat) * full).sum(), 3);
  window.backward((narrow.to(at::kFloat) * full).sum() * 5.0, 1);
  window.finish();
  EXPECT_EQ(narrow.grad()[0].item<double>(), 2.0);
  EXPECT_EQ(full.grad()[0].item<double>(), 2.0);
  EXPECT_FALSE(window.wide_gradient(full).defined());
  // A backward outside of the window is left alone, and the next window starts from nothing.
  narrow.mutable_grad().reset();
  full.mutable_grad().reset();
  narrow.sum().backward();
  EXPECT_EQ(narrow.grad()[0].item<double>(), 1.0);
  narrow.mutable_grad().reset();
  window.backward((narrow.to(at::kFloat) * full).sum(), 7);
  window.finish();
  EXPECT_EQ(narrow.grad()[0].item<double>(), 1.0);
}

TEST(WideGradientsTest, FailedBackwardLeavesNothingAfterReset) {
  auto w = torch::ones({1}, at::kBFloat16).requires_grad_();
  GradientWindow window({w}, {.micro_batches = 2, .fp32_gradients = true});
  window.backward((w * 3.0).sum());
  auto middle = w * 1.0;
  middle.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("fails"); });
  EXPECT_THROW(window.backward(middle.sum()), std::exception);
  w.sum().backward();
  EXPECT_TRUE(w.grad().defined()) << "collecting ended with the exception";
  window.reset();
  EXPECT_FALSE(window.wide_gradient(w).defined());
  window.backward((w * 2.0).sum());
  window.finish();
  EXPECT_EQ(w.grad().item<double>(), 2.0);
}

TEST(WideGradientsTest, SparseGradientsAreRefusedByName) {
  auto table = torch::ones({4, 2}, at::kBFloat16).requires_grad_();
  GradientWindow window({table}, {.micro_batches = 2, .fp32_gradients = true});
  std::string message;
  try {
    window.backward(torch::embedding(table, torch::tensor({1}), -1, false, true).sum());
  } catch (const std::exception& error) {
    message = error.what();
  }
  EXPECT_THAT(message, HasSubstr("dense gradients only"));
}

}  // namespace
}  // namespace gradus::accumulate
