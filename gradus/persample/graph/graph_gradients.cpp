#include <gradus/persample/graph/graph_gradients.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/real.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/base/error.h>
#include <gradus/base/names.h>
#include <gradus/persample/graph/analysis.h>
#include <gradus/persample/graph/internal/arithmetic.h>
#include <gradus/persample/graph/rule.h>
#include <gradus/persample/graph/term.h>
#include <gradus/plane/grad/operands.h>
#include <gradus/plane/op/op_plane.h>

namespace gradus::persample {

namespace grad = plane::grad;

namespace {

constexpr std::size_t kPlansPerStructure = 16;
// A program that the host makes anew for each batch would fill memory with plans.
constexpr std::size_t kStructures = 1024;

/// The way from a shared operand to parameters.
struct Way {
  std::int64_t parameter = -1;  ///< The only one, by rearrangements alone; else -1.
  bool transposed = false;      ///< As a matrix, once.
  bool reshaped = false;        ///< By views that keep the order of elements.
};

bool changes_gradients(const grad::NodeView& node) {
  return node.has_hooks() || node.has_post_hooks();
}

// By node: hooks may change the gradients on some way from it to a parameter.
std::vector<bool> hooked_ways(const Graph& graph) {
  std::vector<bool> hooked(graph.nodes.size(), false);
  for (std::size_t i = graph.nodes.size(); i-- > 0;) {
    if (graph.parameter[i] >= 0 || !graph.leads_to_parameter[i]) continue;
    hooked[i] = changes_gradients(graph.nodes[i]);
    for (const grad::EdgeView& edge : graph.nodes[i].next()) {
      if (hooked[i]) break;
      hooked[i] = edge.node.defined() && hooked[graph.place.at(edge.node.id())];
    }
  }
  return hooked;
}

Way way_from(const Graph& graph, const grad::EdgeView& start) {
  Way way;
  grad::NodeView node = start.node;
  while (node.defined()) {
    const std::int64_t parameter = graph.parameter[graph.place.at(node.id())];
    if (parameter >= 0) {
      way.parameter = parameter;
      return way;
    }
    if (changes_gradients(node)) return {};
    const auto step = grad::as_rearrangement(node);
    const std::vector<grad::EdgeView> next = node.next();
    if (!step || next.size() != 1) return {};
    if (step->transposes_matrix) {
      if (way.reshaped) return {};
      way.transposed = !way.transposed;
    } else if (step->keeps_order) {
      if (way.transposed) return {};
      way.reshaped = true;
    } else if (!step->keeps_shape) {
      return {};
    }
    node = next[0].node;
  }
  return {};
}

// Without gradient recording and autocast: the numbers of a reader are not part of its program.
class [[nodiscard]] InFull {
 public:
  InFull() {
    if (plane::op::newest(plane::op::Order::autocast) != nullptr) {
      off_.emplace(amp::AutocastOptions{.enabled = false});
    }
  }

 private:
  at::NoGradGuard no_grad_;
  std::optional<amp::AutocastGuard> off_;
};

/// Remembers which way was faster for terms of one kind and shape.
class Choices {
 public:
  static Choices& instance() {
    static Choices choices;
    return choices;
  }

  bool form(const Term& term) {
    const std::string key = key_of(term);
    {
      const std::lock_guard lock(mutex_);
      const auto found = formed_.find(key);
      if (found != formed_.end()) return found->second;
    }
    const at::Tensor weights = at::ones({term.examples()});
    constexpr int kRepeats = 2;
    const double formed = internal::milliseconds_of(
        [&] {
          const FormedTerm gradients(term.form());
          gradients.squared_norms();
          gradients.weighted_sum(weights);
        },
        kRepeats);
    const double factors = internal::milliseconds_of(
        [&] {
          term.squared_norms();
          term.weighted_sum(weights);
        },
        kRepeats);
    const std::lock_guard lock(mutex_);
    return formed_.emplace(key, formed < factors).first->second;
  }

 private:
  static std::string key_of(const Term& term) {
    std::string key = term.describe();
    key += " threads " + std::to_string(at::get_num_threads());
    return key;
  }

  std::mutex mutex_;
  std::map<std::string, bool> formed_;
};

}  // namespace

class GraphGradients::Table {
 public:
  Table(std::vector<NamedParameter> parameters, GraphOptions options)
      : parameters_(std::move(parameters)), options_(options), entries_(parameters_.size()) {
    for (const NamedParameter& parameter : parameters_) wants_gradient(parameter);
  }

  void backward(const at::Tensor& losses, bool keep_graph);
  void clear() {
    for (Entry& entry : entries_) entry = Entry();
    halted_.clear();
    examples_ = 0;
  }

  std::int64_t examples() const { return examples_; }
  std::int64_t analyses() const { return analyses_; }
  const std::vector<NamedParameter>& parameters() const { return parameters_; }
  bool wanted(std::size_t index) const { return parameters_.at(index).tensor.requires_grad(); }

  at::Tensor gradients(std::size_t index, bool sparse) const {
    if (!wanted(index)) return {};
    check_used();
    const Entry& entry = entries_[index];
    if (entry.term == nullptr) {
      std::vector<std::int64_t> sizes = parameters_[index].tensor.sizes().vec();
      sizes.insert(sizes.begin(), examples_);
      return at::zeros(sizes, widened_options(index));
    }
    if (sparse) {
      if (const auto* const lookup = dynamic_cast<const LookupTerm*>(entry.term.get())) {
        return lookup->form_sparse();
      }
    }
    return entry.term->form();
  }

  at::Tensor squared_norms(std::size_t index) const {
    check_used();
    const Entry& entry = entries_.at(index);
    if (entry.term == nullptr) return at::zeros({examples_}, at::kDouble);
    return entry.squared.defined() ? entry.squared : entry.term->squared_norms().to(at::kDouble);
  }

  at::Tensor weighted_sum(std::size_t index, const at::Tensor& weights) const {
    if (!wanted(index)) return {};
    check_used();
    GRADUS_CHECK("persample", weights.sizes() == c10::IntArrayRef({examples_}),
                 "weights of shape [", examples_, "] are required; got ",
                 base::describe_tensor(weights));
    const Entry& entry = entries_[index];
    if (entry.term == nullptr) {
      return at::zeros(parameters_[index].tensor.sizes(), widened_options(index));
    }
    return entry.term->weighted_sum(weights).view(parameters_[index].tensor.sizes());
  }

  void forget(std::size_t index) { entries_.at(index) = Entry(); }
  void set_examples_checked(bool checked) { options_.examples_checked = checked; }
  void set_skipped(std::vector<bool> skipped) { skipped_ = std::move(skipped); }
  bool uses(std::size_t index) const { return entries_.at(index).term != nullptr; }

  std::string explain(std::size_t index) const {
    const Entry& entry = entries_.at(index);
    const std::string& name = parameters_.at(index).name;
    if (!wanted(index)) return name + ": frozen";
    if (entry.term == nullptr) return name + ": not used";
    return name + ": " + entry.term->describe() + (entry.by_formula ? ", by its own formula" : "");
  }

 private:
  struct Entry {
    std::vector<std::unique_ptr<Term>> arrived{};  // in this backward call
    std::size_t awaited = 0;                       // terms still to come in it
    std::unique_ptr<Term> term = nullptr;
    at::Tensor squared{};  // norms, float64 [B]
    bool by_formula = false;
  };

  at::TensorOptions widened_options(std::size_t index) const {
    const at::Tensor& tensor = parameters_[index].tensor;
    return tensor.options()
        .dtype(tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)
        .requires_grad(false);
  }
  void check_used() const {
    GRADUS_CHECK("persample", examples_ > 0,
                 "a backward() call before results are read is required; got none since clear()");
  }

  Plan plan_for(const Graph& graph);
  void check(const Plan& plan) const;
  void single_example(const Graph& graph, bool keep_graph);
  void many_examples(const Graph& graph, bool keep_graph);
  void arrive(const Graph& graph, const grad::EdgeView& edge, std::unique_ptr<Term> term,
              bool by_formula);
  // Terms of one node.
  struct Waiting {
    std::vector<OperandTerm> terms{};
    bool by_formula = false;
  };
  void arrive(const Graph& graph, const grad::NodeView& node, Waiting waiting);
  void add(std::int64_t parameter, std::unique_ptr<Term> term, bool by_formula);
  void settle(Entry& entry);
  void pass_hooks(const Graph& graph);
  void check_hooks(const Graph& graph, const Plan& plan) const;
  // Sends rows on through the graph as it is.
  void send(const Graph& graph, const std::vector<grad::EdgeView>& from,
            const std::vector<at::Tensor>& rows, bool by_formula);

  std::vector<NamedParameter> parameters_;
  GraphOptions options_;
  std::vector<Entry> entries_;
  std::vector<bool> skipped_;
  std::int64_t examples_ = 0;
  std::int64_t analyses_ = 0;
  std::map<std::uint64_t, std::deque<Plan>> plans_;
  // Of the call: ways on which hooks wait for the sum of all that comes, and the rows that came.
  struct Halted {
    grad::EdgeView edge{};
    at::Tensor rows{};
  };
  std::vector<bool> hooked_;
  std::map<std::pair<std::size_t, std::size_t>, Halted> halted_;
};

Plan GraphGradients::Table::plan_for(const Graph& graph) {
  const std::uint64_t structure = structure_of(graph);
  if (plans_.size() >= kStructures && !plans_.contains(structure)) plans_.clear();
  std::deque<Plan>& known = plans_[structure];
  Plan adapted;
  for (const Plan& plan : known) {
    if (adapt(plan, graph, adapted)) {
      check(adapted);
      return adapted;
    }
  }
  ++analyses_;
  Plan plan = analyse(graph);
  check(plan);
  if (plan.reusable) {
    known.push_front(plan);
    if (known.size() > kPlansPerStructure) known.pop_back();
  }
  return plan;
}

void GraphGradients::Table::check(const Plan& plan) const {
  if (!plan.unreached.empty()) {
    std::string names;
    for (const std::int64_t index : plan.unreached) {
      names += (names.empty() ? "" : ", ") + parameters_[static_cast<std::size_t>(index)].name;
    }
    GRADUS_CHECK("persample", plan.unreached.empty(),
                 "losses in which data of the examples meets each parameter are required; got "
                 "losses that are functions of ",
                 names,
                 " alone, of which it cannot be told whose gradient is where: use the call with a "
                 "loss function");
  }
  if (options_.examples_checked) return;
  GRADUS_CHECK("persample", plan.mixed.empty(),
               "losses that depend on one example each are required; the gradients of examples may "
               "mix at ",
               plan.mixed,
               " (BatchNorm in training, a mean over the batch, parameters computed by unknown "
               "operators): use GroupNorm, or the call with a loss function, which checks");
  GRADUS_CHECK(
      "persample", plan.irregular.empty(),
      "gradients of examples in the order of their losses are required; at ", plan.irregular,
      " they come in another one, as after a flip or permutation of the batch: if each loss "
      "depends on its own example only (packed sequences), use the call with a loss "
      "function, which checks");
}

void GraphGradients::Table::backward(const at::Tensor& losses, bool keep_graph) {
  std::vector<at::Tensor> tensors;
  for (const NamedParameter& parameter : parameters_) tensors.push_back(parameter.tensor);
  const Graph graph = read_graph(losses, tensors);
  GRADUS_CHECK("persample", examples_ == 0 || examples_ == losses.size(0), "losses of the same ",
               examples_, " examples as in the earlier backward() call are required; got ",
               losses.size(0), ": call clear() between batches");
  examples_ = losses.size(0);
  if (graph.nodes.empty() || !graph.leads_to_parameter[0]) return;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    GRADUS_CHECK("persample", graph.parameter[i] < 0 || !graph.nodes[i].has_hooks(),
                 "parameters without gradient hooks are required; got one on ",
                 parameters_[static_cast<std::size_t>(graph.parameter[i])].name,
                 " (register_hook), which is made for the sum over a batch: remove it");
  }
  const at::NoGradGuard no_grad;
  if (examples_ == 1) {
    single_example(graph, keep_graph);
  } else {
    many_examples(graph, keep_graph);
  }
  for (Entry& entry : entries_) settle(entry);
}

// One example's gradient is the gradient.
void GraphGradients::Table::single_example(const Graph& graph, bool keep_graph) {
  std::vector<grad::EdgeView> ends;
  std::vector<std::int64_t> parameters;
  for (std::size_t node = 0; node < graph.nodes.size(); ++node) {
    if (graph.parameter[node] < 0) continue;
    ends.push_back({graph.nodes[node], 0});
    parameters.push_back(graph.parameter[node]);
  }
  const std::vector<at::Tensor> gradients = grad::backward_to(
      {grad::gradient_edge(graph.losses)}, {at::ones_like(graph.losses)}, ends, keep_graph);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) continue;
    const at::Tensor dense = gradients[i].is_sparse() ? gradients[i].to_dense() : gradients[i];
    add(parameters[i], std::make_unique<FormedTerm>(dense.unsqueeze(0)), false);
  }
}

void GraphGradients::Table::many_examples(const Graph& graph, bool keep_graph) {
  const Plan plan = plan_for(graph);
  check_hooks(graph, plan);
  hooked_ = hooked_ways(graph);
  // A site that no other site is upstream of need not run: the pass ends there.
  std::vector<bool> is_site(graph.nodes.size(), false);
  for (const Site& site : plan.sites) is_site[site.node] = true;
  std::vector<bool> above_site(graph.nodes.size(), false);
  for (std::size_t i = graph.nodes.size(); i-- > 0;) {
    for (const grad::EdgeView& edge : graph.nodes[i].next()) {
      if (!edge.node.defined()) continue;
      const std::size_t next = graph.place.at(edge.node.id());
      if (is_site[next] || above_site[next]) above_site[i] = true;
    }
  }
  for (const Site& site : plan.sites) {
    const std::vector<grad::EdgeView> next = graph.nodes[site.node].next();
    for (const std::size_t edge : site.shared) {
      const Way way = way_from(graph, next[edge]);
      if (way.parameter >= 0) ++entries_[static_cast<std::size_t>(way.parameter)].awaited;
    }
  }
  std::vector<grad::EdgeView> ends;
  std::vector<grad::Hook> hooks;
  for (const Site& site : plan.sites) {
    const grad::NodeView& node = graph.nodes[site.node];
    const bool last = !above_site[site.node];
    for (std::size_t output = 0; last && output < node.inputs(); ++output) {
      ends.push_back({node, output});
    }
    std::vector<std::size_t> onward;
    const std::vector<grad::EdgeView> operands = node.next();
    for (std::size_t edge = 0; edge < operands.size(); ++edge) {
      if (!operands[edge].node.defined()) continue;
      const std::size_t next = graph.place.at(operands[edge].node.id());
      if (is_site[next] || above_site[next]) onward.push_back(edge);
    }
    // What a rule gave in place of the node, which then runs with nothing, and terms that wait.
    const auto replaced = std::make_shared<std::vector<at::Tensor>>();
    const auto waiting = std::make_shared<Waiting>();
    hooks.push_back(
        grad::on_reached(node, [this, &graph, &site, node, last, onward, replaced, waiting,
                                keep_graph](std::vector<at::Tensor>& gradients) {
          const at::NoGradGuard no_grad;
          const NodeUse use{.node = node,
                            .gradients = gradients,
                            .layouts = site.layouts,
                            .shared = site.shared,
                            .onward = onward,
                            .frees_graph = !keep_graph};
          for (std::size_t output = 0; output < gradients.size(); ++output) {
            if (gradients[output].defined() && site.layouts[output].examples == 0) {
              // No gradient came here at analysis.
              GRADUS_CHECK("persample", gradients[output].count_nonzero().item<std::int64_t>() == 0,
                           "a graph like the one analysed is required; got a gradient of output ",
                           output, " of ", node.name(), ", which had none then");
            }
          }
          std::vector<at::Tensor> passed(node.next().size());
          for (OperandTerm& each : terms_of(use, &waiting->by_formula)) {
            if (each.term == nullptr) {
              passed[each.edge] = each.gradient;
            } else {
              waiting->terms.push_back(std::move(each));
            }
          }
          if (last) arrive(graph, node, std::move(*waiting));
          const bool instead = !last && std::ranges::all_of(onward, [&](std::size_t edge) {
            return passed[edge].defined();
          });
          if (instead) *replaced = std::move(passed);
          if (last || instead) std::fill(gradients.begin(), gradients.end(), at::Tensor());
        }));
    if (last) continue;
    hooks.push_back(grad::after(
        node, [this, &graph, node, replaced, waiting](std::vector<at::Tensor>& given,
                                                      const std::vector<at::Tensor>& /*got*/) {
          const at::NoGradGuard no_grad;
          if (!replaced->empty()) given = std::exchange(*replaced, {});
          // Only now: gradients that are formed do not stand beside what the node needs to run.
          arrive(graph, node, std::exchange(*waiting, {}));
        }));
  }
  grad::backward_to({grad::gradient_edge(graph.losses)}, {at::ones_like(graph.losses)}, ends,
                    keep_graph);
  pass_hooks(graph);
}

void GraphGradients::Table::check_hooks(const Graph& graph, const Plan& plan) const {
  for (const Site& site : plan.sites) {
    const grad::NodeView& node = graph.nodes[site.node];
    GRADUS_CHECK("persample", !node.has_post_hooks(),
                 "operators of parameters without hooks on the gradients that they give are "
                 "required; got one on ",
                 node.name(),
                 " (Node::add_post_hook), which is made for the sum over a batch: remove it");
  }
}

// A hook need not be linear: it gets the sum of each example's gradient, as in that one's own pass.
void GraphGradients::Table::pass_hooks(const Graph& graph) {
  if (halted_.empty()) return;
  std::vector<grad::EdgeView> from;
  std::vector<at::Tensor> rows;
  for (auto& [place, halted] : halted_) {
    from.push_back(halted.edge);
    rows.push_back(std::move(halted.rows));
  }
  halted_.clear();
  send(graph, from, rows, true);
}

void GraphGradients::Table::arrive(const Graph& graph, const grad::NodeView& node,
                                   Waiting waiting) {
  const std::vector<grad::EdgeView> next = node.next();
  for (OperandTerm& each : waiting.terms) {
    arrive(graph, next[each.edge], std::move(each.term), waiting.by_formula);
  }
}

void GraphGradients::Table::arrive(const Graph& graph, const grad::EdgeView& edge,
                                   std::unique_ptr<Term> term, bool by_formula) {
  const Way way = way_from(graph, edge);
  if (way.parameter >= 0) {
    std::unique_ptr<Term> turned = std::move(term);
    if (way.transposed) {
      std::unique_ptr<Term> other = turned->transposed();
      if (other == nullptr) {
        other = std::make_unique<FormedTerm>(turned->form().transpose(1, 2));
      }
      turned = std::move(other);
    }
    const auto sizes = parameters_[static_cast<std::size_t>(way.parameter)].tensor.sizes().vec();
    if (turned->sizes() != sizes) {
      std::unique_ptr<Term> other = turned->reshaped(sizes);
      if (other == nullptr) other = FormedTerm(turned->form()).reshaped(sizes);
      turned = std::move(other);
    }
    add(way.parameter, std::move(turned), by_formula);
    return;
  }
  const at::Tensor rows = term->form();
  const std::size_t place = graph.place.at(edge.node.id());
  if (hooked_[place]) {
    Halted& halted = halted_[{place, edge.input}];
    halted.edge = edge;
    halted.rows = halted.rows.defined() ? halted.rows + rows : rows;
    return;
  }
  if (const auto table = grad::as_embedding(edge.node);
      table && !table->scale_by_frequency) {  // positions, looked up once for all examples
    const Way after = way_from(graph, edge.node.next()[grad::Embedding::kWeight]);
    if (after.parameter >= 0 && !after.transposed && !after.reshaped) {
      at::Tensor indices = table->indices().flatten();
      if (table->padding_index >= 0) {
        indices = indices.masked_fill(indices == table->padding_index, -1);
      }
      add(after.parameter,
          std::make_unique<LookupTerm>(indices.unsqueeze(0).expand({rows.size(0), -1}),
                                       rows.flatten(1, -2), table->rows),
          by_formula);
      return;
    }
  }
  // Any other function of parameters: each example's gradient goes back through it.
  send(graph, {edge}, {rows}, by_formula);
}

void GraphGradients::Table::send(const Graph& graph, const std::vector<grad::EdgeView>& from,
                                 const std::vector<at::Tensor>& rows, bool by_formula) {
  std::vector<grad::EdgeView> ends;
  std::vector<std::int64_t> parameters;
  std::vector<std::size_t> open;
  std::set<std::size_t> seen;
  for (const grad::EdgeView& edge : from) {
    const std::size_t place = graph.place.at(edge.node.id());
    if (seen.insert(place).second) open.push_back(place);
  }
  while (!open.empty()) {
    const std::size_t node = open.back();
    open.pop_back();
    if (graph.parameter[node] >= 0) {
      ends.push_back({graph.nodes[node], 0});
      parameters.push_back(graph.parameter[node]);
    }
    for (const grad::EdgeView& next : graph.nodes[node].next()) {
      if (!next.node.defined()) continue;
      const std::size_t to = graph.place.at(next.node.id());
      if (graph.leads_to_parameter[to] && seen.insert(to).second) open.push_back(to);
    }
  }
  const std::vector<at::Tensor> given = grad::backward_rows(from, rows, ends);
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (given[i].defined()) add(parameters[i], std::make_unique<FormedTerm>(given[i]), by_formula);
  }
}

void GraphGradients::Table::add(std::int64_t parameter, std::unique_ptr<Term> term,
                                bool by_formula) {
  const auto index = static_cast<std::size_t>(parameter);
  Entry& entry = entries_[index];
  if (index < skipped_.size() && skipped_[index]) return;
  if (!parameters_[index].tensor.is_complex()) {
    // Through a cast to complex: the gradient of what is real is real.
    if (const auto* const formed = dynamic_cast<const FormedTerm*>(term.get());
        formed != nullptr && formed->form().is_complex()) {
      term = std::make_unique<FormedTerm>(at::real(formed->form()).contiguous());
    }
  }
  entry.arrived.push_back(std::move(term));
  entry.by_formula = entry.by_formula || by_formula;
  if (entry.awaited > 0 && --entry.awaited == 0 && entry.term == nullptr) settle(entry);
}

// All terms of a call are here: their sum, its norms, and what is cheapest to keep of it.
void GraphGradients::Table::settle(Entry& entry) {
  entry.awaited = 0;
  if (entry.arrived.empty()) return;
  std::vector<std::unique_ptr<Term>> terms = std::move(entry.arrived);
  entry.arrived.clear();
  if (entry.term != nullptr) terms.push_back(std::move(entry.term));
  std::unique_ptr<Term> sum = sum_of(std::move(terms));
  if (!options_.reproducible) sum->choose_by_measurement();
  if (dynamic_cast<FormedTerm*>(sum.get()) == nullptr && options_.keep != Keep::factors) {
    double formed_bytes = sum->form_bytes();
    const bool fits = formed_bytes <= options_.formed_bytes * static_cast<double>(sum->bytes());
    const bool form =
        options_.keep == Keep::formed ||
        (fits && (options_.reproducible
                      ? sum->form_operations() < sum->norm_operations() + sum->form_operations() / 2
                      : Choices::instance().form(*sum)));
    if (form) sum = std::make_unique<FormedTerm>(sum->form());
  }
  entry.squared = sum->squared_norms().to(at::kDouble);
  entry.term = std::move(sum);
}

GraphGradients::GraphGradients(std::vector<NamedParameter> parameters, GraphOptions options)
    : table_(std::make_unique<Table>(std::move(parameters), options)) {}
GraphGradients::~GraphGradients() = default;

void GraphGradients::backward(const at::Tensor& losses, bool keep_graph) {
  try {
    table_->backward(losses, keep_graph);
  } catch (...) {
    table_->clear();  // half a table is worse than none
    throw;
  }
}

std::int64_t GraphGradients::examples() const { return table_->examples(); }
const std::vector<NamedParameter>& GraphGradients::parameters() const {
  return table_->parameters();
}
at::Tensor GraphGradients::gradients(std::size_t index, bool sparse) const {
  const InFull in_full;
  return table_->gradients(index, sparse);
}
at::Tensor GraphGradients::norms(std::size_t index) const {
  const InFull in_full;
  return table_->squared_norms(index).sqrt();
}

at::Tensor GraphGradients::norms() const {
  const InFull in_full;
  at::Tensor total;
  for (std::size_t i = 0; i < parameters().size(); ++i) {
    if (!table_->wanted(i)) continue;
    const at::Tensor squared = table_->squared_norms(i);
    total = total.defined() ? total + squared : squared;
  }
  return total.defined() ? total.sqrt() : at::zeros({examples()}, at::kDouble);
}

at::Tensor GraphGradients::weighted_sum(std::size_t index, const at::Tensor& weights) const {
  const InFull in_full;
  return table_->weighted_sum(index, weights);
}

std::vector<at::Tensor> GraphGradients::weighted_sums(const at::Tensor& weights, bool consume) {
  std::vector<at::Tensor> sums;
  for (std::size_t i = 0; i < parameters().size(); ++i) {
    sums.push_back(weighted_sum(i, weights));
    if (consume) table_->forget(i);
  }
  if (consume) table_->clear();
  return sums;
}

void GraphGradients::set_examples_checked(bool checked) { table_->set_examples_checked(checked); }
void GraphGradients::set_skipped(std::vector<bool> skipped) {
  table_->set_skipped(std::move(skipped));
}
bool GraphGradients::uses(std::size_t index) const { return table_->uses(index); }
void GraphGradients::forget(std::size_t index) { table_->forget(index); }
void GraphGradients::clear() { table_->clear(); }
std::int64_t GraphGradients::analyses() const { return table_->analyses(); }
std::vector<std::string> GraphGradients::explain() const {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < parameters().size(); ++i) lines.push_back(table_->explain(i));
  return lines;
}

}  // namespace gradus::persample
