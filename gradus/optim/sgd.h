#pragma once

#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/optim/optimizer.h>

namespace gradus::optim {

struct SGDOptions {
  double lr = 1e-3;       ///< Learning rate of the single group. Finite, >= 0.
  double momentum = 0.0;  ///< Share of the buffer that is kept. Finite, >= 0.
  double dampening =
      0.0;  ///< Share of the gradient kept out of the buffer, from the second update on. Finite.
  double weight_decay =
      0.0;  ///< Added to the gradient times the parameter (an L2 penalty). Finite, >= 0.
  bool nesterov = false;  ///< Needs momentum > 0 and dampening 0.
  bool maximize = false;  ///< Go up the gradient.
  /// Unset: LibTorch's fused kernel where it runs, else its foreach operations. true: refuse by
  /// name where the fused kernel does not run. false: foreach always. On the CPU the fused kernel
  /// is used for float32 and float64 only: LibTorch 2.13's does not store most of a 16-bit
  /// parameter.
  std::optional<bool> fused = std::nullopt;
};

/// Stochastic gradient descent with momentum, as torch.optim.SGD: the first update sets the buffer
/// to the gradient undampened.
///
/// State of a parameter: momentum_buffer (the parameter's shape and dtype); none without momentum.
/// Options of a group: momentum (0 only if the optimizer's is 0 too) and dampening.
class SGD final : public Optimizer {
 public:
  /// One group with the options' lr and weight_decay. @throws UserError on an option out of its
  /// range.
  explicit SGD(std::vector<at::Tensor> parameters, const SGDOptions& options = {});
  /// Several groups; each brings its own lr and weight_decay, and those of @p options are not used.
  SGD(std::vector<ParameterGroup> groups, const SGDOptions& options);

  const SGDOptions& options() const { return options_; }

 private:
  std::vector<StateSpec> state_specs(const at::Tensor& parameter) const override;
  void update(const ParameterGroup& group, std::span<Slot* const> slots) override;
  void check_slot(const Slot& slot) const override;
  void check_group(const ParameterGroup& group) const override;
  std::vector<NamedOption> options_of(const ParameterGroup& group) const override;

  SGDOptions options_;
};

}  // namespace gradus::optim
