#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

namespace gradus::optim::internal {

/// The Euclidean norm of each tensor, as one vector on their device.
inline at::Tensor norms_of(const std::vector<at::Tensor>& tensors) {
  return at::stack(at::_foreach_norm(tensors, 2));
}

/// numerator / denominator, and 1 where either is 0: a layer of zeros (a new bias) would never move
/// and one without a gradient would divide by 0.
inline at::Tensor ratio_or_one(const at::Tensor& numerator, const at::Tensor& denominator) {
  return at::where(numerator.gt(0).logical_and(denominator.gt(0)), numerator / denominator,
                   at::ones_like(numerator));
}

}  // namespace gradus::optim::internal
