#include <gradus/plane/grad/grad_plane.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <gradus/base/error.h>
#include <gradus/base/names.h>

namespace gradus::plane::grad {

using torch::autograd::Node;
using torch::autograd::variable_list;

class Access {
 public:
  static Node& node(const NodeView& view) {
    GRADUS_CHECK("grad_plane", view.defined(), "a defined node is required; got an undefined one");
    return *view.node_;
  }
};

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

Hook before(const NodeView& node, std::function<void(std::vector<at::Tensor>&)> fn) {
  auto state = std::make_shared<BeforeHook::State>(std::move(fn));
  Access::node(node).add_pre_hook(std::make_unique<BeforeHook>(state));
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

}  // namespace gradus::plane::grad
