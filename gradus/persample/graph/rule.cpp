#include <gradus/persample/graph/rule.h>

#include <algorithm>
#include <map>
#include <mutex>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>

#include <gradus/base/error.h>
#include <gradus/persample/graph/internal/rules.h>

namespace gradus::persample {

namespace {

// Rows of masked gradients that are made at once.
constexpr std::int64_t kRowBytes = std::int64_t{64} << 20;

class Registry {
 public:
  static Registry& instance() {
    static Registry registry;
    return registry;
  }
  void add(const std::string& name, Rule rule) {
    const std::lock_guard lock(mutex_);
    auto& rules = rules_[name];
    rules.insert(rules.begin(), std::move(rule));
  }
  std::vector<Rule> rules(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    const auto found = rules_.find(name);
    return found == rules_.end() ? std::vector<Rule>() : found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::vector<Rule>> rules_;
};

// The example of each index of the layout's dimension.
at::Tensor owners_of(const Layout& layout, std::int64_t size) {
  if (!layout.regular()) return at::tensor(layout.owners, at::kLong);
  return at::arange(size, at::kLong).floor_divide(layout.inner).remainder(layout.examples);
}

// Copies of @p gradient, one for each of @p count examples from @p first, in which all that belongs
// to others is zero.
at::Tensor masked_rows(const at::Tensor& gradient, const Layout& layout, std::int64_t first,
                       std::int64_t count) {
  const at::Tensor examples = at::arange(first, first + count, at::kLong).unsqueeze(1);
  if (layout.dim < 0) {
    std::vector<std::int64_t> ones(static_cast<std::size_t>(gradient.dim()) + 1, 1);
    ones[0] = count;
    const at::Tensor mask = (examples == layout.owners.at(0)).to(gradient.scalar_type()).view(ones);
    return gradient.unsqueeze(0) * mask;
  }
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(gradient.dim()) + 1, 1);
  sizes[0] = count;
  sizes[static_cast<std::size_t>(layout.dim) + 1] = gradient.size(layout.dim);
  const at::Tensor mask =
      (owners_of(layout, gradient.size(layout.dim)).unsqueeze(0) == examples).view(sizes);
  // Not a product: what belongs to others may be infinite.
  return gradient.unsqueeze(0).masked_fill(mask.logical_not(), 0);
}

std::vector<OperandTerm> terms_by_formula(const NodeUse& use) {
  const std::int64_t examples = use.examples();
  std::int64_t bytes = 1;
  for (const at::Tensor& gradient : use.gradients) {
    if (gradient.defined()) bytes += static_cast<std::int64_t>(gradient.nbytes());
  }
  const std::int64_t chunk = std::clamp<std::int64_t>(kRowBytes / bytes, 1, examples);
  std::vector<std::vector<at::Tensor>> parts(use.shared.size());
  for (std::int64_t first = 0; first < examples; first += chunk) {
    const std::int64_t count = std::min(chunk, examples - first);
    std::vector<at::Tensor> rows;
    for (std::size_t slot = 0; slot < use.gradients.size(); ++slot) {
      const at::Tensor& gradient = use.gradients[slot];
      rows.push_back(gradient.defined() ? masked_rows(gradient, use.layouts[slot], first, count)
                                        : at::Tensor());
    }
    const std::vector<at::Tensor> given = plane::grad::apply_rows(use.node, rows);
    for (std::size_t i = 0; i < use.shared.size(); ++i) {
      const at::Tensor& one = given.at(use.shared[i]);
      if (one.defined()) parts[i].push_back(one.is_sparse() ? one.to_dense() : one);
    }
  }
  std::vector<OperandTerm> terms;
  for (std::size_t i = 0; i < use.shared.size(); ++i) {
    if (parts[i].empty()) continue;
    terms.push_back({use.shared[i], std::make_unique<FormedTerm>(at::cat(parts[i]))});
  }
  return terms;
}

}  // namespace

std::int64_t NodeUse::examples() const {
  for (const Layout& layout : layouts) {
    if (layout.examples > 0) return layout.examples;
  }
  return 0;
}

bool NodeUse::shares(std::size_t edge) const {
  return std::find(shared.begin(), shared.end(), edge) != shared.end();
}

std::vector<std::int64_t> NodeUse::operand_sizes(std::size_t edge) const {
  const plane::grad::EdgeView to = node.next().at(edge);
  return to.node.sizes(to.input);
}

void register_rule(const std::string& node_name, Rule rule) {
  GRADUS_CHECK("persample", rule != nullptr, "a rule for ", node_name, " is required; got none");
  Registry::instance().add(node_name, std::move(rule));
}

std::vector<OperandTerm> terms_of(const NodeUse& use, bool* by_formula) {
  if (by_formula != nullptr) *by_formula = false;
  for (const Rule& rule : Registry::instance().rules(use.node.name())) {
    if (auto terms = rule(use)) return *std::move(terms);
  }
  for (const auto rule :
       {internal::product_rule, internal::convolution_rule, internal::normalisation_rule,
        internal::embedding_rule, internal::embedding_bag_rule, internal::elementwise_rule,
        internal::recurrent_rule}) {
    if (auto terms = rule(use)) return *std::move(terms);
  }
  if (by_formula != nullptr) *by_formula = true;
  return terms_by_formula(use);
}

}  // namespace gradus::persample
