#include <gradus/persample/graph/analysis.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <utility>

#include <ATen/ops/tensor.h>

#include <gradus/base/error.h>
#include <gradus/base/names.h>
#include <gradus/plane/grad/operands.h>

namespace gradus::persample {

namespace grad = plane::grad;

namespace {

constexpr std::int64_t kNobody = -1;
constexpr std::int64_t kSeveral = -2;
constexpr std::int64_t kUnreadable = -3;  // infinite or no number
// Scaling by a power of two is exact; this is the rounding of the logarithm.
constexpr double kExponentTolerance = 1e-9;

// Below the square of this, subnormal numbers may be all there is, and they lose bits: scaling is
// no longer exact.
double smallest_exact(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return 0x1p-500;
    case at::kHalf:
      return 0x1p-24;  // what is lost must be nothing; scale the losses of float16 models
    default:
      return 0x1p-120;
  }
}

// Operators that make a function of parameters alone out of such functions, and never bring data
// of the batch in, whatever else they save.
const std::set<std::string>& parameter_operators() {
  static const std::set<std::string> names{"TBackward0",
                                           "TransposeBackward0",
                                           "TransposeBackward1",
                                           "PermuteBackward0",
                                           "ViewBackward0",
                                           "UnsafeViewBackward0",
                                           "ReshapeAliasBackward0",
                                           "SqueezeBackward0",
                                           "SqueezeBackward1",
                                           "UnsqueezeBackward0",
                                           "ToCopyBackward0",
                                           "AliasBackward0",
                                           "CloneBackward0",
                                           "SliceBackward0",
                                           "SelectBackward0",
                                           "SplitBackward0",
                                           "SplitWithSizesBackward0",
                                           "UnbindBackward0",
                                           "ChunkBackward0",
                                           "CatBackward0",
                                           "StackBackward0",
                                           "ExpandBackward0",
                                           "RepeatBackward0",
                                           "EmbeddingBackward0",
                                           "NarrowBackward0",
                                           "AsStridedBackward0",
                                           "WeightNormInterfaceBackward0",
                                           "torch::autograd::AccumulateGrad"};
  return names;
}

// The squared norm of each index of each dimension of a tensor, and of the whole.
struct Profile {
  std::vector<std::vector<double>> by_dim{};
  double total = 0;
  double smallest = 0;  ///< Smaller ones tell nothing.
};

std::vector<double> to_vector(const at::Tensor& tensor) {
  const at::Tensor values = tensor.to(at::kCPU, at::kDouble).contiguous();
  const auto* const data = values.const_data_ptr<double>();
  return {data, data + values.numel()};
}

Profile profile_of(const at::Tensor& gradient) {
  at::Tensor dense = gradient.is_sparse() ? gradient.to_dense() : gradient;
  if (dense.is_complex()) dense = dense.abs();
  const at::Tensor squares = dense.to(at::kDouble).square();
  const double smallest = smallest_exact(gradient.scalar_type());
  Profile profile{
      .by_dim = {}, .total = squares.sum().item<double>(), .smallest = smallest * smallest};
  for (std::int64_t dim = 0; dim < squares.dim(); ++dim) {
    std::vector<std::int64_t> others;
    for (std::int64_t other = 0; other < squares.dim(); ++other) {
      if (other != dim) others.push_back(other);
    }
    profile.by_dim.push_back(to_vector(others.empty() ? squares : squares.sum(others)));
  }
  return profile;
}

// Writes b as digits, one a pass; a digit and one more is the exponent of the root gradient in that
// pass: 0 is none, so that a formula that ignores the size of gradients stands out. One more pass
// has exponents by chance, to find what came out as a power by chance.
struct Digits {
  std::int64_t base = 13;
  std::int64_t passes = 1;

  Digits(std::int64_t examples, at::ScalarType type) : base(type == at::kHalf ? 4 : 13) {
    for (std::int64_t reach = base; reach < examples; reach *= base) ++passes;
  }
  std::int64_t digit(std::int64_t example, std::int64_t pass) const {
    if (pass == passes) return chance(example);
    for (; pass > 0; --pass) example /= base;
    return example % base + 1;
  }
  std::int64_t chance(std::int64_t example) const {
    auto mixed = static_cast<std::uint64_t>(example) + 0x9e3779b97f4a7c15ULL;
    mixed = (mixed ^ (mixed >> 30U)) * 0xbf58476d1ce4e5b9ULL;
    mixed = (mixed ^ (mixed >> 27U)) * 0x94d049bb133111ebULL;
    return static_cast<std::int64_t>((mixed >> 33U) % static_cast<std::uint64_t>(base)) + 1;
  }
  /// The example whose digits are log4 of the ratios of @p squares to @p reference.
  std::int64_t example(double reference, const std::vector<double>& squares, double smallest,
                       std::int64_t examples) const {
    if (reference == 0) {
      const bool silent =
          std::all_of(squares.begin(), squares.end(), [](double s) { return s == 0; });
      return silent ? kNobody : kSeveral;
    }
    if (reference < smallest) return kNobody;
    if (!std::isfinite(reference)) return kUnreadable;
    std::int64_t found = 0;
    std::int64_t place = 1;
    std::int64_t last = 0;
    for (std::size_t pass = 0; pass < squares.size(); ++pass) {
      const double square = squares[pass];
      if (!std::isfinite(square)) return kUnreadable;
      const double exponent = std::log2(square / reference) / 2;
      const double digit = std::round(exponent);
      if (!(std::abs(exponent - digit) <= kExponentTolerance) || digit < 1 ||
          digit > static_cast<double>(base)) {
        return kSeveral;
      }
      last = static_cast<std::int64_t>(digit);
      if (pass + 1 == squares.size()) break;  // the one by chance
      found += (last - 1) * place;
      place *= base;
    }
    return found < examples && last == chance(found) ? found : kSeveral;
  }
};

// What one output of a node was found to be.
struct Owner {
  enum class Kind : std::uint8_t { silent, examples, several } kind = Kind::silent;
  Layout layout{};
  bool certain = false;  // seen on several examples, and nothing else fits
};

std::optional<std::int64_t> rule_of(const std::vector<std::int64_t>& owners, std::int64_t examples,
                                    int& fits) {
  const auto size = static_cast<std::int64_t>(owners.size());
  if (size % examples != 0) return std::nullopt;
  std::optional<std::int64_t> found;
  for (std::int64_t inner = 1; inner <= size / examples; ++inner) {
    if ((size / examples) % inner != 0) continue;
    bool fit = true;
    for (std::int64_t i = 0; i < size && fit; ++i) {
      const std::int64_t owner = owners[static_cast<std::size_t>(i)];
      fit = owner == kNobody || owner == (i / inner) % examples;
    }
    if (!fit) continue;
    ++fits;
    if (!found) found = inner;
  }
  return found;
}

Owner owner_of(const std::vector<Profile>& profiles, const Digits& digits, std::int64_t examples) {
  const auto read = [&](auto&& value_of) {
    std::vector<double> squares;
    for (std::size_t pass = 1; pass < profiles.size(); ++pass) {
      squares.push_back(value_of(profiles[pass]));
    }
    return digits.example(value_of(profiles[0]), squares, profiles[0].smallest, examples);
  };
  const std::int64_t whole = read([](const Profile& profile) { return profile.total; });
  if (whole == kNobody) return {};
  int fits = 0;
  std::optional<Layout> regular;
  std::optional<Layout> irregular;
  std::size_t most = 0;  // examples seen along one dimension
  bool readable = whole != kUnreadable;
  const std::size_t dims = profiles[0].by_dim.size();
  for (std::size_t dim = 0; dim < dims; ++dim) {
    std::vector<std::int64_t> owners;
    for (std::size_t i = 0; i < profiles[0].by_dim[dim].size(); ++i) {
      owners.push_back(read([&](const Profile& profile) { return profile.by_dim[dim][i]; }));
    }
    if (std::find(owners.begin(), owners.end(), kSeveral) != owners.end()) continue;
    std::set<std::int64_t> seen(owners.begin(), owners.end());
    seen.erase(kNobody);
    if (seen.erase(kUnreadable) > 0) {
      // The rest must tell: a sum over examples of which one is infinite is infinite all over.
      readable = false;
      if (seen.empty()) continue;
      std::replace(owners.begin(), owners.end(), kUnreadable, kNobody);
    }
    const bool tells_more = seen.size() > most;
    most = std::max(most, seen.size());
    const Layout here{.examples = examples, .dim = static_cast<std::int64_t>(dim)};
    if (const auto inner = rule_of(owners, examples, fits)) {
      if (!regular) {
        regular = here;
        regular->inner = *inner;
      }
    } else if (!irregular || tells_more) {
      irregular = here;
      irregular->owners = owners;
    }
  }
  // In the norm of the whole a small gradient of one example is lost beside a large one of another.
  const bool several_seen = whole == kSeveral || whole == kUnreadable || most > 1;
  if (regular && (several_seen || fits == 1)) {
    return {Owner::Kind::examples, *regular, several_seen && fits == 1 && readable};
  }
  if (!several_seen) {
    // All of one example: right for this batch, wherever the examples lie.
    return {Owner::Kind::examples, Layout{.examples = examples, .dim = -1, .owners = {whole}},
            false};
  }
  if (irregular) return {Owner::Kind::examples, *irregular, false};
  return {Owner::Kind::several, {}, true};
}

using Owners = std::vector<std::vector<Owner>>;  // by node, then by output

Owners probe(const Graph& graph) {
  const std::int64_t examples = graph.losses.size(0);
  const Digits digits(examples, graph.losses.scalar_type());
  std::vector<grad::EdgeView> ends;
  for (std::size_t node = 0; node < graph.nodes.size(); ++node) {
    if (graph.parameter[node] >= 0) ends.push_back({graph.nodes[node], 0});
  }
  std::vector<std::vector<std::vector<Profile>>> profiles(
      graph.nodes.size());  // node, pass, output
  for (std::int64_t pass = 0; pass <= digits.passes + 1; ++pass) {
    std::vector<grad::Hook> hooks;
    for (std::size_t node = 0; node < graph.nodes.size(); ++node) {
      if (!graph.leads_to_parameter[node] || graph.parameter[node] >= 0) continue;
      hooks.push_back(grad::on_reached(graph.nodes[node], [&profiles, node](auto& gradients) {
        std::vector<Profile> outputs;
        for (const at::Tensor& gradient : gradients) {
          outputs.push_back(gradient.defined() ? profile_of(gradient) : Profile{});
        }
        profiles[node].push_back(std::move(outputs));
      }));
    }
    std::vector<double> roots(static_cast<std::size_t>(examples), 1.0);
    if (pass > 0) {
      for (std::int64_t b = 0; b < examples; ++b) {
        roots[static_cast<std::size_t>(b)] =
            std::exp2(static_cast<double>(digits.digit(b, pass - 1)));
      }
    }
    const at::Tensor root = at::tensor(roots, at::kDouble).to(graph.losses.options());
    grad::backward_to({grad::gradient_edge(graph.losses)}, {root}, ends, /*keep_graph=*/true);
  }
  Owners owners(graph.nodes.size());
  for (std::size_t node = 0; node < graph.nodes.size(); ++node) {
    if (profiles[node].empty()) continue;
    for (std::size_t output = 0; output < profiles[node][0].size(); ++output) {
      std::vector<Profile> of_output;
      for (const auto& pass : profiles[node]) of_output.push_back(pass[output]);
      owners[node].push_back(of_output.size() == static_cast<std::size_t>(digits.passes) + 2
                                 ? owner_of(of_output, digits, examples)
                                 : Owner{});
    }
  }
  return owners;
}

// The name of a node at or below @p from that might bring data in, or "".
std::string outsider(const Graph& graph, std::size_t from) {
  std::vector<std::size_t> open{from};
  std::set<std::size_t> seen{from};
  while (!open.empty()) {
    const grad::NodeView& node = graph.nodes[open.back()];
    open.pop_back();
    if (!parameter_operators().contains(node.name())) return node.name();
    for (const grad::EdgeView& edge : node.next()) {
      if (!edge.node.defined()) continue;
      const std::size_t next = graph.place.at(edge.node.id());
      if (seen.insert(next).second) open.push_back(next);
    }
  }
  return "";
}

// What the graph itself says of a node, whatever was measured.
enum class Kind : std::uint8_t {
  parameters,  ///< Depends on parameters alone: all examples share it.
  operands,    ///< Of its operands only parameters are in the graph; others may be data.
  data,        ///< Depends on other nodes that may be data.
};

bool contains_any(const std::string& name, const std::vector<std::string>& parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](const std::string& part) { return name.find(part) != std::string::npos; });
}

// Chooses elements by values that the graph does not show, so that who owns what may change from
// batch to batch.
bool selects_by_values(const grad::NodeView& node) {
  static const std::vector<std::string> parts{
      "Index",  "Gather", "Scatter",  "Take",    "Masked", "Sort",      "Topk",
      "Packed", "Unique", "Kthvalue", "CppNode", "PyNode", "Bucketize", "Nonzero"};
  return contains_any(node.name(), parts);
}

// Has an operand that may be data without a node of its own, or none that saves any.
bool may_take_data(const grad::NodeView& node) {
  if (selects_by_values(node)) return true;
  // expand and repeat make one copy an example as well.
  static const std::vector<std::string> parts{"Embedding", "Where",  "Dropout", "Lerp",
                                              "Cdist",     "Expand", "Repeat"};
  if (contains_any(node.name(), parts)) return true;
  for (const grad::EdgeView& edge : node.next()) {
    if (!edge.node.defined()) return true;
  }
  return false;
}

// Operators whose data operand is known by its place; where examples lie in their output is then
// where they lie in that.
bool takes_data_by_rule(const grad::NodeView& node) {
  return grad::as_product(node) || grad::as_convolution(node) || grad::as_normalisation(node) ||
         grad::as_embedding(node) || grad::as_embedding_bag(node) ||
         grad::as_recurrent_layer(node) || contains_any(node.name(), {"Expand", "Repeat"});
}

std::vector<Kind> kinds_of(const Graph& graph) {
  std::vector<Kind> kinds(graph.nodes.size(), Kind::data);
  for (std::size_t i = graph.nodes.size(); i-- > 0;) {
    if (graph.parameter[i] >= 0) {
      kinds[i] = Kind::parameters;
      continue;
    }
    const std::vector<grad::EdgeView> next = graph.nodes[i].next();
    bool any = false;
    bool all = true;
    for (const grad::EdgeView& edge : next) {
      if (!edge.node.defined()) continue;
      any = true;
      all = all && kinds[graph.place.at(edge.node.id())] == Kind::parameters;
    }
    if (any && all) {
      kinds[i] = may_take_data(graph.nodes[i]) ? Kind::operands : Kind::parameters;
    }
  }
  return kinds;
}

void mix(std::uint64_t& hash, std::uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ULL + (hash << 6U) + (hash >> 2U);
}

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
  return graph;
}

Plan analyse(const Graph& graph) {
  Plan plan{.examples = graph.losses.size(0)};
  const Owners owners = probe(graph);
  const std::vector<Kind> kinds = kinds_of(graph);
  const auto owner_at = [&](std::size_t node, std::size_t output) {
    if (kinds[node] == Kind::parameters) {
      return Owner{.kind = Owner::Kind::several, .certain = true};
    }
    return output < owners[node].size() ? owners[node][output] : Owner{};
  };
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    if (!graph.leads_to_parameter[i] || kinds[i] == Kind::parameters) continue;
    if (selects_by_values(graph.nodes[i])) plan.reusable = false;
    for (const grad::EdgeView& edge : graph.nodes[i].next()) {
      if (!edge.node.defined()) continue;
      const std::size_t to = graph.place.at(edge.node.id());
      // Where no gradient came now, one may come at the next batch.
      if (graph.leads_to_parameter[to] && graph.parameter[to] < 0 &&
          owner_at(to, edge.input).kind == Owner::Kind::silent) {
        plan.reusable = false;
      }
    }
  }
  std::set<std::string> mixed;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    if (!graph.leads_to_parameter[i] || graph.parameter[i] >= 0) continue;
    Site site{.node = i};
    bool by_example = false;
    bool certain = true;
    for (std::size_t output = 0; output < graph.nodes[i].inputs(); ++output) {
      const Owner owner = owner_at(i, output);
      if (owner.kind == Owner::Kind::several) {
        by_example = false;
        break;
      }
      if (owner.kind == Owner::Kind::examples) {
        by_example = true;
        certain = certain && owner.certain;
      }
      site.layouts.push_back(owner.layout);
    }
    if (!by_example) continue;
    if (kinds[i] == Kind::operands && !takes_data_by_rule(graph.nodes[i])) plan.reusable = false;
    const std::vector<grad::EdgeView> next = graph.nodes[i].next();
    for (std::size_t edge = 0; edge < next.size(); ++edge) {
      if (!next[edge].node.defined()) continue;
      const std::size_t to = graph.place.at(next[edge].node.id());
      if (!graph.leads_to_parameter[to]) continue;
      const bool shared =
          graph.parameter[to] >= 0 || owner_at(to, next[edge].input).kind == Owner::Kind::several;
      if (!shared) continue;
      site.shared.push_back(edge);
      if (const std::string name = outsider(graph, to); !name.empty()) {
        mixed.insert(base::join(graph.nodes[i].name(), " towards ", name));
      }
    }
    if (site.shared.empty()) continue;
    for (const Layout& layout : site.layouts) {
      if (layout.examples > 0 && layout.dim >= 0 && !layout.regular() && plan.irregular.empty()) {
        plan.irregular = graph.nodes[i].name();
      }
    }
    plan.reusable = plan.reusable && certain;
    site.operands = shapes_of(graph, site, plan.examples);
    plan.sites.push_back(std::move(site));
  }
  plan.shapes = all_shapes(graph);
  for (const std::string& place : mixed) plan.mixed += (plan.mixed.empty() ? "" : ", ") + place;
  return plan;
}

std::uint64_t structure_of(const Graph& graph) {
  std::uint64_t hash = graph.nodes.size();
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    mix(hash, std::hash<std::string>{}(graph.nodes[i].name()));
    mix(hash, static_cast<std::uint64_t>(graph.parameter[i] + 1));
    if (const auto norm = grad::as_normalisation(graph.nodes[i])) mix(hash, norm->training ? 1 : 2);
    for (std::size_t output = 0; output < graph.nodes[i].inputs(); ++output) {
      mix(hash, graph.nodes[i].sizes(output).size());
    }
    for (const grad::EdgeView& edge : graph.nodes[i].next()) {
      mix(hash, edge.node.defined() ? graph.place.at(edge.node.id()) + 1 : 0);
      mix(hash, edge.input);
    }
  }
  return hash;
}

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
