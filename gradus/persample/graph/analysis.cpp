#include <gradus/persample/graph/analysis.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include <gradus/base/error.h>
#include <gradus/base/names.h>
#include <gradus/persample/graph/internal/functions.h>
#include <gradus/persample/graph/internal/probe.h>
#include <gradus/plane/grad/operands.h>

namespace gradus::persample {

namespace grad = plane::grad;
using internal::Functions;
using internal::Owner;
using internal::Probed;

namespace {

std::vector<std::int64_t> all_shapes(const Graph& graph) {
  std::vector<std::int64_t> shapes;
  for (const grad::NodeView& node : graph.nodes) {
    for (std::size_t output = 0; output < node.inputs(); ++output) {
      const std::vector<std::int64_t> sizes = node.sizes(output);
      shapes.insert(shapes.end(), sizes.begin(), sizes.end());
    }
  }
  return shapes;
}

// The shapes that a site was seen with, its example dimension as a multiple of the examples.
std::vector<std::int64_t> shapes_of(const Graph& graph, const Site& site, std::int64_t examples) {
  std::vector<std::int64_t> shapes;
  const grad::NodeView& node = graph.nodes[site.node];
  for (std::size_t output = 0; output < node.inputs(); ++output) {
    std::vector<std::int64_t> sizes = node.sizes(output);
    const std::int64_t dim = site.layouts[output].examples > 0 ? site.layouts[output].dim : -1;
    if (dim >= 0 && dim < static_cast<std::int64_t>(sizes.size())) {
      auto& size = sizes[static_cast<std::size_t>(dim)];
      size = size % examples == 0 ? -(size / examples) : size;
    }
    shapes.push_back(static_cast<std::int64_t>(sizes.size()));
    shapes.insert(shapes.end(), sizes.begin(), sizes.end());
  }
  return shapes;
}

}  // namespace

Graph read_graph(const at::Tensor& losses, const std::vector<at::Tensor>& parameters) {
  GRADUS_CHECK("persample", losses.defined() && losses.dim() == 1 && losses.size(0) > 0,
               "losses of shape [B], one an example, are required; got ",
               base::describe_tensor(losses),
               ": give the loss reduction=none and reduce it over all but the examples");
  Graph graph{.losses = losses};
  if (!losses.requires_grad()) return graph;
  std::map<const void*, std::int64_t> accumulators;
  std::vector<grad::NodeView> alive;  // or an address would stand for two of them
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].requires_grad() || !parameters[i].is_leaf()) continue;
    alive.push_back(grad::gradient_edge(parameters[i]).node);
    accumulators.emplace(alive.back().id(), static_cast<std::int64_t>(i));
  }
  graph.nodes = grad::walk({losses});
  graph.parameter.assign(graph.nodes.size(), -1);
  graph.leads_to_parameter.assign(graph.nodes.size(), false);
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) graph.place[graph.nodes[i].id()] = i;
  for (std::size_t i = graph.nodes.size(); i-- > 0;) {
    const auto found = accumulators.find(graph.nodes[i].id());
    if (found != accumulators.end()) graph.parameter[i] = found->second;
    bool leads = graph.parameter[i] >= 0;
    for (const grad::EdgeView& edge : graph.nodes[i].next()) {
      leads = leads ||
              (edge.node.defined() && graph.leads_to_parameter[graph.place.at(edge.node.id())]);
    }
    graph.leads_to_parameter[i] = leads;
  }
  graph.kinds = internal::kinds_of(graph);
  return graph;
}

namespace {

// One analysis: what was measured, and what it means.
class Analysis {
 public:
  explicit Analysis(const Graph& graph)
      : graph_(graph), probed_(internal::probe(graph)), kinds_(graph.kinds) {
    for (std::size_t i = graph.nodes.size(); i-- > 0;) settle_kind(i);
  }

  Plan plan() {
    Plan plan{.examples = graph_.losses.size(0)};
    plan.reusable = is_static();
    find_sites(plan);
    find_unreached(plan);
    plan.shapes = all_shapes(graph_);
    return plan;
  }

 private:
  // What is made of parameters alone is shared, unless copies of it are seen to be those of
  // examples.
  void settle_kind(std::size_t i) {
    if (kinds_[i] == Kind::parameters || graph_.parameter[i] >= 0) return;
    const std::string name = graph_.nodes[i].name();
    const std::string_view operation = internal::operation_of(name);
    const bool made_of_operands = operation == "Cat" || operation == "Stack";
    if (graph_.kinds[i] == Kind::operands && !made_of_operands) return;
    if (graph_.kinds[i] == Kind::data && internal::may_take_data(graph_.nodes[i]) &&
        !made_of_operands)
      return;
    for (const grad::EdgeView& edge : graph_.nodes[i].next()) {
      if (!edge.node.defined()) {
        if (made_of_operands) return;
        continue;
      }
      if (kinds_[graph_.place.at(edge.node.id())] != Kind::parameters) return;
    }
    if (graph_.nodes[i].next().empty()) return;
    for (const Owner& owner : probed_.owners[i]) {
      if (owner.kind == Owner::Kind::examples) return;
    }
    kinds_[i] = Kind::parameters;
  }

  Owner owner_at(std::size_t node, std::size_t output) const {
    if (kinds_[node] == Kind::parameters) {
      return Owner{.kind = Owner::Kind::several, .certain = true};
    }
    return output < probed_.owners[node].size() ? probed_.owners[node][output] : Owner{};
  }

  // False if another batch of the same program may have its examples elsewhere.
  bool is_static() const {
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      if (!graph_.leads_to_parameter[i] || kinds_[i] == Kind::parameters) continue;
      for (const Owner& owner : probed_.owners[i]) {
        if (owner.ambiguous) return false;
      }
      const std::vector<grad::EdgeView> next = graph_.nodes[i].next();
      for (std::size_t edge = 0; edge < next.size(); ++edge) {
        if (!next[edge].node.defined()) continue;
        const std::size_t to = graph_.place.at(next[edge].node.id());
        if (!graph_.leads_to_parameter[to] || graph_.parameter[to] >= 0) continue;
        const Owner owner = owner_at(to, next[edge].input);
        // Where no gradient came now, one may come at the next batch.
        if (owner.kind == Owner::Kind::silent) return false;
        if (owner.kind == Owner::Kind::examples && moves_examples(i, edge, owner)) return false;
      }
    }
    return true;
  }

  // True if values of the batch choose where examples lie in the operand at @p edge.
  bool moves_examples(std::size_t node, std::size_t edge, const Owner& owner) const {
    const auto choice = grad::as_choice(graph_.nodes[node], edge);
    if (!choice) return false;
    if (owner.layout.dim < 0) {  // all of one example, as all that comes in
      return !std::ranges::all_of(probed_.owners[node], [](const Owner& from) {
        return from.kind == Owner::Kind::silent ||
               (from.kind == Owner::Kind::examples && from.layout.dim < 0);
      });
    }
    if (!choice->dims || !owner.layout.regular()) return true;
    const grad::EdgeView to = graph_.nodes[node].next()[edge];
    const auto rank = static_cast<std::int64_t>(to.node.sizes(to.input).size());
    return std::ranges::any_of(*choice->dims, [&](std::int64_t dim) {
      return (dim < 0 ? dim + rank : dim) == owner.layout.dim;
    });
  }

  void find_sites(Plan& plan) const {
    const Functions functions(graph_);
    std::set<std::string> mixed;
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      if (!graph_.leads_to_parameter[i] || graph_.parameter[i] >= 0) continue;
      std::optional<Site> site = site_at(i, plan.reusable);
      if (!site) continue;
      const std::vector<grad::EdgeView> next = graph_.nodes[i].next();
      for (const std::size_t edge : site->shared) {
        const std::string name = functions.outsider(graph_.place.at(next[edge].node.id()));
        if (!name.empty()) mixed.insert(base::join(graph_.nodes[i].name(), " towards ", name));
      }
      for (const Layout& layout : site->layouts) {
        if (layout.examples > 0 && layout.dim >= 0 && !layout.regular() && plan.irregular.empty()) {
          plan.irregular = graph_.nodes[i].name();
        }
      }
      site->operands = shapes_of(graph_, *site, plan.examples);
      plan.sites.push_back(*std::move(site));
    }
    for (const std::string& place : mixed) plan.mixed += (plan.mixed.empty() ? "" : ", ") + place;
  }

  // The node as a site, if examples reach it apart and it has an operand that they share.
  std::optional<Site> site_at(std::size_t node, bool& reusable) const {
    Site site{.node = node};
    bool by_example = false;
    bool certain = true;
    for (std::size_t output = 0; output < graph_.nodes[node].inputs(); ++output) {
      const Owner owner = owner_at(node, output);
      if (owner.kind == Owner::Kind::several) return std::nullopt;
      if (owner.kind == Owner::Kind::examples) {
        by_example = true;
        certain = certain && owner.certain;
      }
      site.layouts.push_back(owner.layout);
    }
    if (!by_example) return std::nullopt;
    if (kinds_[node] == Kind::operands && !internal::takes_data_by_rule(graph_.nodes[node]))
      reusable = false;
    const std::vector<grad::EdgeView> next = graph_.nodes[node].next();
    for (std::size_t edge = 0; edge < next.size(); ++edge) {
      if (!next[edge].node.defined()) continue;
      const std::size_t to = graph_.place.at(next[edge].node.id());
      if (!graph_.leads_to_parameter[to]) continue;
      if (graph_.parameter[to] >= 0 ||
          owner_at(to, next[edge].input).kind == Owner::Kind::several) {
        site.shared.push_back(edge);
      }
    }
    if (site.shared.empty()) return std::nullopt;
    reusable = reusable && certain;
    return site;
  }

  // Walks all ways from the losses that end at no site.
  void find_unreached(Plan& plan) const {
    std::set<std::pair<std::size_t, std::size_t>> taken;  // edges whose gradients a site gives
    for (const Site& site : plan.sites) {
      for (const std::size_t edge : site.shared) taken.emplace(site.node, edge);
    }
    std::vector<bool> open(graph_.nodes.size(), false);
    open[0] = true;
    for (std::size_t i = 0; i < graph_.nodes.size(); ++i) {
      if (!open[i]) continue;
      if (graph_.parameter[i] >= 0 && probed_.reached.contains(i)) {
        plan.unreached.push_back(graph_.parameter[i]);
      }
      const std::vector<grad::EdgeView> next = graph_.nodes[i].next();
      for (std::size_t edge = 0; edge < next.size(); ++edge) {
        if (!next[edge].node.defined() || taken.contains({i, edge})) continue;
        const std::size_t to = graph_.place.at(next[edge].node.id());
        const auto& owners = probed_.owners[to];
        const bool silent =
            graph_.parameter[to] < 0 && (next[edge].input >= owners.size() ||
                                         owners[next[edge].input].kind == Owner::Kind::silent);
        if (graph_.leads_to_parameter[to] && !silent) open[to] = true;
      }
    }
  }

  const Graph& graph_;
  Probed probed_;
  std::vector<Kind> kinds_;
};

}  // namespace

Plan analyse(const Graph& graph) { return Analysis(graph).plan(); }

bool adapt(const Plan& plan, const Graph& graph, Plan& adapted) {
  const std::int64_t examples = graph.losses.size(0);
  const std::vector<std::int64_t> shapes = all_shapes(graph);
  if (shapes.size() != plan.shapes.size()) return false;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    // The same, or as many times as large as the batch is.
    if (shapes[i] != plan.shapes[i] && shapes[i] * plan.examples != plan.shapes[i] * examples) {
      return false;
    }
  }
  for (const Site& site : plan.sites) {
    if (shapes_of(graph, site, examples) != site.operands) return false;
    for (const Layout& layout : site.layouts) {
      if (layout.examples == 0) continue;
      const auto sizes =
          graph.nodes[site.node].sizes(static_cast<std::size_t>(&layout - site.layouts.data()));
      if (sizes[static_cast<std::size_t>(layout.dim)] % (examples * layout.inner) != 0)
        return false;
    }
  }
  adapted = plan;
  adapted.examples = examples;
  for (Site& site : adapted.sites) {
    for (Layout& layout : site.layouts) {
      if (layout.examples > 0) layout.examples = examples;
    }
  }
  return true;
}

}  // namespace gradus::persample
