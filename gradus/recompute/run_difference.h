#pragma once

// For this module's tests: a step run plainly and with checkpoints, compared bit by bit.

#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/rand.h>

namespace gradus::recompute {

/// Runs @p step (which returns the tensors to compare) plainly and checkpointed from the same
/// random state; returns "" if all bits and the final random states agree.
inline std::string difference(
    const std::function<std::vector<at::Tensor>(bool checkpointed)>& step) {
  at::manual_seed(11);
  const auto plain = step(false);
  const auto plain_next = at::rand({3});
  at::manual_seed(11);
  const auto checkpointed = step(true);
  if (!at::rand({3}).equal(plain_next)) return "the generator ends in another state";
  if (plain.size() != checkpointed.size()) return "another number of results";
  for (std::size_t i = 0; i < plain.size(); ++i) {
    if (plain[i].defined() != checkpointed[i].defined())
      return "result " + std::to_string(i) + " is missing";
    if (plain[i].defined() && !plain[i].equal(checkpointed[i]))
      return "result " + std::to_string(i) + " differs";
  }
  return "";
}

}  // namespace gradus::recompute
