#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <gradus/persample/graph/analysis.h>

// Which nodes of a graph are functions of parameters alone.

namespace gradus::persample::internal {

/// What an operator does, in the name of its node what comes before "Backward".
inline std::string_view operation_of(std::string_view name) {
  return name.substr(0, name.find("Backward"));
}

/// True if the node has an operand that may be data without a node of its own, or none that saves
/// any, or makes copies that may be those of examples.
bool may_take_data(const plane::grad::NodeView& node);

/// True of operators whose data operand is known by its place; where examples lie in their output
/// is then where they lie in that.
bool takes_data_by_rule(const plane::grad::NodeView& node);

/// The kind of each node, from the graph's nodes, parameters and places.
std::vector<Kind> kinds_of(const Graph& graph);

/// Whether a shared operand is a function of parameters, of which the graph can only tell that data
/// has no part in it where no data fits.
class Functions {
 public:
  explicit Functions(const Graph& graph);

  /// The name of a node at or below @p from that might bring data in, or "".
  std::string outsider(std::size_t from) const;

 private:
  bool is_pure(const plane::grad::NodeView& node) const;
  bool may_hold_examples(const plane::grad::NodeView& node) const;

  const Graph& graph_;
  std::vector<bool> pure_;
};

}  // namespace gradus::persample::internal
