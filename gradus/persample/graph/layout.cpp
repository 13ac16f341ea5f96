#include <gradus/persample/graph/layout.h>

#include <algorithm>

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <gradus/base/error.h>

namespace gradus::persample {

namespace {

// Parts gathered by an index for each example, padded with zeros to the longest.
at::Tensor gathered(const at::Tensor& tensor, const std::vector<std::int64_t>& owners,
                    std::int64_t examples) {
  std::vector<std::vector<std::int64_t>> parts(static_cast<std::size_t>(examples));
  for (std::size_t i = 0; i < owners.size(); ++i) {
    if (owners[i] >= 0)
      parts[static_cast<std::size_t>(owners[i])].push_back(static_cast<std::int64_t>(i));
  }
  std::size_t longest = 0;
  for (const auto& each : parts) longest = std::max(longest, each.size());
  std::vector<std::int64_t> from;
  std::vector<std::int64_t> to;
  for (std::size_t example = 0; example < parts.size(); ++example) {
    for (std::size_t i = 0; i < parts[example].size(); ++i) {
      from.push_back(parts[example][i]);
      to.push_back(static_cast<std::int64_t>(example * longest + i));
    }
  }
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes[0] = examples * static_cast<std::int64_t>(longest);
  at::Tensor result = at::zeros(sizes, tensor.options());
  const auto options = tensor.options().dtype(at::kLong);
  result.index_copy_(0, at::tensor(to, options), tensor.index_select(0, at::tensor(from, options)));
  return result.unflatten(0, {examples, static_cast<std::int64_t>(longest)});
}

}  // namespace

at::Tensor Layout::by_example(const at::Tensor& tensor, std::int64_t at) const {
  if (dim < 0) {
    std::vector<std::int64_t> sizes = tensor.sizes().vec();
    sizes.insert(sizes.begin(), {examples, 1});
    at::Tensor result = at::zeros(sizes, tensor.options());
    result.select(0, owners.at(0)).copy_(tensor.unsqueeze(0));
    return result;
  }
  if (!regular()) return gathered(tensor.movedim(at, 0), owners, examples);
  const std::int64_t size = tensor.size(at);
  GRADUS_CHECK("persample", size % (examples * inner) == 0, "a dimension of a multiple of ",
               examples * inner, " parts is required; got ", size);
  const std::int64_t outer = size / (examples * inner);
  if (outer == 1) return tensor.unflatten(at, {examples, inner}).movedim({at, at + 1}, {0, 1});
  if (inner == 1) return tensor.unflatten(at, {outer, examples}).movedim({at + 1, at}, {0, 1});
  return tensor.unflatten(at, {outer, examples, inner})
      .movedim({at + 1, at, at + 2}, {0, 1, 2})
      .flatten(1, 2);
}

Layout Layout::with_examples(std::int64_t count) const {
  Layout other = *this;
  other.examples = count;
  return other;
}

}  // namespace gradus::persample
