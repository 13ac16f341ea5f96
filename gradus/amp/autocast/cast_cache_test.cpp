#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/plane/op/op_plane.h>

namespace gradus::amp {
namespace {

// Counts casts to the lower precision.
class Casts final : public plane::op::Handler {
 public:
  void call(plane::op::Call& call) override {
    if (call.frame() == plane::op::Frame::autograd && call.name() == "aten::_to_copy" &&
        casting()) {
      ++count;
    }
    call.proceed();
  }
  int count = 0;
};

class CastCacheTest : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    torch::manual_seed(0);
    watch_ = plane::op::push(plane::op::Order::record, casts_);
  }
  int casts() { return std::exchange(casts_->count, 0); }

  std::shared_ptr<Casts> casts_ = std::make_shared<Casts>();
  at::Tensor x_ = torch::randn({4, 8}, at::kBFloat16);
  at::Tensor w_ = torch::randn({8, 8}).requires_grad_();

 private:
  plane::op::Guard watch_;
};

TEST_F(CastCacheTest, AWeightUsedManyTimesIsCastOnceAnIterationAlsoThroughViews) {
  torch::nn::Linear linear(8, 8);  // passes weight.t()
  auto stacked = torch::randn({3, 8, 8}).requires_grad_();
  for (int iteration = 0; iteration < 2; ++iteration) {
    at::Tensor loss;
    {
      const AutocastGuard guard({.dtype = at::kBFloat16});
      auto h = x_;
      for (int i = 0; i < 5; ++i) h = linear(h);
      EXPECT_EQ(casts(), 2);  // weight and bias
      for (int i = 0; i < 3; ++i)
        h = at::matmul(h, stacked.transpose(1, 2)).sum(0).to(at::kBFloat16);
      EXPECT_EQ(casts(), 1);
      EXPECT_EQ(cast_cache_size(), 3);
      loss = h.sum();
    }
    EXPECT_EQ(cast_cache_size(), 0);
    loss.backward();
    EXPECT_EQ(casts(), 0);
    EXPECT_EQ(cast_cache_size(), 0);
  }
}

TEST_F(CastCacheTest, ViewsGiveTheValuesAndGradientsOfCastsAtEachUse) {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> views{
      [](const at::Tensor& w) { return w; },
      [](const at::Tensor& w) { return w.t(); },
      [](const at::Tensor& w) { return w.is_contiguous() ? w.view({4, 16}).t() : w; },
      [](const at::Tensor& w) { return w.narrow(0, 2, 4).t(); },
      [](const at::Tensor& w) { return w.narrow(1, 2, 4); },
      [](const at::Tensor& w) { return w.slice(0, 0, 8, 2).t(); },
      [](const at::Tensor& w) { return w.unsqueeze(0).expand({3, 8, 8}).select(0, 1); },
      [](const at::Tensor& w) { return w.t().t().chunk(2)[1].t(); },
      [](const at::Tensor& w) { return w.diagonal().unsqueeze(1); },
      [](const at::Tensor& w) { return at::Tensor(w.t()).detach(); },
      [](const at::Tensor& w) { return w * 2; },
  };
  for (const bool transposed : {false, true}) {
    for (std::size_t i = 0; i < views.size(); ++i) {
      SCOPED_TRACE(i);
      std::vector<at::Tensor> results;
      for (const bool cache : {false, true}) {
        torch::manual_seed(1);
        auto w = torch::randn({8, 8});
        if (transposed) w = w.t();
        w.requires_grad_();
        at::Tensor y;
        {
          const AutocastGuard guard({.dtype = at::kBFloat16, .cache = cache});
          const auto view = views[i](w);
          y = at::mm(torch::randn({4, view.size(0)}), view);
        }
        if (y.requires_grad()) y.sum().backward();
        results.insert(results.end(), {y.detach(), w.grad()});
      }
      EXPECT_TRUE(at::equal(results[0], results[2]));
      ASSERT_EQ(results[1].defined(), results[3].defined());
      if (results[1].defined()) {
        EXPECT_TRUE(at::equal(results[1], results[3]));
      }
    }
  }
}

TEST_F(CastCacheTest, AChangedWeightIsCastAnew) {  // M16
  const AutocastGuard guard({.dtype = at::kBFloat16});
  const auto before = at::mm(x_, w_).detach();
  const auto view = at::mm(x_, w_.t()).detach();
  {
    const at::NoGradGuard no_grad;
    w_.mul_(2);
  }
  EXPECT_TRUE(at::equal(at::mm(x_, w_).detach(), before * 2));
  EXPECT_TRUE(at::equal(at::mm(x_, w_.t()).detach(), view * 2));
  EXPECT_EQ(cast_cache_size(), 1);  // the old cast is gone
  {
    const at::NoGradGuard no_grad;
    w_.t().narrow(0, 0, 4).zero_();  // through a view
  }
  EXPECT_EQ(at::mm(x_, w_).narrow(1, 0, 4).abs().max().item<double>(), 0);
  w_.set_data(torch::zeros({8, 8}));  // other memory under the same version
  EXPECT_EQ(at::mm(x_, w_).abs().max().item<double>(), 0);
}

TEST_F(CastCacheTest, AnOptimizerStepInsideTheRegionIsSeen) {
  torch::optim::SGD sgd({w_}, 1.0);
  const AutocastGuard guard({.dtype = at::kBFloat16});
  for (int i = 0; i < 3; ++i) {
    sgd.zero_grad();
    const auto y = at::mm(x_, w_);
    EXPECT_TRUE(at::equal(y.detach(), at::mm(x_, w_.detach().to(at::kBFloat16))));
    y.sum().backward();
    sgd.step();
  }
}

TEST_F(CastCacheTest, IsEmptyAfterABackwardPassInsideTheRegion) {
  const AutocastGuard guard({.dtype = at::kBFloat16});
  for (int i = 0; i < 2; ++i) {
    const auto loss = at::mm(x_, w_).sum();
    EXPECT_EQ(cast_cache_size(), 1);
    loss.backward();
    EXPECT_EQ(cast_cache_size(), 0);
    EXPECT_EQ(casts(), 1);
  }
}

struct Reversal : torch::autograd::Function<Reversal> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.view_as(x);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*,
                                               torch::autograd::tensor_list g) {
    return {-g[0]};
  }
};

TEST_F(CastCacheTest, ViewsWithAMeaningOfTheirOwnAreCastAnew) {
  const auto x = torch::ones({1, 4});
  const AutocastGuard guard({.dtype = at::kBFloat16});
  const auto fresh = [] { return torch::ones({4, 4}).requires_grad_(); };
  {  // a gradient reversal
    const auto w = fresh();
    at::linear(x, Reversal::apply(w)).sum().backward();
    EXPECT_TRUE(at::equal(w.grad(), torch::full({4, 4}, -1.0)));
    w.mutable_grad() = at::Tensor();
    at::matmul(x, Reversal::apply(w).t()).sum().backward();  // and a plain view of one
    EXPECT_TRUE(at::equal(w.grad(), torch::full({4, 4}, -1.0)));
  }
  {  // a gradient that is kept
    const auto kept = fresh().t();
    kept.retain_grad();
    at::matmul(x, kept).sum().backward();
    EXPECT_TRUE(kept.grad().defined());
  }
  {  // a part whose gradient is asked for
    const auto part = fresh().narrow(0, 0, 2);
    const auto grads = torch::autograd::grad({at::linear(x, part).sum()}, {part});
    EXPECT_TRUE(at::equal(grads[0], torch::ones({2, 4})));
  }
  {  // a negated view
    const auto w = fresh();
    const auto y = at::linear(x, at::_neg_view(w));
    EXPECT_EQ(y[0][0].item<double>(), -4);
    y.sum().backward();
    EXPECT_TRUE(at::equal(w.grad(), torch::full({4, 4}, -1.0)));
    const at::NoGradGuard no_grad;
    EXPECT_EQ(at::linear(x, at::_neg_view(w))[0][0].item<double>(), -4);
  }
  {  // a tangent
    const auto level = torch::autograd::forward_ad::enter_dual_level();
    const auto dual = at::_make_dual(fresh(), torch::ones({4, 4}), level);
    for (const auto& y : {at::linear(x, dual), at::matmul(x, dual.t())}) {
      const at::Tensor tangent = std::get<1>(at::_unpack_dual(y, level));
      ASSERT_TRUE(tangent.defined());
      EXPECT_EQ(tangent[0][0].item<double>(), 4);
    }
    torch::autograd::forward_ad::exit_dual_level(level);
  }
}

TEST_F(CastCacheTest, WritesThatLeaveNoVersionAreSeen) {
  const auto x = torch::ones({1, 4});
  const AutocastGuard guard({.dtype = at::kBFloat16});
  const auto product = [&](const at::Tensor& w) { return at::linear(x, w)[0][0].item<double>(); };
  auto w = torch::ones({4, 4}).requires_grad_();
  EXPECT_EQ(product(w), 4);
  w.data().mul_(2);
  EXPECT_EQ(product(w), 8);
  {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> parameters{w}, gradients{torch::ones({4, 4})},
        means{torch::zeros({4, 4})}, squares{torch::zeros({4, 4})}, steps{torch::ones({})};
    const auto version = w._version();
    at::_fused_adamw_(parameters, gradients, means, squares, {}, steps, 1.0, 0.0, 0.0, 0.0, 0.0,
                      false, false);
    EXPECT_EQ(w._version(), version);
  }
  EXPECT_EQ(product(w), at::linear(x, w.detach().clone())[0][0].item<double>());
  EXPECT_NE(product(w), 8);
  w.data().fill_(1);
  torch::optim::SGD sgd({w}, 1.0);
  at::linear(x, w).sum().backward();
  EXPECT_EQ(product(w), 4);  // between backward and step
  sgd.step();
  EXPECT_EQ(product(w), 0);
  auto flat = torch::ones({16});
  w.set_data(flat.view({4, 4}));
  EXPECT_EQ(product(w), 4);
  flat.mul_(2);
  EXPECT_EQ(product(w), 8);
  EXPECT_EQ(cast_cache_size(), 1);
  torch::ones({4}).mul_(2);  // of another memory
  EXPECT_EQ(cast_cache_size(), 1);
}

TEST_F(CastCacheTest, OtherPlacesOfOneMemoryAreOtherWeights) {
  const auto x = torch::ones({1, 4}), flat = torch::arange(8, at::kFloat).view({2, 4});
  auto w = torch::ones({1, 4}).requires_grad_();
  const AutocastGuard guard({.dtype = at::kBFloat16});
  w.set_data(flat.narrow(0, 0, 1));
  EXPECT_EQ(at::linear(x, w).item<double>(), 6);
  w.set_data(flat.narrow(0, 1, 1));
  EXPECT_EQ(at::linear(x, w).item<double>(), 22);
  w.set_data(flat.view({4, 2}));
  EXPECT_EQ(at::linear(torch::ones({1, 2}), w).sizes(), (std::vector<std::int64_t>{1, 4}));
}

TEST_F(CastCacheTest, GradientRecordingOnAndOffHaveCastsOfTheirOwn) {
  const AutocastGuard guard({.dtype = at::kBFloat16});
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(at::mm(x_, w_).requires_grad());
    at::mm(x_, w_);
  }
  EXPECT_EQ(casts(), 1);
  const auto y = at::mm(x_, w_);
  EXPECT_TRUE(y.requires_grad());
  EXPECT_EQ(casts(), 1);
  at::Tensor view;
  {
    const at::NoGradGuard no_grad;
    view = w_.t();
  }
  (y.sum() + at::mm(x_, view).sum()).backward();  // which leads to no weight
  const auto gradient = w_.grad().clone();
  w_.mutable_grad() = at::Tensor();
  at::mm(x_, w_).sum().backward();
  EXPECT_TRUE(at::equal(w_.grad(), gradient));
}

TEST_F(CastCacheTest, IsNotUsedWithoutTheOptionAndForWhatIsNoWeight) {
  {
    const AutocastGuard guard({.dtype = at::kBFloat16, .cache = false});
    for (int i = 0; i < 3; ++i) at::mm(x_, w_);
    EXPECT_EQ(casts(), 3);
    EXPECT_EQ(cast_cache_size(), 0);
  }
  const AutocastGuard guard({.dtype = at::kBFloat16});
  const auto activation = w_ * 2, input = torch::randn({8, 8});
  at::mm(x_, activation);
  at::mm(x_, activation.t());
  at::mm(x_, input);
  EXPECT_EQ(cast_cache_size(), 0);
}

TEST_F(CastCacheTest, NestedGuardsShareItAndTheOutermostEmptiesIt) {
  const auto uses = w_.use_count();
  {
    const AutocastGuard outer({.dtype = at::kBFloat16});
    {
      const AutocastGuard off({.enabled = false});
      const AutocastGuard inner({.dtype = at::kBFloat16});
      at::mm(x_, w_);
    }
    at::mm(x_, w_);
    EXPECT_EQ(casts(), 1);
    const AutocastGuard half({.dtype = at::kHalf, .arithmetic = Arithmetic::native});
    at::mm(x_, w_);
    EXPECT_EQ(cast_cache_size(), 2);
  }
  EXPECT_EQ(w_.use_count(), uses);
}

TEST_F(CastCacheTest, HoldsNoWeightAlive) {
  const AutocastGuard guard({.dtype = at::kBFloat16});
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weight(w_.getIntrusivePtr());
  {
    const at::NoGradGuard no_grad;  // a cast with gradient holds its weight through the graph
    at::mm(x_, w_);
  }
  w_ = at::Tensor();
  EXPECT_EQ(weight.use_count(), 0);
}

TEST_F(CastCacheTest, TwoBackwardPassesThroughOneCastGiveTheGradientsOfTwoCasts) {
  std::vector<at::Tensor> gradients;
  for (const bool cache : {true, false}) {
    w_.mutable_grad() = at::Tensor();
    const AutocastGuard guard({.dtype = at::kBFloat16, .cache = cache});
    const auto a = at::mm(x_, w_).sum(), b = at::mm(x_, w_).pow(2).sum();
    a.backward();
    b.backward();
    gradients.push_back(w_.grad());
  }
  EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
}

}  // namespace
}  // namespace gradus::amp
