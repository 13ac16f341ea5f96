#include <gradus/accumulate/batch_norm.h>

#include <functional>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/accumulate/window.h>
#include <gradus/base/error.h>

#include <tests/support/message_of.h>

namespace gradus::accumulate {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using tests::message_of;

// What most C++ models look like: members of the layers' types.
struct TypedNetImpl : torch::nn::Module {
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d bn{nullptr};
  TypedNetImpl() {
    conv = register_module("conv", torch::nn::Conv2d(3, 4, 3));
    bn = register_module("bn", torch::nn::BatchNorm2d(4));
  }
  at::Tensor forward(const at::Tensor& x) { return bn(conv(x)).mean({2, 3}); }
};
TORCH_MODULE(TypedNet);

// Layers in Sequentials below typed members, as residual networks have them.
struct BlockNetImpl : torch::nn::Module {
  torch::nn::Sequential stem{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  BlockNetImpl() {
    stem = register_module(
        "stem", torch::nn::Sequential(torch::nn::Conv2d(3, 6, 3), torch::nn::BatchNorm2d(6)));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 2; ++i) {
      torch::nn::Sequential block(torch::nn::Conv2d(6, 6, 1),
                                  torch::nn::BatchNorm2d(torch::nn::BatchNorm2dOptions(6).eps(0.1)),
                                  torch::nn::ReLU());
      blocks->push_back(block);
    }
  }
  at::Tensor forward(at::Tensor x) {
    x = stem->forward(x);
    for (const auto& block : *blocks) x = x + block->as<torch::nn::Sequential>()->forward(x);
    return x.mean({2, 3});
  }
};
TORCH_MODULE(BlockNet);

template <typename Net>
Net made() {
  torch::manual_seed(7);
  Net net;
  net->to(at::kDouble);
  for (auto& parameter : net->parameters()) torch::nn::init::normal_(parameter);
  return net;
}

at::Tensor images(std::int64_t count) {
  torch::manual_seed(8);
  return torch::randn({count, 3, 5, 5}, at::kDouble);
}

// The largest difference between accumulated gradients, two micro-batches, and the whole batch's.
template <typename Net>
double accumulation_error(Net& net) {
  const at::Tensor x = images(8);
  const auto loss = [&](const at::Tensor& rows) { return net->forward(rows).pow(2).mean(); };
  const auto whole = torch::autograd::grad({loss(x)}, net->parameters());
  GradientWindow window(net->parameters(),
                        {.micro_batches = 2, .normalisation = Normalisation::mean});
  window.backward(loss(x.narrow(0, 0, 4)));
  window.backward(loss(x.narrow(0, 4, 4)));
  window.finish();
  double largest = 0.0;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    largest = std::max(
        largest, (net->parameters()[i].grad() - whole[i]).abs().max().template item<double>());
  }
  net->zero_grad();
  return largest;
}

TEST(BatchNormTest, WarningNamesEachLayerAndOffersGroupNorm) {
  const auto net = made<BlockNet>();
  const std::string text = batch_norm_warning(*net, 4);
  EXPECT_THAT(text, HasSubstr("stem.1 (BatchNorm2d, 6 features), blocks.0.1 (BatchNorm2d, 6 "
                              "features), blocks.1.1 (BatchNorm2d, 6 features)"));
  EXPECT_THAT(text, HasSubstr("convert_batch_norm_to_group_norm() puts it in place"));
  EXPECT_THAT(batch_norm_warning(*made<TypedNet>(), 2), HasSubstr("hold a GroupNormGuard"));
  EXPECT_EQ(batch_norm_warning(*net, 1), "") << "one micro-batch is the batch";
  EXPECT_EQ(batch_norm_warning(*torch::nn::Linear(2, 2), 4), "");
}

TEST(BatchNormTest, FrozenLayersAreNotWarnedOf) {
  torch::nn::Sequential net(
      torch::nn::BatchNorm1d(4),
      torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(4).track_running_stats(false)));
  net->eval();
  const auto layers = batch_norm_layers(*net);
  ASSERT_EQ(layers.size(), 2U);
  EXPECT_FALSE(layers[0].uses_batch_statistics);
  EXPECT_TRUE(layers[1].uses_batch_statistics) << "it has no others, even in eval()";
  EXPECT_THAT(batch_norm_warning(*net, 2), HasSubstr("Layers: 1 (BatchNorm1d, 4 features). "));
}

TEST(BatchNormTest, WarningGoesToLibTorchsHandler) {
  struct Catcher : c10::WarningHandler {
    std::string text{};
    void process(const c10::Warning& warning) override { text += warning.msg(); }
  } catcher;
  const c10::WarningUtils::WarningHandlerGuard guard(&catcher);
  const c10::WarningUtils::WarnAlways always(true);
  EXPECT_TRUE(warn_about_batch_norm(*made<TypedNet>(), 2));
  EXPECT_THAT(catcher.text, HasSubstr("Layers: bn (BatchNorm2d, 4 features)"));
  EXPECT_FALSE(warn_about_batch_norm(*torch::nn::Linear(2, 2), 2));
}

TEST(BatchNormTest, BatchNormMakesAccumulationInexactAndGroupNormExact) {
  auto net = made<BlockNet>();
  EXPECT_GT(accumulation_error(net), 1e-3);
  const auto converted =
      convert_batch_norm_to_group_norm(*net, {.groups = 4, .probe = [&] { net(images(2)); }});
  ASSERT_EQ(converted.size(), 3U);
  EXPECT_EQ(converted[1].name, "blocks.0.1");
  EXPECT_EQ(converted[1].groups, 3) << "the largest divisor of 6 that leaves two channels";
  EXPECT_LE(accumulation_error(net), 1e-12);
  EXPECT_THAT(batch_norm_layers(*net), IsEmpty());
}

TEST(BatchNormTest, ConversionCopiesWhatALayerIs) {
  torch::nn::Sequential net(torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(4).eps(0.25)),
                            torch::nn::BatchNorm3d(torch::nn::BatchNorm3dOptions(1).affine(false)));
  net->to(at::kDouble);
  auto& before = net[0]->as<torch::nn::BatchNorm1d>()->weight;
  {
    const torch::NoGradGuard no_grad;
    before.copy_(torch::arange(4));
  }
  net[0]->as<torch::nn::BatchNorm1d>()->bias.set_requires_grad(false);
  net[0]->eval();
  convert_batch_norm_to_group_norm(*net, {.groups = 2});
  const auto* first = net[0]->as<torch::nn::GroupNorm>();
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->options.eps(), 0.25);
  EXPECT_EQ(first->options.num_groups(), 2);
  EXPECT_TRUE(at::equal(first->weight.detach(), torch::arange(4).to(at::kDouble)));
  EXPECT_TRUE(first->weight.requires_grad());
  EXPECT_FALSE(first->bias.requires_grad());
  EXPECT_FALSE(first->is_training());
  EXPECT_TRUE(net[1]->is_training());
  EXPECT_FALSE(net[1]->as<torch::nn::GroupNorm>()->weight.defined());
  EXPECT_EQ(net->named_parameters().size(), 2U);
  EXPECT_EQ(net->named_children()["0"].get(), net[0].get()) << "registered and called are one";
}

TEST(BatchNormTest, SharedLayerBecomesOneGroupNorm) {
  torch::nn::Sequential net(torch::nn::Linear(4, 4));
  {
    const torch::nn::BatchNorm1d shared(4);
    net->push_back(shared);
    net->push_back(torch::nn::Tanh());
    net->push_back(shared);
    EXPECT_THAT(message_of([&] { convert_batch_norm_to_group_norm(*net); }),
                HasSubstr("something outside of the Sequential holds it too"));
  }
  EXPECT_EQ(convert_batch_norm_to_group_norm(*net, {.groups = 2}).size(), 1U);
  EXPECT_EQ(net[1].get(), net[3].get());
  EXPECT_NE(net[1]->as<torch::nn::GroupNorm>(), nullptr);
}

TEST(BatchNormTest, MembersOfALayersTypeAreRefusedSinceTheForwardWouldStayAsItIs) {
  auto net = made<TypedNet>();
  // What replacing by name would do, and why it is refused: the forward calls its own handle.
  EXPECT_THAT(batch_norm_calls(*net, [&] { net(images(2)); }), ElementsAre("bn"));
  {
    auto renamed = made<TypedNet>();
    renamed->replace_module("bn", torch::nn::GroupNorm(torch::nn::GroupNormOptions(2, 4)));
    EXPECT_THAT(batch_norm_layers(*renamed), IsEmpty());
    EXPECT_THAT(batch_norm_calls(*renamed, [&] { renamed(images(2)); }),
                ElementsAre("a batch_norm of no layer"));
  }
  const std::string message = message_of([&] { convert_batch_norm_to_group_norm(*net); });
  EXPECT_THAT(message, HasSubstr("BatchNorm layer bn cannot be replaced: the forward of "));
  EXPECT_THAT(message, HasSubstr("TypedNetImpl calls its own handle, of type BatchNorm2d"));
  EXPECT_THAT(message, HasSubstr("Hold a GroupNormGuard"));
  EXPECT_THAT(message, HasSubstr("nothing was changed"));
}

TEST(BatchNormTest, ListElementsDerivedClassesAndBareLayersAreRefused) {
  torch::nn::ModuleList list;
  list->push_back(torch::nn::BatchNorm1d(4));
  EXPECT_THAT(message_of([&] { convert_batch_norm_to_group_norm(*list); }),
              HasSubstr("BatchNorm layer 0 cannot be replaced: it stands in a ModuleList, whose "
                        "user has to cast it to BatchNorm1d"));
  torch::nn::BatchNorm1d bare(4);
  EXPECT_THAT(message_of([&] { convert_batch_norm_to_group_norm(*bare); }),
              HasSubstr("it is the model itself"));
  struct Derived : torch::nn::BatchNorm1dImpl {
    Derived() : torch::nn::BatchNorm1dImpl(torch::nn::BatchNorm1dOptions(4)) {}
  };
  torch::nn::Sequential net;
  net->push_back(std::make_shared<Derived>());
  EXPECT_THAT(message_of([&] { convert_batch_norm_to_group_norm(*net); }),
              HasSubstr("whose forward may do more"));
  EXPECT_THAT(message_of([&] { convert_batch_norm_to_group_norm(*net, {.groups = 0}); }),
              HasSubstr("groups must be >= 1; got 0"));
}

TEST(BatchNormTest, ProbeThatStillFindsBatchNormUndoesTheConversion) {
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
  const auto* const before = net[1].get();
  const auto forward = [&] {
    const auto y = net->forward(torch::randn({3, 4}));
    torch::nn::functional::batch_norm(y, {}, {},
                                      torch::nn::functional::BatchNormFuncOptions().training(true));
  };
  const at::Tensor random = torch::rand({1});
  torch::manual_seed(1);
  const at::Tensor expected = torch::rand({1});
  torch::manual_seed(1);
  EXPECT_THAT(
      message_of([&] { convert_batch_norm_to_group_norm(*net, {.groups = 2, .probe = forward}); }),
      HasSubstr("still calls a batch_norm of no layer. Replace those in the model's code; "
                "the conversion was undone"));
  EXPECT_EQ(net[1].get(), before);
  EXPECT_EQ(net->named_children()["1"].get(), before);
  EXPECT_TRUE(at::equal(torch::rand({1}), expected)) << "the probe's random numbers are given back";
}

TEST(GroupNormGuardTest, TypedMembersComputeGroupNormWithoutAChangeToTheModel) {
  auto net = made<TypedNet>();
  const auto mean = net->bn->running_mean.clone();
  const at::Tensor x = images(8);
  const at::Tensor plain = net(x);
  {
    const GroupNormGuard guard(*net, 2);
    const auto before = net->bn->running_mean.clone();
    const at::Tensor expected =
        at::group_norm(net->conv(x), 2, net->bn->weight, net->bn->bias, 1e-5).mean({2, 3});
    EXPECT_TRUE(at::equal(net(x), expected));
    EXPECT_EQ(guard.calls(), 1);
    EXPECT_LE(accumulation_error(net), 1e-12);
    EXPECT_TRUE(at::equal(net->bn->running_mean, before));
    net->eval();
    EXPECT_TRUE(at::equal(net(x), expected)) << "in eval too";
    net->train();
  }
  EXPECT_GT(accumulation_error(net), 1e-4);
  EXPECT_TRUE(at::equal(net(x), plain)) << "nothing of it stays";
  EXPECT_FALSE(at::equal(mean, net->bn->running_mean));
}

TEST(GroupNormGuardTest, OtherModelsLayersStayBatchNorm) {
  torch::nn::BatchNorm1d other(4), mine(4);
  const at::Tensor x = torch::randn({5, 4});
  const at::Tensor expected = other(x);
  const GroupNormGuard guard(*mine, 2);
  EXPECT_TRUE(at::equal(other(x), expected));
  EXPECT_EQ(guard.calls(), 0);
  EXPECT_FALSE(at::equal(mine(x), expected));
  EXPECT_EQ(guard.calls(), 1);
}

TEST(GroupNormGuardTest, LayersThatCannotBeToldApartAreRefused) {
  torch::nn::Sequential net(torch::nn::BatchNorm1d(
      torch::nn::BatchNorm1dOptions(4).affine(false).track_running_stats(false)));
  EXPECT_THAT(message_of([&] { const GroupNormGuard guard(*net); }),
              HasSubstr("to tell its calls by; 0 has neither"));
  EXPECT_THAT(message_of([&] { const GroupNormGuard guard(*torch::nn::Linear(2, 2)); }),
              HasSubstr("must have a BatchNorm layer"));
}

}  // namespace
}  // namespace gradus::accumulate
