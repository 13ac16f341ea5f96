#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <gradus/base/error.h>
#include <gradus/persample/vmap/examples.h>
#include <gradus/privacy/training/internal/dp_state.h>

namespace gradus::privacy {
namespace {

using internal::kComponent;
using persample::NamedParameter;

// Below this, and above its inverse, norms are not sure: float32 does not hold the squares.
constexpr double kSureNorm = 1e-15;
// Examples whose gradients are looked at one by one: so many at a time, for the memory.
constexpr std::size_t kDoubtfulTogether = 8;

// The norms of rows [B, n] of doubles, also where their squares are beyond a double.
at::Tensor scaled_norms(const at::Tensor& rows) {
  if (rows.numel() == 0) return at::zeros({rows.size(0)}, rows.options());
  const at::Tensor largest = rows.abs().amax(1);
  const at::Tensor scale =
      at::where(largest.isfinite().logical_and(largest > 0.0), largest, at::ones_like(largest));
  return (rows / scale.unsqueeze(1)).square().sum(1).sqrt() * scale;
}

at::Tensor index_of(const std::vector<std::int64_t>& rows, const at::Tensor& like) {
  at::Tensor index = at::empty({static_cast<std::int64_t>(rows.size())}, at::kLong);
  std::copy(rows.begin(), rows.end(), index.mutable_data_ptr<std::int64_t>());
  return index.to(like.device());
}

}  // namespace

at::Tensor DPOptimizer::State::accumulate(const LossFunction& loss, const Batch& batch) {
  internal::refuse_running_statistics(*model_);
  LogicalBatch contribution{.sensitivity = scale_thresholds(),
                            .examples = persample::count_examples(batch)};
  std::vector<std::uint32_t> versions;
  for (const NamedParameter& parameter : table_.parameters())
    versions.push_back(parameter.tensor.is_inference() ? 0 : parameter.tensor._version());
  // What changed before this call is the caller's, as a state that was loaded.
  watch_buffers();
  at::Tensor losses;
  try {
    losses = contribute(loss, batch, contribution);
  } catch (...) {
    table_.clear();
    buffers_.restore(*model_);
    throw;
  }
  table_.clear();
  const auto changed = buffers_.restore(*model_);
  for (std::size_t i = 0; i < versions.size(); ++i) {
    const auto& [name, tensor] = table_.parameters()[i];
    GRADUS_CHECK(kComponent, tensor.is_inference() || tensor._version() == versions[i],
                 "parameter '", name,
                 "' must not be written in a forward pass of private training: what is written "
                 "depends on the examples and has no noise. It holds that now, so load the model "
                 "again. embedding with max_norm does this: switch max_norm off");
  }
  internal::refuse_buffer(changed);
  pending_.add(std::move(contribution), targets_.size());
  return losses;
}

at::Tensor DPOptimizer::State::contribute(const LossFunction& loss, const Batch& batch,
                                          LogicalBatch& contribution) {
  at::Tensor losses, all_norms;
  Batch current = batch;
  std::vector<std::int64_t> places(static_cast<std::size_t>(persample::count_examples(batch)));
  std::iota(places.begin(), places.end(), 0);
  while (!places.empty()) {
    table_.clear();
    const at::Tensor these = table_.backward(loss, current);
    if (!losses.defined()) losses = these;
    const at::NoGradGuard no_grad;
    const std::vector<at::Tensor> norms = group_norms();
    const std::vector<std::int64_t> doubtful = doubtful_rows(norms);
    if (!all_norms.defined()) {
      all_norms = norms_of(norms).cpu().clone();
      contribution.norms.push_back(all_norms);
    }
    if (doubtful.empty()) {
      const ClipWeights weights = clipper_.weights(norms);
      count(weights, contribution);
      contribution.add({.sums = sums(weights)}, targets_.size());
      break;
    }
    contribute_doubtful(loss, current, doubtful, places, all_norms, contribution);
    // The others once more, without those: a weight of 0 does not make their products finite.
    std::vector<std::int64_t> rows, left;
    for (std::size_t row = 0; row < places.size(); ++row) {
      const auto index = static_cast<std::int64_t>(row);
      if (std::binary_search(doubtful.begin(), doubtful.end(), index)) continue;
      rows.push_back(index);
      left.push_back(places[row]);
    }
    if (!rows.empty()) current = persample::examples_at(current, rows);
    places = std::move(left);
  }
  return losses;
}

// Adds examples whose norms are not to be trusted: from their gradients themselves, in doubles.
void DPOptimizer::State::contribute_doubtful(const LossFunction& loss, const Batch& batch,
                                             const std::vector<std::int64_t>& rows,
                                             const std::vector<std::int64_t>& places,
                                             const at::Tensor& all_norms,
                                             LogicalBatch& contribution) {
  for (std::size_t from = 0; from < rows.size(); from += kDoubtfulTogether) {
    const std::size_t to = std::min(from + kDoubtfulTogether, rows.size());
    const std::vector<std::int64_t> some(rows.begin() + static_cast<std::ptrdiff_t>(from),
                                         rows.begin() + static_cast<std::ptrdiff_t>(to));
    table_.clear();
    {
      const at::AutoGradMode grad(true);
      table_.backward(loss, persample::examples_at(batch, some));
    }
    const std::vector<at::Tensor> norms =
        exact_group_norms(at::arange(static_cast<std::int64_t>(some.size()), at::kLong));
    const ClipWeights weights = clipper_.weights(norms);
    LogicalBatch more;
    more.non_finite = weights.finite.logical_not().sum().item<std::int64_t>();
    count(weights, more);
    more.sums = finite_sums(weights);
    contribution.add(std::move(more), targets_.size());
    const at::Tensor together = scaled_norms(at::stack(norms, 1)).cpu();
    for (std::size_t i = 0; i < some.size(); ++i)
      all_norms.mutable_data_ptr<double>()[places[static_cast<std::size_t>(some[i])]] =
          together.const_data_ptr<double>()[i];
  }
}

void DPOptimizer::State::accumulate(const at::Tensor& losses) {
  GRADUS_CHECK(kComponent, losses.defined() && losses.dim() == 1,
               "losses must be one for each example, [B]; got ",
               losses.defined() ? base::join("shape ", losses.sizes()) : "an undefined tensor");
  internal::refuse_running_statistics(*model_);
  // The forward pass is over: the buffers must be as this last saw them.
  internal::refuse_buffer(buffers_.restore(*model_));
  const double sensitivity = scale_thresholds();
  table_.clear();
  table_.backward(losses);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> norms = group_norms();
  at::Tensor all_norms = norms_of(norms);
  const std::vector<std::int64_t> doubtful = doubtful_rows(norms);
  if (!doubtful.empty()) {
    const at::Tensor rows = index_of(doubtful, all_norms);
    const std::vector<at::Tensor> exact = exact_group_norms(rows);
    for (std::size_t g = 0; g < norms.size(); ++g)
      norms[g] = norms[g].index_copy(0, rows, exact[g]);
    all_norms = all_norms.index_copy(0, rows, scaled_norms(at::stack(exact, 1)));
  }
  const ClipWeights weights = clipper_.weights(norms);
  LogicalBatch contribution{.sensitivity = sensitivity, .examples = losses.size(0)};
  contribution.non_finite = weights.finite.logical_not().sum().item<std::int64_t>();
  contribution.norms.push_back(all_norms.cpu());
  count(weights, contribution);
  contribution.sums = doubtful.empty() ? sums(weights) : finite_sums(weights);
  table_.clear();
  pending_.add(std::move(contribution), targets_.size());
}

std::vector<at::Tensor> DPOptimizer::State::group_norms() const {
  if (clipper_.groups() == 1) return {table_.norms()};
  std::vector<at::Tensor> squares(clipper_.groups());
  for (std::size_t i = 0; i < table_.parameters().size(); ++i) {
    if (!table_.parameters()[i].tensor.requires_grad()) continue;
    at::Tensor& sum = squares[clipper_.group_of(i)];
    const at::Tensor square = table_.norms(i).square();
    sum = sum.defined() ? sum + square : square;
  }
  for (at::Tensor& sum : squares) {
    sum = sum.defined() ? sum.sqrt() : at::zeros({table_.examples()}, at::kDouble);
  }
  return squares;
}

// Over all parameters, from those of the groups where that is no work.
at::Tensor DPOptimizer::State::norms_of(const std::vector<at::Tensor>& groups) const {
  return groups.size() == 1 ? groups[0] : table_.norms();
}

// Of some examples of the table, from the gradients themselves.
std::vector<at::Tensor> DPOptimizer::State::exact_group_norms(const at::Tensor& rows) {
  std::vector<std::vector<at::Tensor>> of_groups(clipper_.groups());
  for (std::size_t i = 0; i < table_.parameters().size(); ++i) {
    if (!table_.parameters()[i].tensor.requires_grad()) continue;
    const at::Tensor gradients = table_.gradients(i);
    const at::Tensor some = gradients.index_select(0, rows.to(gradients.device()));
    of_groups[clipper_.group_of(i)].push_back(
        scaled_norms(
            some.reshape({rows.numel(), table_.parameters()[i].tensor.numel()}).to(at::kDouble))
            .to(rows.device()));
  }
  std::vector<at::Tensor> result;
  for (const std::vector<at::Tensor>& norms : of_groups) {
    result.push_back(norms.empty() ? at::zeros({rows.numel()}, rows.options().dtype(at::kDouble))
                                   : scaled_norms(at::stack(norms, 1)));
  }
  return result;
}

std::vector<std::int64_t> DPOptimizer::State::doubtful_rows(
    const std::vector<at::Tensor>& norms) const {
  const std::vector<double> thresholds = clipper_.thresholds();
  at::Tensor doubtful;
  for (std::size_t g = 0; g < norms.size(); ++g) {
    at::Tensor here = norms[g].isfinite().logical_not();
    if (thresholds[g] < kSureNorm) here = here.logical_or(norms[g] < kSureNorm);
    doubtful = doubtful.defined() ? doubtful.logical_or(here) : here;
  }
  const at::Tensor rows = doubtful.nonzero().flatten().cpu();
  const auto* row = rows.const_data_ptr<std::int64_t>();
  return {row, row + rows.numel()};
}

std::vector<at::Tensor> DPOptimizer::State::sums(const ClipWeights& weights) {
  if (clipper_.groups() == 1) return table_.weighted_sums(weights.groups[0]);
  std::vector<at::Tensor> result;
  for (std::size_t i = 0; i < table_.parameters().size(); ++i) {
    result.push_back(table_.weighted_sum(i, weights.groups[clipper_.group_of(i)]));
  }
  return result;
}

// Zero times infinity is NaN: the rows themselves must go. In doubles, as a factor may be smaller
// than a float where its row is large.
std::vector<at::Tensor> DPOptimizer::State::finite_sums(const ClipWeights& weights) {
  const at::Tensor rows = weights.finite.nonzero().flatten();
  std::vector<at::Tensor> result;
  for (std::size_t i = 0; i < table_.parameters().size(); ++i) {
    const NamedParameter& parameter = table_.parameters()[i];
    if (!parameter.tensor.requires_grad()) {
      result.emplace_back();
      continue;
    }
    const at::Tensor gradients = table_.gradients(i);
    const at::Tensor kept = gradients.index_select(0, rows.to(gradients.device()))
                                .reshape({rows.numel(), parameter.tensor.numel()})
                                .to(at::kDouble);
    const at::Tensor factors =
        weights.groups[clipper_.group_of(i)].index_select(0, rows).to(kept.device());
    result.push_back(factors.matmul(kept)
                         .reshape(parameter.tensor.sizes())
                         .to(internal::sum_dtype(parameter.tensor)));
  }
  return result;
}

void DPOptimizer::State::count(const ClipWeights& weights, LogicalBatch& into) const {
  into.clipped += weights.clipped.sum().item<std::int64_t>();
  into.unclipped = into.unclipped + clipper_.count(weights).cpu();
}

}  // namespace gradus::privacy
