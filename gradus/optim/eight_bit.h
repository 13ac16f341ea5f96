#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/optim/optimizer.h>

namespace gradus::optim {

struct Adam8bitOptions {
  double lr = 1e-3;                    ///< Learning rate of the single group. Finite, >= 0.
  double beta1 = 0.9;                  ///< Decay of the mean. In [0, 1).
  double beta2 = 0.999;                ///< Decay of the mean square. In [0, 1).
  double eps = 1e-8;                   ///< Added to the root. Finite, >= 0.
  double weight_decay = 1e-2;          ///< As decoupled_weight_decay says. Finite, >= 0.
  bool decoupled_weight_decay = true;  ///< As AdamW; false: an L2 penalty, as Adam.
  bool maximize = false;               ///< Go up the gradient.
  std::int64_t min_values = 4096;      ///< Parameters of fewer values keep float32 state. >= 0.
};

/// Adam and AdamW whose moments take 8 bits a value (Dettmers et al. 2022, "8-bit Optimizers via
/// Block-wise Quantization"). Each 256 values in the order of memory share their largest magnitude;
/// each value is the nearest of 256 shares of it, which lie densely near zero (the dynamic map). A
/// step decodes a block, updates it in float32, writes the parameter from that, and encodes the
/// block again; there is no float32 copy of the state. A mean square above zero is never encoded as
/// zero.
///
/// State of a parameter of n >= min_values values: step (float32 scalar), exp_avg and exp_avg_sq
/// (uint8, its shape: places in the ascending map), exp_avg_absmax and exp_avg_sq_absmax (float32
/// [ceil(n / 256)]): 2 + 1/32 bytes a value, 0.254 of Adam's in float32. Of a smaller one as AdamW,
/// in float32. Blocks and state are row-major, so that they fit the parameter in every layout; one
/// that is not contiguous is copied for its update. Parameters are float32, float16 or bfloat16.
/// amsgrad, for which there is no 8-bit form, is not offered. Options of a group: beta1, beta2,
/// eps.
class Adam8bit final : public Optimizer {
 public:
  /// One group with the options' lr and weight_decay. @throws UserError on an option out of its
  /// range, and on a float64 parameter.
  explicit Adam8bit(std::vector<at::Tensor> parameters, const Adam8bitOptions& options = {});
  /// Several groups; each brings its own lr and weight_decay, and those of @p options are not used.
  Adam8bit(std::vector<ParameterGroup> groups, const Adam8bitOptions& options);

  const Adam8bitOptions& options() const { return options_; }

 private:
  std::vector<StateSpec> state_specs(const at::Tensor& parameter) const override;
  void update(const ParameterGroup& group, std::span<Slot* const> slots) override;
  void check_group(const ParameterGroup& group) const override;
  void check_slot(const Slot& slot) const override;
  std::vector<NamedOption> options_of(const ParameterGroup& group) const override;

  Adam8bitOptions options_;
};

struct SGD8bitOptions {
  double lr = 1e-3;        ///< Learning rate of the single group. Finite, >= 0.
  double momentum = 0.9;   ///< Share of the buffer that is kept. Finite, > 0.
  double dampening = 0.0;  ///< Share of the gradient kept out of the buffer, from the second update
                           ///< on. Finite.
  double weight_decay =
      0.0;  ///< Added to the gradient times the parameter (an L2 penalty). Finite, >= 0.
  bool nesterov = false;           ///< Needs dampening 0.
  bool maximize = false;           ///< Go up the gradient.
  std::int64_t min_values = 4096;  ///< Parameters of fewer values keep float32 state. >= 0.
};

/// SGD whose momentum takes 8 bits a value, encoded as Adam8bit's mean.
///
/// State of a parameter of n >= min_values values: momentum_buffer (uint8, its shape) and
/// momentum_buffer_absmax (float32 [ceil(n / 256)]): 1 + 1/64 bytes a value. Of a smaller one:
/// momentum_buffer in float32. Parameters are float32, float16 or bfloat16. Options of a group:
/// momentum and dampening.
class SGD8bit final : public Optimizer {
 public:
  /// One group with the options' lr and weight_decay. @throws UserError on an option out of its
  /// range, and on a float64 parameter.
  explicit SGD8bit(std::vector<at::Tensor> parameters, const SGD8bitOptions& options = {});
  /// Several groups; each brings its own lr and weight_decay, and those of @p options are not used.
  SGD8bit(std::vector<ParameterGroup> groups, const SGD8bitOptions& options);

  const SGD8bitOptions& options() const { return options_; }

 private:
  std::vector<StateSpec> state_specs(const at::Tensor& parameter) const override;
  void update(const ParameterGroup& group, std::span<Slot* const> slots) override;
  void check_group(const ParameterGroup& group) const override;
  void check_slot(const Slot& slot) const override;
  std::vector<NamedOption> options_of(const ParameterGroup& group) const override;

  SGD8bitOptions options_;
};

}  // namespace gradus::optim
