#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace gradus::plane::grad {

class NodeView;

/// An edge of the graph: the gradient of one input of a node's operator goes to `node`, as its
/// gradient number `input`.
struct EdgeView;

/// A node of the autograd graph. Cheap to copy; keeps the node, and what it saved, alive.
/// Shows nothing that would unpack saved tensors: under rematerialisation that would replay the
/// program.
class NodeView {
 public:
  NodeView() = default;
  explicit NodeView(c10::intrusive_ptr<torch::autograd::Node> node);
  NodeView(const NodeView&);
  NodeView(NodeView&&) noexcept;
  NodeView& operator=(const NodeView&);
  NodeView& operator=(NodeView&&) noexcept;
  ~NodeView();

  /// False for a default-made view and where no gradient flows.
  bool defined() const;
  /// "MmBackward0", "torch::autograd::AccumulateGrad".
  std::string name() const;
  /// How many gradients come in: one for each output of the forward operator.
  std::size_t inputs() const;
  /// Where gradients go: one edge for each input of the forward operator; undefined where none is
  /// wanted.
  std::vector<EdgeView> next() const;
  /// The leaf that an AccumulateGrad node adds to; undefined for any other node.
  at::Tensor leaf() const;
  /// Shape of the forward operator's output number @p output; empty where the node does not know
  /// it.
  std::vector<std::int64_t> sizes(std::size_t output) const;
  /// Dtype of the forward operator's output number @p output; nullopt where the node does not know
  /// it.
  std::optional<at::ScalarType> scalar_type(std::size_t output) const;
  /// True if someone else's hook may change the gradients that come in (Tensor::register_hook).
  bool has_hooks() const;
  /// True if someone else's hook may change the gradients that the node gives
  /// (Node::add_post_hook).
  bool has_post_hooks() const;
  /// Grows from node to node in the order of the forward pass, on each thread.
  std::uint64_t sequence_number() const;
  /// Equal for views of one node, and only for those while they live.
  const void* id() const;

  bool operator==(const NodeView& other) const { return id() == other.id(); }

 private:
  friend class Access;
  c10::intrusive_ptr<torch::autograd::Node> node_;
};

struct EdgeView {
  NodeView node;
  std::size_t input = 0;
};

/// The node that receives the gradient of @p tensor: its grad_fn, or the accumulator of a leaf.
/// @throws UserError if @p tensor needs no gradient.
EdgeView gradient_edge(const at::Tensor& tensor);

/// Every node that backward from @p roots would reach, each once, in an order in which a node comes
/// before all that it sends gradients to. Iterative: deep graphs are no danger.
std::vector<NodeView> walk(const std::vector<at::Tensor>& roots);

/// Ends a hook when destroyed; from then on the hook is never started again. May outlive the graph.
class [[nodiscard]] Hook {
 public:
  Hook() = default;
  explicit Hook(std::shared_ptr<void> alive) : alive_(std::move(alive)) {}
  Hook(Hook&&) noexcept = default;
  Hook& operator=(Hook&&) noexcept = default;
  Hook(const Hook&) = delete;

 private:
  std::shared_ptr<void> alive_;
};

/// Calls @p fn before @p node runs in backward, with the gradients of the forward operator's
/// outputs (undefined where none came), which it may replace. Hooks of one node run in the order
/// they were made.
Hook before(const NodeView& node, std::function<void(std::vector<at::Tensor>& gradients)> fn);

/// Calls @p fn after @p node ran, with the gradients it gives (of the forward operator's inputs; @p
/// fn may replace them) and those it got.
Hook after(
    const NodeView& node,
    std::function<void(std::vector<at::Tensor>& given, const std::vector<at::Tensor>& got)> fn);

/// Calls @p fn with the gradients of the forward operator's outputs once backward has them, also
/// where @p node itself need not run because backward ends there (backward_to). @p fn may replace
/// them; where backward ends, an undefined one frees its memory at once.
Hook on_reached(const NodeView& node, std::function<void(std::vector<at::Tensor>& gradients)> fn);

/// Calls @p fn each time backward has added to the .grad of @p leaf. Any number of hooks on one
/// tensor, in the order they were made; the hook stays through module->to(dtype). Not called by
/// torch::autograd::grad, which does not touch .grad.
/// @throws UserError if @p leaf is no leaf that wants a gradient.
Hook on_accumulated(const at::Tensor& leaf, std::function<void(const at::Tensor& leaf)> fn);

/// One backward pass from @p from, with @p gradients, that runs only what leads to @p ends and
/// stops there: no gradient is computed that no end needs, and no .grad changes. Returns the
/// gradient at each end, undefined where none arrived.
/// @throws UserError if the counts of @p from and @p gradients differ.
std::vector<at::Tensor> backward_to(const std::vector<EdgeView>& from,
                                    const std::vector<at::Tensor>& gradients,
                                    const std::vector<EdgeView>& ends, bool keep_graph);

/// Runs the backward formula of @p node alone, hooks aside, for each row of @p rows: one tensor [R,
/// *shape] for each output of the forward operator, undefined where no gradient comes. Returns [R,
/// *shape of operand] for each edge of next(), undefined where there is none. One call under
/// functorch's vmap where the formula allows it, else R calls.
std::vector<at::Tensor> apply_rows(const NodeView& node, const std::vector<at::Tensor>& rows);

/// backward_to() for each row of @p rows [R, *shape of from's output], on a graph that is kept.
/// Returns [R, *shape] for each end, undefined where none arrived. One pass under functorch's vmap
/// where every formula on the way allows it, else R passes.
std::vector<at::Tensor> backward_rows(const EdgeView& from, const at::Tensor& rows,
                                      const std::vector<EdgeView>& ends);
/// The same from several edges at once, with equally many rows for each: where their ways meet,
/// hooks get each row's sum.
std::vector<at::Tensor> backward_rows(const std::vector<EdgeView>& from,
                                      const std::vector<at::Tensor>& rows,
                                      const std::vector<EdgeView>& ends);

}  // namespace gradus::plane::grad
