#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::optim {

class Optimizer;

struct ClipNormOptions {
  double norm_type = 2.0;  ///< The p of the norm: > 0, or infinity for the largest absolute value.
  bool error_if_nonfinite =
      false;  ///< Throw, with the gradients untouched, when the norm is NaN or infinite.
};

/// The norm of all gradients of @p parameters taken as one vector; 0 without any. Gradients of 16
/// bits are summed in float32. Parameters without a gradient, and repeats of one, do not count. NaN
/// and infinity are returned.
/// @throws UserError on a sparse gradient, a norm_type out of its range, and, as everything here,
/// on a parameter that an OptimizerInBackward steps: its gradient is gone after backward.
double gradient_norm(const std::vector<at::Tensor>& parameters, double norm_type = 2.0);

/// gradient_norm of each group of @p optimizer, in order; 0 for a group without gradients. The norm
/// over all of them is the norm of these. @throws UserError as gradient_norm does.
std::vector<double> gradient_norm_by_group(const Optimizer& optimizer, double norm_type = 2.0);

/// The factor that clips a total of @p norm to @p max_norm: min(1, max_norm / (norm + 1e-6)), NaN
/// for a NaN norm.
double clip_coefficient(double norm, double max_norm);

/// Multiplies every gradient by @p factor in place; nothing to do for 1. @throws UserError on a
/// gradient that overlaps itself in memory (an expanded one), with nothing scaled.
void scale_gradients(const std::vector<at::Tensor>& parameters, double factor);

/// Scales the gradients so that their common norm is at most @p max_norm, as
/// torch.nn.utils.clip_grad_norm_.
///
/// @param max_norm  >= 0; infinity only measures.
/// @return The norm before clipping. If it is NaN every gradient becomes NaN; if it is infinite the
/// finite ones
///         become 0 and the infinite ones NaN: check the result, or ask for error_if_nonfinite.
/// @throws UserError as gradient_norm and scale_gradients do, and on a max_norm out of its range.
double clip_gradient_norm(const std::vector<at::Tensor>& parameters, double max_norm,
                          const ClipNormOptions& options = {});

/// Limits every element of every gradient to [-max_value, max_value] in place; NaN stays NaN.
/// @throws UserError unless max_value is finite and >= 0, and as scale_gradients does.
void clip_gradient_value(const std::vector<at::Tensor>& parameters, double max_value);

}  // namespace gradus::optim
