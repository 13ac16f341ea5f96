#include <gradus/optim/sgd.h>

#include <array>
#include <cmath>
#include <utility>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_fused_sgd.h>

#include <gradus/base/error.h>

namespace gradus::optim {
namespace {

struct Lists {
  std::vector<at::Tensor> parameters, gradients, buffers;
};

void update_fused(const ParameterGroup& group, const SGDOptions& options, const Lists& lists,
                  bool first) {
  at::_fused_sgd_(lists.parameters, lists.gradients, lists.buffers, group.weight_decay,
                  options.momentum, group.lr, options.dampening, options.nesterov, options.maximize,
                  first);
}

void update_foreach(const ParameterGroup& group, const SGDOptions& options, const Lists& lists,
                    bool first) {
  auto gradients = options.maximize ? at::_foreach_neg(lists.gradients) : lists.gradients;
  if (group.weight_decay != 0.0) {
    gradients = at::_foreach_add(gradients, lists.parameters, at::Scalar(group.weight_decay));
  }
  if (options.momentum != 0.0) {
    if (first) {
      at::_foreach_copy_(lists.buffers, gradients);
    } else {
      at::_foreach_mul_(lists.buffers, options.momentum);
      at::_foreach_add_(lists.buffers, gradients, at::Scalar(1.0 - options.dampening));
    }
    gradients = options.nesterov
                    ? at::_foreach_add(gradients, lists.buffers, at::Scalar(options.momentum))
                    : lists.buffers;
  }
  at::_foreach_add_(lists.parameters, gradients, at::Scalar(-group.lr));
}

// LibTorch 2.13's CPU kernel computes new values of 16-bit parameters in whole vectors and does not
// store them: only the last n % 16 move.
bool fused_sgd_takes(const at::Tensor& parameter) {
  return fused_kernel_takes(parameter) &&
         (!parameter.is_cpu() || c10::elementSize(parameter.scalar_type()) > 2);
}

void check_ranges(const std::string& component, const SGDOptions& options) {
  GRADUS_CHECK(component, std::isfinite(options.momentum) && options.momentum >= 0.0,
               "momentum must be finite and >= 0; got ", options.momentum);
  GRADUS_CHECK(component, std::isfinite(options.dampening), "dampening must be finite; got ",
               options.dampening);
  GRADUS_CHECK(component, !options.nesterov || (options.momentum > 0.0 && options.dampening == 0.0),
               "nesterov needs momentum > 0 and dampening 0; got momentum ", options.momentum,
               " and dampening ", options.dampening);
}

SGDOptions with_group(const SGDOptions& options, const ParameterGroup& group,
                      double (*option_of)(const ParameterGroup&, const std::string&, double)) {
  auto result = options;
  result.momentum = option_of(group, "momentum", options.momentum);
  result.dampening = option_of(group, "dampening", options.dampening);
  return result;
}

}  // namespace

SGD::SGD(std::vector<at::Tensor> parameters, const SGDOptions& options)
    : SGD(std::vector<ParameterGroup>{{.parameters = std::move(parameters),
                                       .lr = options.lr,
                                       .weight_decay = options.weight_decay}},
          options) {}

SGD::SGD(std::vector<ParameterGroup> groups, const SGDOptions& options)
    : Optimizer("sgd", std::move(groups), {"momentum", "dampening"}), options_(options) {
  check_ranges(component(), options_);
  check_groups();
}

void SGD::check_group(const ParameterGroup& group) const {
  const auto own = with_group(options_, group, option_of);
  check_ranges(component(), own);
  GRADUS_CHECK(component(), (own.momentum == 0.0) == (options_.momentum == 0.0),
               "a group's momentum must be 0 if and only if the optimizer's is, which decides "
               "whether there is a momentum_buffer; got ",
               own.momentum, " and ", options_.momentum);
}

std::vector<NamedOption> SGD::options_of(const ParameterGroup& group) const {
  const auto own = with_group(options_, group, option_of);
  return {{"lr", group.lr},
          {"momentum", own.momentum},
          {"dampening", own.dampening},
          {"weight_decay", group.weight_decay},
          {"nesterov", own.nesterov},
          {"maximize", own.maximize}};
}

std::vector<Optimizer::StateSpec> SGD::state_specs(const at::Tensor& parameter) const {
  if (options_.momentum == 0.0) return {};
  return {{"momentum_buffer", parameter.sizes().vec(), parameter.scalar_type()}};
}

void SGD::check_slot(const Slot& slot) const {
  GRADUS_CHECK(
      component(), !options_.fused.value_or(false) || fused_sgd_takes(slot.parameter),
      "parameter '", slot.name,
      "' must suit the fused kernel (CPU, float32 or float64; or CUDA, float16 and bfloat16 as "
      "well; no gaps in memory); got ",
      slot.parameter.scalar_type(), " on ", slot.parameter.device(), " with strides ",
      slot.parameter.strides(), ". Leave 'fused' unset to use the foreach operations there");
}

void SGD::update(const ParameterGroup& group, std::span<Slot* const> slots) {
  const auto own = with_group(options_, group, option_of);
  // Indexed by first update: the kernels take that as one flag for the whole list.
  std::array<Lists, 2> fused, foreach;
  for (const Slot* slot : slots) {
    auto& kind =
        options_.fused.value_or(true) && fused_sgd_takes(slot->parameter) ? fused : foreach;
    auto& lists = kind[slot->first_update ? 1 : 0];
    lists.parameters.push_back(slot->parameter);
    lists.gradients.push_back(gradient_laid_out_as(slot->parameter));
    if (!slot->state.empty()) lists.buffers.push_back(slot->state[0]);
  }
  for (const bool first : {false, true}) {
    if (!fused[first].parameters.empty()) update_fused(group, own, fused[first], first);
    if (!foreach[first].parameters.empty()) update_foreach(group, own, foreach[first], first);
  }
}

}  // namespace gradus::optim
