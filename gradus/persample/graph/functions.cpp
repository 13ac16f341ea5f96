#include <gradus/persample/graph/internal/functions.h>

#include <algorithm>
#include <set>
#include <utility>

#include <gradus/plane/grad/operands.h>

namespace gradus::persample::internal {

namespace grad = plane::grad;

namespace {

using Names = std::set<std::string_view>;

// Copies or moves elements, all of them.
const Names& arranging() {
  static const Names names{"T",
                           "Transpose",
                           "Permute",
                           "View",
                           "UnsafeView",
                           "ReshapeAlias",
                           "Squeeze",
                           "Unsqueeze",
                           "ToCopy",
                           "Alias",
                           "Clone",
                           "Cat",
                           "Stack",
                           "Expand",
                           "Repeat",
                           "WeightNormInterface",
                           "torch::autograd::AccumulateGrad"};
  return names;
}

// Takes some elements, and so perhaps those of one example.
const Names& picking() {
  static const Names names{"Slice",  "Select", "Split",  "SplitWithSizes",
                           "Unbind", "Chunk",  "Narrow", "AsStrided"};
  return names;
}

// Gives one row, or element, of its operand for each index.
const Names& looking_up() {
  static const Names names{"Embedding", "Index", "IndexSelect", "Gather"};
  return names;
}

// Works element by element.
const Names& elementwise() {
  static const Names names{
      "Add",        "Sub",      "Rsub",          "Mul",  "Div",     "Pow",     "Neg",
      "Exp",        "Exp2",     "Expm1",         "Log",  "Log1P",   "Tanh",    "Sigmoid",
      "LogSigmoid", "Relu",     "Softplus",      "Abs",  "Sqrt",    "Rsqrt",   "Reciprocal",
      "Clamp",      "ClampMin", "ClampMax",      "Gelu", "Silu",    "Elu",     "LeakyRelu",
      "Hardtanh",   "Sin",      "Cos",           "Erf",  "Maximum", "Minimum", "Where",
      "MaskedFill", "Lerp",     "NativeDropout", "Fmod", "Atan"};
  return names;
}

// Sums products of a dimension that both operands have: of mv and mm the result has each one's
// other dimension.
bool contracts(const grad::NodeView& node) {
  static const Names names{"Dot", "Vdot", "Mv", "Mm"};
  const std::string name = node.name();
  const std::vector<grad::EdgeView> next = node.next();
  if (!names.contains(operation_of(name)) || next.size() != 2) return false;
  const std::vector<std::int64_t> result = node.sizes(0);
  const bool left = !next[0].node.defined();
  const bool right = !next[1].node.defined();
  if (result.empty() || (!left && !right)) return true;
  return left ? result[0] == 1 : result.size() == 1 || result[1] == 1;
}

// True if each dimension of the result is one of the operands in the graph, so that what else the
// operator takes has no place for examples.
bool keeps_shapes(const grad::NodeView& node) {
  const std::string name = node.name();
  if (!elementwise().contains(operation_of(name))) return contracts(node);
  const std::vector<std::int64_t> result = node.sizes(0);
  std::vector<std::int64_t> known(result.size(), 1);
  for (const grad::EdgeView& edge : node.next()) {
    if (!edge.node.defined()) continue;
    const std::vector<std::int64_t> sizes = edge.node.sizes(edge.input);
    if (sizes.size() > result.size()) return false;
    const std::size_t extra = result.size() - sizes.size();
    for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
      known[extra + dim] = std::max(known[extra + dim], sizes[dim]);
    }
  }
  return known == result;
}

}  // namespace

bool may_take_data(const grad::NodeView& node) {
  const std::string name = node.name();
  if (name == "CopySlices") return true;
  const std::string_view operation = operation_of(name);
  // One of these operands may be a copy, or a place, for each example.
  static const Names names{"Stack",           "Cat",        "Expand",
                           "Repeat",          "Where",      "Lerp",
                           "Cdist",           "NllLoss",    "NllLoss2D",
                           "MultiMarginLoss", "CtcLoss",    "MultilabelMarginLoss",
                           "RreluWithNoise",  "MaskedFill", "MaskedSoftmax"};
  if (names.contains(operation) || operation.find("Dropout") != std::string_view::npos) return true;
  const std::vector<grad::EdgeView> next = node.next();
  for (std::size_t edge = 0; edge < next.size(); ++edge) {
    if (!next[edge].node.defined()) return true;
    const auto choice = grad::as_choice(node, edge);
    if (choice && choice->by_saved) return true;
  }
  return false;
}

bool takes_data_by_rule(const grad::NodeView& node) {
  if (grad::as_product(node) || grad::as_convolution(node) || grad::as_normalisation(node) ||
      grad::as_recurrent_layer(node) || grad::as_embedding_bag(node)) {
    return true;
  }
  const std::string name = node.name();
  const std::string_view operation = operation_of(name);
  return looking_up().contains(operation) || operation == "Expand" || operation == "Repeat";
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

Functions::Functions(const Graph& graph) : graph_(graph), pure_(graph.nodes.size(), false) {
  for (std::size_t i = graph.nodes.size(); i-- > 0;) {
    pure_[i] = graph.kinds[i] == Kind::parameters || is_pure(graph.nodes[i]);
  }
}

std::string Functions::outsider(std::size_t from) const {
  using Visit = std::pair<std::size_t, bool>;  // and whether elements of it are picked
  std::vector<Visit> open{{from, false}};
  std::set<Visit> seen{open.front()};
  while (!open.empty()) {
    const auto [place, above] = open.back();
    open.pop_back();
    if (pure_[place]) continue;
    const grad::NodeView& node = graph_.nodes[place];
    const std::string name = node.name();
    const std::string_view operation = operation_of(name);
    const bool picked = above || picking().contains(operation);
    const bool known = arranging().contains(operation) || picking().contains(operation) ||
                       (elementwise().contains(operation) && keeps_shapes(node)) ||
                       (looking_up().contains(operation) && !(picked && may_hold_examples(node)));
    if (!known) return name;
    for (const grad::EdgeView& edge : node.next()) {
      if (!edge.node.defined()) continue;
      const Visit next{graph_.place.at(edge.node.id()), picked};
      if (seen.insert(next).second) open.push_back(next);
    }
  }
  return "";
}

bool Functions::is_pure(const grad::NodeView& node) const {
  bool any = false;
  for (const grad::EdgeView& edge : node.next()) {
    if (!edge.node.defined()) continue;
    any = true;
    if (!pure_[graph_.place.at(edge.node.id())]) return false;
  }
  if (!any) return false;
  if (!may_take_data(node)) return true;
  const std::string name = node.name();
  const std::string_view operation = operation_of(name);
  return operation == "Cat" || operation == "Stack" || keeps_shapes(node);
}

// As its indices may be those of the examples.
bool Functions::may_hold_examples(const grad::NodeView& node) const {
  const std::vector<std::int64_t> sizes = node.sizes(0);
  return std::ranges::any_of(sizes,
                             [&](std::int64_t size) { return size % graph_.losses.size(0) == 0; });
}

}  // namespace gradus::persample::internal
