#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace gradus::metrics {

/// Share of examples whose highest logit is that of their label, over any number of batches.
class Accuracy {
 public:
  /// Adds a batch. Of equal highest logits the first counts; a row with NaN counts as wrong.
  /// @param logits_BK  Floating, [B, K], K >= 1.
  /// @param labels_B  int64, [B], on the same device.
  /// @throws UserError on other shapes or dtypes.
  void add(const at::Tensor& logits_BK, const at::Tensor& labels_B);

  std::int64_t correct() const { return correct_; }
  std::int64_t examples() const { return examples_; }
  /// correct() / examples(). @throws UserError before the first example.
  double value() const;

 private:
  std::int64_t correct_ = 0;
  std::int64_t examples_ = 0;
};

}  // namespace gradus::metrics
