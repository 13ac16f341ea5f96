#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::optim::internal {

/// The place of the first of @p gradients that has a NaN or an infinity. One read of each, and one
/// wait a device.
std::optional<std::size_t> first_non_finite(const std::vector<at::Tensor>& gradients);

}  // namespace gradus::optim::internal
