#pragma once

#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/optim/optimizer.h>

namespace gradus::optim {

struct LarsOptions {
  double lr = 1e-3;                 ///< Global rate of the single group. Finite, >= 0.
  double momentum = 0.9;            ///< Share of the buffer that is kept. Finite, >= 0.
  double weight_decay = 0.0;        ///< The paper's beta. Finite, >= 0.
  double trust_coefficient = 1e-3;  ///< The paper's eta. Finite, > 0.
  double eps = 0.0;                 ///< Added to the local rate's denominator. Finite, >= 0.
  bool adapt = true;  ///< Give each tensor a local rate; false leaves SGD with momentum.
};

/// Layer-wise adaptive rate scaling for large batches (You et al. 2017, Algorithm 1): each
/// parameter tensor has the local rate eta * ||w|| / (||g|| + weight_decay * ||w|| + eps), applied
/// with the global rate as the gradient enters the momentum buffer. The local rate is 1 where a
/// norm is 0, so that tensors of zeros can move.
///
/// State of a parameter: momentum_buffer; none without momentum. 16-bit parameters are updated in
/// float32 and have float32 state. Options of a group: momentum (0 only if the optimizer's is 0
/// too), trust_coefficient, adapt (0 or 1; usual for biases and norms is 0).
class Lars final : public Optimizer {
 public:
  /// One group with the options' lr and weight_decay. @throws UserError on an option out of its
  /// range.
  explicit Lars(std::vector<at::Tensor> parameters, const LarsOptions& options = {});
  /// Several groups; each brings its own lr and weight_decay, and those of @p options are not used.
  Lars(std::vector<ParameterGroup> groups, const LarsOptions& options);

  const LarsOptions& options() const { return options_; }

 private:
  std::vector<StateSpec> state_specs(const at::Tensor& parameter) const override;
  void update(const ParameterGroup& group, std::span<Slot* const> slots) override;
  void check_slot(const Slot& slot) const override;
  void check_group(const ParameterGroup& group) const override;
  std::vector<NamedOption> options_of(const ParameterGroup& group) const override;
  LarsOptions with_group(const ParameterGroup& group) const;
  void update_run(const ParameterGroup& group, const LarsOptions& own,
                  std::span<Slot* const> slots) const;

  LarsOptions options_;
};

}  // namespace gradus::optim
