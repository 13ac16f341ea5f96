#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/persample/engine/sample_gradients.h>

namespace gradus::persample::internal {

/// How each parameter of one program is computed, and how well that is known.
struct Verdict {
  std::vector<Engine> engines{};  ///< By parameter.
  /// The batch showed that it holds: each example's loss depends on its values, and each parameter
  /// that the losses reach had a gradient.
  bool proved = false;
  /// Parameters that the losses reach and whose gradients were all zero.
  std::vector<std::size_t> silent{};
};

/// What is examined: one program on one batch.
struct Subject {
  const std::vector<NamedParameter>& parameters;
  const SampleOptions& options;
  const LossFunction& loss;
  const Batch& batch;
  std::vector<bool> reached{};  ///< By parameter: the graph of the losses has it.
  std::int64_t number = 0;      ///< Of the examination of this program; chooses examples.
  std::function<void(const std::string&)> log = nullptr;
};

/// Examines a program on a batch of at least two examples.
/// @throws UserError, by name, if examples mix, or a parameter needs another engine than the
/// options allow.
Verdict examine(const Subject& subject);

/// Examines it on a batch of one, which can mix with others by a state between calls only: with
/// @p other computed in between, if not null.
Verdict examine_alone(const Subject& subject, const Batch* other);

/// Looks for mixing again, by three forward passes.
void glance(const Subject& subject, const Batch* other);

/// @p loss on copies of its batch, from the random numbers as they are now, which stay as they are.
LossFunction with_same_draws(const LossFunction& loss);

/// Gradients by vmap or the loop.
std::vector<at::Tensor> gradients_by(Engine engine, const std::vector<NamedParameter>& parameters,
                                     const LossFunction& loss, const Batch& batch,
                                     const SampleOptions& options);

}  // namespace gradus::persample::internal
