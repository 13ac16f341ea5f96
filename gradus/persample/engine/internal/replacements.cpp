#include <gradus/persample/engine/internal/replacements.h>

#include <algorithm>
#include <cmath>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/view_as_real.h>

namespace gradus::persample::internal {

namespace {

constexpr std::int64_t kRowsAtOnce = 16;  // of a large batch no second copy in float64 is made

// A number for each example, by a sum with irrational weights, which other values do not give.
std::vector<double> prints_of(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  std::vector<double> prints;
  at::Tensor weights;
  for (std::int64_t first = 0; first < tensor.size(0); first += kRowsAtOnce) {
    at::Tensor rows =
        tensor.detach().narrow(0, first, std::min(kRowsAtOnce, tensor.size(0) - first));
    if (rows.is_complex()) rows = at::view_as_real(rows.resolve_conj());
    rows = rows.to(c10::kCPU, at::kDouble).reshape({rows.size(0), -1});
    if (!weights.defined()) {
      weights = at::arange(1, rows.size(1) + 1, at::kDouble).mul(0.7548776662466927).frac() + 0.5;
    }
    const at::Tensor sums = rows.nan_to_num(0.1234, 1e30, -1e30).mv(weights);
    for (std::int64_t i = 0; i < sums.size(0); ++i) prints.push_back(sums[i].item<double>());
  }
  return prints;
}

bool differ(double one, double other) {
  return std::abs(one - other) > 1e-13 * (std::abs(one) + std::abs(other));
}

}  // namespace

Replacements::Replacements(const Batch& batch)
    : examples_(static_cast<std::size_t>(count_examples(batch))) {
  for (const at::Tensor& tensor : batch) {
    if (tensor.numel() == 0) continue;
    prints_.push_back(prints_of(tensor));
    const std::vector<double>& last = prints_.back();
    if (std::any_of(last.begin(), last.end(), [&](double p) { return differ(p, last[0]); })) {
      ++most_;
    }
  }
}

std::size_t Replacements::differences(std::size_t one, std::size_t other) const {
  return static_cast<std::size_t>(
      std::count_if(prints_.begin(), prints_.end(),
                    [&](const std::vector<double>& of) { return differ(of[one], of[other]); }));
}

Replacement Replacements::taking(const std::vector<bool>& changed) const {
  std::vector<std::size_t> kept;
  for (std::size_t i = 0; i < examples_; ++i) {
    if (!changed[i]) kept.push_back(i);
  }
  Replacement from(examples_);
  for (std::size_t i = 0; i < examples_; ++i) {
    from[i] = static_cast<std::int64_t>(i);
    if (!changed[i]) continue;
    std::size_t best = 0;
    // From another place for each, so that not all become alike.
    for (std::size_t step = 0; step < kept.size() && best < most_; ++step) {
      const std::size_t other = kept[(i + step) % kept.size()];
      const std::size_t differing = differences(i, other);
      if (differing <= best) continue;
      best = differing;
      from[i] = static_cast<std::int64_t>(other);
    }
  }
  return from;
}

std::vector<Replacement> Replacements::both(std::vector<bool> changed) const {
  std::vector<Replacement> result{taking(changed)};
  changed.flip();
  result.push_back(taking(changed));
  return result;
}

std::vector<Replacement> Replacements::separating() const {
  std::vector<Replacement> all;
  for (std::size_t bit = 1; bit < examples_; bit *= 2) {
    std::vector<bool> changed(examples_);
    for (std::size_t i = 0; i < examples_; ++i) changed[i] = (i & bit) != 0;
    for (Replacement& each : both(changed)) all.push_back(std::move(each));
  }
  return all;
}

std::vector<Replacement> Replacements::halves(std::uint64_t seed) const {
  std::vector<bool> changed(examples_);
  for (std::size_t i = 0; i < examples_; ++i) {
    changed[i] = (example_seed(seed, static_cast<std::int64_t>(i)) & 1U) != 0;
  }
  return both(changed);
}

Replacement Replacements::all_but(std::int64_t example) const {
  std::vector<bool> changed(examples_, true);
  changed[static_cast<std::size_t>(example)] = false;
  return taking(changed);
}

Replacement Replacements::only(std::int64_t example) const {
  std::vector<bool> changed(examples_, false);
  changed[static_cast<std::size_t>(example)] = true;
  return taking(changed);
}

}  // namespace gradus::persample::internal
