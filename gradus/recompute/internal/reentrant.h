#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/recompute/checkpoint.h>

namespace gradus::recompute::internal {

/// run_reentrant() with options as they are.
std::vector<at::Tensor> run_reentrant_node(
    const CheckpointOptions& options, std::vector<at::Tensor> inputs,
    const std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)>& first,
    std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)> again);

}  // namespace gradus::recompute::internal
