#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/persample/engine/internal/precision.h>
#include <gradus/persample/engine/internal/replacements.h>
#include <gradus/persample/vmap/examples.h>

namespace gradus::persample::internal {

/// Refuses programs in which one example changes what belongs to another, by changing examples.
class MixingCheck {
 public:
  /// @param loss  Gives for equal batches equal losses: by the same draws, from copies.
  MixingCheck(LossFunction loss, const Batch& batch, const Precision& precision,
              std::function<void(const std::string&)> log);

  /// Runs the forward pass on each of @p replacements.
  /// @return False if nothing could be told of some example: its own loss is not a number, or did
  /// not change with its values.
  /// @throws UserError if the loss of an example that kept its values changes.
  bool losses(const std::vector<Replacement>& replacements);
  /// The same for the gradient of the sum of the losses of the examples that keep their values, by
  /// a backward pass more: what the losses do not show yet behind weights that are zero. Whatever
  /// rules know, and hooks do, is no part of it.
  void gradients(const std::vector<Replacement>& replacements,
                 const std::vector<NamedParameter>& parameters);

  const Replacements& replacements() const { return replacements_; }

 private:
  at::Tensor losses_of(const Batch& batch);
  [[noreturn]] void refuse(const Replacement& replacement, std::int64_t example, double by);
  std::vector<at::Tensor> sum_gradients(const Batch& batch, const at::Tensor& kept,
                                        const std::vector<at::Tensor>& wanted) const;

  LossFunction loss_;
  const Batch& batch_;
  const Precision& precision_;
  std::function<void(const std::string&)> log_;
  Replacements replacements_;
  bool with_grad_ = false;  // the loss needs gradient mode
};

/// Dense, of @p wanted, zeros where the sum does not depend on them.
std::vector<at::Tensor> dense_gradients(const at::Tensor& sum,
                                        const std::vector<at::Tensor>& wanted);

/// L2 norm in float64.
double norm_of(const at::Tensor& tensor);

}  // namespace gradus::persample::internal
