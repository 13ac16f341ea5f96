#pragma once

#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/optim/adamw.h>
#include <gradus/optim/optimizer.h>

namespace gradus::optim {

struct AdamOptions {
  double lr = 1e-3;      ///< Learning rate of the single group. Finite, >= 0.
  double beta1 = 0.9;    ///< Decay of the mean. In [0, 1).
  double beta2 = 0.999;  ///< Decay of the mean square. In [0, 1).
  double eps = 1e-8;     ///< Added to the root. Finite, >= 0.
  double weight_decay =
      0.0;  ///< Added to the gradient times the parameter (an L2 penalty). Finite, >= 0.
  bool amsgrad = false;   ///< Divide by the largest mean square so far (Reddi et al. 2018).
  bool maximize = false;  ///< Go up the gradient.
  /// Unset: LibTorch's fused kernel where it runs, else its foreach operations. true: refuse by
  /// name where the fused kernel does not run. false: foreach always.
  std::optional<bool> fused = std::nullopt;
};

/// Adam (Kingma and Ba 2015), as torch.optim.Adam. Weight decay passes through the moments; AdamW
/// decays the parameter itself, which is nearly always what is wanted.
///
/// State and options of a group as in AdamW.
class Adam final : public Optimizer {
 public:
  /// One group with the options' lr and weight_decay. @throws UserError on an option out of its
  /// range.
  explicit Adam(std::vector<at::Tensor> parameters, const AdamOptions& options = {});
  /// Several groups; each brings its own lr and weight_decay, and those of @p options are not used.
  Adam(std::vector<ParameterGroup> groups, const AdamOptions& options);

  const AdamOptions& options() const { return options_; }

 private:
  std::vector<StateSpec> state_specs(const at::Tensor& parameter) const override;
  void update(const ParameterGroup& group, std::span<Slot* const> slots) override;
  void check_slot(const Slot& slot) const override;
  void check_group(const ParameterGroup& group) const override;
  std::vector<NamedOption> options_of(const ParameterGroup& group) const override;

  AdamOptions options_;
  AdamWOptions shared_;  // the same options for the code that AdamW has
};

}  // namespace gradus::optim
