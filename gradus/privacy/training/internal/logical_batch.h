#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

namespace gradus::privacy::internal {

/// What was accumulated: of a logical batch, or of the one micro-batch that is added to it.
struct LogicalBatch {
  std::vector<at::Tensor> sums{};  ///< Clipped, one a parameter; undefined: nothing yet.
  at::Tensor unclipped = at::zeros({}, at::kDouble);  ///< Clipper::count.
  double sensitivity = 0.0;  ///< The largest that a micro-batch was clipped to.
  std::int64_t examples = 0;
  std::int64_t clipped = 0;
  std::int64_t non_finite = 0;
  std::vector<at::Tensor> norms{};

  /// Adds @p more for @p parameters parameters. After an exception this is as it was.
  void add(LogicalBatch more, std::size_t parameters);
};

}  // namespace gradus::privacy::internal
