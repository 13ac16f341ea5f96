#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::accumulate {

/// What the accumulated gradient of a window is.
enum class Normalisation : std::uint8_t {
  mean,      ///< Mean of the losses' gradients: right when micro-batches weigh the same.
  tokens,    ///< Mean over all tokens: losses weighted by backward()'s weight, divided by the
             ///< window's total weight.
  sum,       ///< Sum of the losses' gradients: SGD does theta - lr * sum.
  examples,  ///< As tokens, with examples for weights.
};

/// For a technique that exchanges gradients between processes: once a window, not once a
/// micro-batch.
struct WindowHooks {
  /// Called before each backward pass. @p last: the window ends with this one, so that gradients
  /// may be exchanged while it runs. Known for a full window, and for a partial one that was
  /// announced by MicroBatch::last.
  std::function<void(bool last)> before_backward{};
  /// Called by finish() if no backward pass was announced as the last: exchanges what the window
  /// accumulated, in place, before it is normalised. One tensor a parameter, undefined where there
  /// is no gradient.
  std::function<void(const std::vector<at::Tensor>& gradients)> reduce{};
  /// Gives the sum over all processes of this process's weight, for gradients that are summed over
  /// processes. Called once in finish(), with tokens and examples only.
  std::function<double(double weight)> sum_weights{};
};

struct WindowOptions {
  std::int64_t micro_batches = 1;  ///< Micro-batches in a full window. >= 1.
  Normalisation normalisation = Normalisation::tokens;
  /// The total weight of every full window, if known beforehand (fixed-length text). Only with
  /// tokens and examples; finite, > 0. Then each loss is scaled as it comes and finish() needs no
  /// pass over the gradients. With hooks.sum_weights: the total of all processes.
  std::optional<double> total_weight = std::nullopt;
  /// Examples in a full window, in place of micro_batches: the window is full when it holds as
  /// many, however they were cut into micro-batches. >= 1; not with mean.
  std::optional<std::int64_t> effective_batch = std::nullopt;
  /// Multiplies a loss by the loss scale, for mixed precision:
  /// `[&](const at::Tensor& t) { return scaler.scale(t); }`. Given a scalar in fp32 (fp64 for an
  /// fp64 loss); its result is part of backward's seed, so that the loss reported is the true one
  /// and finish() leaves gradients scaled.
  std::function<at::Tensor(const at::Tensor&)> scale_loss{};
  /// Sums up the gradients of bf16 and fp16 parameters in fp32, see WideGradients.
  bool fp32_gradients = false;
  /// finish() drops the gradients of a window with a value that is not finite, be it only in .grad
  /// because an fp32 sum is beyond fp16, and says so. Not with scale_loss, whose scaler has to see
  /// them.
  bool skip_non_finite = false;
  WindowHooks hooks{};
};

/// What is known of one micro-batch beside its loss and weight.
struct MicroBatch {
  /// Rows behind the loss, for reports and effective_batch. Unset: the weight if the normalisation
  /// is examples, else unknown.
  std::optional<std::int64_t> examples = std::nullopt;
  bool last = false;  ///< The window ends here, full or not (the end of an epoch).
};

/// What a window accumulated.
struct WindowResult {
  std::int64_t micro_batches = 0;
  double weight = 0.0;  ///< Sum of the weights given to backward(), of this process.
  double loss = 0.0;    ///< The losses combined as the gradients were. NaN if one of them was.
  std::optional<std::int64_t> examples = std::nullopt;  ///< The effective batch, if known.
  Normalisation normalisation = Normalisation::tokens;
  bool partial = false;     ///< It held less than a full window.
  bool skipped = false;     ///< Not finite; its gradients were dropped (skip_non_finite).
  double loss_scale = 1.0;  ///< What gradients are still multiplied by.
};

/// "4 micro-batches, effective batch 32 examples, 4096 tokens, loss 1.8"; a partial or skipped
/// window is called so.
std::string describe(const WindowResult& result);

/// A window over given parameters, for parts that must not act between its micro-batches.
struct OpenWindow {
  std::int64_t micro_batches = 0;  ///< Of a full one; 0: as many as the effective batch takes.
  std::int64_t held = 0;           ///< Backward passes finished in the window.
  bool in_last_backward = false;   ///< The backward pass that ends the window is running.
  /// With in_last_backward: what finish() will multiply gradients by. Unknown to the window, and so
  /// that of this process alone, with WindowHooks::sum_weights.
  double remaining_factor = 1.0;
};

/// The living window of more than one micro-batch over any of @p parameters, if there is one.
/// Optimizers that step inside backward ask at construction, to refuse or to defer, and in
/// backward. Thread-safe.
std::optional<OpenWindow> open_window(const std::vector<at::Tensor>& parameters);

/// Where a window stands, for an optimizer that steps inside backward.
struct WindowPass {
  bool running = false;  ///< In a backward pass of the window; else it holds earlier ones.
  bool last = false;     ///< That pass ends the window.
  double factor = 1.0;   ///< With last: what finish() would multiply gradients by.
};

/// That of the window over any of @p parameters, of however many micro-batches, whose backward pass
/// is running; else of one that is not finished; else nothing. Thread-safe.
std::optional<WindowPass> window_pass(const std::vector<at::Tensor>& parameters);

/// Cuts @p effective_batch examples into the fewest micro-batches of at most @p micro_batch, whose
/// sizes differ by at most one: 32 by 6 gives 6, 6, 5, 5, 5, 5.
/// @throws UserError if either is < 1.
std::vector<std::int64_t> split_batch(std::int64_t effective_batch, std::int64_t micro_batch);

/// Accumulates the gradients of several micro-batches into one optimizer step's.
///
/// A window ends with finish(), full or not: a partial one (the end of an epoch) is divided by what
/// it really holds. The object then starts the next window. Gradients must be cleared in between.
/// Not safe from two threads at once.
///
/// @code
/// GradientWindow window(model->parameters(), {.micro_batches = 8});
/// for (const auto& batch : batches) {
///   window.backward(model->loss(batch), batch.tokens);
///   if (!window.full()) continue;
///   log(window.finish().loss);
///   optimizer.step();
///   optimizer.zero_grad();
/// }
/// if (!window.empty()) { window.finish(); optimizer.step(); optimizer.zero_grad(); }
/// @endcode
class GradientWindow {
 public:
  /// @param parameters  Those whose gradients finish() may have to divide; repeats count once.
  /// Others that a loss reaches accumulate too, but are never divided: give all of them.
  /// @throws UserError on an undefined parameter, an option out of its range, and one that cannot
  /// work with an optimizer that steps a parameter inside backward (BackwardSteps): fp32_gradients,
  /// skip_non_finite, scale_loss, hooks.reduce, hooks.sum_weights.
  GradientWindow(std::vector<at::Tensor> parameters, const WindowOptions& options);
  ~GradientWindow();
  GradientWindow(GradientWindow&&) noexcept;
  GradientWindow& operator=(GradientWindow&&) noexcept;
  GradientWindow(const GradientWindow&) = delete;
  GradientWindow& operator=(const GradientWindow&) = delete;

  /// Runs backward on one micro-batch's loss.
  ///
  /// @param loss    Scalar of a floating dtype: the mean over the micro-batch's @p weight tokens.
  /// @param weight  Tokens (or examples) behind @p loss: finite, > 0. With mean and sum it is only
  /// counted.
  /// @throws UserError, with nothing run: full window, bad loss or weight, a 16-bit loss that would
  ///         round its weight where hooks forbid another one, more examples than the
  ///         effective batch has left, or a parameter that still has a gradient when the window
  ///         begins (clear it with zero_grad(true); a gradient of zeros is refused too). If
  ///         backward itself throws, the window is broken: some parameters may hold part of a
  ///         gradient, so only reset() is accepted then.
  void backward(const at::Tensor& loss, double weight = 1.0);
  void backward(const at::Tensor& loss, double weight, const MicroBatch& micro_batch);

  bool full() const;
  bool empty() const;
  /// Whether the next backward() fills the window, told before its forward pass: all others need no
  /// exchange of gradients. @p examples: of that micro-batch; needed with effective_batch.
  bool is_last_micro_batch(std::optional<std::int64_t> examples = std::nullopt) const;

  /// Brings the gradients to their normalisation and starts the next window.
  /// @throws UserError if the window is empty or broken, if the loss scale changed within it, and
  /// if it is a partial one that nobody announced and hooks exchange gradients in backward only.
  WindowResult finish();

  /// The fp32 gradient of @p parameter that the last finish() left (its .grad is that, rounded to
  /// the parameter's dtype), for master weights. Until the next window begins; undefined if there
  /// is none.
  ///
  /// Clipping and unscaling change .grad and not this: use scale_gradients(), which changes both.
  /// @throws UserError without fp32_gradients, and if .grad was changed in place since finish().
  at::Tensor wide_gradient(const at::Tensor& parameter) const;

  /// Multiplies the gradients that the last finish() left by @p factor: .grad and wide_gradient()
  /// alike. Clips to a norm: `window.scale_gradients(clip_coefficient(gradient_norm(p), norm))`.
  /// @throws UserError within a window, and if @p factor is not finite.
  void scale_gradients(double factor);

  /// States the total weight of the window about to begin in place of options.total_weight; for
  /// that window only. If the weights add up to something else, finish() divides by what was really
  /// accumulated.
  /// @throws UserError unless the window is empty, the normalisation is tokens or examples and
  /// @p weight is finite and > 0.
  void expect_total_weight(double weight);

  /// Abandons the window: drops its losses and the gradients of every parameter.
  void reset();

  /// "8 micro-batches a step, mean over tokens" or "effective batch 32 examples a step, whatever
  /// the micro-batch, mean over examples".
  std::string describe() const;

 private:
  friend std::optional<OpenWindow> open_window(const std::vector<at::Tensor>& parameters);
  friend std::optional<WindowPass> window_pass(const std::vector<at::Tensor>& parameters);
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace gradus::accumulate
