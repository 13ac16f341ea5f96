#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::persample {

/// Which example each part of a tensor belongs to. It was measured, never assumed (analysis.h).
struct Layout {
  std::int64_t examples = 0;
  /// The dimension whose index tells the example; -1 if the whole tensor belongs to owners[0].
  std::int64_t dim = 0;
  /// Index i belongs to example (i / inner) % examples: 1 for a batch dimension or one folded with
  /// others before it, T for a batch folded with T steps behind it.
  std::int64_t inner = 1;
  /// Where no such rule holds (packed sequences): the example of each index, -1 for no one's.
  std::vector<std::int64_t> owners{};

  bool regular() const { return owners.empty(); }

  /// The parts of @p tensor by example: [B, T, other dimensions in their order], where dimension
  /// @p at of @p tensor is indexed as `dim` of the tensor that was measured. A view where strides
  /// allow it; where examples have different numbers of parts the rest is zero.
  at::Tensor by_example(const at::Tensor& tensor, std::int64_t at) const;

  /// The same rule for a batch of another size.
  Layout with_examples(std::int64_t count) const;
};

}  // namespace gradus::persample
