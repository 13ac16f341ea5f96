#include <gradus/persample/engine/internal/precision.h>

#include <atomic>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

namespace gradus::persample::internal {

namespace {

int coarseness(at::ScalarType type) {
  switch (c10::toRealValueType(type)) {
    case at::kDouble:
      return 0;
    case at::kFloat:
      return 1;
    default:
      return at::isFloatingType(type) ? 2 : 0;
  }
}

}  // namespace

class Precision::Handler final : public plane::op::Handler {
 public:
  void call(plane::op::Call& call) override {
    call.proceed();
    for (const c10::IValue& result : call.results()) {
      if (!result.isTensor() || !result.toTensor().defined()) continue;
      const int seen = coarseness(result.toTensor().scalar_type());
      int known = coarsest.load();
      while (seen > known && !coarsest.compare_exchange_weak(known, seen)) {
      }
    }
  }

  std::atomic<int> coarsest = 0;  // backward may run on threads of its own
};

Precision::Precision()
    : handler_(std::make_shared<Handler>()),
      guard_(plane::op::push(plane::op::Order::transform, handler_)) {}

at::ScalarType Precision::coarsest() const {
  const int seen = handler_->coarsest.load();
  return seen == 0 ? at::kDouble : seen == 1 ? at::kFloat : at::kBFloat16;
}

double Precision::rounding() const {
  const at::ScalarType type = coarsest();
  return type == at::kDouble ? 1e-10 : type == at::kFloat ? 1e-5 : 2e-3;
}

}  // namespace gradus::persample::internal
