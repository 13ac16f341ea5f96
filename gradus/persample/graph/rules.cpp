#include <gradus/persample/graph/internal/rules.h>

#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/native_group_norm_backward.h>

#include <gradus/base/error.h>
#include <gradus/plane/grad/operands.h>

namespace gradus::persample::internal {

namespace {

namespace grad = plane::grad;

std::size_t as_index(std::int64_t value) { return static_cast<std::size_t>(value); }

OperandTerm formed(std::size_t edge, const at::Tensor& gradients) {
  return {edge, std::make_unique<FormedTerm>(gradients)};
}

// left [N, d] @ right [d, p], of which the examples are rows: right is shared.
// Or columns, where the weight stands on the left.
std::optional<OperandTerm> matrix_term(const grad::Product& product, std::size_t edge,
                                       const at::Tensor& gradient, const Layout& layout) {
  const bool right = edge == product.right;
  if (layout.dim != (right ? 0 : 1)) return std::nullopt;
  const at::Tensor other = right ? product.left_value() : product.right_value();
  if (!other.defined()) return std::nullopt;
  at::Tensor scaled = product.alpha == 1 ? gradient : gradient * product.alpha;
  const at::Tensor outputs = layout.by_example(scaled, layout.dim);
  const at::Tensor inputs = layout.by_example(other, layout.dim);
  if (right) return OperandTerm{edge, std::make_unique<ProductTerm>(inputs, outputs)};
  return OperandTerm{edge, std::make_unique<ProductTerm>(outputs, inputs)};
}

std::optional<OperandTerm> vector_term(const grad::Product& product, std::size_t edge,
                                       const at::Tensor& gradient, const Layout& layout) {
  if (edge != product.right || layout.dim != 0) return std::nullopt;
  const at::Tensor matrix = product.left_value();
  if (!matrix.defined()) return std::nullopt;
  const at::Tensor outputs = widened(layout.by_example(gradient, 0)).unsqueeze(1);  // [B, 1, T]
  const at::Tensor inputs = widened(layout.by_example(matrix, 0));                  // [B, T, d]
  return formed(edge, at::bmm(outputs, inputs).squeeze(1));
}

// [H, N, d] @ [H, d, p]: a matrix for each of H heads or groups.
std::optional<OperandTerm> batched_term(const grad::Product& product, std::size_t edge,
                                        const at::Tensor& gradient, const Layout& layout) {
  const bool right = edge == product.right;
  if (layout.dim != (right ? 1 : 2)) return std::nullopt;
  const at::Tensor other = right ? product.left_value() : product.right_value();
  if (!other.defined()) return std::nullopt;
  const auto by_head = [&](const at::Tensor& tensor) {  // [B, T, H, k] to [B * H, T, k]
    return widened(layout.by_example(tensor, layout.dim)).permute({0, 2, 1, 3}).flatten(0, 1);
  };
  const at::Tensor outputs = by_head(product.alpha == 1 ? gradient : gradient * product.alpha);
  const at::Tensor inputs = by_head(other);
  const at::Tensor gradients =
      right ? at::bmm(inputs.transpose(1, 2), outputs) : at::bmm(outputs.transpose(1, 2), inputs);
  return formed(edge, gradients.unflatten(0, {layout.examples, gradient.size(0)}));
}

}  // namespace

std::optional<at::Tensor> reduced_by_example(const at::Tensor& gradient, const Layout& layout,
                                             const std::vector<std::int64_t>& sizes) {
  const std::int64_t extra = gradient.dim() - static_cast<std::int64_t>(sizes.size());
  if (extra < 0 || layout.dim < 0) return std::nullopt;
  const auto operand_size = [&](std::int64_t dim) {
    return dim < extra ? 1 : sizes[as_index(dim - extra)];
  };
  if (operand_size(layout.dim) != 1) return std::nullopt;
  const at::Tensor parts = layout.by_example(gradient, layout.dim);  // [B, T, others]
  std::vector<std::int64_t> summed{1};
  for (std::int64_t dim = 0; dim < gradient.dim(); ++dim) {
    if (dim == layout.dim) continue;
    if (operand_size(dim) == 1) {
      summed.push_back(dim < layout.dim ? dim + 2 : dim + 1);
    } else if (operand_size(dim) != gradient.size(dim)) {
      return std::nullopt;
    }
  }
  const at::ScalarType type =
      gradient.scalar_type() == at::kDouble ? at::kDouble : at::ScalarType::Float;
  if (gradient.is_complex()) return std::nullopt;
  std::vector<std::int64_t> result{layout.examples};
  result.insert(result.end(), sizes.begin(), sizes.end());
  return parts.sum(summed, /*keepdim=*/false, type).view(result);
}

std::optional<std::vector<OperandTerm>> product_rule(const NodeUse& use) {
  const auto product = grad::as_product(use.node);
  if (!product || !use.gradients[0].defined() || use.layouts[0].dim < 0) return std::nullopt;
  const at::Tensor& gradient = use.gradients[0];
  const Layout& layout = use.layouts[0];
  if (gradient.is_complex()) return std::nullopt;
  std::vector<OperandTerm> terms;
  for (const std::size_t edge : use.shared) {
    if (product->added == edge) {
      auto sum = reduced_by_example(gradient, layout, use.operand_sizes(edge));
      if (!sum) return std::nullopt;
      terms.push_back(formed(edge, product->beta == 1 ? *sum : *sum * product->beta));
      continue;
    }
    auto term = product->vector       ? vector_term(*product, edge, gradient, layout)
                : gradient.dim() == 2 ? matrix_term(*product, edge, gradient, layout)
                                      : batched_term(*product, edge, gradient, layout);
    if (!term) return std::nullopt;
    terms.push_back(*std::move(term));
  }
  return terms;
}

namespace {

// Gradients of scale and bias, [B, channels].
struct ScaleGradients {
  at::Tensor weight{};
  at::Tensor bias{};
};

// The operator's own kernel adds up over examples. Told that all examples' channels are channels of
// one example, it does not; it reads its operands once and keeps nothing in their size.
ScaleGradients group_gradients(const grad::Normalisation& norm, const at::Tensor& gradient,
                               const Layout& layout) {
  const std::int64_t images = gradient.size(0);
  const std::int64_t channels = images * gradient.size(1);
  const at::Tensor gradients = widened(gradient).contiguous().view({1, channels, -1});
  const at::Tensor inputs = widened(norm.input()).contiguous().view({1, channels, -1});
  const at::Tensor mean = widened(norm.mean()).reshape({1, -1});
  const at::Tensor deviation = widened(norm.inverse_deviation()).reshape({1, -1});
  const auto [none, weight, bias] = at::native_group_norm_backward(
      gradients, inputs, mean, deviation, at::empty({channels}, inputs.options()), 1, channels,
      gradients.size(2), images * norm.groups, {false, true, true});
  const auto summed = [&](const at::Tensor& rows) {
    const at::Tensor parts = layout.by_example(rows.view({images, -1}), 0);
    return parts.size(1) == 1 ? parts.squeeze(1) : parts.sum(1);
  };
  return {summed(weight), summed(bias)};
}

}  // namespace

std::optional<std::vector<OperandTerm>> normalisation_rule(const NodeUse& use) {
  const auto norm = grad::as_normalisation(use.node);
  if (!norm || !use.gradients[0].defined()) return std::nullopt;
  GRADUS_CHECK("persample", !norm->training,
               "losses that depend on one example each are required; got BatchNorm in training "
               "(NativeBatchNormBackward0), which normalises over the batch: call eval() on it, or "
               "replace it by GroupNorm");
  const at::Tensor& gradient = use.gradients[0];
  for (const std::size_t edge : use.shared) {
    if (edge != norm->weight && edge != norm->bias) return std::nullopt;
  }
  std::vector<OperandTerm> terms;
  if (norm->kind == grad::Normalisation::Kind::group && use.layouts[0].dim == 0 &&
      gradient.numel() > 0) {
    const ScaleGradients both = group_gradients(*norm, gradient, use.layouts[0]);
    for (const std::size_t edge : use.shared) {
      terms.push_back(formed(edge, edge == norm->weight ? both.weight : both.bias));
    }
    return terms;
  }
  for (const std::size_t edge : use.shared) {
    const std::vector<std::int64_t> sizes = use.operand_sizes(edge);
    std::vector<std::int64_t> broadcast = sizes;
    if (norm->normalised_dims == 0) {
      // One value a channel, which is dimension 1.
      broadcast.assign(as_index(gradient.dim()) - 1, 1);
      broadcast[0] = gradient.size(1);
    }
    at::Tensor values = gradient;
    if (edge == norm->weight) {
      const at::Tensor inputs = norm->normalised_input();
      values = inputs.scalar_type() == gradient.scalar_type() ? inputs.mul_(gradient)
                                                              : inputs * gradient;
    }
    auto sum = reduced_by_example(values, use.layouts[0], broadcast);
    if (!sum) return std::nullopt;
    std::vector<std::int64_t> result{use.examples()};
    result.insert(result.end(), sizes.begin(), sizes.end());
    terms.push_back(formed(edge, sum->view(result)));
  }
  return terms;
}

std::optional<std::vector<OperandTerm>> embedding_rule(const NodeUse& use) {
  const auto embedding = grad::as_embedding(use.node);
  if (!embedding || !use.gradients[0].defined()) return std::nullopt;
  const Layout& layout = use.layouts[0];
  const at::Tensor& gradient = use.gradients[0];
  if (layout.dim < 0 || layout.dim == gradient.dim() - 1) return std::nullopt;
  GRADUS_CHECK("persample", !embedding->scale_by_frequency,
               "an Embedding whose gradients belong to single examples is required; got "
               "scale_grad_by_freq, which divides by the frequency in the whole batch: set it to "
               "false");
  at::Tensor indices = layout.by_example(embedding->indices(), layout.dim).flatten(1);
  if (embedding->padding_index >= 0) {
    indices = indices.masked_fill(indices == embedding->padding_index, -1);
  }
  const at::Tensor values = layout.by_example(gradient, layout.dim).flatten(1, -2);
  std::vector<OperandTerm> terms;
  terms.push_back(
      {grad::Embedding::kWeight, std::make_unique<LookupTerm>(indices, values, embedding->rows)});
  return terms;
}

std::optional<std::vector<OperandTerm>> elementwise_rule(const NodeUse& use) {
  using Kind = grad::Elementwise::Kind;
  const auto operation = grad::as_elementwise(use.node);
  if (!operation || !use.gradients[0].defined()) return std::nullopt;
  const at::Tensor& gradient = use.gradients[0];
  std::vector<OperandTerm> terms;
  for (const std::size_t edge : use.shared) {
    at::Tensor values = gradient;
    switch (operation->kind) {
      case Kind::add:
        if (operation->scale.at(edge) != 1) values = gradient * operation->scale[edge];
        break;
      case Kind::expand:
        break;
      case Kind::multiply: {
        const at::Tensor other = operation->operand(1 - edge);
        if (!other.defined()) return std::nullopt;
        values = gradient * other;
        break;
      }
      case Kind::divide: {
        const at::Tensor divisor = operation->operand(1);
        if (!divisor.defined()) return std::nullopt;
        values = gradient / divisor;
        if (edge == 1) values = values * operation->operand(0).neg() / divisor;
        break;
      }
      case Kind::prelu:
        if (edge != 1) return std::nullopt;
        values = gradient * operation->operand(0).clamp_max(0);
        break;
    }
    auto sum = reduced_by_example(values, use.layouts[0], use.operand_sizes(edge));
    if (!sum) return std::nullopt;
    terms.push_back(formed(edge, *sum));
  }
  return terms;
}

}  // namespace gradus::persample::internal
