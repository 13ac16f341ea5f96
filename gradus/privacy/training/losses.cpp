#include <gradus/privacy/training/losses.h>

#include <algorithm>

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/movedim.h>

#include <gradus/base/error.h>
#include <gradus/privacy/training/internal/state_codec.h>

namespace gradus::privacy {

using internal::kComponent;

at::Tensor cross_entropy_per_example(const at::Tensor& logits, const at::Tensor& targets,
                                     std::int64_t ignore_index, std::int64_t class_dim) {
  GRADUS_CHECK(kComponent, logits.defined() && logits.dim() >= 2,
               "logits must have at least two dimensions, [B, K]");
  const std::int64_t dim = class_dim < 0 ? class_dim + logits.dim() : class_dim;
  GRADUS_CHECK(kComponent, dim >= 1 && dim < logits.dim(),
               "class_dim must name a dimension of the logits after the first; got ", class_dim,
               " for shape ", logits.sizes());
  const at::Tensor last = logits.movedim(dim, -1);
  GRADUS_CHECK(kComponent,
               targets.defined() && targets.sizes() == last.sizes().slice(0, last.dim() - 1),
               "targets must have the shape of logits without the classes, ",
               last.sizes().slice(0, last.dim() - 1), "; got ",
               targets.defined() ? base::join(targets.sizes()) : "an undefined tensor");
  const std::int64_t examples = targets.size(0);
  const at::Tensor losses =
      at::cross_entropy_loss(last.reshape({-1, last.size(-1)}), targets.reshape({-1}), {},
                             at::Reduction::None, ignore_index)
          .reshape({examples, targets.numel() / std::max<std::int64_t>(examples, 1)});
  const at::Tensor tokens =
      targets.reshape(losses.sizes()).ne(ignore_index).sum(1).clamp_min(1).to(losses.scalar_type());
  return losses.sum(1).div(tokens);
}

at::Tensor mean_per_example(const at::Tensor& values) {
  GRADUS_CHECK(kComponent, values.defined() && values.dim() >= 1,
               "values must have examples in dimension 0; got a scalar or nothing");
  return values.dim() == 1 ? values : values.flatten(1).mean(1);
}

}  // namespace gradus::privacy
