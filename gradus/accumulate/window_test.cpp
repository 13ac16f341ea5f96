#include <gradus/accumulate/window.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

namespace gradus::accumulate {
namespace {

using testing::HasSubstr;

std::string message_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const UserError& error) {
    return error.what();
  }
  return "no UserError";
}

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
  window.backward(loss_of(w, 1.0, 3.0), 8.0);
  EXPECT_EQ(w.grad().item<double>(), 24.0);
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
              HasSubstr("Normalisation::tokens only"));
  EXPECT_THAT(refused({w}, {.total_weight = 0.0}),
              HasSubstr("total_weight must be finite and > 0; got 0"));
}

}  // namespace
}  // namespace gradus::accumulate
