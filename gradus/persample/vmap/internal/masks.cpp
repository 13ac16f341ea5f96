#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/broadcast_tensors.h>
#include <ATen/ops/index.h>
#include <ATen/ops/nonzero.h>

#include <gradus/persample/vmap/internal/example_transform.h>

namespace gradus::persample::internal {
namespace {

bool is_mask(const at::Tensor& tensor) {
  return (tensor.scalar_type() == c10::kBool || tensor.scalar_type() == c10::kByte) &&
         tensor.dim() > 0;
}

// The places where @p mask holds, one index tensor a dimension of it.
std::vector<at::Tensor> places(ExampleTransform& transform, const at::Tensor& mask,
                               std::string_view op) {
  const Plain value = plain(mask);
  std::vector<at::Tensor> columns;
  std::vector<std::vector<at::Tensor>> found(static_cast<std::size_t>(mask.dim()));
  {
    const OutsideLayers outside;
    const at::NoGradGuard no_grad;
    const std::int64_t examples = value.batched ? transform.layers().examples() : 1;
    for (std::int64_t example = 0; example < examples; ++example) {
      const at::Tensor at = at::nonzero(plain_of(value, example));
      for (std::size_t d = 0; d < found.size(); ++d) {
        found[d].push_back(at.select(1, static_cast<std::int64_t>(d)));
      }
    }
  }
  for (std::vector<at::Tensor>& column : found) {
    columns.push_back(value.batched ? transform.joined(column, op)
                                    : transform.layers().wrapped(column[0]));
  }
  return columns;
}

std::vector<std::optional<at::Tensor>> without_masks(
    ExampleTransform& transform, const std::vector<std::optional<at::Tensor>>& indices,
    std::string_view op) {
  std::vector<std::optional<at::Tensor>> plain_indices;
  for (const std::optional<at::Tensor>& index : indices) {
    if (!index || !index->defined() || !is_mask(*index)) {
      plain_indices.push_back(index);
      continue;
    }
    for (at::Tensor& column : places(transform, *index, op)) {
      plain_indices.emplace_back(std::move(column));
    }
  }
  return plain_indices;
}

}  // namespace

bool index_masks(ExampleTransform& transform, plane::op::Call& call) {
  const std::string_view name = call.name();
  if (name == "aten::masked_select") {
    const auto both =
        at::broadcast_tensors({call.arguments()[0].toTensor(), call.arguments()[1].toTensor()});
    if (!is_mask(both[1])) return false;
    c10::List<std::optional<at::Tensor>> indices;
    for (at::Tensor& column : places(transform, both[1], name))
      indices.push_back(std::move(column));
    call.replace({at::index(both[0], indices)});
    return true;
  }
  if (name != "aten::index" && name != "aten::index_put" && name != "aten::index_put_" &&
      name != "aten::_index_put_impl_") {
    return false;
  }
  if (!call.arguments()[1].isOptionalTensorList()) return false;
  const auto indices = call.arguments()[1].toOptionalTensorVector();
  bool any = false;
  for (const auto& index : indices) any = any || (index && index->defined() && is_mask(*index));
  if (any) {
    c10::List<std::optional<at::Tensor>> list;
    for (auto& index : without_masks(transform, indices, name)) list.push_back(std::move(index));
    call.set_argument(1, std::move(list));
  }
  return false;
}

}  // namespace gradus::persample::internal
