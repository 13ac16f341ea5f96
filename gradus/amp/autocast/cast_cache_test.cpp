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
      for (int i = 0; i < 3; ++i) h = at::mm(h, stacked[i]);
      h = at::mm(h, stacked.select(0, 1).t());
      h = at::mm(h, stacked.view({24, 8}).narrow(0, 8, 8));
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
