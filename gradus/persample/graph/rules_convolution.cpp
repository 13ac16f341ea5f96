#include <algorithm>
#include <utility>

#include <ATen/ops/constant_pad_nd.h>

#include <gradus/persample/graph/convolution_term.h>
#include <gradus/persample/graph/internal/rules.h>
#include <gradus/plane/grad/operands.h>

namespace gradus::persample::internal {

namespace {

namespace grad = plane::grad;

// Padding by values where the operator's own would give the narrow factor another extent: an output
// padding of a stride and more, which a dilation allows.
at::Tensor fitted(const at::Tensor& wide, const at::Tensor& narrow, Correlation& correlation) {
  bool fits = true;
  std::vector<std::int64_t> pad;
  for (std::size_t dim = correlation.kernel.size(); dim-- > 0;) {
    const auto at = static_cast<std::int64_t>(dim) + 3;
    const std::int64_t reach = correlation.dilation[dim] * (correlation.kernel[dim] - 1) + 1;
    const std::int64_t padded = wide.size(at) + 2 * correlation.padding[dim];
    fits = fits && (padded - reach) / correlation.stride[dim] + 1 == narrow.size(at);
    const std::int64_t needed = (narrow.size(at) - 1) * correlation.stride[dim] + reach;
    pad.push_back(correlation.padding[dim]);
    pad.push_back(needed - wide.size(at) - correlation.padding[dim]);
  }
  if (fits) return wide;
  std::fill(correlation.padding.begin(), correlation.padding.end(), 0);
  return at::constant_pad_nd(wide, pad, 0);
}

// One value stands for all dimensions, as callers of at::conv2d may give it.
std::vector<std::int64_t> for_each_dim(const std::vector<std::int64_t>& values, std::size_t dims) {
  return values.size() == 1 ? std::vector<std::int64_t>(dims, values[0]) : values;
}

at::Tensor bias_gradients(const at::Tensor& gradient) {  // [B, I, O, *extents] to [B, O]
  std::vector<std::int64_t> summed{1};
  for (std::int64_t dim = 3; dim < gradient.dim(); ++dim) summed.push_back(dim);
  const bool is_double = gradient.scalar_type() == at::kDouble;
  return gradient.sum(summed, /*keepdim=*/false, is_double ? at::kDouble : at::ScalarType::Float);
}

}  // namespace

std::optional<std::vector<OperandTerm>> convolution_rule(const NodeUse& use) {
  using Convolution = grad::Convolution;
  const auto convolution = grad::as_convolution(use.node);
  if (!convolution || !use.gradients[0].defined()) return std::nullopt;
  const at::Tensor& gradient = use.gradients[0];
  const Layout& layout = use.layouts[0];
  if (layout.dim != 0 || gradient.is_complex() || gradient.numel() == 0) return std::nullopt;
  const at::Tensor gradients = layout.by_example(gradient, 0);
  std::vector<OperandTerm> terms;
  for (const std::size_t edge : use.shared) {
    if (edge == Convolution::kBias) {
      terms.push_back({edge, std::make_unique<FormedTerm>(bias_gradients(gradients))});
      continue;
    }
    const at::Tensor input = convolution->input();
    const std::vector<std::int64_t> sizes = use.operand_sizes(edge);
    if (edge != Convolution::kWeight || !input.defined() || input.numel() == 0 ||
        input.size(0) != gradient.size(0) || input.scalar_type() != gradient.scalar_type() ||
        sizes.size() < 3 || sizes.size() > 5) {
      return std::nullopt;
    }
    const at::Tensor inputs = layout.by_example(input, 0);
    const std::size_t dims = sizes.size() - 2;
    Correlation correlation{.kernel = {sizes.begin() + 2, sizes.end()},
                            .stride = for_each_dim(convolution->stride, dims),
                            .padding = for_each_dim(convolution->padding, dims),
                            .dilation = for_each_dim(convolution->dilation, dims),
                            .groups = convolution->groups};
    const at::Tensor& narrow = convolution->transposed ? inputs : gradients;
    const at::Tensor wide =
        fitted(convolution->transposed ? gradients : inputs, narrow, correlation);
    terms.push_back(
        {edge, std::make_unique<ConvolutionTerm>(wide, narrow, std::move(correlation))});
  }
  return terms;
}

}  // namespace gradus::persample::internal
