#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/persample/graph/layout.h>
#include <gradus/persample/graph/term.h>
#include <gradus/plane/grad/grad_plane.h>

namespace gradus::persample {

/// One node of the graph at which data of the examples meets something that all share.
struct NodeUse {
  plane::grad::NodeView node{};
  /// Gradients of the losses' sum for each output of the forward operator; undefined where none
  /// came.
  std::vector<at::Tensor> gradients{};
  /// Where the examples lie in each of them.
  std::vector<Layout> layouts{};
  /// The edges (positions in node.next()) whose operands all examples share.
  std::vector<std::size_t> shared{};
  /// The edges by which backward goes on from here.
  std::vector<std::size_t> onward{};
  /// True if the graph is freed by this pass, and a rule that gives the gradients of `onward` may
  /// free what the node saved for its own formula.
  bool frees_graph = false;

  std::int64_t examples() const;
  /// True if @p edge is in `shared`.
  bool shares(std::size_t edge) const;
  /// The shape of the operand at @p edge.
  std::vector<std::int64_t> operand_sizes(std::size_t edge) const;
};

/// The per-sample gradient of one shared operand, in the operand's shape; or, of an operand at one
/// of NodeUse::onward, the gradient that goes on there. If a rule gives all of these, the node's
/// own formula does not run.
struct OperandTerm {
  std::size_t edge = 0;
  std::unique_ptr<Term> term = nullptr;
  at::Tensor gradient{};
};

/// Gives a term for each shared operand, or nullopt where it does not know the case: then the
/// node's own backward formula runs once an example. Called in the backward pass, without gradient
/// recording, before the node runs.
using Rule = std::function<std::optional<std::vector<OperandTerm>>(const NodeUse&)>;

/// Adds a rule for nodes of the name @p node_name ("MmBackward0"; of a custom autograd function as
/// NodeView::name() shows it). The newest is asked first. Thread-safe; process-wide.
void register_rule(const std::string& node_name, Rule rule);

/// Terms by the first rule that knows the node, else by its own formula. Sets @p by_formula.
std::vector<OperandTerm> terms_of(const NodeUse& use, bool* by_formula = nullptr);

}  // namespace gradus::persample
