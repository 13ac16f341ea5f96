#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::optim {

struct ClipNormOptions {
  double norm_type = 2.0;  ///< The p of the norm: > 0, or infinity for the largest absolute value.
  bool error_if_nonfinite =
      false;  ///< Throw, with the gradients untouched, when the norm is NaN or infinite.
};

/// The norm of all gradients of @p parameters taken as one vector; 0 without any. Gradients of 16
/// bits are summed in float32. Parameters without a gradient, and repeats of one, do not count. NaN
/// and infinity are returned.
/// @throws UserError on a sparse gradient or a norm_type out of its range.
double gradient_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2.0);

/// The factor that clips a total of @p norm to @p max_norm: min(1, max_norm / (norm + 1e-6)), NaN
/// for a NaN norm.
double clip_coefficient(double norm, double max_norm);

/// Multiplies every gradient by @p factor in place; nothing to do for 1.
void scale_gradients(const std::vector<at::Tensor>& parameters, double factor);

/// Scales the gradients so that their common norm is at most @p max_norm, as
/// torch.nn.utils.clip_grad_norm_.
///
/// @param max_norm  >= 0; infinity only measures.
/// @return The norm before clipping. If it is NaN every gradient becomes NaN; if it is infinite the
/// finite ones
///         become 0 and the infinite ones NaN: check the result, or ask for error_if_nonfinite.
/// @throws UserError as gradient_norm does, and on a max_norm out of its range.
double clip_gradient_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                          const ClipNormOptions& options = {});

/// Limits every element of every gradient to [-max_value, max_value] in place; NaN stays NaN.
/// @throws UserError unless max_value is finite and >= 0.
void clip_gradient_value(const std::vector<at::Tensor>& parameters, double max_value);

}  // namespace gradus::optim
