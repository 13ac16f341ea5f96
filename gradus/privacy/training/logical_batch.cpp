#include <gradus/privacy/training/internal/logical_batch.h>

#include <algorithm>
#include <utility>

#include <ATen/TensorOperators.h>

namespace gradus::privacy::internal {

void LogicalBatch::add(LogicalBatch more, std::size_t parameters) {
  // All memory is there before the first sum is touched.
  const at::Tensor both = unclipped + more.unclipped;
  sums.resize(parameters);
  more.sums.resize(parameters);
  norms.reserve(norms.size() + more.norms.size());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (!more.sums[i].defined()) continue;
    if (sums[i].defined()) {
      sums[i].add_(more.sums[i]);
    } else {
      sums[i] = std::move(more.sums[i]);
    }
  }
  unclipped = both;
  sensitivity = std::max(sensitivity, more.sensitivity);
  examples += more.examples;
  clipped += more.clipped;
  non_finite += more.non_finite;
  for (at::Tensor& each : more.norms) norms.push_back(std::move(each));
}

}  // namespace gradus::privacy::internal
