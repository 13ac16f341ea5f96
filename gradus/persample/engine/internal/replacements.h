#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <gradus/persample/vmap/examples.h>

namespace gradus::persample::internal {

/// The example whose values each example takes: its own number where nothing changes. What takes
/// part takes the values of one that does not change, so that no sum over the batch stays the same.
using Replacement = std::vector<std::int64_t>;

/// Ways to change some examples of a batch and leave the others, by values that the model takes:
/// those of other examples.
class Replacements {
 public:
  explicit Replacements(const Batch& batch);

  /// 2 ceil(log2 B): the examples that have a bit of their number set change, then those that have
  /// not. Of each pair either one changes alone in one of them.
  std::vector<Replacement> separating() const;
  /// Two: half of the examples, drawn from @p seed, changes, then the other half.
  std::vector<Replacement> halves(std::uint64_t seed) const;
  /// All but one change.
  Replacement all_but(std::int64_t example) const;
  /// One changes.
  Replacement only(std::int64_t example) const;

 private:
  Replacement taking(const std::vector<bool>& changed) const;
  std::vector<Replacement> both(std::vector<bool> changed) const;
  /// In how many tensors two examples have different values.
  std::size_t differences(std::size_t one, std::size_t other) const;

  std::size_t examples_ = 0;
  std::size_t most_ = 0;                     // tensors that differ between any examples
  std::vector<std::vector<double>> prints_;  // by tensor and example, equal for equal values
};

}  // namespace gradus::persample::internal
