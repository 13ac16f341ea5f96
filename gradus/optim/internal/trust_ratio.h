#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

namespace gradus::optim::internal {

/// The Euclidean norm of each tensor, as one vector on their device and in their dtype. Where
/// float32 squares may have been lost or infinite, in float64: in between, every value that counts
/// (at least norm / sqrt(n)) has a normal square.
inline at::Tensor norms_of(const std::vector<at::Tensor>& tensors) {
  auto norms = at::_foreach_norm(tensors, 2);
  if (tensors.front().scalar_type() != at::kFloat) return at::stack(norms);
  const auto first = at::stack(norms).to(at::kCPU);
  const auto values = first.accessor<float, 1>();
  for (std::size_t i = 0; i < norms.size(); ++i) {
    const float norm = values[static_cast<std::int64_t>(i)];
    if (norm > 1e-12F && norm < 1e18F) continue;  // false for NaN
    norms[i] = at::linalg_vector_norm(tensors[i].to(at::kDouble)).to(at::kFloat);
  }
  return at::stack(norms);
}

/// numerator / denominator, and 1 where either is 0: a layer of zeros (a new bias) would never move
/// and one without a gradient would divide by 0. At most the dtype's largest number.
inline at::Tensor ratio_or_one(const at::Tensor& numerator, const at::Tensor& denominator) {
  const double largest = numerator.scalar_type() == at::kFloat
                             ? double{std::numeric_limits<float>::max()}
                             : std::numeric_limits<double>::max();
  return at::where(numerator.gt(0).logical_and(denominator.gt(0)),
                   (numerator / denominator).clamp_max_(largest), at::ones_like(numerator));
}

}  // namespace gradus::optim::internal
