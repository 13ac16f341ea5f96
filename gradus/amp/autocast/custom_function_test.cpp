#include <gradus/amp/autocast/custom_function.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>

namespace gradus::amp {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::tensor_list;

std::vector<at::ScalarType> types;

// A product that notes the types it computes in; `cast` casts its inputs to float32.
template <bool cast>
struct Product : torch::autograd::Function<Product<cast>> {
  static at::Tensor forward(AutogradContext* ctx, at::Tensor x, at::Tensor w) {
    const CustomForward autocast(ctx, cast ? std::optional(at::kFloat) : std::nullopt);
    x = autocast.cast(x);
    w = autocast.cast(w);
    ctx->save_for_backward({x, w});
    const auto y = at::mm(x, w);
    types.push_back(y.scalar_type());
    return y;
  }
  static tensor_list backward(AutogradContext* ctx, tensor_list grads) {
    const CustomBackward autocast(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto dx = at::mm(grads[0], saved[1].t());
    types.push_back(dx.scalar_type());
    return {dx, at::mm(saved[0].t(), grads[0])};
  }
};

class CustomFunctionTest : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    types.clear();
  }
  at::Tensor x_ = torch::randn({2, 3}).requires_grad_(), w_ = torch::randn({3, 4}).requires_grad_();
};

TEST_F(CustomFunctionTest, BackwardRunsUnderTheStateOfForward) {
  at::Tensor y;
  {
    const AutocastGuard guard({.dtype = at::kBFloat16});
    y = Product<false>::apply(x_, w_);
  }
  y.sum().backward();
  EXPECT_EQ(types, (std::vector{at::kBFloat16, at::kBFloat16}));
  types.clear();
  // The gradient that arrives in float32 would else be multiplied by a bfloat16 weight.
  const auto z = Product<false>::apply(x_, w_);
  {
    const AutocastGuard guard({.dtype = at::kBFloat16});
    z.sum().backward();
  }
  EXPECT_EQ(types, (std::vector{at::kFloat, at::kFloat}));
}

TEST_F(CustomFunctionTest, CastInputsRunWithAutocastOffInForwardAndBackward) {
  const auto half = x_.detach().to(at::kHalf).requires_grad_();
  at::Tensor y;
  {
    const AutocastGuard guard({.dtype = at::kBFloat16});
    y = Product<true>::apply(half, w_);
    EXPECT_EQ(at::mm(x_, w_).scalar_type(), at::kBFloat16);
  }
  y.sum().backward();
  EXPECT_EQ(types, (std::vector{at::kFloat, at::kFloat}));
  EXPECT_EQ(half.grad().scalar_type(), at::kHalf);
  EXPECT_EQ(w_.grad().scalar_type(), at::kFloat);
}

TEST_F(CustomFunctionTest, WithoutAutocastInputsStayAsTheyAre) {
  const auto a = x_.detach().to(at::kBFloat16), b = w_.detach().to(at::kBFloat16);
  EXPECT_EQ(Product<true>::apply(a, b).scalar_type(), at::kBFloat16);
  EXPECT_EQ(Product<true>::apply(x_.to(at::kDouble), w_.to(at::kDouble)).scalar_type(),
            at::kDouble);
}

struct NoForward : torch::autograd::Function<NoForward> {
  static at::Tensor forward(AutogradContext* ctx, at::Tensor x) { return x * 2; }
  static tensor_list backward(AutogradContext* ctx, tensor_list grads) {
    const CustomBackward autocast(ctx);
    return {grads[0]};
  }
};

TEST_F(CustomFunctionTest, ABackwardWithoutItsForwardIsAnError) {
  EXPECT_THROW(NoForward::apply(x_).sum().backward(), UserError);
}

}  // namespace
}  // namespace gradus::amp
