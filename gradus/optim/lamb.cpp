#include <gradus/optim/lamb.h>

#include <cmath>
#include <utility>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>

#include <gradus/base/error.h>
#include <gradus/optim/internal/trust_ratio.h>
#include <gradus/optim/internal/working_set.h>

namespace gradus::optim {
namespace {

enum State { kStep, kMean, kSquare };

}  // namespace

Lamb::Lamb(std::vector<at::Tensor> parameters, const LambOptions& options)
    : Lamb(std::vector<ParameterGroup>{{.parameters = std::move(parameters),
                                        .lr = options.lr,
                                        .weight_decay = options.weight_decay}},
           options) {}

Lamb::Lamb(std::vector<ParameterGroup> groups, const LambOptions& options)
    : Optimizer("lamb", std::move(groups), {"beta1", "beta2", "eps", "adapt"}), options_(options) {
  GRADUS_CHECK(component(), std::isfinite(options.min_norm) && options.min_norm >= 0.0,
               "min_norm must be finite and >= 0; got ", options.min_norm);
  GRADUS_CHECK(component(), options.max_norm >= options.min_norm && options.max_norm > 0.0,
               "max_norm must be > 0 and at least min_norm; got ", options.max_norm);
  check_groups();
}

LambOptions Lamb::with_group(const ParameterGroup& group) const {
  auto own = options_;
  own.beta1 = option_of(group, "beta1", own.beta1);
  own.beta2 = option_of(group, "beta2", own.beta2);
  own.eps = option_of(group, "eps", own.eps);
  own.adapt = option_of(group, "adapt", own.adapt ? 1.0 : 0.0) != 0.0;
  return own;
}

void Lamb::check_group(const ParameterGroup& group) const {
  const auto own = with_group(group);
  GRADUS_CHECK(component(), own.beta1 >= 0.0 && own.beta1 < 1.0, "beta1 must be in [0, 1); got ",
               own.beta1);
  GRADUS_CHECK(component(), own.beta2 >= 0.0 && own.beta2 < 1.0, "beta2 must be in [0, 1); got ",
               own.beta2);
  GRADUS_CHECK(component(), std::isfinite(own.eps) && own.eps >= 0.0,
               "eps must be finite and >= 0; got ", own.eps);
}

std::vector<NamedOption> Lamb::options_of(const ParameterGroup& group) const {
  const auto own = with_group(group);
  return {{"lr", group.lr},           {"betas", std::vector<double>{own.beta1, own.beta2}},
          {"eps", own.eps},           {"weight_decay", group.weight_decay},
          {"min_norm", own.min_norm}, {"max_norm", own.max_norm},
          {"adapt", own.adapt}};
}

std::vector<Optimizer::StateSpec> Lamb::state_specs(const at::Tensor& parameter) const {
  const auto sizes = parameter.sizes().vec();
  const auto dtype = internal::working_dtype(parameter);
  return {{"step", {}, at::kFloat}, {"exp_avg", sizes, dtype}, {"exp_avg_sq", sizes, dtype}};
}

void Lamb::check_slot(const Slot& slot) const {
  internal::check_working_dtype(component(), slot.name, slot.parameter);
}

void Lamb::update(const ParameterGroup& group, std::span<Slot* const> slots) {
  const auto own = with_group(group);
  internal::for_each_run(slots, [&](std::span<Slot* const> run) { update_run(group, own, run); });
}

void Lamb::update_run(const ParameterGroup& group, const LambOptions& own,
                      std::span<Slot* const> slots) const {
  const internal::WorkingSet work(slots);
  std::vector<at::Tensor> steps, means, squares;
  for (const Slot* slot : slots) {
    steps.push_back(slot->state[kStep]);
    means.push_back(slot->state[kMean]);
    squares.push_back(slot->state[kSquare]);
  }
  at::_foreach_add_(steps, 1);
  at::_foreach_lerp_(means, work.gradients, at::Scalar(1.0 - own.beta1));
  at::_foreach_mul_(squares, own.beta2);
  at::_foreach_addcmul_(squares, work.gradients, work.gradients, at::Scalar(1.0 - own.beta2));

  std::vector<at::Scalar> mean_corrections, root_corrections;
  for (const double t : internal::values_of(steps)) {
    mean_corrections.emplace_back(1.0 - std::pow(own.beta1, t));
    root_corrections.emplace_back(std::sqrt(1.0 - std::pow(own.beta2, t)));
  }
  auto roots = at::_foreach_sqrt(squares);
  at::_foreach_div_(roots, root_corrections);
  at::_foreach_add_(roots, own.eps);
  auto updates = at::_foreach_div(means, mean_corrections);
  at::_foreach_div_(updates, roots);
  roots.clear();
  if (group.weight_decay != 0.0) {
    at::_foreach_add_(updates, work.parameters, at::Scalar(group.weight_decay));
  }
  if (own.adapt) {
    const auto ratios = internal::ratio_or_one(
        internal::norms_of(work.parameters).clamp(own.min_norm, own.max_norm),
        internal::norms_of(updates));
    at::_foreach_mul_(updates, ratios.unbind());
  }
  at::_foreach_add_(work.parameters, updates, at::Scalar(-group.lr));
  work.store();
}

}  // namespace gradus::optim
