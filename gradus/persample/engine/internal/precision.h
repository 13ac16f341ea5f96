#pragma once

#include <memory>

#include <c10/core/ScalarType.h>

#include <gradus/plane/op/op_plane.h>

namespace gradus::persample::internal {

/// Sees, while it lives, how coarsely the program computes.
class [[nodiscard]] Precision {
 public:
  Precision();

  /// The floating dtype with the fewest digits that an operator gave so far: float64 if none did.
  at::ScalarType coarsest() const;
  /// Relative difference that another order of sums alone makes between two passes of one shape.
  double rounding() const;

 private:
  class Handler;
  std::shared_ptr<Handler> handler_;
  plane::op::Guard guard_;
};

}  // namespace gradus::persample::internal
