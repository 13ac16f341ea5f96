// Six models at shares of their plain activation peak, and at the least budget that has a plan:
// bit-equal gradients, and peaks inside the budget and where the plan says.

#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/memory_tracker.h>
#include <gradus/models/gpt.h>
#include <gradus/models/lstm_language_model.h>
#include <gradus/models/mlp.h>
#include <gradus/models/resnet.h>
#include <gradus/models/transformer.h>
#include <gradus/models/unet.h>
#include <gradus/plan/planned_budget.h>

namespace gradus {
namespace {

// A training step without its optimizer: forward, loss and backward from fixed random numbers.
struct Program {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor()> loss;
  int threads = 1;
};

Program mlp() {
  models::Mlp model(models::MlpOptions{.widths = std::vector<std::int64_t>(17, 32)});
  const auto x = torch::randn({512, 32});
  return {"MLP", model.ptr(), [=]() mutable { return model(x).pow(2).mean(); }};
}

Program resnet() {
  models::ResNet model(models::ResNetOptions{.width = 8, .groups = 4});
  const auto x = torch::randn({16, 3, 32, 32});
  const auto y = torch::randint(10, {16});
  return {"ResNet-18", model.ptr(), [=]() mutable { return at::cross_entropy_loss(model(x), y); },
          2};
}

Program unet() {
  models::UNet model(
      models::UNetOptions{.in_channels = 1, .out_channels = 2, .width = 8, .levels = 3});
  const auto x = torch::randn({8, 1, 32, 32});
  const auto y = torch::randint(2, {8, 32, 32});
  return {"U-Net", model.ptr(), [=]() mutable { return at::cross_entropy_loss(model(x), y); }};
}

Program gpt() {
  models::Gpt model(models::GptOptions{
      .vocabulary = 64, .context = 32, .layers = 12, .heads = 4, .width = 32, .dropout = 0.1});
  const auto x = torch::randint(64, {4, 32});
  const auto y = torch::randint(64, {4 * 32});
  return {"GPT", model.ptr(),
          [=]() mutable { return at::cross_entropy_loss(model(x).flatten(0, 1), y); }, 2};
}

Program lstm() {
  models::LstmLanguageModel model(models::LstmLanguageModelOptions{
      .vocabulary = 64, .embedding = 32, .width = 32, .layers = 4, .dropout = 0.1});
  const auto x = torch::randint(64, {8, 24});
  const auto y = torch::randint(64, {8 * 24});
  return {"LSTM", model.ptr(),
          [=]() mutable { return at::cross_entropy_loss(model(x).flatten(0, 1), y); }};
}

Program transformer() {
  models::Transformer model(models::TransformerOptions{.source_vocabulary = 64,
                                                       .target_vocabulary = 64,
                                                       .context = 24,
                                                       .encoder_layers = 4,
                                                       .decoder_layers = 4,
                                                       .heads = 4,
                                                       .width = 32,
                                                       .hidden = 64,
                                                       .dropout = 0.1});
  const auto source = torch::randint(64, {4, 24}), target = torch::randint(64, {4, 20});
  const auto padding = torch::zeros({4, 24}, torch::kBool);
  const auto y = torch::randint(64, {4 * 20});
  return {"transformer", model.ptr(), [=]() mutable {
            return at::cross_entropy_loss(model(source, target, padding).flatten(0, 1), y);
          }};
}

class BudgetModelsTest : public testing::TestWithParam<std::function<Program()>> {
 protected:
  // One pass; the numbers drawn are the same each time.
  void pass() {
    torch::manual_seed(7);
    {
      const at::NoGradGuard no_grad;
      for (const auto& p : program_.module->parameters())
        if (p.grad().defined()) p.mutable_grad().zero_();
    }
    at::Tensor loss = program_.loss();
    loss.backward();
  }
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> result;
    for (const auto& p : program_.module->parameters()) result.push_back(p.grad().clone());
    return result;
  }
  void expect_equal(const std::vector<at::Tensor>& plain) const {
    const auto parameters = program_.module->named_parameters();
    for (std::size_t i = 0; i < plain.size(); ++i)
      EXPECT_TRUE(parameters[i].value().grad().equal(plain[i])) << parameters[i].key();
  }

  base::MemoryTracker& tracker_ = base::MemoryTracker::install();
  Program program_;
};

bool long_mode() { return std::getenv("GRADUS_LONG_TESTS") != nullptr; }

TEST_P(BudgetModelsTest, EveryBudgetIsMetBitForBitAndAsPredicted) {
  torch::manual_seed(3);
  program_ = GetParam()();
  at::set_num_threads(program_.threads);
  pass();
  tracker_.reset_peak();
  pass();
  const std::int64_t plain_peak = tracker_.peak().total();
  const std::vector<at::Tensor> plain = gradients();
  const std::int64_t live = tracker_.live().total();
  const auto activations = static_cast<double>(plain_peak - live);
  std::int64_t least = 0;
  for (const double share : {0.75, 0.5, 0.35, 0.25, 0.0}) {
    std::int64_t limit = live + static_cast<std::int64_t>(share * activations);
    if (share == 0.0) limit = least;  // as planned for the budget before
    if (limit < least) continue;
    SCOPED_TRACE(program_.name + " at " + std::to_string(share));
    plan::PlannedBudget budget({.limit_bytes = limit, .planning_seconds = 0.4});
    for (int i = 0; i < 3; ++i) pass();  // traced, traced again, planned
    ASSERT_NE(budget.plan(), nullptr) << budget.refusal();
    for (int i = 0; i < 2; ++i) {
      tracker_.reset_peak();
      pass();
      const std::int64_t peak = tracker_.peak().total();
      EXPECT_LE(peak, limit);
      const auto predicted = static_cast<double>(budget.plan()->predicted_peak_bytes);
      EXPECT_NEAR(predicted, static_cast<double>(peak), 0.03 * static_cast<double>(peak));
      expect_equal(plain);
    }
    // Compression is measured in the second pass only: the first must do without.
    const plan::PlanOptions uncompressed{.limit_bytes = plain_peak, .time_limit_s = 0.4};
    least = plan::least_bytes(*budget.trace(), uncompressed);
    EXPECT_LT(static_cast<double>(least), static_cast<double>(live) + activations / 2);
    if (!budget.plan()->dispositions.empty())  // else online eviction is the plan
      EXPECT_GT(budget.statistics().planned_passes, 0);
    EXPECT_EQ(budget.statistics().strayed_passes, 0);
  }
}

std::string model_name(const testing::TestParamInfo<std::function<Program()>>& info) {
  const std::vector<std::string> names{"Mlp", "ResNet18", "UNet", "Gpt", "Lstm", "Transformer"};
  return names[info.index];
}

INSTANTIATE_TEST_SUITE_P(Models, BudgetModelsTest,
                         testing::Values(mlp, resnet, unet, gpt, lstm, transformer), model_name);

// Under the limit that plain training of 8 layers just fits: a GPT of width 64, length 256 and
// batch 64 in the long mode, of width 16, length 64 and batch 32 else.
TEST(DeepGptTest, EightyLayersTrainWhereEightFit) {
  auto& tracker = base::MemoryTracker::install();
  at::set_num_threads(2);
  const std::int64_t width = long_mode() ? 64 : 16, length = long_mode() ? 256 : 64,
                     batch = long_mode() ? 64 : 32, vocabulary = width;
  const auto make = [=](std::int64_t layers) {
    torch::manual_seed(1);
    return models::Gpt(models::GptOptions{
        .vocabulary = vocabulary, .context = length, .layers = layers, .heads = 4, .width = width});
  };
  const auto x = torch::randint(vocabulary, {batch, length}),
             y = torch::randint(vocabulary, {batch * length});
  const auto step = [&](models::Gpt& model) {
    at::Tensor loss = at::cross_entropy_loss(model(x).flatten(0, 1), y);
    loss.backward();
    const at::NoGradGuard no_grad;
    for (auto& p : model->parameters()) {
      p.sub_(p.grad(), 0.1);
      p.mutable_grad().reset();
    }
    return loss.item<double>();
  };
  std::int64_t limit = 0;
  {
    models::Gpt shallow = make(8);
    tracker.reset_peak();
    step(shallow);
    limit = tracker.peak().total();
  }
  plan::PlannedBudget budget({.limit_bytes = limit});
  models::Gpt deep = make(80);
  const double first = step(deep);
  step(deep);
  EXPECT_LT(step(deep), first);
}

}  // namespace
}  // namespace gradus
