#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::privacy {

/// A saved state: tensors by name, on the CPU, copies. Any format that keeps names, dtypes and
/// shapes will do to store it (gradus/state/safetensors.h does).
using StateEntries = std::vector<std::pair<std::string, at::Tensor>>;

}  // namespace gradus::privacy
