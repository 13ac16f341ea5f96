#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include <gradus/optim/optimizer.h>

namespace gradus::optim {

struct InBackwardOptions {
  /// Gradients accumulate over several backward passes: none steps until begin_last_pass() says
  /// that the next one is the last, or a pass of an accumulate::GradientWindow over the parameters
  /// is. That window's factor is applied then. Not with clip_norm.
  bool accumulation = false;
  /// Limits each element of each gradient, as clip_gradient_value. Finite, >= 0.
  std::optional<double> clip_value = std::nullopt;
  /// Clips to this norm over all gradients, as clip_gradient_norm. The norm is known only when all
  /// of them are, so OptimizerInBackward::backward runs the backward pass twice. >= 0.
  std::optional<double> clip_norm = std::nullopt;
  /// A constant factor in the loss, by which gradients are divided. A dynamic scale cannot work: it
  /// skips a step after seeing every gradient. Finite, > 0.
  double loss_scale = 1.0;
  /// Measures the norm of all gradients, before clipping, for InBackwardResult::gradient_norm. One
  /// more read of each; clip_norm measures it anyway.
  bool measure_norm = false;
};

/// What a step in backward did.
struct InBackwardResult {
  std::int64_t updated = 0;  ///< Parameters updated, in all.
  std::int64_t in_backward =
      0;  ///< Those that were updated, and their gradients freed, in backward.
  std::optional<double> gradient_norm =
      std::nullopt;  ///< Unscaled, before clipping; with measure_norm or clip_norm.
};

/// Steps each parameter as soon as backward has its whole gradient, and frees the gradient then
/// (Lv et al. 2023, LOMO, Algorithm 1, for any optimizer of gradus): the gradients never exist all
/// at once, so their peak is that of the largest few.
///
/// A parameter used several times steps once, after the sum. What cannot be right is refused by
/// name: a second gradient for a parameter before step() (an undeclared accumulation), step() of
/// the optimizer itself, clipping after backward, a skipping NonFinitePolicy. State, learning rates
/// and groups are the optimizer's own; set the rate before backward. If backward throws, parameters
/// that were updated stay so: reset() drops what is left. The optimizer must outlive this object.
///
/// @code
/// AdamW optimizer(model->parameters());
/// OptimizerInBackward in_backward(optimizer);
/// for (const auto& batch : batches) {
///   optimizer.set_learning_rate(schedule(step));
///   model->loss(batch).backward();
///   in_backward.step();  // ends the step: where optimizer.step() and zero_grad() would be
/// }
/// @endcode
class OptimizerInBackward {
 public:
  /// @throws UserError on options that do not fit together or are out of range, on a parameter that
  /// still has a gradient, on one that another OptimizerInBackward steps, on an optimizer whose
  /// NonFinitePolicy is skip, and on a parameter of a living accumulate::GradientWindow or
  /// LocalSteps that cannot work with it, see accumulate::BackwardSteps.
  explicit OptimizerInBackward(Optimizer& optimizer, const InBackwardOptions& options = {});
  ~OptimizerInBackward();
  OptimizerInBackward(const OptimizerInBackward&) = delete;
  OptimizerInBackward& operator=(const OptimizerInBackward&) = delete;

  /// Runs backward from @p loss, a scalar. With clip_norm this is the only way, and it runs twice:
  /// first to measure the norm, keeping the graph, then to step. Leaves that are not this
  /// optimizer's get their gradient once, unclipped (twice if a reentrant region hides them).
  /// @throws UserError with clip_norm and NonFinitePolicy::refuse, before any update, on a gradient
  /// that is not finite.
  void backward(const at::Tensor& loss);

  /// The next backward pass is the last one of the window, and steps. Not needed with an
  /// accumulate::GradientWindow, which knows. @throws UserError without accumulation.
  void begin_last_pass();

  /// Ends the step: updates parameters that have a gradient and did not step in backward (unused in
  /// the last pass of a window, or no pass was declared the last), frees those gradients, and lets
  /// the parameters step again. After finish() of a window.
  /// @throws UserError, with nothing changed, if a GradientWindow over the parameters is
  /// unfinished.
  InBackwardResult step();

  /// Drops all gradients and begins a new step, after a backward pass that threw.
  void reset();

  Optimizer& optimizer() const;
  const InBackwardOptions& options() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// True if an OptimizerInBackward steps @p parameter, so that its gradient is gone after backward.
bool steps_in_backward(const at::Tensor& parameter);

}  // namespace gradus::optim
