#pragma once

#include <set>
#include <string>

#include <gradus/base/rng.h>
#include <gradus/plane/op/op_plane.h>

namespace gradus::persample::internal {

/// While it lives, operators that draw random numbers give constants (a Bernoulli draw 1, others
/// 1/2), so that a batch and its examples alone can be compared; generators are put back at the
/// end.
class [[nodiscard]] FixedRandomness {
 public:
  FixedRandomness();

  /// Names of random operators that could not be made constant.
  const std::set<std::string>& still_random() const;
  /// True if any operator drew random numbers.
  bool drew() const;

 private:
  class Handler;
  base::RngGuard generators_;
  std::shared_ptr<Handler> handler_;
  plane::op::Guard guard_;
};

}  // namespace gradus::persample::internal
