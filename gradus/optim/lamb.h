#pragma once

#include <limits>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/optim/optimizer.h>

namespace gradus::optim {

struct LambOptions {
  double lr = 1e-3;            ///< Learning rate of the single group. Finite, >= 0.
  double beta1 = 0.9;          ///< Decay of the mean. In [0, 1).
  double beta2 = 0.999;        ///< Decay of the mean square. In [0, 1).
  double eps = 1e-6;           ///< Added to the root. Finite, >= 0.
  double weight_decay = 1e-2;  ///< Part of the layer's update, and so of its norm. Finite, >= 0.
  double min_norm = 0.0;       ///< The paper's gamma_l: parameter norms below count as this. >= 0.
  /// The paper's gamma_u: parameter norms above count as this. >= min_norm.
  double max_norm = std::numeric_limits<double>::infinity();
  bool adapt =
      true;  ///< Scale each tensor's update by its norms; false leaves AdamW with L2 inside.
};

/// Layer-wise adaptive moments for large batches (You et al. 2020, Algorithm 2): Adam's direction
/// r plus weight_decay * x, scaled by phi(||x||) / ||r + weight_decay * x|| for each parameter
/// tensor, where phi limits the norm to [min_norm, max_norm]. The ratio is 1 where a norm is 0.
///
/// State of a parameter: step (float32 scalar), exp_avg, exp_avg_sq. 16-bit parameters are updated
/// in float32 and have float32 state. Options of a group: beta1, beta2, eps, adapt (0 or 1; usual
/// for biases and norms is 0).
class Lamb final : public Optimizer {
 public:
  /// One group with the options' lr and weight_decay. @throws UserError on an option out of its
  /// range.
  explicit Lamb(std::vector<at::Tensor> parameters, const LambOptions& options = {});
  /// Several groups; each brings its own lr and weight_decay, and those of @p options are not used.
  Lamb(std::vector<ParameterGroup> groups, const LambOptions& options);

  const LambOptions& options() const { return options_; }

 private:
  std::vector<StateSpec> state_specs(const at::Tensor& parameter) const override;
  void update(const ParameterGroup& group, std::span<Slot* const> slots) override;
  void check_slot(const Slot& slot) const override;
  void check_group(const ParameterGroup& group) const override;
  std::vector<NamedOption> options_of(const ParameterGroup& group) const override;
  LambOptions with_group(const ParameterGroup& group) const;
  void update_run(const ParameterGroup& group, const LambOptions& own,
                  std::span<Slot* const> slots) const;

  LambOptions options_;
};

}  // namespace gradus::optim
