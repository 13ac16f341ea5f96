#include <gradus/optim/adamw.h>

#include <cmath>
#include <utility>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include <gradus/base/error.h>

namespace gradus::optim {
namespace {

// Order of the state tensors in a slot.
enum State { kStep, kMean, kSquare, kMaxSquare };

struct Lists {
  std::vector<at::Tensor> parameters = {}, gradients = {}, steps = {}, means = {}, squares = {},
                          max_squares = {};
};

void update_fused(const ParameterGroup& group, const AdamWOptions& options, bool decoupled,
                  const Lists& lists) {
  at::_foreach_add_(lists.steps, 1);
  if (decoupled) {
    at::_fused_adamw_(lists.parameters, lists.gradients, lists.means, lists.squares,
                      lists.max_squares, lists.steps, group.lr, options.beta1, options.beta2,
                      group.weight_decay, options.eps, options.amsgrad, options.maximize);
  } else {
    at::_fused_adam_(lists.parameters, lists.gradients, lists.means, lists.squares,
                     lists.max_squares, lists.steps, group.lr, options.beta1, options.beta2,
                     group.weight_decay, options.eps, options.amsgrad, options.maximize);
  }
}

// Algorithm 2 of Loshchilov and Hutter 2019, in the order of operations of torch.optim's
// multi-tensor AdamW and Adam.
void update_foreach(const ParameterGroup& group, const AdamWOptions& options, bool decoupled,
                    const Lists& lists) {
  at::_foreach_add_(lists.steps, 1);
  auto gradients = options.maximize ? at::_foreach_neg(lists.gradients) : lists.gradients;
  if (group.weight_decay != 0.0) {
    if (decoupled) {
      at::_foreach_mul_(lists.parameters, 1.0 - group.lr * group.weight_decay);
    } else {
      gradients = at::_foreach_add(gradients, lists.parameters, at::Scalar(group.weight_decay));
    }
  }
  at::_foreach_lerp_(lists.means, gradients, at::Scalar(1.0 - options.beta1));
  at::_foreach_mul_(lists.squares, options.beta2);
  at::_foreach_addcmul_(lists.squares, gradients, gradients, at::Scalar(1.0 - options.beta2));
  if (options.amsgrad) at::_foreach_maximum_(lists.max_squares, lists.squares);

  // Parameters may have joined at different steps, so each has its own bias corrections.
  std::vector<at::Scalar> root_corrections, step_sizes;
  for (const auto& step : lists.steps) {
    const double t = step.item<double>();
    root_corrections.emplace_back(std::sqrt(1.0 - std::pow(options.beta2, t)));
    step_sizes.emplace_back(-group.lr / (1.0 - std::pow(options.beta1, t)));
  }
  auto roots = at::_foreach_sqrt(options.amsgrad ? lists.max_squares : lists.squares);
  at::_foreach_div_(roots, root_corrections);
  at::_foreach_add_(roots, options.eps);
  at::_foreach_addcdiv_(lists.parameters, lists.means, roots, step_sizes);
}

std::vector<at::Tensor> in_float32(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const auto& tensor : tensors) result.push_back(tensor.to(at::kFloat));
  return result;
}

// float16 in float32, as the fused kernels do it: eps and the squares of usual gradients are 0 in
// float16, and 0 / 0 is NaN.
void update_float16(const ParameterGroup& group, const AdamWOptions& options, bool decoupled,
                    const Lists& lists) {
  const Lists wide{.parameters = in_float32(lists.parameters),
                   .gradients = in_float32(lists.gradients),
                   .steps = lists.steps,
                   .means = in_float32(lists.means),
                   .squares = in_float32(lists.squares),
                   .max_squares = in_float32(lists.max_squares)};
  update_foreach(group, options, decoupled, wide);
  at::_foreach_copy_(lists.parameters, wide.parameters);
  at::_foreach_copy_(lists.means, wide.means);
  at::_foreach_copy_(lists.squares, wide.squares);
  if (options.amsgrad) at::_foreach_copy_(lists.max_squares, wide.max_squares);
}

}  // namespace

AdamW::AdamW(std::vector<at::Tensor> parameters, const AdamWOptions& options)
    : AdamW(std::vector<ParameterGroup>{{.parameters = std::move(parameters),
                                         .lr = options.lr,
                                         .weight_decay = options.weight_decay}},
            options) {}

AdamW::AdamW(std::vector<ParameterGroup> groups, const AdamWOptions& options)
    : Optimizer("adamw", std::move(groups), {"beta1", "beta2", "eps"}), options_(options) {
  check_ranges(component(), options_);
  check_groups();
}

void AdamW::check_ranges(const std::string& component, const AdamWOptions& options) {
  GRADUS_CHECK(component, options.beta1 >= 0.0 && options.beta1 < 1.0,
               "beta1 must be in [0, 1); got ", options.beta1);
  GRADUS_CHECK(component, options.beta2 >= 0.0 && options.beta2 < 1.0,
               "beta2 must be in [0, 1); got ", options.beta2);
  GRADUS_CHECK(component, std::isfinite(options.eps) && options.eps >= 0.0,
               "eps must be finite and >= 0; got ", options.eps);
}

AdamWOptions AdamW::with_group(const AdamWOptions& options, const ParameterGroup& group) {
  auto result = options;
  result.beta1 = option_of(group, "beta1", options.beta1);
  result.beta2 = option_of(group, "beta2", options.beta2);
  result.eps = option_of(group, "eps", options.eps);
  return result;
}

void AdamW::check_group(const ParameterGroup& group) const {
  check_ranges(component(), with_group(options_, group));
}

std::vector<NamedOption> AdamW::named_options(const AdamWOptions& options,
                                              const ParameterGroup& group) {
  const auto o = with_group(options, group);
  return {{"lr", group.lr},       {"betas", std::vector<double>{o.beta1, o.beta2}},
          {"eps", o.eps},         {"weight_decay", group.weight_decay},
          {"amsgrad", o.amsgrad}, {"maximize", o.maximize}};
}

std::vector<NamedOption> AdamW::options_of(const ParameterGroup& group) const {
  return named_options(options_, group);
}

std::vector<Optimizer::StateSpec> AdamW::specs_of(const AdamWOptions& options,
                                                  const at::Tensor& parameter) {
  const auto sizes = parameter.sizes().vec();
  const auto dtype = parameter.scalar_type();
  std::vector<StateSpec> specs{
      {"step", {}, at::kFloat}, {"exp_avg", sizes, dtype}, {"exp_avg_sq", sizes, dtype}};
  if (options.amsgrad) specs.push_back({"max_exp_avg_sq", sizes, dtype});
  return specs;
}

std::vector<Optimizer::StateSpec> AdamW::state_specs(const at::Tensor& parameter) const {
  return specs_of(options_, parameter);
}

void AdamW::check_fused(const std::string& component, const AdamWOptions& options,
                        const Slot& slot) {
  GRADUS_CHECK(
      component, !options.fused.value_or(false) || fused_kernel_takes(slot.parameter),
      "parameter '", slot.name,
      "' must suit the fused kernel (CPU or CUDA; float32, float64, float16 or bfloat16; no gaps "
      "in memory); got ",
      slot.parameter.scalar_type(), " on ", slot.parameter.device(), " with strides ",
      slot.parameter.strides(), ". Leave 'fused' unset to use the foreach operations there");
}

void AdamW::check_slot(const Slot& slot) const { check_fused(component(), options_, slot); }

void AdamW::apply(const AdamWOptions& options, const ParameterGroup& group,
                  std::span<Slot* const> slots, bool decoupled) {
  const auto own = with_group(options, group);
  Lists fused, foreach;
  for (const Slot* slot : slots) {
    auto& lists = own.fused.value_or(true) && fused_kernel_takes(slot->parameter) ? fused : foreach;
    lists.parameters.push_back(slot->parameter);
    lists.gradients.push_back(gradient_laid_out_as(slot->parameter));
    lists.steps.push_back(slot->state[kStep]);
    lists.means.push_back(slot->state[kMean]);
    lists.squares.push_back(slot->state[kSquare]);
    if (own.amsgrad) lists.max_squares.push_back(slot->state[kMaxSquare]);
  }
  if (!fused.parameters.empty()) update_fused(group, own, decoupled, fused);
  if (foreach.parameters.empty()) return;
  if (foreach.parameters[0].scalar_type() == at::kHalf) {
    update_float16(group, own, decoupled, foreach);
  } else {
    update_foreach(group, own, decoupled, foreach);
  }
}

void AdamW::update(const ParameterGroup& group, std::span<Slot* const> slots) {
  apply(options_, group, slots);
}

}  // namespace gradus::optim
