#pragma once

#include <set>
#include <vector>

#include <gradus/persample/graph/analysis.h>

namespace gradus::persample::internal {

/// What one output of a node was found to be.
struct Owner {
  enum class Kind : std::uint8_t { silent, examples, several } kind = Kind::silent;
  Layout layout{};
  bool certain = false;    ///< Seen on several examples, and nothing else fits.
  bool ambiguous = false;  ///< Another rule fits as well.
};

struct Probed {
  std::vector<std::vector<Owner>> owners{};  ///< By node, then by output.
  std::set<std::size_t> reached{};           ///< Accumulators that get a gradient other than zero.
};

/// Measures whose the gradients in the graph are: backward passes whose root gradients are powers
/// of two.
Probed probe(const Graph& graph);

}  // namespace gradus::persample::internal
