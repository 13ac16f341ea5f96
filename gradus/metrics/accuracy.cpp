#include <gradus/metrics/accuracy.h>

#include <ATen/ops/argmax.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/logical_not.h>

#include <gradus/base/error.h>

namespace gradus::metrics {

void Accuracy::add(const at::Tensor& logits_BK, const at::Tensor& labels_B) {
  GRADUS_CHECK(
      "accuracy", logits_BK.dim() == 2 && logits_BK.size(1) >= 1 && logits_BK.is_floating_point(),
      "logits must be floating and [B, K]; got ", logits_BK.sizes(), " of ", logits_BK.dtype());
  GRADUS_CHECK("accuracy",
               labels_B.dim() == 1 && labels_B.size(0) == logits_BK.size(0) &&
                   labels_B.scalar_type() == at::kLong,
               "labels must be int64 and [", logits_BK.size(0), "]; got ", labels_B.sizes(), " of ",
               labels_B.dtype());
  // argmax takes a NaN for the highest.
  const at::Tensor finite = logits_BK.isnan().any(1).logical_not();
  const at::Tensor right = logits_BK.argmax(1).eq(labels_B).logical_and(finite);
  correct_ += right.sum().item<std::int64_t>();
  examples_ += labels_B.size(0);
}

double Accuracy::value() const {
  GRADUS_CHECK("accuracy", examples_ > 0, "accuracy is known after the first example; got none");
  return static_cast<double>(correct_) / static_cast<double>(examples_);
}

}  // namespace gradus::metrics
