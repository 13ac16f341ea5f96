#include <gradus/persample/engine/internal/fixed_randomness.h>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>

namespace gradus::persample::internal {

namespace {

// Fill a tensor with independent draws, so that a constant stands for them.
const std::set<std::string_view> kFills{
    "aten::bernoulli",    "aten::bernoulli_",  "aten::uniform_",  "aten::normal_",
    "aten::rand",         "aten::randn",       "aten::rand_like", "aten::randn_like",
    "aten::exponential_", "aten::log_normal_", "aten::cauchy_",   "aten::normal",
    "aten::uniform"};

bool is_random(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded);
}

}  // namespace

class FixedRandomness::Handler final : public plane::op::Handler {
 public:
  void call(plane::op::Call& call) override {
    call.proceed();
    if (call.frame() == plane::op::Frame::composite || !is_random(call.op())) return;
    drew = true;
    if (!kFills.contains(call.name())) {
      still_random.emplace(call.name());
      return;
    }
    const at::NoGradGuard no_grad;
    const double value = call.name().starts_with("aten::bernoulli") ? 1.0 : 0.5;
    for (const c10::IValue& result : call.results()) {
      if (result.isTensor() && result.toTensor().defined()) result.toTensor().fill_(value);
    }
  }

  std::set<std::string> still_random{};
  bool drew = false;
};

FixedRandomness::FixedRandomness()
    : handler_(std::make_shared<Handler>()),
      guard_(plane::op::push(plane::op::Order::transform, handler_)) {}

const std::set<std::string>& FixedRandomness::still_random() const {
  return handler_->still_random;
}
bool FixedRandomness::drew() const { return handler_->drew; }

}  // namespace gradus::persample::internal
