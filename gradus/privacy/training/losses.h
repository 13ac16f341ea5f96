#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace gradus::privacy {

/// Cross entropy of each example: the mean over its own tokens whose target is not @p ignore_index;
/// 0 for an example without any. A mean over the tokens of the whole batch, as torch's
/// cross_entropy gives it, would let an example's length change the others' weight.
///
/// @param logits  [B, K] or, with places (tokens, pixels), [B, K, *places]; K classes in dimension
/// @p class_dim, so that [B, T, K] is class_dim = -1.
/// @param targets  int64 [B] or [B, *places], in [0, K) or ignore_index.
/// @return [B]. @throws UserError if shapes do not fit.
at::Tensor cross_entropy_per_example(const at::Tensor& logits, const at::Tensor& targets,
                                     std::int64_t ignore_index = -100, std::int64_t class_dim = 1);

/// Mean over all but dimension 0: [B, *] -> [B], for losses made without reduction.
at::Tensor mean_per_example(const at::Tensor& values);

}  // namespace gradus::privacy
