#include <functional>
#include <set>
#include <string>
#include <unordered_map>

#include <gradus/persample/graph/analysis.h>
#include <gradus/plane/grad/saved_numbers.h>

namespace gradus::persample {

namespace grad = plane::grad;

namespace {

void mix(std::uint64_t& hash, std::uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15ULL + (hash << 6U) + (hash >> 2U);
}

// Sizes by which of those before them they are equal to.
class Sizes {
 public:
  explicit Sizes(std::int64_t examples) { size(examples); }
  std::uint64_t size(std::int64_t value) {
    if (value <= 1) return static_cast<std::uint64_t>(value);
    return known_.emplace(value, kSizes + known_.size()).first->second;
  }
  /// A position or length along a dimension of @p length (or 0): the end of it, its last index, one
  /// of the sizes, or the number itself.
  std::uint64_t place(std::int64_t value, std::int64_t length) const {
    if (value <= 1) return static_cast<std::uint64_t>(value);
    if (value == length) return kEnd;
    if (value == length - 1) return kLast;
    const auto found = known_.find(value);
    return found == known_.end() ? static_cast<std::uint64_t>(value) : found->second;
  }

 private:
  static constexpr std::uint64_t kEnd = std::uint64_t{1} << 61U;
  static constexpr std::uint64_t kLast = kEnd + 1;
  static constexpr std::uint64_t kSizes = std::uint64_t{1} << 62U;
  std::unordered_map<std::int64_t, std::uint64_t> known_;
};

// Of the operand of an operator that works along one dimension.
std::int64_t length_along(const grad::NodeView& node, const std::vector<std::int64_t>& dims) {
  const std::vector<grad::EdgeView> next = node.next();
  if (dims.size() != 1 || next.size() != 1 || !next[0].node.defined()) return 0;
  const std::vector<std::int64_t> sizes = next[0].node.sizes(next[0].input);
  const auto rank = static_cast<std::int64_t>(sizes.size());
  const std::int64_t dim = dims[0] < 0 ? dims[0] + rank : dims[0];
  return dim >= 0 && dim < rank ? sizes[static_cast<std::size_t>(dim)] : 0;
}

// Of these the saved numbers tell how long the list is.
bool takes_or_gives_a_list(const std::string& name) {
  for (const char* const each : {"Cat", "Stack", "Split", "Unbind", "UnsafeSplit"}) {
    if (name.starts_with(each)) return true;
  }
  return false;
}

}  // namespace

std::uint64_t structure_of(const Graph& graph) {
  std::uint64_t hash = graph.nodes.size();
  Sizes sizes(graph.losses.size(0));
  grad::SavedNumbers numbers;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    const grad::NodeView& node = graph.nodes[i];
    mix(hash, std::hash<std::string>{}(node.name()));
    mix(hash, static_cast<std::uint64_t>(graph.parameter[i] + 1));
    for (std::size_t output = 0; output < node.inputs(); ++output) {
      const std::vector<std::int64_t> shape = node.sizes(output);
      mix(hash, shape.size());
      for (const std::int64_t size : shape) mix(hash, sizes.size(size));
      if (const auto type = node.scalar_type(output)) mix(hash, static_cast<std::uint64_t>(*type));
    }
    if (graph.parameter[i] < 0) {
      grad::read_saved_numbers(node, numbers);
      for (const std::int64_t each : numbers.exact) mix(hash, static_cast<std::uint64_t>(each));
      for (const std::int64_t each : numbers.dims) mix(hash, static_cast<std::uint64_t>(each));
      for (const std::int64_t each : numbers.sizes) mix(hash, sizes.size(each));
      // Which part of a parameter all share makes no difference to whose gradient is where.
      if (graph.kinds[i] != Kind::parameters) {
        const std::int64_t length = length_along(node, numbers.dims);
        for (const std::int64_t each : numbers.places) mix(hash, sizes.place(each, length));
      }
    }
    for (const grad::EdgeView& edge : node.next()) {
      mix(hash, edge.node.defined() ? graph.place.at(edge.node.id()) + 1 : 0);
      mix(hash, edge.input);
    }
  }
  return hash;
}

std::uint64_t family_of(const Graph& graph) {
  std::set<std::uint64_t> kinds;
  grad::SavedNumbers numbers;
  for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
    const grad::NodeView& node = graph.nodes[i];
    std::uint64_t hash = std::hash<std::string>{}(node.name());
    mix(hash, static_cast<std::uint64_t>(graph.parameter[i] + 1));
    if (node.inputs() > 0) {
      mix(hash, node.sizes(0).size());
      if (const auto type = node.scalar_type(0)) mix(hash, static_cast<std::uint64_t>(*type));
    }
    if (graph.parameter[i] < 0) {
      grad::read_saved_numbers(node, numbers);
      if (!takes_or_gives_a_list(node.name())) {
        for (const std::int64_t each : numbers.exact) mix(hash, static_cast<std::uint64_t>(each));
      }
      for (const std::int64_t each : numbers.dims) mix(hash, static_cast<std::uint64_t>(each));
    }
    kinds.insert(hash);
  }
  std::uint64_t family = 0;
  for (const std::uint64_t each : kinds) mix(family, each);
  return family;
}

}  // namespace gradus::persample
