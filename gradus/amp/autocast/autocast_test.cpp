#include <gradus/amp/autocast/autocast.h>

#include <limits>
#include <optional>
#include <thread>

#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/base/names.h>
#include <gradus/plane/op/op_plane.h>

namespace gradus::amp {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class AutocastTest : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    torch::manual_seed(0);
  }
  void TearDown() override {
    EXPECT_FALSE(AutocastState::capture().enabled());
    EXPECT_EQ(cast_cache_size(), 0);
    EXPECT_FALSE(plane::op::active());
  }
};

at::ScalarType type_of_mm(at::ScalarType dtype = at::kFloat) {
  const auto a = torch::ones({2, 2}, dtype);
  return at::mm(a, a).scalar_type();
}

TEST_F(AutocastTest, CastsMatrixProductsInsideAndNotOutside) {
  {
    const AutocastGuard guard({.dtype = at::kBFloat16});
    EXPECT_EQ(type_of_mm(), at::kBFloat16);
    {
      const AutocastGuard off({.enabled = false});
      EXPECT_EQ(type_of_mm(), at::kFloat);
      EXPECT_EQ(type_of_mm(at::kBFloat16), at::kBFloat16);
      const AutocastGuard half({.dtype = at::kHalf});
      EXPECT_EQ(type_of_mm(), at::kHalf);
      EXPECT_EQ(type_of_mm(at::kBFloat16), at::kHalf);
    }
    EXPECT_EQ(type_of_mm(), at::kBFloat16);
    EXPECT_EQ(type_of_mm(at::kHalf), at::kBFloat16);
    EXPECT_EQ(type_of_mm(at::kDouble), at::kDouble);
  }
  EXPECT_EQ(type_of_mm(), at::kFloat);
}

TEST_F(AutocastTest, UnsetOptionsAreThoseOfTheGuardOutside) {
  auto lists = OperatorLists::defaults(at::kCPU, at::kHalf);
  lists.set("mm", Policy::fp32);
  const AutocastGuard outer({.dtype = at::kHalf, .lists = lists});
  EXPECT_EQ(type_of_mm(), at::kFloat);
  const AutocastGuard off({.enabled = false});
  EXPECT_EQ(AutocastState::capture().dtype(), at::kHalf);
  const AutocastGuard again;
  EXPECT_EQ(AutocastState::capture().dtype(), at::kHalf);
  EXPECT_EQ(type_of_mm(), at::kFloat);
  const AutocastGuard other({.dtype = at::kBFloat16});  // whose lists those are not
  EXPECT_EQ(type_of_mm(), at::kBFloat16);
}

TEST_F(AutocastTest, RestoresEverySettingAlsoByException) {
  const auto dtype = AutocastState::capture().dtype();
  try {
    const AutocastGuard guard({.dtype = at::kHalf, .cache = false});
    EXPECT_FALSE(AutocastState::capture().cache());
    throw std::runtime_error("x");
  } catch (const std::runtime_error&) {
  }
  EXPECT_TRUE(AutocastState::capture().cache());
  EXPECT_EQ(AutocastState::capture().dtype(), dtype);
}

TEST_F(AutocastTest, AnOperatorThatThrowsLeavesTheRegionAsItWas) {
  const AutocastGuard guard({.dtype = at::kBFloat16});
  EXPECT_THROW(at::linear(torch::ones({2, 3}), torch::ones({2, 2})), c10::Error);
  EXPECT_EQ(type_of_mm(), at::kBFloat16);
  EXPECT_FALSE(casting());
}

TEST_F(AutocastTest, CapturedStateIsEnteredAgainAndLeft) {
  AutocastState inside;
  {
    const AutocastGuard guard({.dtype = at::kHalf, .cache = false});
    inside = AutocastState::capture();
  }
  {
    const AutocastStateGuard again(inside);
    const auto now = AutocastState::capture();
    EXPECT_TRUE(now.enabled());
    EXPECT_EQ(now.dtype(), at::kHalf);
    EXPECT_FALSE(now.cache());
    EXPECT_EQ(type_of_mm(), at::kHalf);
    const AutocastStateGuard off{AutocastState()};
    EXPECT_FALSE(AutocastState::capture().enabled());
    EXPECT_EQ(type_of_mm(), at::kFloat);
  }
  EXPECT_FALSE(AutocastState::capture().enabled());
  EXPECT_TRUE(AutocastState::capture().cache());
}

TEST_F(AutocastTest, RefusesADtypeThatIsNoLowerPrecision) {
  EXPECT_THROW(AutocastGuard({.dtype = at::kDouble}), UserError);
  EXPECT_THROW(AutocastGuard({.device = at::kMeta, .dtype = at::kHalf}), UserError);
}

TEST_F(AutocastTest, ThreadsSeeTheRegionUnderAThreadLocalStateGuardAndByACapturedState) {
  const AutocastGuard guard({.dtype = at::kBFloat16});
  const at::ThreadLocalState local;
  const auto state = AutocastState::capture();
  at::ScalarType bare{}, carried{}, entered{}, after{};
  std::thread([&] {
    bare = type_of_mm();
    {
      const at::ThreadLocalStateGuard with(local);
      carried = type_of_mm();
    }
    {
      const auto with = state.apply();
      entered = type_of_mm();
    }
    after = type_of_mm();
  }).join();
  EXPECT_EQ(bare, at::kFloat);
  EXPECT_EQ(carried, at::kBFloat16);
  EXPECT_EQ(entered, at::kBFloat16);
  EXPECT_EQ(after, at::kFloat);
}

TEST_F(AutocastTest, ManyThreadsShareARegion) {
  auto w = torch::randn({16, 16}).requires_grad_();
  const auto x = torch::randn({4, 16});
  at::Tensor expected;
  std::vector<at::Tensor> results(8);
  {
    const AutocastGuard guard({.dtype = at::kBFloat16});
    expected = at::mm(x, w);
    const at::ThreadLocalState local;
    std::vector<std::thread> threads;
    for (auto& result : results) {
      threads.emplace_back([&, local] {
        const at::ThreadLocalStateGuard with(local);
        for (int i = 0; i < 50; ++i) result = at::mm(x, w);
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(cast_cache_size(), 1);
  }
  for (const auto& result : results) EXPECT_TRUE(at::equal(result, expected));
}

TEST_F(AutocastTest, ABackwardPassInsideTheRegionRunsAsOutside) {
  const auto gradients = [](bool inside) {
    torch::manual_seed(0);
    torch::nn::Linear a(8, 8), b(8, 8);
    const auto x = torch::randn({4, 8});
    at::Tensor loss;
    {
      const AutocastGuard guard({.dtype = at::kBFloat16});
      loss = b(a(x).exp()).sum();
      if (inside) loss.backward();
    }
    if (!inside) loss.backward();
    return std::vector<at::Tensor>{a->weight.grad(), a->bias.grad(), b->weight.grad()};
  };
  const auto plain = gradients(false), within = gradients(true);
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(plain[i], within[i])) << i;
}

TEST_F(AutocastTest, LibTorchsOwnAutocastIsOffInsideAndThenAsBefore) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  EXPECT_TRUE(AutocastState::capture().enabled());
  const auto state = AutocastState::capture();
  {
    const AutocastGuard off({.enabled = false});
    EXPECT_EQ(type_of_mm(), at::kFloat);
    const AutocastGuard half({.dtype = at::kHalf});
    EXPECT_EQ(type_of_mm(), at::kHalf);
  }
  EXPECT_EQ(type_of_mm(), at::kBFloat16);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  {
    const AutocastStateGuard again(state);
    EXPECT_EQ(type_of_mm(), at::kBFloat16);
  }
  EXPECT_EQ(type_of_mm(), at::kFloat);
}

TEST_F(AutocastTest, LibTorchsAutocastSwitchedOnInsideDecides) {
  const AutocastGuard guard({.dtype = at::kHalf});
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  EXPECT_EQ(type_of_mm(), at::kBFloat16);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
}

TEST_F(AutocastTest, InferenceModeIsCastToo) {
  const AutocastGuard guard({.dtype = at::kBFloat16});
  const c10::InferenceMode inference;
  const auto x = torch::ones({2, 3});
  EXPECT_EQ(at::linear(x, torch::ones({4, 3})).scalar_type(), at::kBFloat16);
  EXPECT_EQ(at::linear(x, torch::ones({4, 3})).softmax(-1).scalar_type(), at::kFloat);
}

// Remembers names and types of what it sees just above autograd.
class Seen final : public plane::op::Handler {
 public:
  void call(plane::op::Call& call) override {
    if (call.frame() == plane::op::Frame::autograd && call.arguments()[0].isTensor()) {
      names.push_back(std::string(call.name()) + " " +
                      c10::toString(call.arguments()[0].toTensor().scalar_type()));
    }
    call.proceed();
  }
  std::vector<std::string> names;
};

TEST_F(AutocastTest, OtherHandlersSeeTheCastsAndTheCastArguments) {
  auto seen = std::make_shared<Seen>();
  const auto a = torch::ones({2, 2});
  const auto watch = plane::op::push(plane::op::Order::record, seen);
  {
    const AutocastGuard outer({.dtype = at::kHalf});
    const AutocastGuard guard({.dtype = at::kBFloat16});
    at::mm(a, a.to(at::kBFloat16));
    at::exp(a.to(at::kBFloat16));
  }
  EXPECT_THAT(seen->names,
              ElementsAre("aten::_to_copy Float", "aten::_to_copy Float", "aten::mm BFloat16",
                          "aten::_to_copy Float", "aten::_to_copy BFloat16", "aten::exp Float"));
}

TEST_F(AutocastTest, InPlaceAndOutVariantsRunInTheTypeOfWhatTheyWrite) {
  const AutocastGuard guard({.dtype = at::kBFloat16});
  auto a = torch::ones({2, 2});
  auto out = torch::empty({2, 2});
  EXPECT_EQ(at::mm_out(out, a, a).scalar_type(), at::kFloat);
  EXPECT_EQ(a.addmm_(a, a).scalar_type(), at::kFloat);
}

TEST_F(AutocastTest, SensitiveOperatorsRunAndReturnInFloat32OnTheCpu) {  // M18
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    SCOPED_TRACE(c10::toString(dtype));
    const AutocastGuard guard({.dtype = dtype});
    const auto ones = torch::ones({70000}, dtype);
    for (const auto& sum : {ones.sum(), ones.sum(0), ones.cumsum(0)[-1], ones.norm(1),
                            at::linalg_vector_norm(ones, 1), ones.mean() * 70000,
                            at::logsumexp(ones, 0).exp() / std::exp(1.0)}) {
      EXPECT_EQ(sum.scalar_type(), at::kFloat);
      EXPECT_NEAR(sum.item<double>(), 70000, 1);
    }
    const auto x = torch::randn({4, 32}, dtype) * 8;
    const auto wide = x.to(at::kFloat);
    const auto exact = [&](const at::Tensor& got, const at::Tensor& expected) {
      EXPECT_EQ(got.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(got, expected));
    };
    exact(x.softmax(-1), wide.softmax(-1));
    exact(x.log_softmax(-1), wide.log_softmax(-1));
    exact(at::layer_norm(x, {32}), at::layer_norm(wide, {32}));
    exact(at::group_norm(x, 4), at::group_norm(wide, 4));
    exact(x.exp(), wide.exp());
    exact(x.pow(2), wide.pow(2));
    exact(x.var(-1), wide.var(-1));
    exact(x.prod(-1), wide.prod(-1));
    EXPECT_EQ(x.sum(-1, false, at::kDouble).scalar_type(), at::kDouble);
  }
  EXPECT_EQ(torch::ones({4}, at::kHalf).sum().scalar_type(), at::kHalf);
}

TEST_F(AutocastTest, MaskingInFloat16WithALargeNumberGivesAFiniteSoftmax) {  // M17
  const auto mask = torch::tensor({false, true, true, false});
  const auto scores = torch::randn({3, 4}, at::kHalf);
  EXPECT_THROW(scores.masked_fill(mask, -1e9), std::exception);
  const AutocastGuard guard({.dtype = at::kHalf});
  const auto check = [&](const at::Tensor& filled) {
    const auto p = filled.softmax(-1);
    EXPECT_TRUE(p.isfinite().all().item<bool>());
    EXPECT_EQ(p.index({torch::indexing::Slice(), 1}).max().item<double>(), 0);
    EXPECT_NEAR(p.sum().item<double>(), 3, 1e-6);
  };
  check(scores.masked_fill(mask, -1e9));
  check(scores.clone().masked_fill_(mask, -1e9));
  EXPECT_EQ(scores.clone().masked_fill_(mask, -1e9).scalar_type(), at::kHalf);
  // Whole rows masked: evenly spread, not NaN.
  check(scores.masked_fill(torch::tensor({false, true, false, false}), -1e30));
  EXPECT_EQ(scores.clone().masked_fill_(mask, -1e9).min().item<double>(), -65504);
  EXPECT_EQ(scores.clone().masked_fill_(mask, 1e9).max().item<double>(), 65504);
  EXPECT_EQ(scores.clone()
                .masked_fill_(mask, -std::numeric_limits<double>::infinity())
                .min()
                .item<double>(),
            -std::numeric_limits<double>::infinity());
}

TEST_F(AutocastTest, BinaryCrossEntropyIsRefusedInFloat16AndNamesTheOtherForm) {
  const auto p = torch::full({4}, 0.5), t = torch::ones({4});
  {
    const AutocastGuard guard({.dtype = at::kHalf});
    try {
      at::binary_cross_entropy(p, t);
      ADD_FAILURE() << "no error";
    } catch (const UserError& error) {
      EXPECT_THAT(error.what(), HasSubstr("binary_cross_entropy_with_logits"));
    }
    EXPECT_EQ(at::binary_cross_entropy_with_logits(p.to(at::kHalf), t).scalar_type(), at::kFloat);
    const AutocastGuard off({.enabled = false});
    EXPECT_EQ(at::binary_cross_entropy(p, t).scalar_type(), at::kFloat);
  }
  const AutocastGuard guard({.dtype = at::kBFloat16});
  EXPECT_EQ(at::binary_cross_entropy(p.to(at::kBFloat16), t).scalar_type(), at::kFloat);
}

TEST_F(AutocastTest, ListsOfTensorsTakeTheWidestType) {
  const AutocastGuard guard({.dtype = at::kBFloat16});
  const auto f = torch::ones({2});
  const auto b = f.to(at::kBFloat16);
  const auto h = f.to(at::kHalf);
  EXPECT_EQ(at::cat({b, b}).scalar_type(), at::kBFloat16);
  EXPECT_EQ(at::cat({b, f}).scalar_type(), at::kFloat);
  EXPECT_EQ(at::stack({f, b}).scalar_type(), at::kFloat);
  EXPECT_EQ(at::cat({b, h}).scalar_type(), at::kFloat);
  EXPECT_EQ(at::dot(b, f).scalar_type(), at::kFloat);
  EXPECT_EQ(at::addcmul(f, b, b).scalar_type(), at::kFloat);
  EXPECT_EQ(at::addcmul(b, b, b).scalar_type(), at::kBFloat16);
  EXPECT_EQ(at::linalg_multi_dot({torch::ones({2, 2}), torch::ones({2, 2})}).scalar_type(),
            at::kBFloat16);
}

TEST_F(AutocastTest, MovingLinearBetweenTheListsChangesItsTypeAtTheNextGuard) {
  const auto x = torch::ones({2, 3}), w = torch::ones({4, 3});
  const auto type = [&] { return at::linear(x, w).scalar_type(); };
  auto lists = OperatorLists::defaults(at::kCPU, at::kBFloat16);
  {
    const AutocastGuard guard({.dtype = at::kBFloat16});
    EXPECT_EQ(type(), at::kBFloat16);
    lists.set("linear", Policy::fp32);
    OperatorLists::set_defaults(at::kCPU, at::kBFloat16, lists);
    EXPECT_EQ(type(), at::kBFloat16);
  }
  {
    const AutocastGuard guard({.dtype = at::kBFloat16});
    EXPECT_EQ(type(), at::kFloat);
    EXPECT_EQ(at::linear(x.to(at::kBFloat16), w).scalar_type(), at::kFloat);
  }
  OperatorLists::reset_defaults();
  const AutocastGuard guard({.dtype = at::kBFloat16});
  EXPECT_EQ(type(), at::kBFloat16);
  lists.set("aten::linear", Policy::none);
  const AutocastGuard with({.lists = lists});
  EXPECT_EQ(type(), at::kBFloat16);  // none: its parts (addmm) are listed themselves
  lists.set("linear", Policy::banned);
  const AutocastGuard without({.lists = lists});
  EXPECT_THROW(type(), UserError);
}

TEST_F(AutocastTest, ModulesOfManyKindsComputeNearFloat32AndGetGradients) {
  const auto run = [](const std::optional<AutocastOptions>& options) {
    torch::manual_seed(3);
    torch::nn::LSTM lstm(torch::nn::LSTMOptions(8, 8).num_layers(2));
    torch::nn::GRU gru(8, 8);
    torch::nn::MultiheadAttention attention(8, 2);
    torch::nn::TransformerEncoderLayer encoder(
        torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0));
    torch::nn::Bilinear bilinear(8, 8, 8);
    torch::nn::Conv1d conv(8, 8, 3);
    torch::nn::ConvTranspose1d up(8, 8, 3);
    torch::nn::BatchNorm1d batch_norm(8);
    torch::nn::GroupNorm group_norm(2, 8);
    torch::nn::PReLU prelu;
    torch::nn::Embedding embedding(16, 8);
    const auto x = torch::randn({5, 3, 8}).requires_grad_();
    at::Tensor loss;
    {
      std::optional<AutocastGuard> guard;
      if (options) guard.emplace(*options);
      auto h = x + embedding(torch::arange(15).view({5, 3}));
      h = h + std::get<0>(lstm(h));
      h = h + std::get<0>(gru(h));
      h = h + std::get<0>(attention(h, h, h));
      h = encoder(h);
      h = h + bilinear(h, h.tanh());
      auto c = group_norm(up(batch_norm(conv(h.permute({1, 2, 0})))));
      c = torch::upsample_linear1d(prelu(c), {10}, false);
      loss = torch::mse_loss(c, torch::ones_like(c)) + c.softmax(-1).pow(2).sum() + c.norm() / 10;
    }
    EXPECT_EQ(loss.scalar_type(), at::kFloat);
    loss.backward();
    for (const auto& module : std::initializer_list<std::shared_ptr<torch::nn::Module>>{
             lstm.ptr(), gru.ptr(), attention.ptr(), encoder.ptr(), bilinear.ptr(), conv.ptr(),
             up.ptr(), batch_norm.ptr(), group_norm.ptr(), prelu.ptr(), embedding.ptr()}) {
      for (const auto& p : module->named_parameters()) {
        EXPECT_TRUE(p->grad().defined() && p->grad().isfinite().all().item<bool>())
            << module->name() << " " << p.key();
        EXPECT_EQ(p->grad().scalar_type(), at::kFloat);
      }
    }
    return loss.item<double>();
  };
  const double expected = run(std::nullopt);
  // Not float16 by LibTorch's kernels: oneDNN's LSTM throws where it has none.
  for (const auto& options :
       std::vector<AutocastOptions>{{.dtype = at::kBFloat16},
                                    {.dtype = at::kBFloat16, .arithmetic = Arithmetic::rounded},
                                    {.dtype = at::kHalf, .arithmetic = Arithmetic::rounded}}) {
    SCOPED_TRACE(c10::toString(*options.dtype));
    EXPECT_NEAR(run(options), expected, 0.03 * expected);
  }
}

TEST_F(AutocastTest, HintsAtEachLayerShapeThatTensorCoresDoNotTakeOnce) {
  clear_shape_hints();
  const auto x = torch::randn({4, 10});
  auto w = torch::randn({7, 10}), even = torch::randn({16, 16});
  const base::NamedTensors names({{"head.weight", w}});
  {
    const AutocastGuard guard({.dtype = at::kBFloat16});
    at::linear(x, w);
  }
  EXPECT_THAT(shape_hints(), ElementsAre());
  {
    const AutocastGuard guard({.dtype = at::kBFloat16, .hint_shapes = true});
    at::linear(x, w);
    at::linear(x, w);
    at::linear(torch::randn({3, 16}), even);
    at::conv2d(torch::randn({1, 3, 8, 8}), torch::randn({16, 3, 3, 3}));
  }
  EXPECT_THAT(shape_hints(),
              ElementsAre(AllOf(HasSubstr("aten::linear with head.weight of shape [7, 10]"),
                                HasSubstr("7 output features (next: 8)"),
                                HasSubstr("10 input features (next: 16)")),
                          AllOf(HasSubstr("aten::conv2d"), HasSubstr("3 input channels"))));
  clear_shape_hints();
}

}  // namespace
}  // namespace gradus::amp
