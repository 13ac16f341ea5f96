#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
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
};

/// One tensor of an optimizer's state: "<parameter>.<state>", such as "0.exp_avg" or
/// "head.weight.exp_avg".
struct NamedState {
  std::string name;
  at::Tensor tensor;
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
  /// NaN and infinity pass through.
  /// @throws UserError before any write, naming the parameter: sparse gradient, or one of another
  /// dtype or device.
  void step();

  /// Drops every gradient, or fills it with zeros in place when @p set_to_none is false.
  void zero_grad(bool set_to_none = true);

  const std::vector<ParameterGroup>& groups() const { return groups_; }

  /// Sets the learning rate of every group, or of one. @throws UserError unless finite and >= 0.
  void set_learning_rate(double lr);
  void set_learning_rate(std::size_t group, double lr);

  /// The state in order of parameters, then of torch.optim's names (step, exp_avg, ...,
  /// momentum_buffer). The tensors are the live ones: clone them to keep a moment. Empty until the
  /// first step.
  std::vector<NamedState> state() const;

  /// Replaces the whole state by copies of @p entries; parameters that @p entries do not mention
  /// lose theirs.
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
  Optimizer(std::string component, std::vector<ParameterGroup> groups);

  /// The state of @p parameter, the same at every call. Must not depend on anything that changes
  /// after construction.
  virtual std::vector<StateSpec> state_specs(const at::Tensor& parameter) const = 0;

  /// Updates slots of one group, dtype and device, each with a dense gradient of that dtype and
  /// device and with its state in place. Runs without autograd.
  virtual void update(const ParameterGroup& group, std::span<Slot* const> slots) = 0;

  /// Refuses what update cannot do (checked for all slots before any update). The default refuses
  /// nothing.
  virtual void check_slot(const Slot&) const {}

  const std::string& component() const { return component_; }

 private:
  std::vector<Slot*> slots_with_gradient();
  void create_state(Slot& slot);

  std::string component_;
  std::vector<ParameterGroup> groups_;
  std::vector<Slot> slots_;
};

/// True where LibTorch's fused kernels may run on @p parameter: CPU or CUDA, float32, float64,
/// float16 or bfloat16, and memory without gaps or overlaps (the CPU kernels walk it as one flat
/// array, whatever its strides).
bool fused_kernel_takes(const at::Tensor& parameter);

/// The gradient of @p parameter with the parameter's own strides: the gradient itself where it has
/// them already.
at::Tensor gradient_laid_out_as(const at::Tensor& parameter);

}  // namespace gradus::optim
