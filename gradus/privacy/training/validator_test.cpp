#include <gradus/privacy/training/validator.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/accumulate/batch_norm.h>
#include <gradus/base/error.h>

#include <tests/support/message_of.h>

namespace gradus::privacy {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using tests::message_of;

std::vector<std::string> refused(const torch::nn::Module& model,
                                 const ValidatorOptions& options = {}) {
  std::vector<std::string> names;
  for (const PrivacyIssue& issue : find_issues(model, options)) {
    if (issue.refused) names.push_back(issue.module + ":" + issue.type);
  }
  return names;
}

struct CustomImpl : torch::nn::Module {
  CustomImpl() {
    register_module("conv", conv);
    register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& x) { return norm(conv(x)); }
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(3, 8, 3)};
  torch::nn::BatchNorm2d norm{8};
};
TORCH_MODULE(Custom);

TEST(PrivacyValidatorTest, PlainLayersPass) {
  torch::nn::Sequential model(torch::nn::Conv2d(3, 8, 3), torch::nn::GroupNorm(2, 8),
                              torch::nn::InstanceNorm2d(8),
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})),
                              torch::nn::Dropout(), torch::nn::ReLU());
  model->push_back(torch::nn::Embedding(10, 4));
  model->push_back(torch::nn::LSTM(4, 4));
  model->push_back(torch::nn::GRU(4, 4));
  EXPECT_TRUE(find_issues(*model).empty());
  EXPECT_EQ(message_of([&] { validate(*model); }), "no UserError");
  EXPECT_TRUE(fix(*model).fixed.empty());
}

// P21: in training, frozen parameters or not; eval mode is fine.
TEST(PrivacyValidatorTest, NamesBatchNormInTrainingAndItsReplacement) {
  torch::nn::Sequential model(torch::nn::Linear(4, 6), torch::nn::BatchNorm1d(6));
  for (auto& parameter : model[1]->parameters()) parameter.set_requires_grad(false);
  const std::string message = message_of([&] { validate(*model); });
  EXPECT_THAT(message, AllOf(HasSubstr("1 (BatchNorm1d): it normalises over the batch"),
                             HasSubstr("GroupNorm(min(32, C), C) with C = 6"),
                             HasSubstr("privacy::fix(model)")));
  model[1]->eval();
  EXPECT_EQ(message_of([&] { validate(*model); }), "no UserError");
}

TEST(PrivacyValidatorTest, BatchNormWithoutRunningStatisticsIsRefusedInEvalToo) {
  torch::nn::Sequential model(
      torch::nn::BatchNorm2d(torch::nn::BatchNorm2dOptions(6).track_running_stats(false)));
  model->eval();
  EXPECT_THAT(refused(*model), ElementsAre("0:BatchNorm2d"));
}

// A Sequential below a custom module, whose forward calls it.
struct FeaturesImpl : torch::nn::Module {
  FeaturesImpl() { register_module("features", features); }
  at::Tensor forward(const at::Tensor& x) { return features->forward(x); }
  torch::nn::Sequential features{torch::nn::Conv2d(3, 64, 3), torch::nn::BatchNorm2d(64)};
};

TEST(PrivacyValidatorTest, FixPutsGroupNormIntoSequentialsWithTheWeights) {
  const auto model = std::make_shared<FeaturesImpl>();
  torch::nn::init::uniform_(model->named_parameters()["features.1.weight"]);
  const at::Tensor weight = model->named_parameters()["features.1.weight"].clone();
  const FixReport report = fix(*model);
  EXPECT_THAT(report.fixed, ElementsAre("features.1: BatchNorm2d -> GroupNorm(32, 64)"));
  EXPECT_TRUE(report.remaining.empty());
  EXPECT_EQ(message_of([&] { validate(*model); }), "no UserError");
  EXPECT_TRUE(torch::equal(model->named_parameters()["features.1.weight"], weight));
  // Its forward calls the new layer: examples do not mix any more.
  const at::Tensor x = torch::randn({2, 3, 5, 5});
  EXPECT_TRUE(torch::allclose(model->forward(x).narrow(0, 0, 1), model->forward(x.narrow(0, 0, 1)),
                              1e-5, 1e-6));
}

TEST(PrivacyValidatorTest, FixCuresWhatItCanBesideWhatItCannot) {
  struct Net : torch::nn::Module {
    Net() {
      register_module("features", features);
      register_module("custom", custom);
    }
    std::shared_ptr<FeaturesImpl> features = std::make_shared<FeaturesImpl>();
    Custom custom;
  };
  Net net;
  const FixReport report = fix(net);
  EXPECT_THAT(report.fixed, ElementsAre("features.features.1: BatchNorm2d -> GroupNorm(32, 64)"));
  EXPECT_THAT(refused(net), ElementsAre("custom.norm:BatchNorm2d"));
  EXPECT_EQ(report.remaining.size(), 1U);
}

TEST(PrivacyValidatorTest, FixLeavesAFrozenBatchNormAlone) {
  torch::nn::Sequential model(torch::nn::Linear(4, 6), torch::nn::BatchNorm1d(6));
  model->eval();
  EXPECT_TRUE(fix(*model).fixed.empty());
  EXPECT_NE(model[1]->as<torch::nn::BatchNorm1d>(), nullptr);
}

TEST(PrivacyValidatorTest, MembersAndModuleListsRemainAndAreNamed) {
  struct Net : torch::nn::Module {
    Net() {
      register_module("block", block);
      register_module("list", list);
    }
    Custom block;
    torch::nn::ModuleList list{torch::nn::BatchNorm1d(4)};
  };
  const auto net = std::make_shared<Net>();
  const FixReport report = fix(*net);
  EXPECT_TRUE(report.fixed.empty());
  ASSERT_EQ(report.remaining.size(), 2U);
  EXPECT_EQ(report.remaining[0].module, "block.norm");
  EXPECT_THAT(report.remaining[0].cure,
              AllOf(HasSubstr("cannot be replaced from outside"), HasSubstr("GroupNormGuard"),
                    HasSubstr("calls its own handle")));
  EXPECT_EQ(report.remaining[1].module, "list.0");
  EXPECT_THAT(report.remaining[1].cure, HasSubstr("ModuleList"));
  EXPECT_FALSE(report.remaining[1].fixable);
  EXPECT_NE(net->list[0]->as<torch::nn::BatchNorm1d>(), nullptr);
  EXPECT_TRUE(refused(*net, {.group_norm_guard = true}).empty());
}

TEST(PrivacyValidatorTest, InstanceNormMayNotKeepStatistics) {
  torch::nn::Sequential model(torch::nn::InstanceNorm2d(
      torch::nn::InstanceNorm2dOptions(3).affine(true).track_running_stats(true)));
  EXPECT_THAT(refused(*model), ElementsAre("0:InstanceNorm2d"));
  const auto keys = model->named_buffers().keys();
  EXPECT_THAT(fix(*model).fixed, ElementsAre("0: InstanceNorm2d without running statistics"));
  EXPECT_TRUE(refused(*model).empty());
  EXPECT_EQ(model->named_buffers().keys(), keys);  // still loads into the plain module
  const at::Tensor mean = model->named_buffers()["0.running_mean"].clone();
  model->forward(torch::randn({2, 3, 5, 5}) + 4.0);
  EXPECT_TRUE(torch::equal(model->named_buffers()["0.running_mean"], mean));
}

TEST(PrivacyValidatorTest, EmbeddingsMayNeitherCountNorRenormalise) {
  torch::nn::Sequential model;
  model->push_back("words",
                   torch::nn::Embedding(
                       torch::nn::EmbeddingOptions(9, 4).scale_grad_by_freq(true).max_norm(1.0)));
  model->push_back("bag",
                   torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(9, 4).max_norm(1.0)));
  EXPECT_THAT(refused(*model),
              ElementsAre("words:Embedding", "words:Embedding", "bag:EmbeddingBag"));
  EXPECT_THAT(message_of([&] { validate(*model); }), AllOf(HasSubstr("scale_grad_by_freq divides"),
                                                           HasSubstr("max_norm changes the rows")));
  EXPECT_EQ(fix(*model).fixed.size(), 3U);
  EXPECT_TRUE(refused(*model).empty());
  auto* words = model[0]->as<torch::nn::Embedding>();
  const at::Tensor before = words->weight.detach().mul_(9.0).clone();
  words->forward(torch::tensor({1, 2}));
  EXPECT_TRUE(torch::equal(words->weight, before));
}

TEST(PrivacyValidatorTest, SixteenBitParametersWithoutMastersAreAdvice) {
  torch::nn::Sequential model(torch::nn::Linear(4, 4));
  model->to(torch::kBFloat16);
  const auto issues = find_issues(*model);
  ASSERT_EQ(issues.size(), 1U);
  EXPECT_FALSE(issues[0].refused);
  EXPECT_THAT(describe(issues[0]), HasSubstr("16 bits and no master weights"));
  EXPECT_EQ(message_of([&] { validate(*model); }), "no UserError");
  EXPECT_TRUE(find_issues(*model, {.master_weights = true}).empty());
}

}  // namespace
}  // namespace gradus::privacy
