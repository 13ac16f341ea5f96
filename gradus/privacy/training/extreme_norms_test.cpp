// Gradients whose squares are beyond float32, and thresholds that no noise can be made for.

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/optim/sgd.h>
#include <gradus/privacy/training/dp_optimizer.h>
#include <gradus/privacy/training/internal/private_problem.h>

#include <tests/support/message_of.h>

namespace gradus::privacy {
namespace {

using namespace gradus::privacy::testing;  // NOLINT: a test's own problem
using ::testing::AllOf;
using ::testing::HasSubstr;
using tests::message_of;

// Two weights of the loss w . x: an example's gradients are its row and 1.
struct LineImpl : torch::nn::Module {
  explicit LineImpl(at::ScalarType dtype) {
    weight = register_parameter("weight", torch::zeros({1, 3}, dtype));
    bias = register_parameter("bias", torch::zeros({1}, dtype));
  }
  at::Tensor loss(const at::Tensor& x) { return torch::linear(x, weight, bias).squeeze(1); }
  at::Tensor weight, bias;
};

class ExtremeNormsTest : public ::testing::Test {
 protected:
  ExtremeNormsTest() { at::set_num_threads(1); }
};

// The sum of clipped gradients [weight, bias] by hand, in doubles.
std::vector<at::Tensor> by_hand(const at::Tensor& rows, Clipping policy, double max_norm) {
  at::Tensor weight = torch::zeros({1, 3}, torch::kDouble),
             bias = torch::zeros({1}, torch::kDouble);
  for (std::int64_t i = 0; i < rows.size(0); ++i) {
    const at::Tensor row = rows[i].to(torch::kDouble);
    if (!row.isfinite().all().item<bool>()) continue;
    const double largest = std::max(row.abs().max().item<double>(), 1.0);
    const auto norm_with = [&](double more) {
      return largest *
             std::sqrt((row / largest).square().sum().item<double>() + more / largest / largest);
    };
    double of_weight = 0.0, of_bias = 0.0;
    switch (policy) {
      case Clipping::per_layer: {
        const double each = max_norm / std::sqrt(2.0);
        of_weight = std::min(1.0, each / norm_with(0.0)), of_bias = std::min(1.0, each);
        break;
      }
      case Clipping::automatic:
        of_weight = of_bias = max_norm / (norm_with(1.0) + 0.01);
        break;
      default:
        of_weight = of_bias = std::min(1.0, max_norm / norm_with(1.0));
    }
    weight += of_weight * row.unsqueeze(0);
    bias += of_bias;
  }
  return {weight, bias};
}

TEST_F(ExtremeNormsTest, FiniteGradientsOfAnySizeAreClippedAndNotDropped) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const double huge = dtype == at::kFloat ? 1e25 : 1e200;
    const double largest = dtype == at::kFloat ? 3e38 : 1e308;
    const at::Tensor rows = torch::tensor({{1.0, 2.0, 2.0},
                                           {3.0 * huge, 0.0, 4.0 * huge},
                                           {1.0, kInf, 0.0},
                                           {-largest, largest, 1.0},
                                           {0.1, 0.0, 0.0}},
                                          torch::kDouble)
                                .to(dtype);
    for (const Clipping policy :
         {Clipping::flat, Clipping::per_layer, Clipping::adaptive, Clipping::automatic}) {
      for (const bool by_losses : {false, true}) {
        SCOPED_TRACE(::testing::Message() << dtype << " " << name(policy) << " " << by_losses);
        auto line = std::make_shared<LineImpl>(dtype);
        optim::SGD sgd(line->parameters(), {.lr = 0.0});
        DPOptimizer dp(sgd, line, std::make_shared<Accountant>(),
                       {.noise_multiplier = 0.0,
                        .expected_batch_size = 1.0,
                        .clipping = {.policy = policy, .max_norm = 0.5},
                        .seed = 1});
        if (by_losses)
          dp.accumulate(line->loss(rows));
        else
          dp.accumulate([&](const persample::Batch& b) { return line->loss(b[0]); }, {rows});
        const DPStep done = dp.step();
        EXPECT_EQ(done.non_finite, 1);
        EXPECT_EQ(done.examples, 5);
        const auto expected = by_hand(rows, policy, 0.5);
        EXPECT_LT(difference({line->weight.grad().to(torch::kDouble),
                              line->bias.grad().to(torch::kDouble)},
                             expected),
                  1e-5);
        const at::Tensor norms = dp.last_norms();
        EXPECT_NEAR(norms[0].item<double>(), std::sqrt(10.0), 1e-5);
        EXPECT_NEAR(norms[1].item<double>() / (5.0 * huge), 1.0, 1e-6);
        EXPECT_FALSE(std::isfinite(norms[2].item<double>()));
      }
    }
  }
}

TEST_F(ExtremeNormsTest, SmallGradientsAboveASmallThresholdAreClipped) {
  for (const Clipping policy : {Clipping::flat, Clipping::per_layer}) {
    auto line = std::make_shared<LineImpl>(at::kFloat);
    optim::SGD sgd(line->parameters(), {.lr = 0.0});
    line->bias.requires_grad_(false);
    DPOptimizer dp(sgd, line, std::make_shared<Accountant>(),
                   {.noise_multiplier = 0.0,
                    .expected_batch_size = 1.0,
                    .clipping = {.policy = policy, .max_norm = 1e-30},
                    .seed = 1});
    // The square is 0 in float32, and the norm was 0 then: not clipped.
    dp.accumulate([&](const persample::Batch& b) { return line->loss(b[0]); },
                  {torch::tensor({{1e-25, 0.0, 0.0}, {1e-25, 0.0, 0.0}}, torch::kFloat)});
    EXPECT_EQ(dp.step().clipped, 2);
    EXPECT_NEAR(line->weight.grad()[0][0].item<double>(), 2e-30, 1e-35);
  }
}

TEST_F(ExtremeNormsTest, ThresholdsThatNoNoiseCanBeMadeForAreRefusedAtOnce) {
  const auto refusal = [](DPOptimizerOptions options, at::ScalarType dtype = at::kFloat) {
    auto line = std::make_shared<LineImpl>(dtype);
    optim::SGD sgd(line->parameters(), {.lr = 0.0});
    return message_of(
        [&] { DPOptimizer(sgd, line, std::make_shared<Accountant>(), std::move(options)); });
  };
  const auto with = [](double max_norm, double noise = 1.0) {
    return DPOptimizerOptions{
        .noise_multiplier = noise, .expected_batch_size = 1.0, .clipping = {.max_norm = max_norm}};
  };
  for (const double max_norm : {1e-40, 1e38}) {
    EXPECT_THAT(refusal(with(max_norm)), AllOf(HasSubstr("must be from 1.17549e-38 to 2.12676e+37"),
                                               HasSubstr("'weight'"), HasSubstr("Float")));
    EXPECT_EQ(refusal(with(max_norm), at::kDouble), "no UserError");
    EXPECT_EQ(refusal(with(max_norm, 0.0)), "no UserError");  // no noise to be made
  }
  EXPECT_THAT(refusal(with(1e-20, 1e-20)), HasSubstr("noise_multiplier 1e-20"));
  EXPECT_THAT(refusal(with(1e-310, 1e-5), at::kDouble), HasSubstr("from 2.22507e-308"));
  DPOptimizerOptions scheduled = with(1.0);
  scheduled.clip_schedule = [](std::int64_t) { return 1e-39; };
  EXPECT_THAT(refusal(scheduled), HasSubstr("(with schedules and adaptation)"));
  DPOptimizerOptions adaptive = with(1.0);
  adaptive.clipping.policy = Clipping::adaptive;
  EXPECT_EQ(refusal(adaptive), "no UserError");
  adaptive.clipping.least_norm = 1e-39;
  EXPECT_THAT(refusal(adaptive), HasSubstr("1.17549e-38"));
}

TEST_F(ExtremeNormsTest, AScheduleThatLeavesTheRangeIsRefusedBeforeTheStepCounts) {
  auto line = std::make_shared<LineImpl>(at::kFloat);
  optim::SGD sgd(line->parameters(), {.lr = 0.0});
  const auto accountant = std::make_shared<Accountant>();
  DPOptimizer dp(sgd, line, accountant,
                 {.noise_multiplier = 1.0,
                  .expected_batch_size = 1.0,
                  .clip_schedule = [](std::int64_t step) { return step == 0 ? 1.0 : 1e-40; }});
  dp.step_empty();
  EXPECT_THAT(message_of([&] { dp.step_empty(); }), HasSubstr("the clipping norm times the noise"));
  EXPECT_EQ(accountant->history().steps(), 1);
}

}  // namespace
}  // namespace gradus::privacy
