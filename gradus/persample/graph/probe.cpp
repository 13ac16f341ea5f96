#include <gradus/persample/graph/internal/probe.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include <ATen/ops/tensor.h>

namespace gradus::persample::internal {

namespace grad = plane::grad;

namespace {

constexpr std::int64_t kNobody = -1;
constexpr std::int64_t kSeveral = -2;
constexpr std::int64_t kUnreadable = -3;  // infinite or no number
// Scaling by a power of two is exact; this is the rounding of the logarithm.
constexpr double kExponentTolerance = 1e-9;

// Of elements smaller than this on average, subnormal numbers may be all there is, and they lose
// bits: scaling is no longer exact.
double smallest_exact(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return 0x1p-1000;
    case at::kHalf:
      return 0;  // what is lost must be nothing; scale the losses of float16 models
    default:
      return 0x1p-120;
  }
}

// The sum of absolute values at each index of each dimension of a tensor, and of the whole. Rounded
// in the tensor's own precision: sums of the same numbers times a power of two round alike.
struct Profile {
  std::vector<std::vector<double>> by_dim{};
  double total = 0;
  double smallest = 0;  ///< Smaller ones, for each element, tell nothing.
  std::int64_t elements = 0;
};

std::vector<double> to_vector(const at::Tensor& tensor) {
  const at::Tensor values = tensor.to(at::kCPU, at::kDouble).contiguous();
  const auto* const data = values.const_data_ptr<double>();
  return {data, data + values.numel()};
}

Profile profile_of(const at::Tensor& gradient) {
  at::Tensor rest = (gradient.is_sparse() ? gradient.to_dense() : gradient).abs();
  if (rest.scalar_type() != at::kDouble) rest = rest.to(at::kFloat);
  Profile profile{.smallest = smallest_exact(gradient.scalar_type()), .elements = rest.numel()};
  profile.by_dim.resize(static_cast<std::size_t>(rest.dim()));
  if (rest.dim() == 0) profile.total = rest.item<double>();
  // Two sums over the tensor, and then of ever fewer dimensions.
  while (rest.dim() > 0) {
    const std::int64_t last = rest.dim() - 1;
    at::Tensor along = rest;
    if (last > 0) {
      std::vector<std::int64_t> others(static_cast<std::size_t>(last));
      std::iota(others.begin(), others.end(), 0);
      along = rest.sum(others);
    }
    profile.by_dim[static_cast<std::size_t>(last)] = to_vector(along);
    if (last == 0) break;
    rest = rest.sum(-1);
  }
  if (!profile.by_dim.empty()) {
    profile.total = std::accumulate(profile.by_dim[0].begin(), profile.by_dim[0].end(), 0.0);
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
  /// The example whose digits are log2 of the ratios of @p sums to @p reference.
  std::int64_t example(double reference, const std::vector<double>& sums, double smallest,
                       std::int64_t examples) const {
    if (reference == 0) {
      const bool silent = std::all_of(sums.begin(), sums.end(), [](double s) { return s == 0; });
      return silent ? kNobody : kSeveral;
    }
    if (reference < smallest) return kNobody;
    if (!std::isfinite(reference)) return kUnreadable;
    std::int64_t found = 0;
    std::int64_t place = 1;
    std::int64_t last = 0;
    for (std::size_t pass = 0; pass < sums.size(); ++pass) {
      if (!std::isfinite(sums[pass])) return kUnreadable;
      const double exponent = std::log2(sums[pass] / reference);
      const double digit = std::round(exponent);
      if (!(std::abs(exponent - digit) <= kExponentTolerance) || digit < 1 ||
          digit > static_cast<double>(base)) {
        return kSeveral;
      }
      last = static_cast<std::int64_t>(digit);
      if (pass + 1 == sums.size()) break;  // the one by chance
      found += (last - 1) * place;
      place *= base;
    }
    return found < examples && last == chance(found) ? found : kSeveral;
  }
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
  std::vector<double> sums(profiles.size() - 1);
  const auto read = [&](std::int64_t indices, auto&& value_of) {
    for (std::size_t pass = 1; pass < profiles.size(); ++pass) {
      sums[pass - 1] = value_of(profiles[pass]);
    }
    const double elements = static_cast<double>(profiles[0].elements / indices);
    return digits.example(value_of(profiles[0]), sums, profiles[0].smallest * elements, examples);
  };
  const std::int64_t whole = read(1, [](const Profile& profile) { return profile.total; });
  if (whole == kNobody) return {};
  int fits = 0;
  std::optional<Layout> regular;
  std::optional<Layout> irregular;
  std::size_t most = 0;  // examples seen along one dimension
  bool readable = whole != kUnreadable;
  const std::size_t dims = profiles[0].by_dim.size();
  for (std::size_t dim = 0; dim < dims; ++dim) {
    std::vector<std::int64_t> owners;
    const auto size = static_cast<std::int64_t>(profiles[0].by_dim[dim].size());
    for (std::size_t i = 0; i < profiles[0].by_dim[dim].size(); ++i) {
      owners.push_back(read(size, [&](const Profile& profile) { return profile.by_dim[dim][i]; }));
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
    return {Owner::Kind::examples, *regular, several_seen && fits == 1 && readable, fits > 1};
  }
  if (!several_seen) {
    // All of one example: right for this batch, wherever the examples lie.
    return {Owner::Kind::examples, Layout{.examples = examples, .dim = -1, .owners = {whole}},
            false};
  }
  if (irregular) return {Owner::Kind::examples, *irregular, false};
  return {Owner::Kind::several, {}, true};
}

bool is_zero(const at::Tensor& gradient) {
  const at::Tensor values = gradient.is_sparse() ? gradient.coalesce().values() : gradient;
  return values.count_nonzero().item<std::int64_t>() == 0;
}

}  // namespace

Probed probe(const Graph& graph) {
  const std::int64_t examples = graph.losses.size(0);
  const Digits digits(examples, graph.losses.scalar_type());
  std::vector<grad::EdgeView> ends;
  std::vector<std::size_t> leaves;
  for (std::size_t node = 0; node < graph.nodes.size(); ++node) {
    if (graph.parameter[node] < 0) continue;
    ends.push_back({graph.nodes[node], 0});
    leaves.push_back(node);
  }
  Probed result;
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
    const std::vector<at::Tensor> given =
        grad::backward_to({grad::gradient_edge(graph.losses)}, {root}, ends, /*keep_graph=*/true);
    for (std::size_t i = 0; pass == 0 && i < given.size(); ++i) {
      if (given[i].defined() && !is_zero(given[i])) result.reached.insert(leaves[i]);
    }
  }
  auto& owners = result.owners;
  owners.resize(graph.nodes.size());
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
  return result;
}

}  // namespace gradus::persample::internal
