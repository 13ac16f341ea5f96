#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/randn.h>

// What the tests of small losses make them of.

namespace gradus::persample::internal {

inline at::Tensor doubles(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); }
inline at::Tensor leaf(at::IntArrayRef sizes) { return (doubles(sizes) * 0.5).requires_grad_(); }
inline at::Tensor by_example(const at::Tensor& values) { return values.flatten(1).sum(1); }

}  // namespace gradus::persample::internal
