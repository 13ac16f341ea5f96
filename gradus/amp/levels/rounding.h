#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace gradus::amp {

/// Numbers for stochastic rounding. The n-th use of one seed draws the same numbers in any process,
/// on any number of threads.
struct RoundingStream {
  std::uint64_t seed = 0;
  std::uint64_t uses = 0;  ///< Advances by one at each use.
};

/// Writes @p source, rounded to bfloat16, to @p target: to one of the two neighbours, the nearer
/// the likelier, so that the mean is the value (Gupta et al. 2015, section 3.2). Values that
/// bfloat16 holds stay as they are; infinities and NaN too. Bumps the version of @p target.
///
/// @param source  float32.
/// @param target  bfloat16, the shape and device of @p source, no gaps or overlaps in memory.
/// @throws UserError on another dtype, shape or device.
void round_stochastically(const at::Tensor& source, const at::Tensor& target,
                          RoundingStream& stream);

}  // namespace gradus::amp
