#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::optim {
class Optimizer;
}

namespace gradus::amp {

/// Which overflows add up to GradScalerOptions::hysteresis.
enum class Hysteresis : std::uint8_t {
  total,        ///< All since the scale last grew (Megatron-LM).
  consecutive,  ///< Those of iterations in a row: a clean one starts again (Apex).
};

/// What a skip-rate warning tells.
struct SkipWarning {
  std::size_t optimizer = 0;  ///< Number of the optimizer, in the order of first use.
  double rate = 0.0;          ///< Skipped steps over steps, among the last `window`.
  std::int64_t window = 0;
  std::string message = {};
};

struct GradScalerOptions {
  double init_scale = 65536.0;          ///< First factor of the loss. Finite, >= min_scale.
  double growth_factor = 2.0;           ///< > 1.
  double backoff_factor = 0.5;          ///< In (0, 1).
  std::int64_t growth_interval = 2000;  ///< Clean iterations in a row before growth. >= 1.
  bool enabled = true;  ///< False: scale() returns its input, step() is a plain step.
  bool dynamic =
      true;  ///< False: the scale stays as it is set; overflows are skipped all the same.
  /// The scale goes no lower. An overflow at the floor is an error: gradients up to 65504 / floor
  /// fit float16, so it is the loss that is not finite. > 0.
  double min_scale = 1.0 / 65536.0;
  double max_scale = std::numeric_limits<double>::infinity();  ///< Growth stops here.
  std::int64_t hysteresis = 1;  ///< The overflow that backs off: 1 is the first, as in torch. >= 1.
  Hysteresis hysteresis_counts = Hysteresis::total;
  /// All optimizers of an iteration skip if one overflows (Apex). Then unscale each of them before
  /// the first step, or step them by one call.
  bool skip_together = false;
  /// Warns once an optimizer when more than this part of its last skip_window steps were skipped.
  /// In [0, 1]; 1 never warns.
  double warn_skip_rate = 0.1;
  std::int64_t skip_window = 200;                          ///< Steps. >= 1.
  std::function<void(const SkipWarning&)> warn = nullptr;  ///< Default: TORCH_WARN.
  /// Makes the ranks of a group agree: gets a float32 tensor [optimizers], non-zero where this rank
  /// saw an overflow, and reduces it in place by maximum or sum. Called once a step() call, also
  /// for an optimizer without gradients here, and by update() for optimizers that were unscaled but
  /// not stepped: at the same places on every rank that runs the same program.
  std::function<void(at::Tensor&)> reduce_found_inf = nullptr;
};

/// Counts of one optimizer since the scaler was made.
struct StepCounts {
  std::int64_t steps = 0;    ///< step() calls, skipped ones included.
  std::int64_t skipped = 0;  ///< Those that changed nothing.
  double skip_rate() const {
    return steps == 0 ? 0.0 : static_cast<double>(skipped) / static_cast<double>(steps);
  }
};

/// Multiplies @p gradients by 1/@p scale in place, bumps their versions, and tells whether one was
/// not finite before. The scaler does this for an optimizer; use it yourself, with
/// GradScaler::set_unscaled, when the gradients are elsewhere (float16 gradients of master
/// weights).
///
/// @param gradients  Dense, floating, any devices and dtypes (float16 too); undefined ones are
/// passed over.
/// @return float32 scalar on the first gradient's device (CPU if there is none): non-zero if one
/// was not finite. No host synchronisation.
/// @throws UserError on a sparse or complex gradient.
at::Tensor unscale_gradients(std::span<const at::Tensor> gradients, double scale);

/// Scales the loss so that float16 gradients do not underflow, takes the scale out again before the
/// step, skips the steps whose gradients overflowed, and adapts the scale (Micikevicius et al.
/// 2018, section 3.2). States and state names as torch.amp.GradScaler; it takes the same decisions.
///
/// An iteration is: scale and backward, once or more; unscale, if gradients are read or clipped;
/// step, each optimizer once; update, once. Needs no autocast. Not safe from two threads at once.
///
/// @code
/// gradus::amp::GradScaler scaler;
/// scaler.scale(loss).backward();
/// scaler.unscale(optimizer);                                // optional: only to clip
/// gradus::optim::clip_gradient_norm(model->parameters(), 1.0);
/// scaler.step(optimizer);
/// scaler.update();
/// optimizer.zero_grad();
/// @endcode
class GradScaler {
 public:
  /// @throws UserError on an option out of its range.
  explicit GradScaler(GradScalerOptions options = {});
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;

  /// @p output times the scale. A float16 or bfloat16 scalar becomes float32, where the scale fits.
  /// Unless in a NoGradGuard it opens a window: update() is refused until gradients are unscaled.
  /// @throws UserError on an undefined output, or one of no real floating dtype.
  at::Tensor scale(const at::Tensor& output);
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs);

  /// Divides the gradients of @p optimizer by the scale, in place, each gradient once an iteration
  /// even if two optimizers hold its parameter, and looks for infinities and NaN. Without a host
  /// synchronisation. Sparse gradients are coalesced first.
  /// @throws UserError, with nothing changed: unscaled or stepped already since update(); float16
  /// gradient (names the parameter); gradient left from before the scale changed; no gradient at
  /// all (allowed with reduce_found_inf); an optimizer that steps within backward; with
  /// skip_together, after another optimizer's step.
  void unscale(optim::Optimizer& optimizer);

  /// Unscales if that was not done, then steps unless a gradient was not finite. One host
  /// synchronisation. What the callers wrote since unscale (clipping) is not checked again.
  /// @return Whether the optimizer stepped.
  /// @throws UserError as unscale, and if it stepped already since update().
  bool step(optim::Optimizer& optimizer);

  /// The same for several, with one host synchronisation: unscales all before the first steps.
  /// @return For each whether it stepped.
  std::vector<bool> step(std::span<optim::Optimizer* const> optimizers);

  /// Ends the iteration: backs off if an optimizer overflowed, else counts towards growth; or sets
  /// the scale to @p new_scale.
  /// @throws UserError: inside an accumulation window (a loss was scaled since the last unscale or
  /// step, and its gradients would be unscaled by another scale) and when nothing was stepped or
  /// unscaled, with nothing changed; @p new_scale not finite or below min_scale; an overflow at
  /// min_scale, after ending the iteration with the scale unchanged.
  void update(std::optional<double> new_scale = std::nullopt);

  /// The scale; 1 if not enabled. Costs no synchronisation.
  double get_scale() const;
  /// Clean iterations in a row since the scale last changed; torch's _growth_tracker.
  std::int64_t growth_tracker() const;
  bool enabled() const;
  const GradScalerOptions& options() const;

  /// Declares @p optimizer unscaled by the caller: its step reads @p found_inf (one element,
  /// non-zero: skip) and touches no gradient before it.
  /// @throws UserError as unscale.
  void set_unscaled(optim::Optimizer& optimizer, const at::Tensor& found_inf);

  /// The counts of @p optimizer: zeros if it was never stepped here.
  StepCounts counts(const optim::Optimizer& optimizer) const;
  /// The counts of all optimizers together.
  StepCounts counts() const;

  /// torch's keys: scale, growth_factor, backoff_factor, growth_interval, _growth_tracker; and
  /// _hysteresis_tracker if hysteresis > 1. Take it after update(). Empty if not enabled.
  std::map<std::string, double> state() const;

  /// Takes over a state of this class or of torch.amp.GradScaler and abandons the current
  /// iteration (zero the gradients). Nothing if not enabled.
  /// @throws UserError, with nothing changed: one of torch's five keys is missing, an unknown key,
  /// a value out of its range.
  void load_state(const std::map<std::string, double>& state);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gradus::amp
