#include <gradus/accumulate/micro_batch.h>

#include <functional>
#include <stdexcept>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/accumulate/window.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>

#include <tests/support/message_of.h>

namespace gradus::accumulate {
namespace {

using testing::HasSubstr;
using tests::message_of;

std::int64_t live() { return base::MemoryTracker::install().live().total(); }

// A net with everything that a search could disturb: gradients, running statistics, dropout.
struct Net {
  torch::nn::Sequential model{nullptr};
  Net() {
    base::MemoryTracker::install();
    torch::manual_seed(1);
    model = torch::nn::Sequential(torch::nn::Linear(64, 128), torch::nn::BatchNorm1d(128),
                                  torch::nn::ReLU(), torch::nn::Dropout(0.3),
                                  torch::nn::Linear(128, 64));
  }
  at::Tensor loss(std::int64_t size) {
    // Two rows an example: BatchNorm takes no single row.
    return model->forward(torch::randn({2 * size, 64})).pow(2).mean();
  }
  std::function<at::Tensor(std::int64_t)> loss_of() {
    return [this](std::int64_t size) { return loss(size); };
  }
  // By one run, as a window makes it.
  std::int64_t peak_of(std::int64_t size) {
    base::MemoryTracker& tracker = base::MemoryTracker::install();
    tracker.reset_peak();
    loss(size).backward();
    loss(size).backward();
    const std::int64_t peak = tracker.peak().total();
    model->zero_grad();
    return peak;
  }
};

TEST(MicroBatchTest, FindsTheLargestThatFitsByEveryCount) {
  Net net;
  net.peak_of(1);
  for (const std::int64_t largest_that_fits : {1, 2, 3, 7, 8, 21, 40}) {
    SCOPED_TRACE(largest_that_fits);
    const std::int64_t limit = net.peak_of(largest_that_fits);
    ASSERT_LT(limit, net.peak_of(largest_that_fits + 1));
    const std::int64_t before = live();
    const auto found =
        find_micro_batch(*net.model, net.loss_of(), {.largest = 64, .limit_bytes = limit});
    EXPECT_EQ(found.size, largest_that_fits);
    EXPECT_EQ(found.peak_bytes, limit);
    EXPECT_EQ(found.retained_bytes, 0);
    EXPECT_EQ(live(), before) << "memory is released";
    EXPECT_LE(found.tries.size(), 14U) << "doubling and halving, no scan";
    for (const auto& made : found.tries) EXPECT_EQ(made.fits, made.size <= found.size);
    EXPECT_THAT(describe(found), HasSubstr("; tried 1, 2"));
  }
}

TEST(MicroBatchTest, LargestIsAsFarAsItGoes) {
  Net net;
  for (const std::int64_t largest : {1, 5, 8}) {
    const auto found = find_micro_batch(*net.model, net.loss_of(), {.largest = largest});
    EXPECT_EQ(found.size, largest);
    for (const auto& made : found.tries) EXPECT_LE(made.size, largest);
  }
}

TEST(MicroBatchTest, ALimitInForceIsFoundWithoutBeingNamed) {
  Net net;
  net.peak_of(1);
  const std::int64_t limit_bytes = net.peak_of(9);
  const base::MemoryLimit limit({.device_bytes = limit_bytes});
  EXPECT_EQ(find_micro_batch(*net.model, net.loss_of(), {.largest = 64}).size, 9);
}

TEST(MicroBatchTest, ReserveLeavesRoomForOptimizerState) {
  Net net;
  net.peak_of(1);
  const std::int64_t limit = net.peak_of(12);
  const auto found = find_micro_batch(
      *net.model, net.loss_of(),
      {.largest = 64, .limit_bytes = limit, .reserve_bytes = limit - net.peak_of(5)});
  EXPECT_EQ(found.size, 5);
  EXPECT_EQ(found.peak_bytes, limit);
}

TEST(MicroBatchTest, WhatIsFoundTrainsUnderThatLimitAndOneMoreDoesNot) {
  Net net;
  net.peak_of(1);
  const std::int64_t limit_bytes = net.peak_of(10) + 64;
  const auto found =
      find_micro_batch(*net.model, net.loss_of(), {.largest = 32, .limit_bytes = limit_bytes});
  const base::MemoryLimit limit({.device_bytes = limit_bytes});
  const auto train = [&](std::int64_t size) {
    GradientWindow window(net.model->parameters(),
                          {.normalisation = Normalisation::examples, .effective_batch = 32});
    for (const auto part : split_batch(32, size)) {
      window.backward(net.loss(part), static_cast<double>(part));
    }
    window.finish();
    net.model->zero_grad();
  };
  EXPECT_NO_THROW(train(found.size));
  net.model->zero_grad();
  EXPECT_THROW(net.peak_of(found.size + 1), MemoryLimitError);
}

TEST(MicroBatchTest, GradientsBuffersAndRandomStateAreAsBefore) {
  Net net;
  net.loss(3).backward();
  std::vector<at::Tensor> gradients, values, buffers;
  for (const auto& parameter : net.model->parameters()) {
    gradients.push_back(parameter.grad());
    values.push_back(parameter.grad().clone());
  }
  for (const auto& buffer : net.model->buffers()) buffers.push_back(buffer.clone());
  torch::manual_seed(9);
  const at::Tensor next = torch::rand({4});
  torch::manual_seed(9);
  const std::int64_t limit = live() + 400'000;
  const auto found =
      find_micro_batch(*net.model, net.loss_of(), {.largest = 1000, .limit_bytes = limit});
  EXPECT_FALSE(found.tries.back().fits && found.size == 1000) << "the limit was met";
  EXPECT_TRUE(at::equal(torch::rand({4}), next));
  const auto parameters = net.model->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(parameters[i].grad().is_same(gradients[i]));
    EXPECT_TRUE(at::equal(gradients[i], values[i]));
  }
  for (std::size_t i = 0; i < buffers.size(); ++i)
    EXPECT_TRUE(at::equal(net.model->buffers()[i], buffers[i]));
}

TEST(MicroBatchTest, OneExampleThatDoesNotFitIsRefusedWithTheBytesItNeeds) {
  Net net;
  net.peak_of(1);
  const std::int64_t needed = net.peak_of(1);
  const std::int64_t before = live();
  const auto message_under = [&](std::int64_t limit) {
    return message_of(
        [&] { find_micro_batch(*net.model, net.loss_of(), {.largest = 8, .limit_bytes = limit}); });
  };
  const std::string message = message_under(needed - 1);
  EXPECT_THAT(message, HasSubstr("a micro-batch of one example must fit; it needs "));
  EXPECT_THAT(message, HasSubstr("(" + std::to_string(needed) + " bytes"));
  EXPECT_THAT(message, HasSubstr("Recompute, offload or compress"));
  EXPECT_EQ(live(), before);
  EXPECT_EQ(message_under(needed), "no UserError") << "what it names is enough";
}

TEST(MicroBatchTest, FailuresOfTheLossPassAndRestoreEverything) {
  Net net;
  net.loss(2).backward();
  const at::Tensor gradient = net.model->parameters()[0].grad();
  const at::Tensor mean = net.model->buffers()[0].clone();
  const auto fails = [&](std::int64_t size) -> at::Tensor {
    if (size >= 4) throw std::runtime_error("no such data");
    return net.loss(size);
  };
  EXPECT_THROW(find_micro_batch(*net.model, fails, {.largest = 8}), std::runtime_error);
  EXPECT_TRUE(net.model->parameters()[0].grad().is_same(gradient));
  EXPECT_TRUE(at::equal(net.model->buffers()[0], mean));
}

TEST(MicroBatchTest, OptionsOutOfRangeAreRefused) {
  Net net;
  const auto refused = [&](const MicroBatchOptions& options) {
    return message_of([&] { find_micro_batch(*net.model, net.loss_of(), options); });
  };
  EXPECT_THAT(refused({}), HasSubstr("largest must be >= 1"));
  EXPECT_THAT(refused({.largest = 1, .limit_bytes = 0}), HasSubstr("limit_bytes must be > 0"));
  EXPECT_THAT(refused({.largest = 1, .reserve_bytes = -1}),
              HasSubstr("reserve_bytes must be >= 0"));
  EXPECT_THAT(message_of([&] {
                find_micro_batch(*net.model, [](std::int64_t size) { return torch::ones({size}); },
                                 {.largest = 2});
              }),
              HasSubstr("loss_of must return a scalar that requires a gradient"));
  torch::nn::Module elsewhere;
  elsewhere.register_parameter("w", torch::ones({2}, at::kMeta));
  EXPECT_THAT(message_of([&] { find_micro_batch(elsewhere, net.loss_of(), {.largest = 2}); }),
              HasSubstr("the model has a parameter on meta"));
}

}  // namespace
}  // namespace gradus::accumulate
