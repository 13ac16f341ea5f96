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
  /// True if it will hold for other batches of the same graph: each site's layout is a rule, and
  /// was seen on gradients of several examples.
  bool reusable = true;
  /// Shapes of all outputs in the graph, to know it again.
  std::vector<std::int64_t> shapes{};
  /// Not empty if some gradients belong to examples by no rule: the name of the node, and why this
  /// is a sign of mixed examples.
  std::string irregular = "";
  /// Not empty if something else than a function of parameters alone is shared: where.
  std::string mixed = "";
};

/// Finds the sites by backward passes over the kept graph whose root gradients are powers of two,
/// which scale what belongs to one example exactly: what was scaled by no power of two mixes
/// examples. Takes 1 + ceil(log13 B) passes.
Plan analyse(const Graph& graph);

/// Equal for graphs that Plan::reusable may be used for, whatever the number of examples.
std::uint64_t structure_of(const Graph& graph);

/// @p plan for the present batch of @p graph, whose structure is the same; false if some operand's
/// shape differs by more than the number of examples.
bool adapt(const Plan& plan, const Graph& graph, Plan& adapted);

}  // namespace gradus::persample
