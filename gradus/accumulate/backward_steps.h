#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::accumulate {

/// Declares, while it lives, that the gradients of some parameters are used and freed inside
/// backward, by an optimizer that steps there. Windows and local steps over any of them that need
/// gradients after backward are refused by name, whichever of the two is made first. Thread-safe.
class [[nodiscard]] BackwardSteps {
 public:
  /// @param accumulates  The optimizer waits for a window's last backward pass (backward_pass()).
  /// @throws UserError naming what a living window or LocalSteps over a parameter needs.
  BackwardSteps(const std::vector<at::Tensor>& parameters, bool accumulates);
  ~BackwardSteps();
  BackwardSteps(const BackwardSteps&) = delete;
  BackwardSteps& operator=(const BackwardSteps&) = delete;
};

}  // namespace gradus::accumulate
