// Every optimizer of the library, made private.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/optim/adafactor.h>
#include <gradus/optim/adam.h>
#include <gradus/optim/adam_mini.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/came.h>
#include <gradus/optim/eight_bit.h>
#include <gradus/optim/lamb.h>
#include <gradus/optim/lars.h>
#include <gradus/optim/schedule.h>
#include <gradus/optim/sgd.h>
#include <gradus/privacy/training/internal/private_problem.h>
#include <gradus/privacy/training/make_private.h>

#include <tests/support/message_of.h>

namespace gradus::privacy {
namespace {

using namespace gradus::privacy::testing;  // NOLINT: a test's own problem
using tests::message_of;

using Make = std::function<std::unique_ptr<optim::Optimizer>(std::vector<at::Tensor>)>;

template <typename Kind>
std::pair<std::string, Make> kind(const char* name) {
  return {name, [](std::vector<at::Tensor> parameters) {
            return std::make_unique<Kind>(std::move(parameters));
          }};
}

std::vector<std::pair<std::string, Make>> kinds() {
  return {kind<optim::SGD>("SGD"),           kind<optim::Adam>("Adam"),
          kind<optim::AdamW>("AdamW"),       kind<optim::Adafactor>("Adafactor"),
          kind<optim::AdamMini>("AdamMini"), kind<optim::Came>("Came"),
          kind<optim::Adam8bit>("Adam8bit"), kind<optim::SGD8bit>("SGD8bit"),
          kind<optim::Lamb>("Lamb"),         kind<optim::Lars>("Lars")};
}

class OptimizerKindsTest : public ::testing::Test {
 protected:
  OptimizerKindsTest() { at::set_num_threads(1); }
};

torch::nn::Sequential float_model() {
  auto model = small_model();
  model->to(torch::kFloat);
  return model;
}

persample::Batch float_rows(std::int64_t examples) {
  auto rows = small_rows(examples);
  rows[0] = rows[0].to(torch::kFloat);
  return rows;
}

TEST_F(OptimizerKindsTest, EachStepsOnThePrivateGradientAsOnAnyOther) {
  for (const auto& [name, make] : kinds()) {
    SCOPED_TRACE(name);
    auto model = float_model(), plain = float_model();
    const auto ours = make(model->parameters()), theirs = make(plain->parameters());
    DPOptimizer dp(*ours, model.ptr(), std::make_shared<Accountant>(),
                   {.noise_multiplier = 1.0, .expected_batch_size = 8.0, .seed = 4});
    for (int step = 0; step < 3; ++step) {
      dp.accumulate(loss_of(model), float_rows(8));
      dp.step();
      for (std::size_t p = 0; p < plain->parameters().size(); ++p)
        plain->parameters()[p].mutable_grad() = model->parameters()[p].grad().clone();
      theirs->step();
      EXPECT_TRUE(identical(model->parameters(), plain->parameters()));
    }
  }
}

TEST_F(OptimizerKindsTest, EachResumesBitForBitWithAdaptiveClippingAndSchedules) {
  for (const auto& [name, make] : kinds()) {
    SCOPED_TRACE(name);
    const auto options = [] {
      return DPOptimizerOptions{
          .noise_multiplier = 1.0,
          .expected_batch_size = 8.0,
          .clipping = {.policy = Clipping::adaptive, .max_norm = 0.5},
          .noise_schedule = [](std::int64_t step) { return 1.0 + 0.1 * static_cast<double>(step); },
          .clip_schedule =
              [](std::int64_t step) { return 1.0 / (1.0 + static_cast<double>(step)); },
          .seed = 4};
    };
    const auto train = [](DPOptimizer& dp, const torch::nn::Sequential& model, int steps) {
      for (int step = 0; step < steps; ++step) {
        dp.accumulate(loss_of(model), float_rows(8));
        dp.step();
      }
    };
    auto straight = float_model(), first = float_model();
    const auto a = make(straight->parameters()), b = make(first->parameters());
    DPOptimizer whole(*a, straight.ptr(), std::make_shared<Accountant>(), options());
    train(whole, straight, 4);
    DPOptimizer begun(*b, first.ptr(), std::make_shared<Accountant>(), options());
    train(begun, first, 2);
    auto second = float_model();
    {
      torch::NoGradGuard no_grad;
      for (std::size_t p = 0; p < second->parameters().size(); ++p)
        second->parameters()[p].copy_(first->parameters()[p]);
    }
    const auto c = make(second->parameters());
    DPOptimizer resumed(*c, second.ptr(), std::make_shared<Accountant>(), options());
    resumed.load_state(begun.state());
    train(resumed, second, 2);
    EXPECT_TRUE(identical(second->parameters(), straight->parameters()));
    EXPECT_EQ(resumed.accountant().history(), whole.accountant().history());
    EXPECT_EQ(resumed.clipper().adapted_norm(), whole.clipper().adapted_norm());
  }
}

struct ComplexImpl : torch::nn::Module {
  ComplexImpl() { w = register_parameter("w", torch::ones({3}, torch::kComplexFloat)); }
  at::Tensor w;
};

TEST_F(OptimizerKindsTest, ComplexParametersAreRefusedByName) {
  auto model = std::make_shared<ComplexImpl>();
  const auto refusal = message_of([&] {
    optim::SGD sgd(model->parameters());
    DPOptimizer dp(sgd, model, std::make_shared<Accountant>(), {.expected_batch_size = 1.0});
  });
  EXPECT_THAT(refusal, ::testing::HasSubstr("omplex"));
}

}  // namespace
}  // namespace gradus::privacy
