#include <gradus/optim/lars.h>

#include <cmath>
#include <utility>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>

#include <gradus/base/error.h>
#include <gradus/optim/internal/trust_ratio.h>
#include <gradus/optim/internal/working_set.h>

namespace gradus::optim {

Lars::Lars(std::vector<at::Tensor> parameters, const LarsOptions& options)
    : Lars(std::vector<ParameterGroup>{{.parameters = std::move(parameters),
                                        .lr = options.lr,
                                        .weight_decay = options.weight_decay}},
           options) {}

Lars::Lars(std::vector<ParameterGroup> groups, const LarsOptions& options)
    : Optimizer("lars", std::move(groups), {"momentum", "trust_coefficient", "adapt"}),
      options_(options) {
  GRADUS_CHECK(component(), std::isfinite(options.eps) && options.eps >= 0.0,
               "eps must be finite and >= 0; got ", options.eps);
  check_groups();
}

LarsOptions Lars::with_group(const ParameterGroup& group) const {
  auto own = options_;
  own.momentum = option_of(group, "momentum", own.momentum);
  own.trust_coefficient = option_of(group, "trust_coefficient", own.trust_coefficient);
  own.adapt = option_of(group, "adapt", own.adapt ? 1.0 : 0.0) != 0.0;
  return own;
}

void Lars::check_group(const ParameterGroup& group) const {
  const auto own = with_group(group);
  GRADUS_CHECK(component(), std::isfinite(own.momentum) && own.momentum >= 0.0,
               "momentum must be finite and >= 0; got ", own.momentum);
  GRADUS_CHECK(component(), (own.momentum == 0.0) == (options_.momentum == 0.0),
               "a group's momentum must be 0 if and only if the optimizer's is, which decides "
               "whether there is a momentum_buffer; got ",
               own.momentum, " and ", options_.momentum);
  GRADUS_CHECK(component(), std::isfinite(own.trust_coefficient) && own.trust_coefficient > 0.0,
               "trust_coefficient must be finite and > 0; got ", own.trust_coefficient);
}

std::vector<NamedOption> Lars::options_of(const ParameterGroup& group) const {
  const auto own = with_group(group);
  return {{"lr", group.lr},
          {"momentum", own.momentum},
          {"weight_decay", group.weight_decay},
          {"trust_coefficient", own.trust_coefficient},
          {"eps", own.eps},
          {"adapt", own.adapt}};
}

std::vector<Optimizer::StateSpec> Lars::state_specs(const at::Tensor& parameter) const {
  if (options_.momentum == 0.0) return {};
  return {{"momentum_buffer", parameter.sizes().vec(), internal::working_dtype(parameter)}};
}

void Lars::check_slot(const Slot& slot) const {
  internal::check_working_dtype(component(), slot.name, slot.parameter);
}

void Lars::update(const ParameterGroup& group, std::span<Slot* const> slots) {
  const auto own = with_group(group);
  internal::for_each_run(slots, [&](std::span<Slot* const> run) { update_run(group, own, run); });
}

void Lars::update_run(const ParameterGroup& group, const LarsOptions& own,
                      std::span<Slot* const> slots) const {
  const internal::WorkingSet work(slots);
  // A list of its own in every case: the caller's gradients are not scaled.
  auto updates = at::_foreach_add(work.gradients, work.parameters, at::Scalar(group.weight_decay));
  if (own.adapt) {
    const auto weights = internal::norms_of(work.parameters);
    const auto gradients = internal::norms_of(work.gradients);
    const auto denominators = gradients + weights * group.weight_decay + own.eps;
    const auto rates = at::where(
        gradients.gt(0), internal::ratio_or_one(weights * own.trust_coefficient, denominators),
        at::ones_like(weights));
    at::_foreach_mul_(updates, rates.unbind());
  }
  if (own.momentum == 0.0) {
    at::_foreach_add_(work.parameters, updates, at::Scalar(-group.lr));
  } else {
    std::vector<at::Tensor> buffers;
    for (const Slot* slot : slots) buffers.push_back(slot->state[0]);
    // The rate enters the buffer, so that a change of rate does not rescale what it holds.
    at::_foreach_mul_(buffers, own.momentum);
    at::_foreach_add_(buffers, updates, at::Scalar(group.lr));
    at::_foreach_add_(work.parameters, buffers, at::Scalar(-1));
  }
  work.store();
}

}  // namespace gradus::optim
