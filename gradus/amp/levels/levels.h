#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/amp/levels/cast_tensors.h>
#include <gradus/amp/levels/properties.h>
#include <gradus/amp/scaler/grad_scaler.h>

namespace gradus::optim {
class Optimizer;
struct ParameterGroup;
}  // namespace gradus::optim

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace gradus::amp {

class Amp;

namespace internal {

// What a holder, a pointer or a module itself leads to.
template <typename Model>
auto& module_of(Model& model) {
  if constexpr (requires { *model; }) {
    return *model;
  } else {
    return model;
  }
}

}  // namespace internal

/// What a level does to operators, while it lives. O0: nothing. O1: autocast, with its lists. Where
/// the model is cast: products, convolutions and attention (autocast's lower-precision list, and
/// nothing else of autocast) run in the model's dtype, in AutocastOptions' automatic arithmetic;
/// any other operator that takes a cast parameter, or a view of one, gets its other floating
/// arguments in the parameter's dtype. All other operators follow their arguments.
///
/// forward() and call() make one themselves. Make one for a loss that O1 shall cast too, or to call
/// a cast model's layers directly. Ends on the thread that made it, newest first.
class [[nodiscard]] Region {
 public:
  ~Region();
  Region(Region&&) noexcept;
  Region& operator=(Region&&) = delete;
  Region(const Region&) = delete;

 private:
  friend class Amp;
  struct Impl;
  explicit Region(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Models under an opt level, and what their training needs beside them: master weights, loss
/// scales, skipped steps. Made by initialize(). Not safe from two threads at once, but for forward.
///
/// @code
/// auto amp = gradus::amp::initialize(*model, {.opt_level = gradus::amp::OptLevel::O2});
/// gradus::optim::AdamW optimizer(amp.parameters(*model), {.lr = 1e-3});
/// for (const auto& [x, y] : batches) {
///   optimizer.zero_grad();
///   const auto loss = torch::mse_loss(amp.forward(model, x), y);
///   {
///     gradus::amp::ScaledLoss scaled(amp, loss, {&optimizer});
///     scaled.backward();
///   }
///   gradus::optim::clip_gradient_norm(amp.master_params(optimizer), 1.0);
///   amp.step(optimizer);
/// }
/// @endcode
class Amp {
 public:
  ~Amp();
  Amp(Amp&&) noexcept;
  Amp& operator=(Amp&&) noexcept;
  Amp(const Amp&) = delete;

  const Properties& properties() const;

  /// What an optimizer of @p model must step on, in the order of its parameters(): the float32
  /// masters of cast parameters, else the parameters themselves. Under stochastic rounding they are
  /// stand-ins that hold the weights in float32 during step() only (NaN at other times).
  /// @throws UserError if @p model is none of initialize()'s, if a parameter that was frozen then
  /// wants a gradient now (it has no master), and after initialize() for inference.
  std::vector<at::Tensor> parameters(const torch::nn::Module& model) const;

  /// @p groups of parameters of the models with what an optimizer must step on in their place;
  /// names, learning rates and all else stay.
  std::vector<optim::ParameterGroup> groups(std::vector<optim::ParameterGroup> groups) const;

  /// All that @p optimizer steps on: after a ScaledLoss ended, its gradients are unscaled and in
  /// float32 wherever there are masters. For clipping.
  std::vector<at::Tensor> master_params(const optim::Optimizer& optimizer) const;

  /// Runs @p model's forward under the level: floating tensors in @p arguments come in the model's
  /// dtype, those of the result go out in cast_model_outputs. Integers and bools stay as they are.
  /// Tensors are found in optionals, tuples, vectors, maps and in structs that have a
  /// for_each_tensor (gradus/recompute/for_each_tensor.h).
  ///
  /// @param model  A module holder, a pointer to a module, or a module.
  template <typename Model, typename... Arguments>
  auto forward(Model& model, Arguments&&... arguments) const {
    auto& module = internal::module_of(model);
    return call(
        [&module](auto&&... cast) -> decltype(auto) {
          return module.forward(std::forward<decltype(cast)>(cast)...);
        },
        std::forward<Arguments>(arguments)...);
  }

  /// The same for any function: another entry point of a model, a piece of it, several in a row.
  template <typename Function, typename... Arguments>
  auto call(Function&& function, Arguments&&... arguments) const {
    const auto& chosen = properties();
    if (!chosen.enabled) return function(std::forward<Arguments>(arguments)...);
    const Region here = region();
    if constexpr (std::is_void_v<decltype(function(
                      cast_copy(std::forward<Arguments>(arguments), chosen.cast_model_type)...))>) {
      function(cast_copy(std::forward<Arguments>(arguments), chosen.cast_model_type)...);
    } else {
      auto result =
          function(cast_copy(std::forward<Arguments>(arguments), chosen.cast_model_type)...);
      cast_in_place(result, chosen.cast_model_outputs);
      return result;
    }
  }

  Region region() const;

  /// Steps @p optimizer, unless a ScaledLoss since its last step found that its gradients were not
  /// finite; then copies masters into the model's weights, whose versions it bumps.
  /// @return Whether it stepped.
  /// @throws UserError: its gradients are still scaled (end a ScaledLoss without delay_unscale
  /// first); what a ScaledLoss threw at its end, if it ended without finish().
  bool step(optim::Optimizer& optimizer);

  /// Drops the gradients of @p optimizer, and those of the model that are still scaled. (The
  /// optimizer's own zero_grad does unless delay_unscale was used.)
  void zero_grad(optim::Optimizer& optimizer);

  /// Copies all masters into the model's weights: after a change of masters by other hands.
  void copy_masters_to_models();

  /// Steps and skipped steps of @p optimizer.
  StepCounts counts(const optim::Optimizer& optimizer) const;

  double loss_scale(std::size_t loss_id = 0) const;  ///< 1 if not enabled.

  /// Parameters and buffers of @p model by name, copies. Floating ones are float32 at any level:
  /// masters where there are some, else exact copies of what the model has.
  std::vector<std::pair<std::string, at::Tensor>> model_state(const torch::nn::Module& model) const;

  /// Takes over what model_state() gave, at this level or another: masters, then the model's
  /// weights rounded from them.
  /// @throws UserError, with nothing changed: a name is missing, unknown or given twice, or a shape
  /// differs.
  void load_model_state(torch::nn::Module& model,
                        const std::vector<std::pair<std::string, at::Tensor>>& state);

  /// Loss scales by number ("loss_scaler0.scale"), and the position of stochastic rounding. Take it
  /// between a step and the next backward.
  std::vector<std::pair<std::string, at::Tensor>> state() const;
  /// Takes over state() of the same level and number of losses; abandons what is pending.
  /// @throws UserError, with nothing changed, on a missing or unknown name or a value out of range.
  void load_state(const std::vector<std::pair<std::string, at::Tensor>>& state);

 private:
  friend class ScaledLoss;
  friend Amp initialize(std::vector<std::reference_wrapper<torch::nn::Module>> models,
                        const LevelOptions& options);
  struct Impl;
  explicit Amp(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Casts @p models in place as the level says (their tensors stay the same objects) and makes the
/// masters and loss scales. Call it once, before optimizers are made, with models in float32.
/// @throws UserError as resolve(); a parameter that is not float32 (by name): models need no cast
/// before; a sparse or complex parameter.
Amp initialize(std::vector<std::reference_wrapper<torch::nn::Module>> models,
               const LevelOptions& options = {});
Amp initialize(torch::nn::Module& model, const LevelOptions& options = {});

struct ScaledLossOptions {
  std::size_t loss_id = 0;  ///< Which scale. Below num_losses.
  /// Gradients stay scaled and accumulate in the model's dtype; a later ScaledLoss of the same
  /// optimizers and loss_id unscales them. Saves the work of unscaling; without it, accumulation is
  /// in float32 wherever there are masters.
  bool delay_unscale = false;
  /// Unscales, but leaves the judgement (skip, scale update) to a later ScaledLoss of this loss_id.
  bool delay_overflow_check = false;
};

/// Apex's scale_loss: yields the scaled loss; at its end unscales the gradients of the optimizers
/// (into their masters, added to what they hold), looks for infinities and NaN, adapts the scale,
/// and makes the next step of all these optimizers skip if it found some.
///
/// Where the scale is fixed at 1 and the model needs no masters of float16, it yields the loss in
/// float32 and checks nothing. An exception on the way out drops the gradients of this loss only.
///
/// The end is finish(), or the destructor, which cannot throw: step() and the next ScaledLoss then
/// throw what it would have.
class [[nodiscard]] ScaledLoss {
 public:
  /// @throws UserError: loss_id out of range, no optimizer, an optimizer that steps on cast
  /// parameters instead of amp.parameters() or in backward, gradients left scaled by another scale,
  /// or made by a backward outside a ScaledLoss.
  ScaledLoss(Amp& amp, const at::Tensor& loss, std::vector<optim::Optimizer*> optimizers,
             ScaledLossOptions options = {});
  ~ScaledLoss();
  ScaledLoss(const ScaledLoss&) = delete;
  ScaledLoss& operator=(const ScaledLoss&) = delete;

  /// The scaled loss, float32.
  const at::Tensor& loss() const;
  /// loss().backward().
  void backward(bool retain_graph = false, bool create_graph = false);

  /// Ends it now. @return Whether all gradients were finite, as far as it looked.
  /// @throws UserError: no gradient came; an overflow at min_loss_scale (GradScaler::update).
  bool finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gradus::amp
