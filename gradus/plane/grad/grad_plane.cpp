#include <gradus/plane/grad/grad_plane.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <ATen/ExpandUtils.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/DynamicLayer.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <gradus/base/error.h>
#include <gradus/base/names.h>
#include <gradus/plane/grad/internal/access.h>

namespace gradus::plane::grad {

using torch::autograd::Node;
using torch::autograd::variable_list;

NodeView::NodeView(c10::intrusive_ptr<Node> node) : node_(std::move(node)) {}
NodeView::NodeView(const NodeView&) = default;
NodeView::NodeView(NodeView&&) noexcept = default;
NodeView& NodeView::operator=(const NodeView&) = default;
NodeView& NodeView::operator=(NodeView&&) noexcept = default;
NodeView::~NodeView() = default;

bool NodeView::defined() const { return node_.defined(); }
std::string NodeView::name() const { return Access::node(*this).name(); }
std::size_t NodeView::inputs() const { return Access::node(*this).num_inputs(); }
std::uint64_t NodeView::sequence_number() const { return Access::node(*this).sequence_nr(); }
const void* NodeView::id() const { return node_.get(); }

std::vector<EdgeView> NodeView::next() const {
  std::vector<EdgeView> edges;
  for (const auto& edge : Access::node(*this).next_edges()) {
    edges.push_back({NodeView(edge.function), edge.input_nr});
  }
  return edges;
}

at::Tensor NodeView::leaf() const {
  const auto* const accumulate =
      dynamic_cast<const torch::autograd::AccumulateGrad*>(&Access::node(*this));
  return accumulate == nullptr ? at::Tensor() : accumulate->variable;
}

std::vector<std::int64_t> NodeView::sizes(std::size_t output) const {
  const Node& node = Access::node(*this);
  if (output >= node.num_inputs() || node.input_metadata(output).was_default_constructed())
    return {};
  std::vector<std::int64_t> sizes;
  for (const c10::SymInt& size : node.input_metadata(output).shape_as_dim_vector()) {
    sizes.push_back(size.expect_int());
  }
  return sizes;
}

std::optional<at::ScalarType> NodeView::scalar_type(std::size_t output) const {
  const Node& node = Access::node(*this);
  if (output >= node.num_inputs() || node.input_metadata(output).was_default_constructed()) {
    return std::nullopt;
  }
  return c10::typeMetaToScalarType(node.input_metadata(output).options().dtype());
}

EdgeView gradient_edge(const at::Tensor& tensor) {
  GRADUS_CHECK("grad_plane", tensor.defined() && tensor.requires_grad(),
               "a tensor that requires a gradient is needed; got ", base::describe_tensor(tensor));
  const torch::autograd::Edge edge = torch::autograd::impl::gradient_edge(tensor);
  return {NodeView(edge.function), edge.input_nr};
}

std::vector<NodeView> walk(const std::vector<at::Tensor>& roots) {
  // Depth first with an explicit stack; the reverse of the order of leaving is topological.
  struct Visit {
    c10::intrusive_ptr<Node> node;
    std::size_t next = 0;
  };
  std::vector<Visit> path;
  std::unordered_map<const Node*, bool> seen;
  std::vector<NodeView> order;
  const auto enter = [&](const c10::intrusive_ptr<Node>& node) {
    if (node && seen.emplace(node.get(), true).second) path.push_back({node});
  };
  for (auto root = roots.rbegin(); root != roots.rend(); ++root) {
    if (!root->defined() || !root->requires_grad()) continue;
    enter(torch::autograd::impl::gradient_edge(*root).function);
    while (!path.empty()) {
      Visit& top = path.back();
      if (top.next < top.node->next_edges().size()) {
        enter(top.node->next_edge(top.next++).function);
      } else {
        order.emplace_back(top.node);
        path.pop_back();
      }
    }
  }
  std::reverse(order.begin(), order.end());
  return order;
}

namespace {

// A function that may be ended from any thread; a call under way is finished first or not awaited,
// as the hook's own copy keeps it alive.
template <typename... Arguments>
struct Ending {
  explicit Ending(std::function<void(Arguments...)> fn) : fn(std::move(fn)) {}
  std::function<void(Arguments...)> fn;
};

class BeforeHook final : public torch::autograd::FunctionPreHook {
 public:
  using State = Ending<std::vector<at::Tensor>&>;
  explicit BeforeHook(std::weak_ptr<State> state) : state_(std::move(state)) {}
  variable_list operator()(const variable_list& gradients) override {
    variable_list result = gradients;
    if (const auto state = state_.lock()) state->fn(result);
    return result;
  }

 private:
  std::weak_ptr<State> state_;
};

class AfterHook final : public torch::autograd::FunctionPostHook {
 public:
  using State = Ending<std::vector<at::Tensor>&, const std::vector<at::Tensor>&>;
  explicit AfterHook(std::weak_ptr<State> state) : state_(std::move(state)) {}
  variable_list operator()(const variable_list& given, const variable_list& got) override {
    variable_list result = given;
    if (const auto state = state_.lock()) state->fn(result, got);
    return result;
  }

 private:
  std::weak_ptr<State> state_;
};

// LibTorch has one slot a tensor; this fills it and calls any number of hooks, and one that was
// there before.
class AccumulatedHooks final : public torch::autograd::PostAccumulateGradHook {
 public:
  using State = Ending<const at::Tensor&>;
  explicit AccumulatedHooks(std::unique_ptr<PostAccumulateGradHook> earlier)
      : earlier_(std::move(earlier)) {}

  void add(std::weak_ptr<State> state) {
    const std::lock_guard lock(mutex_);
    std::erase_if(states_, [](const auto& other) { return other.expired(); });
    states_.push_back(std::move(state));
  }

  void operator()(const torch::autograd::Variable& tensor) override {
    if (earlier_ != nullptr) (*earlier_)(tensor);
    std::vector<std::weak_ptr<State>> states;
    {
      const std::lock_guard lock(mutex_);
      states = states_;
    }
    for (const auto& weak : states) {
      if (const auto state = weak.lock()) state->fn(tensor);
    }
  }

 private:
  std::unique_ptr<PostAccumulateGradHook> earlier_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<State>> states_;
};

}  // namespace

namespace {

// A leaf holds its accumulator weakly: a hook on one keeps it, or the hook would go with the view.
template <typename State>
Hook hold(std::shared_ptr<State> state, const NodeView& node) {
  return Hook(
      std::make_shared<std::pair<std::shared_ptr<State>, NodeView>>(std::move(state), node));
}

}  // namespace

bool NodeView::has_hooks() const {
  Node& node = Access::node(*this);
  const auto foreign = [](const auto& hooks) {
    return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
      return dynamic_cast<const BeforeHook*>(hook.get()) == nullptr;
    });
  };
  return foreign(node.pre_hooks()) || foreign(node.tensor_pre_hooks());
}

bool NodeView::has_post_hooks() const {
  const auto& hooks = Access::node(*this).post_hooks();
  return std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    return dynamic_cast<const AfterHook*>(hook.get()) == nullptr;
  });
}

Hook before(const NodeView& node, std::function<void(std::vector<at::Tensor>&)> fn) {
  auto state = std::make_shared<BeforeHook::State>(std::move(fn));
  Access::node(node).add_pre_hook(std::make_unique<BeforeHook>(state));
  return hold(std::move(state), node);
}

Hook on_reached(const NodeView& node, std::function<void(std::vector<at::Tensor>&)> fn) {
  auto state = std::make_shared<BeforeHook::State>(std::move(fn));
  Access::node(node).add_tensor_pre_hook(std::make_unique<BeforeHook>(state));
  return hold(std::move(state), node);
}

Hook after(const NodeView& node,
           std::function<void(std::vector<at::Tensor>&, const std::vector<at::Tensor>&)> fn) {
  auto state = std::make_shared<AfterHook::State>(std::move(fn));
  Access::node(node).add_post_hook(std::make_unique<AfterHook>(state));
  return hold(std::move(state), node);
}

Hook on_accumulated(const at::Tensor& leaf, std::function<void(const at::Tensor&)> fn) {
  GRADUS_CHECK(
      "grad_plane", leaf.defined() && leaf.requires_grad() && leaf.is_leaf(),
      "a leaf that requires a gradient is needed; got ", base::describe_tensor(leaf),
      leaf.defined() && !leaf.is_leaf() ? ", which an operator made" : ", which requires none");
  static std::mutex mutex;  // of the check and the exchange of the slot
  const std::lock_guard lock(mutex);
  auto& slot = torch::autograd::impl::post_acc_grad_hooks(leaf);
  auto* hooks = dynamic_cast<AccumulatedHooks*>(slot.get());
  if (hooks == nullptr) {
    auto made = std::make_unique<AccumulatedHooks>(std::move(slot));
    hooks = made.get();
    torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::move(made));
  }
  auto state = std::make_shared<AccumulatedHooks::State>(std::move(fn));
  hooks->add(state);
  return Hook(std::move(state));
}

namespace {

torch::autograd::edge_list edges_of(const std::vector<EdgeView>& views) {
  torch::autograd::edge_list edges;
  edges.reserve(views.size());
  for (const EdgeView& view : views) edges.push_back(Access::edge(view));
  return edges;
}

// A vmap level of functorch while it lives.
class VmapLevel {
 public:
  explicit VmapLevel(std::int64_t size)
      : level_(at::functorch::initAndPushDynamicLayer(at::functorch::TransformType::Vmap,
                                                      c10::SymInt(size),
                                                      at::functorch::RandomnessType::Error)) {}
  ~VmapLevel() { at::functorch::popDynamicLayerAndDeleteMetadata(); }
  VmapLevel(const VmapLevel&) = delete;
  VmapLevel& operator=(const VmapLevel&) = delete;

  at::Tensor wrap(const at::Tensor& rows) const {
    return at::functorch::makeBatched(rows, 0, level_);
  }
  /// The rows of a value of this level; one that does not depend on the row stands for all.
  at::Tensor unwrap(const at::Tensor& value, std::int64_t rows) const {
    if (!value.defined()) return value;
    const auto* const batched = at::functorch::maybeGetBatchedImpl(value);
    if (batched != nullptr && batched->level() == level_) {
      return batched->value().movedim(batched->bdim(), 0);
    }
    std::vector<std::int64_t> sizes = value.sizes().vec();
    sizes.insert(sizes.begin(), rows);
    return value.unsqueeze(0).expand(sizes);
  }

 private:
  std::int64_t level_;
};

std::int64_t row_count(const std::vector<at::Tensor>& rows) {
  for (const at::Tensor& each : rows) {
    if (each.defined()) return each.size(0);
  }
  return 0;
}

using Formula = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

std::vector<at::Tensor> rows_at_once(const Formula& formula, const std::vector<at::Tensor>& rows) {
  const std::int64_t count = row_count(rows);
  const VmapLevel level(count);
  std::vector<at::Tensor> wrapped;
  for (const at::Tensor& each : rows) {
    wrapped.push_back(each.defined() ? level.wrap(each) : each);
  }
  std::vector<at::Tensor> given = formula(wrapped);
  for (at::Tensor& each : given) each = level.unwrap(each, count);
  return given;
}

std::vector<at::Tensor> rows_one_by_one(const Formula& formula,
                                        const std::vector<at::Tensor>& rows) {
  const std::int64_t count = row_count(rows);
  std::vector<std::vector<at::Tensor>> given;
  for (std::int64_t row = 0; row < count; ++row) {
    std::vector<at::Tensor> chosen;
    for (const at::Tensor& each : rows) {
      chosen.push_back(each.defined() ? each.select(0, row) : each);
    }
    const std::vector<at::Tensor> one = formula(chosen);
    given.resize(one.size());
    for (std::size_t end = 0; end < one.size(); ++end) {
      if (!one[end].defined()) continue;
      const at::Tensor dense = one[end].is_sparse() ? one[end].to_dense() : one[end];
      auto& all = given[end];
      if (all.empty()) all.resize(static_cast<std::size_t>(count), at::zeros_like(dense));
      all[static_cast<std::size_t>(row)] = dense;
    }
  }
  std::vector<at::Tensor> results;
  results.reserve(given.size());
  for (const auto& all : given) results.push_back(all.empty() ? at::Tensor() : at::stack(all));
  return results;
}

// A batching rule of vmap may be wrong (that of cdist's backward): the last row alone tells.
bool last_row_agrees(const Formula& formula, const std::vector<at::Tensor>& rows,
                     const std::vector<at::Tensor>& given) {
  const std::int64_t last = row_count(rows) - 1;
  std::vector<at::Tensor> chosen;
  for (const at::Tensor& each : rows) {
    chosen.push_back(each.defined() ? each.select(0, last) : each);
  }
  const std::vector<at::Tensor> alone = formula(chosen);
  for (std::size_t end = 0; end < alone.size(); ++end) {
    if (!alone[end].defined()) continue;
    const at::Tensor want = alone[end].is_sparse() ? alone[end].to_dense() : alone[end];
    if (!given[end].defined()) return false;
    const double tolerance =
        c10::isComplexType(want.scalar_type()) || want.scalar_type() == at::kDouble ? 1e-9 : 1e-2;
    const at::Tensor difference = given[end].select(0, last) - want;
    const double error = at::linalg_vector_norm(difference).item<double>();
    if (error > tolerance * (at::linalg_vector_norm(want).item<double>() + 1e-30)) return false;
  }
  return true;
}

std::vector<at::Tensor> by_rows(const Formula& formula, const std::vector<at::Tensor>& rows) {
  const at::NoGradGuard no_grad;
  try {
    std::vector<at::Tensor> given = rows_at_once(formula, rows);
    if (row_count(rows) == 1 || last_row_agrees(formula, rows, given)) return given;
    return rows_one_by_one(formula, rows);
  } catch (const c10::Error&) {
    // A formula that vmap does not know, or that reads a value on the host: one by one is the same.
    return rows_one_by_one(formula, rows);
  }
}

}  // namespace

std::vector<at::Tensor> backward_to(const std::vector<EdgeView>& from,
                                    const std::vector<at::Tensor>& gradients,
                                    const std::vector<EdgeView>& ends, bool keep_graph) {
  GRADUS_CHECK("grad_plane", from.size() == gradients.size(),
               "one gradient for each edge is required; got ", from.size(), " edges and ",
               gradients.size(), " gradients");
  if (from.empty() || ends.empty()) return std::vector<at::Tensor>(ends.size());
  return torch::autograd::Engine::get_default_engine().execute(
      edges_of(from), gradients, keep_graph, /*create_graph=*/false, /*accumulate_grad=*/false,
      edges_of(ends));
}

namespace {

// Calls a node's formula inside a pass of its own: within the pass of a caller's hook a formula
// computes only what that pass needs.
class Alone final : public Node {
 public:
  explicit Alone(Node& node) : node_(node) {}
  variable_list apply(variable_list&& gradients) override {
    given_ = node_(std::move(gradients));
    return {};
  }
  variable_list take() { return std::move(given_); }

 private:
  Node& node_;
  variable_list given_;
};

variable_list apply_alone(Node& node, const variable_list& gradients) {
  auto alone = c10::make_intrusive<Alone>(node);
  torch::autograd::edge_list roots;
  variable_list values;
  for (std::size_t output = 0; output < gradients.size(); ++output) {
    if (!gradients[output].defined()) {
      alone->add_input_metadata(Node::undefined_input());
      continue;
    }
    alone->add_input_metadata(gradients[output]);
    roots.emplace_back(alone, static_cast<std::uint32_t>(output));
    values.push_back(gradients[output]);
  }
  torch::autograd::Engine::get_default_engine().execute(roots, values, /*keep_graph=*/true,
                                                        /*create_graph=*/false,
                                                        /*accumulate_grad=*/true, {});
  return alone->take();
}

}  // namespace

std::vector<at::Tensor> apply_rows(const NodeView& node, const std::vector<at::Tensor>& rows) {
  Node& found = Access::node(node);
  GRADUS_CHECK("grad_plane", rows.size() == found.num_inputs() && row_count(rows) > 0,
               "rows for each of ", found.num_inputs(), " outputs of ", found.name(),
               " are required; got ", rows.size());
  const Formula formula = [&](const std::vector<at::Tensor>& gradients) {
    std::vector<at::Tensor> given = apply_alone(found, gradients);
    // What the engine does with a gradient of an operand that was broadcast.
    for (std::size_t edge = 0; edge < given.size(); ++edge) {
      const auto& next = found.next_edge(edge);
      if (!given[edge].defined() || !next.is_valid()) {
        given[edge] = at::Tensor();
        continue;
      }
      const auto sizes = NodeView(next.function).sizes(next.input_nr);
      if (given[edge].sizes() != c10::IntArrayRef(sizes)) {
        given[edge] = at::sum_to(given[edge], sizes);
      }
    }
    return given;
  };
  return by_rows(formula, rows);
}

std::vector<at::Tensor> backward_rows(const EdgeView& from, const at::Tensor& rows,
                                      const std::vector<EdgeView>& ends) {
  return backward_rows(std::vector<EdgeView>{from}, std::vector<at::Tensor>{rows}, ends);
}

std::vector<at::Tensor> backward_rows(const std::vector<EdgeView>& from,
                                      const std::vector<at::Tensor>& rows,
                                      const std::vector<EdgeView>& ends) {
  GRADUS_CHECK("grad_plane", from.size() == rows.size(), "rows for each edge are required; got ",
               from.size(), " edges and ", rows.size(), " tensors of rows");
  if (from.empty() || ends.empty()) return std::vector<at::Tensor>(ends.size());
  return by_rows(
      [&](const std::vector<at::Tensor>& gradients) {
        return backward_to(from, gradients, ends, true);
      },
      rows);
}

}  // namespace gradus::plane::grad
