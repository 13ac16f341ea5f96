#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::accumulate::internal {

/// Why what accumulates gradients cannot live beside an optimizer that steps inside backward.
struct Obstacles {
  std::string always{};              ///< Empty: none.
  std::string if_each_pass_steps{};  ///< Unless the optimizer waits for the last pass.
};

/// Keeps an accumulator known to BackwardSteps while it lives.
class [[nodiscard]] Accumulator {
 public:
  /// @throws UserError of @p component if there is an obstacle and a BackwardSteps over one of
  /// @p parameters lives.
  Accumulator(const char* component, const std::vector<at::Tensor>& parameters,
              const Obstacles& obstacles);
  ~Accumulator();
  Accumulator(const Accumulator&) = delete;
  Accumulator& operator=(const Accumulator&) = delete;
};

}  // namespace gradus::accumulate::internal
