#pragma once

#include <cstdint>
#include <vector>

namespace gradus::privacy {

/// Steps of the Poisson-subsampled Gaussian mechanism that share their parameters: each example
/// enters the batch on its own with probability sample_rate, contributions are clipped to L2 norm
/// C, and Gaussian noise of standard deviation noise_multiplier * C is added to their sum.
struct GaussianSteps {
  double noise_multiplier = 1.0;    ///< Sigma, finite, >= 0; 0 adds no noise: epsilon is infinite.
  double sample_rate = 0.0;         ///< q, in [0, 1]; 1 is the full batch, 0 releases only noise.
  std::int64_t steps = 1;           ///< >= 0; empty batches count.
  std::int64_t dataset_size = 0;    ///< Examples; > 0 where max_batch_size is set, else unused.
  std::int64_t max_batch_size = 0;  ///< Larger batches are cut to this; 0 where none is ever cut.

  bool operator==(const GaussianSteps&) const = default;
};

/// Everything that was released about the data: plain data, to be saved and restored as it is.
///
/// Order does not matter to any accountant, so that steps with equal parameters are one entry: a
/// schedule of noise or of sample rates costs one entry for each distinct value. Reading from
/// several threads is safe while none writes.
class History {
 public:
  History() = default;
  /// Restores saved entries; equal ones merge. @throws UserError as add().
  explicit History(const std::vector<GaussianSteps>& entries);

  /// Counts @p steps. Those of 0 steps are dropped. @throws UserError on a value outside the ranges
  /// of GaussianSteps, or more than 2^62 steps in all; nothing is counted then.
  void add(const GaussianSteps& steps);
  /// Counts all of @p other. @throws UserError as add(); nothing is counted then.
  void add(const History& other);

  const std::vector<GaussianSteps>& entries() const { return entries_; }
  std::int64_t steps() const { return steps_; }  ///< Of all entries.

  /// Whatever the order of entries.
  bool operator==(const History& other) const;

 private:
  std::vector<GaussianSteps> entries_;
  std::int64_t steps_ = 0;
};

}  // namespace gradus::privacy
