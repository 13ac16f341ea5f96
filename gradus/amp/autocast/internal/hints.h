#pragma once

#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include <gradus/plane/op/op_plane.h>

namespace gradus::amp::internal {

/// Notes the operator if a dimension of its layer is no multiple of 8, once a layer shape.
void note_shape(const plane::op::Call& call, c10::ScalarType dtype);

std::vector<std::string> noted_shapes();
void clear_noted_shapes();

}  // namespace gradus::amp::internal
