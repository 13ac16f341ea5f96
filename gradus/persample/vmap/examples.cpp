#include <gradus/persample/vmap/examples.h>

#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>
#include <c10/core/ScalarType.h>

#include <gradus/base/error.h>

namespace gradus::persample {

std::int64_t count_examples(const Batch& batch) {
  GRADUS_CHECK("persample", !batch.empty(), "a batch needs at least one tensor; got none");
  std::int64_t examples = -1;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const at::Tensor& tensor = batch[i];
    GRADUS_CHECK("persample", tensor.defined(), "tensor ", i, " of the batch is undefined");
    GRADUS_CHECK("persample", tensor.layout() == c10::kStrided, "tensor ", i,
                 " of the batch must be dense; got layout ", tensor.layout());
    GRADUS_CHECK("persample", tensor.dim() >= 1, "tensor ", i,
                 " of the batch must count examples in dimension 0; got a scalar");
    GRADUS_CHECK("persample", tensor.size(0) >= 1, "tensor ", i,
                 " of the batch must hold at least one example; got shape ", tensor.sizes());
    if (examples < 0) examples = tensor.size(0);
    GRADUS_CHECK("persample", tensor.size(0) == examples,
                 "all tensors of a batch must hold the same number of examples in dimension 0; "
                 "tensor 0 has ",
                 examples, ", tensor ", i, " has shape ", tensor.sizes());
  }
  return examples;
}

Batch examples_at(const Batch& batch, const std::vector<std::int64_t>& indices) {
  const std::int64_t examples = count_examples(batch);
  GRADUS_CHECK("persample", !indices.empty(), "at least one example is required; got no index");
  for (const std::int64_t index : indices) {
    GRADUS_CHECK("persample", index >= 0 && index < examples, "an example's index must be in [0, ",
                 examples, "); got ", index);
  }
  const at::Tensor at = at::tensor(indices);
  Batch chosen;
  chosen.reserve(batch.size());
  for (const at::Tensor& tensor : batch) {
    chosen.push_back(at::index_select(tensor.detach(), 0, at.to(tensor.device())));
  }
  return chosen;
}

at::Tensor summed_loss(const at::Tensor& loss, std::int64_t examples) {
  GRADUS_CHECK("persample", loss.defined(), "the loss function returned an undefined tensor");
  GRADUS_CHECK("persample", at::isFloatingType(loss.scalar_type()),
               "the loss must be of a real floating dtype; got ", loss.scalar_type());
  const bool by_example = loss.dim() == 1 && loss.size(0) == examples;
  const bool by_batch = loss.dim() == 1 && examples == 1;
  GRADUS_CHECK("persample", by_example || (loss.dim() == 0 && examples == 1),
               "the loss function must give one loss an example, shape [", examples,
               "]; got shape ", loss.sizes(),
               by_batch ? ". If it uses a tensor that holds one row for each example of the batch, "
                          "pass that in the batch too instead of capturing it"
                        : ". Leave out the mean over the batch");
  return loss.sum();
}

bool wants_gradient(const NamedParameter& parameter) {
  GRADUS_CHECK("persample", parameter.tensor.defined(), "parameter '", parameter.name,
               "' is undefined");
  GRADUS_CHECK("persample", !parameter.tensor.requires_grad() || parameter.tensor.is_leaf(),
               "parameter '", parameter.name, "' must be a leaf; it was computed by ",
               "an operator: pass what it was computed from");
  return parameter.tensor.requires_grad();
}

std::uint64_t example_seed(std::uint64_t seed, std::int64_t index) {
  std::uint64_t mixed = seed + 0x9e3779b97f4a7c15U * (static_cast<std::uint64_t>(index) + 1);
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9U;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebU;
  return mixed ^ (mixed >> 31);
}

}  // namespace gradus::persample
