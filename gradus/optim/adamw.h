#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/optim/optimizer.h>

namespace gradus::optim {

struct AdamWOptions {
  double lr = 1e-3;      ///< Learning rate of the single group. Finite, >= 0.
  double beta1 = 0.9;    ///< Decay of the mean. In [0, 1).
  double beta2 = 0.999;  ///< Decay of the mean square. In [0, 1).
  double eps = 1e-8;     ///< Added to the root. Finite, >= 0.
  double weight_decay =
      1e-2;  ///< Decoupled: each step multiplies by 1 - lr * weight_decay. Finite, >= 0.
  bool amsgrad = false;   ///< Divide by the largest mean square so far (Reddi et al. 2018).
  bool maximize = false;  ///< Go up the gradient.
  /// Unset: LibTorch's fused kernel where it runs, else its foreach operations. true: refuse by
  /// name where the fused kernel does not run. false: foreach always.
  std::optional<bool> fused = std::nullopt;
};

/// Adam with decoupled weight decay (Loshchilov and Hutter 2019), as torch.optim.AdamW.
///
/// State of a parameter: step (float32 scalar), exp_avg, exp_avg_sq and, with amsgrad,
/// max_exp_avg_sq (the parameter's shape and dtype): two or three times the parameter's bytes.
/// Options of a group: beta1, beta2, eps.
class AdamW final : public Optimizer {
 public:
  /// One group with the options' lr and weight_decay. @throws UserError on an option out of its
  /// range.
  explicit AdamW(std::vector<at::Tensor> parameters, const AdamWOptions& options = {});
  /// Several groups; each brings its own lr and weight_decay, and those of @p options are not used.
  AdamW(std::vector<ParameterGroup> groups, const AdamWOptions& options);

  const AdamWOptions& options() const { return options_; }

 private:
  friend class Adam;           // is the same rule but for the decay
  friend class MuonWithAdamW;  // applies this rule to its groups that are not Muon's

  static void check_ranges(const std::string& component, const AdamWOptions& options);
  static void check_fused(const std::string& component, const AdamWOptions& options,
                          const Slot& slot);
  static AdamWOptions with_group(const AdamWOptions& options, const ParameterGroup& group);
  static std::vector<StateSpec> specs_of(const AdamWOptions& options, const at::Tensor& parameter);
  static void apply(const AdamWOptions& options, const ParameterGroup& group,
                    std::span<Slot* const> slots, bool decoupled = true);
  static std::vector<NamedOption> named_options(const AdamWOptions& options,
                                                const ParameterGroup& group);

  std::vector<StateSpec> state_specs(const at::Tensor& parameter) const override;
  void update(const ParameterGroup& group, std::span<Slot* const> slots) override;
  void check_slot(const Slot& slot) const override;
  void check_group(const ParameterGroup& group) const override;
  std::vector<NamedOption> options_of(const ParameterGroup& group) const override;

  AdamWOptions options_;
};

}  // namespace gradus::optim
