#pragma once

#include <cstdint>
#include <vector>

#include <gradus/plane/grad/grad_plane.h>

namespace gradus::plane::grad {

/// What a node saved besides tensors: with its name and its edges, all that decides what it
/// computes from them. Of every operator of LibTorch, read from the header it was built with; of
/// in-place writes to a view; of custom functions what they keep in saved_data.
struct SavedNumbers {
  std::vector<std::int64_t> dims{};    ///< Dimensions that the operator works along.
  std::vector<std::int64_t> places{};  ///< Positions, lengths and shifts along a dimension.
  std::vector<std::int64_t> sizes{};   ///< Shapes of operands and results.
  /// All else (modes, kernel sizes, strides, dtypes, flags), and how many of the above each field
  /// gave. Of a fraction only the sign: it scales, but neither chooses nor moves elements.
  std::vector<std::int64_t> exact{};

  void clear();
};

/// Replaces @p numbers by those of @p node. Left out: strides of operands in memory, and lengths of
/// each example (of packed sequences, of CTC), which a batch may change. Unpacks no saved tensor,
/// except of a custom function whose saved tensors have no hooks.
void read_saved_numbers(const NodeView& node, SavedNumbers& numbers);

}  // namespace gradus::plane::grad
