#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::accumulate {

/// Sums up the gradients of bf16 and fp16 parameters in fp32.
///
/// A bf16 sum has 8 significant bits: once it is 256 times a micro-batch's gradient, adding that
/// changes nothing. While collect() is on, each gradient that backward puts into such a parameter's
/// .grad is added to an fp32 tensor and dropped, so that .grad takes memory for one parameter at a
/// time. Parameters of other dtypes are left alone. GradientWindow does this with
/// WindowOptions::fp32_gradients.
class WideGradients {
 public:
  /// @throws UserError on an undefined parameter, and on one that an optimizer steps inside
  /// backward (BackwardSteps).
  explicit WideGradients(const std::vector<at::Tensor>& parameters);
  ~WideGradients();
  WideGradients(const WideGradients&) = delete;
  WideGradients& operator=(const WideGradients&) = delete;

  /// Turns collecting on or off; off at first. A sparse gradient met while it is on is a UserError
  /// out of backward. Parameters that were thawed since are watched from the next collect(true) on.
  void collect(bool on);
  /// The fp32 sum of @p parameter, itself and no copy; undefined if it has none.
  at::Tensor gradient(const at::Tensor& parameter) const;
  /// All defined sums.
  std::vector<at::Tensor> gradients() const;
  /// Sets .grad of each parameter that has a sum to it, rounded to the parameter's dtype.
  void write() const;
  /// Drops all sums.
  void clear();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gradus::accumulate
