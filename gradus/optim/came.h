#pragma once

#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/optim/optimizer.h>

namespace gradus::optim {

struct CameOptions {
  double lr = 2e-4;       ///< Learning rate of the single group. Finite, >= 0.
  double beta1 = 0.9;     ///< Decay of the mean of the updates. In [0, 1).
  double beta2 = 0.999;   ///< Decay of the mean square of the gradient. In [0, 1).
  double beta3 = 0.9999;  ///< Decay of the instability. In [0, 1).
  double eps1 = 1e-30;    ///< Added to the squared gradient. Finite, >= 0.
  double eps2 = 1e-16;    ///< Added to the instability. Finite, >= 0.
  double clip_threshold =
      1.0;                    ///< The largest root mean square of an update, before the mean. > 0.
  double weight_decay = 0.0;  ///< Decoupled: each step multiplies by 1 - lr * weight_decay.
};

/// Confidence-guided memory-efficient optimization (Luo et al. 2023, Algorithm 2): Adafactor's
/// factored second moment, a mean of the clipped updates, and a second factored moment of their
/// distance from that mean, by whose root each update is divided.
///
/// A parameter of two or more dimensions is factored over its last two: n * m values of mean and
/// 2 * (n + m) of moments for an n x m matrix. One of fewer dimensions keeps its whole second
/// moment and is not confidence-guided, as in the authors' program. State: exp_avg, and either
/// exp_avg_sq_row, exp_avg_sq_col, exp_avg_res_row, exp_avg_res_col or exp_avg_sq. There is no bias
/// correction, so no step. 16-bit parameters are updated in float32 and have float32 state. Options
/// of a group: beta1, beta2, beta3, clip_threshold.
class Came final : public Optimizer {
 public:
  /// One group with the options' lr and weight_decay. @throws UserError on an option out of its
  /// range.
  explicit Came(std::vector<at::Tensor> parameters, const CameOptions& options = {});
  /// Several groups; each brings its own lr and weight_decay, and those of @p options are not used.
  Came(std::vector<ParameterGroup> groups, const CameOptions& options);

  const CameOptions& options() const { return options_; }

 private:
  std::vector<StateSpec> state_specs(const at::Tensor& parameter) const override;
  void update(const ParameterGroup& group, std::span<Slot* const> slots) override;
  void check_slot(const Slot& slot) const override;
  void check_group(const ParameterGroup& group) const override;
  std::vector<NamedOption> options_of(const ParameterGroup& group) const override;
  CameOptions with_group(const ParameterGroup& group) const;

  CameOptions options_;
};

}  // namespace gradus::optim
