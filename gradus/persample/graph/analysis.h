#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/persample/graph/layout.h>
#include <gradus/plane/grad/grad_plane.h>

namespace gradus::persample {

/// What the graph itself says of a node, whatever is measured.
enum class Kind : std::uint8_t {
  parameters,  ///< Depends on parameters alone: all examples share it.
  operands,    ///< Of its operands only parameters are in the graph; others may be data.
  data,        ///< Depends on other nodes that may be data.
};

/// The graph below per-example losses, in an order in which a node comes before all that it sends
/// gradients to.
struct Graph {
  at::Tensor losses{};
  std::vector<plane::grad::NodeView> nodes{};
  std::map<const void*, std::size_t> place{};  ///< Of nodes, by NodeView::id().
  /// By node: the number of the parameter that it accumulates for, or -1.
  std::vector<std::int64_t> parameter{};
  /// By node: it sends gradients, on whatever way, to one of the parameters.
  std::vector<bool> leads_to_parameter{};
  std::vector<Kind> kinds{};  ///< By node.
};

/// @param losses  [B], one loss an example.
/// @throws UserError if losses have another shape or depend on no parameter's graph.
Graph read_graph(const at::Tensor& losses, const std::vector<at::Tensor>& parameters);

/// A node at which data of the examples meets operands that all share.
struct Site {
  std::size_t node = 0;                  ///< In Graph::nodes.
  std::vector<Layout> layouts{};         ///< By output of the forward operator.
  std::vector<std::size_t> shared{};     ///< Edges.
  std::vector<std::int64_t> operands{};  ///< Shapes at analysis, to know the graph again.
};

/// How the gradients of a graph belong to its examples.
struct Plan {
  std::int64_t examples = 0;
  std::vector<Site> sites{};
  /// True if it will hold for other batches of the same graph: each site's layout is a rule, was
  /// seen on gradients of several examples, and no values of the batch choose what lies along the
  /// dimension of the examples.
  bool reusable = true;
  /// Shapes of all outputs in the graph, to know it again.
  std::vector<std::int64_t> shapes{};
  /// Not empty if some gradients belong to examples by no rule: the name of the node, and why this
  /// is a sign of mixed examples.
  std::string irregular = "";
  /// Not empty if something else than a function of parameters alone is shared: where.
  std::string mixed = "";
  /// Numbers of parameters that got a gradient which comes through no site, so that whose it is
  /// cannot be told.
  std::vector<std::int64_t> unreached{};
};

/// Finds the sites by backward passes over the kept graph whose root gradients are powers of two,
/// which scale what belongs to one example exactly: what was scaled by no power of two mixes
/// examples. Takes 1 + ceil(log13 B) passes.
Plan analyse(const Graph& graph);

/// Equal for graphs of one program, whatever the number of examples and the lengths of their
/// sequences: the same operators on the same operands, with the same numbers (dimensions, places,
/// shifts, modes), of which those that are sizes, and the shapes themselves, need only be equal and
/// different among each other in the same way.
std::uint64_t structure_of(const Graph& graph);

/// Equal for graphs of the same operators (with the same dimensions and modes) on the same
/// parameters, however often, at whatever places and in whatever order: what a model makes of
/// sequences of other lengths.
std::uint64_t family_of(const Graph& graph);

/// @p plan for the present batch of @p graph, whose structure is the same; false if some operand's
/// shape differs by more than the number of examples.
bool adapt(const Plan& plan, const Graph& graph, Plan& adapted);

}  // namespace gradus::persample
