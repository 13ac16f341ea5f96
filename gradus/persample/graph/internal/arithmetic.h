#pragma once

#include <algorithm>
#include <chrono>

#include <ATen/core/Tensor.h>

// What the terms share.

namespace gradus::persample::internal {

/// Squared L2 norm of each example of [B, ...], [B].
at::Tensor squared_norm_by_example(const at::Tensor& tensor);

/// The shortest of some runs: what the machine does beside only adds.
double milliseconds_of(const auto& work, int repeats) {
  double best = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    best = repeat == 0 ? taken.count() : std::min(best, taken.count());
  }
  return best;
}

}  // namespace gradus::persample::internal
