#pragma once

#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::amp::scaler {

/// Multiplies dense floating @p gradients by 1/@p scale in place and bumps their versions (unless
/// @p scale is 1, which only looks). Adds to @p found, for each device, a float32 scalar that is 1
/// if one of them was not finite.
void unscale_in_place(std::span<const at::Tensor> gradients, double scale,
                      std::vector<at::Tensor>& found);

/// One float32 scalar on the first one's device: their sum; CPU zero if there is none.
at::Tensor sum_of_found(std::span<const at::Tensor> found);

}  // namespace gradus::amp::scaler
