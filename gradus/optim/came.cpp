#include <gradus/optim/came.h>

#include <cmath>
#include <utility>

#include <ATen/ops/mul.h>
#include <ATen/ops/rsqrt.h>

#include <gradus/base/error.h>
#include <gradus/optim/internal/working_set.h>

namespace gradus::optim {
namespace {

// Order of the state tensors in a slot: a factored one, and one of fewer than two dimensions.
enum Factored { kMean, kSquareRow, kSquareColumn, kResidualRow, kResidualColumn };
enum Whole { kWholeMean, kSquare };

// Moves the row and column means of `values` into a factored moment.
void decay_into(const at::Tensor& row, const at::Tensor& column, const at::Tensor& values,
                double beta) {
  row.lerp_(values.mean(-1), 1.0 - beta);
  column.lerp_(values.mean(-2), 1.0 - beta);
}

// 1 / sqrt(row * column / mean(row)), Shazeer and Stern 2018, equation 4, with means for sums.
at::Tensor inverse_root(const at::Tensor& row, const at::Tensor& column) {
  return at::mul((row / row.mean(-1, /*keepdim=*/true)).rsqrt_().unsqueeze(-1),
                 column.rsqrt().unsqueeze(-2));
}

}  // namespace

Came::Came(std::vector<at::Tensor> parameters, const CameOptions& options)
    : Came(std::vector<ParameterGroup>{{.parameters = std::move(parameters),
                                        .lr = options.lr,
                                        .weight_decay = options.weight_decay}},
           options) {}

Came::Came(std::vector<ParameterGroup> groups, const CameOptions& options)
    : Optimizer("came", std::move(groups), {"beta1", "beta2", "beta3", "clip_threshold"}),
      options_(options) {
  for (const double eps : {options.eps1, options.eps2}) {
    GRADUS_CHECK(component(), std::isfinite(eps) && eps >= 0.0,
                 "eps1 and eps2 must be finite and >= 0; got ", eps);
  }
  check_groups();
}

CameOptions Came::with_group(const ParameterGroup& group) const {
  auto own = options_;
  own.beta1 = option_of(group, "beta1", own.beta1);
  own.beta2 = option_of(group, "beta2", own.beta2);
  own.beta3 = option_of(group, "beta3", own.beta3);
  own.clip_threshold = option_of(group, "clip_threshold", own.clip_threshold);
  return own;
}

void Came::check_group(const ParameterGroup& group) const {
  const auto own = with_group(group);
  for (const double beta : {own.beta1, own.beta2, own.beta3}) {
    GRADUS_CHECK(component(), beta >= 0.0 && beta < 1.0,
                 "beta1, beta2 and beta3 must be in [0, 1); got ", beta);
  }
  GRADUS_CHECK(component(), own.clip_threshold > 0.0, "clip_threshold must be > 0; got ",
               own.clip_threshold);
}

std::vector<NamedOption> Came::options_of(const ParameterGroup& group) const {
  const auto own = with_group(group);
  return {{"lr", group.lr},
          {"betas", std::vector<double>{own.beta1, own.beta2, own.beta3}},
          {"eps", std::vector<double>{own.eps1, own.eps2}},
          {"clip_threshold", own.clip_threshold},
          {"weight_decay", group.weight_decay}};
}

std::vector<Optimizer::StateSpec> Came::state_specs(const at::Tensor& parameter) const {
  const auto sizes = parameter.sizes().vec();
  const auto dtype = internal::working_dtype(parameter);
  if (sizes.size() < 2) return {{"exp_avg", sizes, dtype}, {"exp_avg_sq", sizes, dtype}};
  const std::vector<std::int64_t> row(sizes.begin(), sizes.end() - 1);
  auto column = sizes;
  column.erase(column.end() - 2);
  return {{"exp_avg", sizes, dtype},
          {"exp_avg_sq_row", row, dtype},
          {"exp_avg_sq_col", column, dtype},
          {"exp_avg_res_row", row, dtype},
          {"exp_avg_res_col", column, dtype}};
}

void Came::check_slot(const Slot& slot) const {
  internal::check_working_dtype(component(), slot.name, slot.parameter);
}

void Came::update(const ParameterGroup& group, std::span<Slot* const> slots) {
  const auto own = with_group(group);
  for (Slot* const& slot : slots) {
    if (slot->parameter.numel() == 0) continue;
    const internal::WorkingSet work(std::span<Slot* const>(&slot, 1));
    const auto& parameter = work.parameters[0];
    const auto& gradient = work.gradients[0];
    const auto& state = slot->state;
    const bool factored = parameter.dim() >= 2;

    auto update = gradient.square().add_(own.eps1);
    if (factored) {
      decay_into(state[kSquareRow], state[kSquareColumn], update, own.beta2);
      update = inverse_root(state[kSquareRow], state[kSquareColumn]).mul_(gradient);
    } else {
      state[kSquare].lerp_(update, 1.0 - own.beta2);
      update = state[kSquare].rsqrt().mul_(gradient);
    }
    const auto rms = update.norm() / std::sqrt(static_cast<double>(update.numel()));
    update.div_((rms / own.clip_threshold).clamp_min_(1.0));
    const auto& mean = state[kMean];
    mean.lerp_(update, 1.0 - own.beta1);

    if (group.weight_decay != 0.0) parameter.mul_(1.0 - group.lr * group.weight_decay);
    if (factored) {
      const auto residual = update.sub_(mean).square_().add_(own.eps2);
      decay_into(state[kResidualRow], state[kResidualColumn], residual, own.beta3);
      update = inverse_root(state[kResidualRow], state[kResidualColumn]).mul_(mean);
      parameter.sub_(update, group.lr);
    } else {
      parameter.sub_(mean, group.lr);
    }
    work.store();
  }
}

}  // namespace gradus::optim
