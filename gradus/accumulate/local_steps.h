#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::accumulate {

struct LocalStepsOptions {
  std::int64_t steps = 1;      ///< Micro-batches, each with a local step: the paper's lambda. >= 1.
  double learning_rate = 0.0;  ///< Of the local steps: the paper's eta. Finite, > 0.
};

/// What a window of local steps accumulated.
struct LocalStepsResult {
  std::int64_t steps = 0;
  double mean_loss = 0.0;  ///< Of the losses on the way; NaN if one of them was.
};

/// Accumulated gradient normalisation (Hermans, Spanakis and Moeckel 2017, "Accumulated gradient
/// normalization").
///
/// Each micro-batch i is evaluated at parameters that already made the local steps before it, and
/// the update is the path's sum divided by the number of steps:
///
///     theta_{i+1} = theta_i - eta * g_i,   g_i = dL(theta_i; x_i, y_i) / dtheta
///     theta_new   = theta_0 - (eta / lambda) * sum_{i < lambda} g_i
///
/// finish() puts the parameters back to theta_0 and leaves (1 / lambda) * sum g_i in .grad, so that
/// SGD with rate eta makes the paper's update, any other optimizer its own, and a process can send
/// the gradient to others first. GradientWindow with Normalisation::mean differs only in that all
/// g_i are taken at theta_0. Keeps two copies of the parameters: theta_0 and the sum, in fp32 for
/// narrower dtypes.
class LocalSteps {
 public:
  /// @throws UserError on an undefined parameter, an option out of its range, and a parameter that
  /// an optimizer steps inside backward (BackwardSteps).
  LocalSteps(const std::vector<at::Tensor>& parameters, const LocalStepsOptions& options);
  /// Puts the parameters back if a window is unfinished.
  ~LocalSteps();
  LocalSteps(const LocalSteps&) = delete;
  LocalSteps& operator=(const LocalSteps&) = delete;

  /// Runs backward on @p loss, a scalar, adds the gradients to the sum, makes the local step and
  /// clears the gradients.
  /// @throws UserError, with nothing run, if the window is full, if @p loss is no scalar that
  /// requires a gradient, or if a parameter has a gradient already. If backward throws, the
  /// parameters stay as the steps before left them and only reset() is accepted.
  void backward(const at::Tensor& loss);

  bool full() const;
  bool empty() const;

  /// Ends the window, full or not: a partial one is divided by the steps it made.
  /// @throws UserError if it is empty or broken.
  LocalStepsResult finish();

  /// Abandons the window: parameters as they were before it, no gradients.
  void reset();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradus::accumulate
