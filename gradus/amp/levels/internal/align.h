#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/plane/op/op_plane.h>

namespace gradus::amp::internal {

/// Gives an operator that takes one of @p parameters, or a view of one, its other floating
/// arguments in @p dtype, which is theirs: a module whose parameters were cast meets its inputs
/// there.
std::shared_ptr<plane::op::Handler> align_with(std::vector<at::Tensor> parameters,
                                               at::ScalarType dtype);

}  // namespace gradus::amp::internal
