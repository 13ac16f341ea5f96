#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::accumulate {

/// What the accumulated gradient of a window is.
enum class Normalisation : std::uint8_t {
  mean,    ///< Mean of the losses' gradients: right when micro-batches weigh the same.
  tokens,  ///< Mean over all tokens: losses weighted by backward()'s weight, divided by the
           ///< window's total weight.
  sum,     ///< Sum of the losses' gradients.
};

struct WindowOptions {
  std::int64_t micro_batches = 1;  ///< Micro-batches in a full window. >= 1.
  Normalisation normalisation = Normalisation::tokens;
  /// The total weight of every full window, if known beforehand (fixed-length text). Only with
  /// tokens; finite, > 0. Then each loss is scaled as it comes and finish() needs no pass over the
  /// gradients.
  std::optional<double> total_weight = std::nullopt;
};

/// What a window accumulated.
struct WindowResult {
  std::int64_t micro_batches = 0;
  double weight = 0.0;  ///< Sum of the weights given to backward().
  double loss = 0.0;    ///< The losses combined as the gradients were. NaN if one of them was.
};

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
  /// Others that a loss
  ///                    reaches accumulate too, but are never divided: give all of them.
  /// @throws UserError on an undefined parameter or an option out of its range.
  GradientWindow(std::vector<at::Tensor> parameters, const WindowOptions& options);

  /// Runs backward on one micro-batch's loss.
  ///
  /// @param loss    Scalar of a floating dtype: the mean over the micro-batch's @p weight tokens.
  /// @param weight  Tokens (or examples) behind @p loss: finite, > 0. With mean and sum it is only
  /// counted.
  /// @throws UserError, with nothing run: full window, bad loss or weight, or a parameter that
  /// still has a gradient
  ///         when the window begins (clear it with zero_grad(true); a gradient of zeros is refused
  ///         too). If backward itself throws, the window is broken: some parameters may hold part
  ///         of a gradient, so only reset() is accepted then.
  void backward(const at::Tensor& loss, double weight = 1.0);

  bool full() const { return count() >= options_.micro_batches; }
  bool empty() const { return count() == 0; }

  /// Brings the gradients to their normalisation and starts the next window.
  /// @throws UserError if the window is empty or broken.
  WindowResult finish();

  /// States the total weight of the window about to begin in place of options.total_weight; for
  /// that window only. If the weights add up to something else, finish() divides by what was really
  /// accumulated.
  /// @throws UserError unless the window is empty, the normalisation is tokens and @p weight is
  /// finite and > 0.
  void expect_total_weight(double weight);

  /// Abandons the window: drops its losses and the gradients of every parameter.
  void reset();

 private:
  std::int64_t count() const { return static_cast<std::int64_t>(losses_.size()); }
  void check_ready(const at::Tensor& loss, double weight) const;
  double seed_for(double weight) const;
  double remaining_factor() const;
  void start_next();

  std::vector<at::Tensor> parameters_;
  WindowOptions options_;
  std::optional<double> expected_weight_;
  std::vector<at::Tensor>
      losses_;  // Detached; read back only in finish(), so that no micro-batch waits for a device.
  std::vector<double> weights_;
  bool broken_ = false;
};

}  // namespace gradus::accumulate
