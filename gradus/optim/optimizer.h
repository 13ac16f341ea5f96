#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::optim {

/// Parameters that share a learning rate and a weight decay.
struct ParameterGroup {
  std::vector<at::Tensor> parameters;  ///< Leaves of a real floating dtype; each in one group only.
  double lr = 1e-3;                    ///< Learning rate. Finite, >= 0.
  double weight_decay = 0.0;           ///< Meaning as in the optimizer at hand. Finite, >= 0.
  std::vector<std::string> names =
      {};  ///< One a parameter, or none: then its running index over all groups.
  /// Hyperparameters of this group in place of the optimizer's own, such as {"beta1", 0.8} or
  /// {"momentum", 0.0}. Which names an optimizer takes is said at its class; others are refused.
  std::map<std::string, double> options = {};
};

/// One tensor of an optimizer's state: "<parameter>.<state>", such as "0.exp_avg" or
/// "head.weight.exp_avg".
struct NamedState {
  std::string name;
  at::Tensor tensor;
};

/// The value of a hyperparameter; std::monostate is Python's None.
using OptionValue =
    std::variant<std::monostate, bool, std::int64_t, double, std::vector<double>, std::string>;

/// A hyperparameter by torch.optim's name: {"betas", {0.9, 0.999}}.
struct NamedOption {
  std::string name;
  OptionValue value = std::monostate{};
};

/// What a step does about a NaN or an infinity in a gradient.
enum class NonFinitePolicy : std::uint8_t {
  pass,    ///< Does not look: they reach the parameters.
  skip,    ///< Changes nothing, and says so in the StepResult.
  refuse,  ///< Changes nothing and throws, naming the first parameter.
};

/// What a step did.
struct StepResult {
  bool skipped = false;      ///< NonFinitePolicy::skip met a gradient that is not finite.
  std::int64_t updated = 0;  ///< Parameters that were updated.
  std::string non_finite =
      {};  ///< The first parameter with such a gradient; empty if none, and always with pass.
};

/// Updates parameters from their gradients. Base of every optimizer: it owns the groups and the
/// state, checks the gradients before anything is written, and tells autograd what was written.
///
/// A derived class states which tensors a parameter needs (state_specs) and does the arithmetic
/// (update). Not copyable. Not safe to call from two threads at once.
///
/// @code
/// gradus::optim::AdamW optimizer(model->parameters(), {.lr = 3e-4});
/// loss.backward();
/// optimizer.step();
/// optimizer.zero_grad();
/// @endcode
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Updates every parameter that has a gradient and bumps its version, so that a backward pass
  /// that still needs the old value fails with LibTorch's "modified by an inplace operation"
  /// instead of using the new one. Parameters without a gradient are left alone and get no state.
  /// NaN and infinity pass through unless set_non_finite_policy says otherwise.
  ///
  /// A parameter may get other strides between steps (Module::to(memory_format)): its state
  /// follows.
  /// @throws UserError before any write, naming the parameter: sparse gradient, or one of another
  /// shape, dtype or device; state that no longer fits, because the parameter got another shape,
  /// dtype or device; and if an OptimizerInBackward holds this optimizer.
  StepResult step();

  /// What the next steps do about gradients that are not finite. Looking costs one more read of the
  /// gradients and one wait for each device that holds some.
  /// @throws UserError for skip while an OptimizerInBackward holds this optimizer.
  void set_non_finite_policy(NonFinitePolicy policy);
  NonFinitePolicy non_finite_policy() const { return non_finite_policy_; }

  /// Drops every gradient, or fills it with zeros in place when @p set_to_none is false.
  void zero_grad(bool set_to_none = true);

  const std::vector<ParameterGroup>& groups() const { return groups_; }

  /// Sets the learning rate of every group, or of one. @throws UserError unless finite and >= 0.
  void set_learning_rate(double lr);
  void set_learning_rate(std::size_t group, double lr);

  /// Appends a group, whose parameters have no state yet, as torch.optim's add_param_group.
  /// @throws UserError, with nothing changed, as the constructor does, and while an
  /// OptimizerInBackward holds this optimizer.
  void add_group(ParameterGroup group);

  /// Sets "lr", "weight_decay" or one of the group's options from the next step on.
  /// @throws UserError, with nothing changed, on a name this optimizer does not take, a value out
  /// of its range, and another value of an option that decides which state there is.
  void set_option(std::size_t group, const std::string& name, double value);

  /// The names that set_option and ParameterGroup::options take.
  std::vector<std::string> option_names() const;

  /// The hyperparameters of a group by torch.optim's names, lr and weight_decay included, in
  /// torch.optim's order where torch has the optimizer.
  std::vector<NamedOption> hyperparameters(std::size_t group) const;

  /// All parameters, in the order of the groups.
  std::vector<at::Tensor> parameters() const;

  /// The name of each parameter, in the order of the groups: as given, or its running index.
  std::vector<std::string> parameter_names() const;

  /// True while an OptimizerInBackward holds this optimizer: step() is refused then, and gradients
  /// are gone when backward ends.
  bool steps_in_backward() const { return in_backward_; }

  /// The state in order of parameters, then of torch.optim's names (step, exp_avg, ...,
  /// momentum_buffer). The tensors are the live ones: clone them to keep a moment. Empty until the
  /// first step. @throws UserError where the parameter changed since, as step().
  std::vector<NamedState> state() const;

  /// Replaces the whole state by copies of @p entries; parameters that @p entries do not mention
  /// lose theirs. Narrower floats are cast, as torch.optim keeps the state of 16-bit parameters.
  /// @throws UserError, with nothing changed, on an unknown or repeated name, on another shape or
  /// dtype, and when
  ///         a parameter has some of its tensors but not all.
  void load_state(const std::vector<NamedState>& entries);

  /// Every state tensor, for memory attribution. @see base::MemoryCategory::optimizer_state
  std::vector<at::Tensor> state_tensors() const;

 protected:
  /// A state tensor that a parameter needs; starts as zeros on the parameter's device.
  struct StateSpec {
    std::string name;
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    /// Row-major in memory whatever the parameter's strides; else of the parameter's own strides
    /// where it has its shape, which is how the fused kernels walk the two side by side.
    bool row_major = false;
  };

  /// One parameter with its state, which is empty until the parameter's first update.
  struct Slot {
    at::Tensor parameter;
    std::string name;
    std::size_t group = 0;
    std::vector<at::Tensor> state =
        {};                    ///< In the order of state_specs(parameter); undefined never.
    bool first_update = true;  ///< True during the update that created the state (or would have).
  };

  /// @param component  Name in messages, such as "adamw".
  /// @param group_options  Names that ParameterGroup::options may have; give check_group if any.
  Optimizer(std::string component, std::vector<ParameterGroup> groups,
            std::vector<std::string> group_options = {});

  /// Refuses a group whose options are out of their ranges. Call check_groups() at the end of the
  /// constructor; later groups and values are checked by the base.
  virtual void check_group(const ParameterGroup&) const {}
  void check_groups() const;

  /// True for an option that decides which state a parameter has: set_option refuses to change it.
  virtual bool fixes_state(const std::string& /*option*/) const { return false; }

  /// The group's own value of an option, or @p fallback.
  static double option_of(const ParameterGroup& group, const std::string& name, double fallback);

  /// hyperparameters() of a group. The default: lr, weight_decay and the group's own options.
  virtual std::vector<NamedOption> options_of(const ParameterGroup& group) const;

  /// The state of @p parameter, the same at every call. Must not depend on anything that changes
  /// after construction.
  virtual std::vector<StateSpec> state_specs(const at::Tensor& parameter) const = 0;

  /// The state of the parameter in @p slot, for optimizers where it depends on the parameter's name
  /// or group as well. The default asks state_specs.
  virtual std::vector<StateSpec> slot_state_specs(const Slot& slot) const {
    return state_specs(slot.parameter);
  }

  /// Updates slots of one group, dtype and device, each with a dense gradient of that dtype and
  /// device and with its state in place. Runs without autograd.
  virtual void update(const ParameterGroup& group, std::span<Slot* const> slots) = 0;

  /// Refuses what update cannot do (checked for all slots before any update). The default refuses
  /// nothing.
  virtual void check_slot(const Slot&) const {}

  const std::string& component() const { return component_; }
  const std::vector<Slot>& slots() const { return slots_; }

 private:
  friend class OptimizerInBackward;

  void check_and_append(const ParameterGroup& group, std::vector<Slot>& slots) const;
  void check_options(const ParameterGroup& group) const;
  void check_gradient(const Slot& slot) const;
  void check_state(const Slot& slot) const;
  void lay_state_out(Slot& slot) const;
  std::vector<Slot*> slots_with_gradient();
  StepResult update_all(const std::vector<Slot*>& ready);
  void create_state(Slot& slot);

  std::string component_;
  std::vector<std::string> group_options_;
  std::vector<ParameterGroup> groups_;
  std::vector<Slot> slots_;
  NonFinitePolicy non_finite_policy_ = NonFinitePolicy::pass;
  bool in_backward_ = false;
};

/// True where LibTorch's fused kernels may run on @p parameter: CPU or CUDA, float32, float64,
/// float16 or bfloat16, and memory without gaps or overlaps (the CPU kernels walk it as one flat
/// array, whatever its strides).
bool fused_kernel_takes(const at::Tensor& parameter);

/// The gradient of @p parameter with the parameter's own strides: the gradient itself where it has
/// them already.
at::Tensor gradient_laid_out_as(const at::Tensor& parameter);

}  // namespace gradus::optim
