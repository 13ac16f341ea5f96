#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/optim/optimizer.h>

namespace gradus::optim {

/// Where eps1 stands and what weight decay is scaled by: implementations of Adafactor differ.
enum class AdafactorForm : std::uint8_t {
  torch,  ///< torch.optim's: eps1 bounds the root and the mean of the rows from below; the
          ///< parameter is multiplied by 1 - lr * weight_decay.
  paper,  ///< Shazeer and Stern's, and Transformers' and fairseq's: eps1 is added to the squared
          ///< gradients; the parameter is multiplied by 1 - (step size) * weight_decay.
};

struct AdafactorOptions {
  /// The largest relative step; the step itself where relative_step is off. Finite, >= 0.
  double lr = 1e-2;
  double beta2_decay = -0.8;  ///< beta2 of step t is 1 - t^beta2_decay. Finite, <= 0.
  /// Keeps the root away from zero, see AdafactorForm. Unset: the machine epsilon of the dtype that
  /// is computed in. The paper has 1e-30. Finite, >= 0.
  std::optional<double> eps1 = std::nullopt;
  double eps2 = 1e-3;  ///< Least root mean square of a parameter that scales its step. >= 0.
  double clip_threshold = 1.0;  ///< Largest root mean square of an update; infinity clips never and
                                ///< saves a pass over the gradients. > 0.
  double weight_decay = 0.0;    ///< Decoupled. Finite, >= 0.
  bool maximize = false;        ///< Go up the gradient.

  // What torch.optim.Adafactor lacks. The defaults are what it does.
  /// Keeps a mean of the updates with this decay, in [0, 1): as much state as parameters.
  std::optional<double> beta1 = std::nullopt;
  bool relative_step = true;    ///< The step is min(lr, 1 / sqrt(t)), else lr.
  bool scale_parameter = true;  ///< Times max(eps2, root mean square of the parameter).
  bool warmup_init = false;     ///< The step is min(1e-6 t, 1 / sqrt(t)); needs relative_step.
  AdafactorForm form = AdafactorForm::torch;

  /// Unset: gradus' own kernel where it runs (CPU, contiguous), else tensor operations. true:
  /// refuse by name where the kernel does not run. false: tensor operations always.
  std::optional<bool> fused = std::nullopt;
};

/// Adafactor (Shazeer and Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory
/// Cost", Algorithm 4), as torch.optim.Adafactor, with the paper's options that torch leaves out.
///
/// State of a parameter [..., n, m]: step (float32 scalar), row_var [..., n, 1] and col_var
/// [..., 1, m], so n + m values a matrix; of a vector or scalar: step and variance (its shape);
/// with beta1 also exp_avg (the parameter's shape). The state is float32, or float64 for float64:
/// that of 16-bit parameters is not rounded to 16 bits, as torch's is. Options of a group:
/// beta2_decay, eps1, eps2, clip_threshold.
class Adafactor final : public Optimizer {
 public:
  /// One group with the options' lr and weight_decay. @throws UserError on an option out of its
  /// range.
  explicit Adafactor(std::vector<at::Tensor> parameters, const AdafactorOptions& options = {});
  /// Several groups; each brings its own lr and weight_decay, and those of @p options are not used.
  Adafactor(std::vector<ParameterGroup> groups, const AdafactorOptions& options);

  const AdafactorOptions& options() const { return options_; }

 private:
  std::vector<StateSpec> state_specs(const at::Tensor& parameter) const override;
  void update(const ParameterGroup& group, std::span<Slot* const> slots) override;
  void check_slot(const Slot& slot) const override;
  void check_group(const ParameterGroup& group) const override;
  std::vector<NamedOption> options_of(const ParameterGroup& group) const override;

  AdafactorOptions options_;
};

}  // namespace gradus::optim
