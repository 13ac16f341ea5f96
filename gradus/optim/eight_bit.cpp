#include <gradus/optim/eight_bit.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <gradus/base/error.h>
#include <gradus/optim/internal/block_quantise.h>

namespace gradus::optim {
namespace {

using internal::AdamScalars;
using internal::BlockState;
using internal::kBlock;
using internal::SgdScalars;

constexpr bool kRowMajor = true;

bool is_quantised(const at::Tensor& parameter, std::int64_t min_values) {
  return parameter.numel() >= min_values;
}

// A moment of a parameter as it is kept: codes and the largest magnitude a block, or float32 alone.
struct Moment {
  at::Tensor values = {}, absmax = {};
};

// A parameter, its gradient and its moments as row-major vectors.
struct Flat {
  at::Tensor parameter = {}, gradient = {};
  std::vector<Moment> moments = {};
};

at::Tensor flat(const at::Tensor& dense) { return dense.as_strided({dense.numel()}, {1}); }

// Work on vectors; a parameter that is not row-major is copied out and back: blocks are of
// neighbours by index, so that a state fits the parameter in every layout.
template <typename Slot, typename Work>
void with_flat(const Slot& slot, std::size_t first_moment, std::size_t moments, bool quantised,
               Work work) {
  const auto& parameter = slot.parameter;
  const auto whole = parameter.contiguous();
  Flat vectors{.parameter = flat(whole), .gradient = flat(parameter.grad().contiguous())};
  for (std::size_t i = 0; i < moments; ++i) {
    const std::size_t place = first_moment + i * (quantised ? 2 : 1);
    vectors.moments.push_back({.values = flat(slot.state[place]),
                               .absmax = quantised ? slot.state[place + 1] : at::Tensor()});
  }
  work(vectors);
  if (!whole.is_same(parameter)) parameter.copy_(whole);
}

// Blocks that one thread takes at a time.
constexpr std::int64_t kGrainBlocks = 64;

template <typename Work>
void each_range(std::int64_t values, Work work) {
  at::parallel_for(0, internal::block_count(values), kGrainBlocks,
                   [&](std::int64_t begin, std::int64_t end) {
                     const std::int64_t first = begin * kBlock;
                     work(first, std::min(end * kBlock, values) - first);
                   });
}

BlockState blocks_at(const Moment& moment, std::int64_t first) {
  return {.codes = moment.values.mutable_data_ptr<std::uint8_t>() + first,
          .absmax = moment.absmax.mutable_data_ptr<float>() + first / kBlock};
}

float* floats_at(const Moment& moment, std::int64_t first) {
  return moment.values.mutable_data_ptr<float>() + first;
}

// The rule on float32 vectors by tensor operations, as adam_value and sgd_value have it.
at::Tensor gradient_of(const at::Tensor& g, const at::Tensor& p, double sign, double l2) {
  auto gradient = sign < 0.0 ? g.neg() : g;
  return l2 == 0.0 ? gradient : gradient.add(p, l2);
}

at::Tensor updated(const at::Tensor& p, const at::Tensor& g, std::vector<at::Tensor>& moments,
                   const AdamScalars& s) {
  const auto gradient = gradient_of(g, p, s.sign, s.l2);
  moments[0] = moments[0].mul(s.beta1).add_(gradient, s.rest1);
  moments[1] = moments[1].mul(s.beta2).addcmul_(gradient, gradient, s.rest2);
  const auto root = moments[1].sqrt().div_(s.root_correction).add_(s.eps);
  return p.mul(s.keep).addcdiv_(moments[0], root, -s.step_size);
}

at::Tensor updated(const at::Tensor& p, const at::Tensor& g, std::vector<at::Tensor>& moments,
                   const SgdScalars& s) {
  const auto gradient = gradient_of(g, p, s.sign, s.l2);
  moments[0] = moments[0].mul(s.kept).add_(gradient, s.added);
  const auto direction = gradient.mul(s.of_gradient).add_(moments[0], s.of_buffer);
  return p.sub(direction, s.lr);
}

// Other devices than the CPU. In pieces, so that only so much of the state is float32 at a time.
constexpr std::int64_t kPieceBlocks = 1 << 14;

template <typename Scalars>
void update_by_operations(const Flat& vectors, const Scalars& scalars) {
  const std::int64_t values = vectors.parameter.numel();
  for (std::int64_t first = 0; first < values; first += kPieceBlocks * kBlock) {
    const std::int64_t end = std::min(first + kPieceBlocks * kBlock, values);
    std::vector<Moment> parts;
    std::vector<at::Tensor> moments;
    for (const auto& moment : vectors.moments) {
      // The first moment and momentum have a sign, the second has not.
      const bool is_signed = parts.empty();
      Moment part{.values = moment.values.slice(0, first, end)};
      if (moment.absmax.defined()) {
        part.absmax = moment.absmax.slice(0, first / kBlock, internal::block_count(end));
        moments.push_back(internal::dequantise_by_operations(part.values, is_signed, part.absmax));
      } else {
        moments.push_back(part.values);
      }
      parts.push_back(std::move(part));
    }
    const auto p = vectors.parameter.slice(0, first, end);
    p.copy_(updated(p.to(at::kFloat), vectors.gradient.slice(0, first, end).to(at::kFloat), moments,
                    scalars));
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].absmax.defined()) {
        // As in the loops: an infinite scale would make the whole block NaN.
        if (i == 1) moments[i].clamp_max_(std::numeric_limits<float>::max());
        internal::quantise_by_operations(moments[i], i == 0, parts[i].values, parts[i].absmax);
      } else {
        parts[i].values.copy_(moments[i]);
      }
    }
  }
}

template <typename Value>
void update_range(const Flat& vectors, std::int64_t first, std::int64_t n,
                  const AdamScalars& scalars) {
  const auto& loops = internal::block_loops<Value>();
  Value* const p = vectors.parameter.mutable_data_ptr<Value>() + first;
  const Value* const g = vectors.gradient.const_data_ptr<Value>() + first;
  const auto& mean = vectors.moments[0];
  const auto& square = vectors.moments[1];
  if (mean.absmax.defined()) {
    loops.adam(p, g, blocks_at(mean, first), blocks_at(square, first), n,
               internal::dynamic_map(true), internal::dynamic_map(false), scalars);
  } else {
    loops.plain_adam(p, g, floats_at(mean, first), floats_at(square, first), n, scalars);
  }
}

template <typename Value>
void update_range(const Flat& vectors, std::int64_t first, std::int64_t n,
                  const SgdScalars& scalars) {
  const auto& loops = internal::block_loops<Value>();
  Value* const p = vectors.parameter.mutable_data_ptr<Value>() + first;
  const Value* const g = vectors.gradient.const_data_ptr<Value>() + first;
  const auto& buffer = vectors.moments[0];
  if (buffer.absmax.defined()) {
    loops.sgd(p, g, blocks_at(buffer, first), n, internal::dynamic_map(true), scalars);
  } else {
    loops.plain_sgd(p, g, floats_at(buffer, first), n, scalars);
  }
}

template <typename Scalars>
void update_flat(const Flat& vectors, const Scalars& scalars) {
  if (vectors.parameter.numel() == 0) return;
  if (!vectors.parameter.is_cpu()) return update_by_operations(vectors, scalars);
  const auto update = [&]<typename Value>(const Value&) {
    each_range(vectors.parameter.numel(), [&](std::int64_t first, std::int64_t n) {
      update_range<Value>(vectors, first, n, scalars);
    });
  };
  switch (vectors.parameter.scalar_type()) {
    case at::kFloat:
      return update(float{});
    case at::kHalf:
      return update(c10::Half{});
    default:  // check_parameter let nothing else in
      return update(c10::BFloat16{});
  }
}

void check_parameter(const std::string& component, const std::string& name,
                     const at::Tensor& parameter) {
  const auto dtype = parameter.scalar_type();
  GRADUS_CHECK(component, dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16,
               "parameter '", name,
               "' must be float32, float16 or bfloat16: 8-bit state is computed in float32; got ",
               dtype);
}

void check_parameters(const std::string& component, const ParameterGroup& group) {
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    if (!group.parameters[i].defined()) continue;  // the base says so
    check_parameter(component, i < group.names.size() ? group.names[i] : std::to_string(i),
                    group.parameters[i]);
  }
}

}  // namespace

Adam8bit::Adam8bit(std::vector<at::Tensor> parameters, const Adam8bitOptions& options)
    : Adam8bit(std::vector<ParameterGroup>{{.parameters = std::move(parameters),
                                            .lr = options.lr,
                                            .weight_decay = options.weight_decay}},
               options) {}

Adam8bit::Adam8bit(std::vector<ParameterGroup> groups, const Adam8bitOptions& options)
    : Optimizer("adam8bit", std::move(groups), {"beta1", "beta2", "eps"}), options_(options) {
  GRADUS_CHECK(component(), options.min_values >= 0, "min_values must be >= 0; got ",
               options.min_values);
  check_groups();
}

void Adam8bit::check_group(const ParameterGroup& group) const {
  const double beta1 = option_of(group, "beta1", options_.beta1);
  const double beta2 = option_of(group, "beta2", options_.beta2);
  const double eps = option_of(group, "eps", options_.eps);
  GRADUS_CHECK(component(), beta1 >= 0.0 && beta1 < 1.0, "beta1 must be in [0, 1); got ", beta1);
  GRADUS_CHECK(component(), beta2 >= 0.0 && beta2 < 1.0, "beta2 must be in [0, 1); got ", beta2);
  GRADUS_CHECK(component(), std::isfinite(eps) && eps >= 0.0, "eps must be finite and >= 0; got ",
               eps);
  check_parameters(component(), group);
}

std::vector<NamedOption> Adam8bit::options_of(const ParameterGroup& group) const {
  return {{"lr", group.lr},
          {"betas", std::vector<double>{option_of(group, "beta1", options_.beta1),
                                        option_of(group, "beta2", options_.beta2)}},
          {"eps", option_of(group, "eps", options_.eps)},
          {"weight_decay", group.weight_decay},
          {"decoupled_weight_decay", options_.decoupled_weight_decay},
          {"maximize", options_.maximize}};
}

std::vector<Optimizer::StateSpec> Adam8bit::state_specs(const at::Tensor& parameter) const {
  const auto sizes = parameter.sizes().vec();
  if (!is_quantised(parameter, options_.min_values)) {
    return {{"step", {}, at::kFloat},
            {"exp_avg", sizes, at::kFloat, kRowMajor},
            {"exp_avg_sq", sizes, at::kFloat, kRowMajor}};
  }
  const std::int64_t blocks = internal::block_count(parameter.numel());
  return {{"step", {}, at::kFloat},
          {"exp_avg", sizes, at::kByte, kRowMajor},
          {"exp_avg_absmax", {blocks}, at::kFloat},
          {"exp_avg_sq", sizes, at::kByte, kRowMajor},
          {"exp_avg_sq_absmax", {blocks}, at::kFloat}};
}

void Adam8bit::check_slot(const Slot& slot) const {
  check_parameter(component(), slot.name, slot.parameter);
}

void Adam8bit::update(const ParameterGroup& group, std::span<Slot* const> slots) {
  const double beta1 = option_of(group, "beta1", options_.beta1);
  const double beta2 = option_of(group, "beta2", options_.beta2);
  AdamScalars scalars{.beta1 = static_cast<float>(beta1),
                      .rest1 = static_cast<float>(1.0 - beta1),
                      .beta2 = static_cast<float>(beta2),
                      .rest2 = static_cast<float>(1.0 - beta2),
                      .eps = static_cast<float>(option_of(group, "eps", options_.eps)),
                      .sign = options_.maximize ? -1.0F : 1.0F};
  if (options_.decoupled_weight_decay) {
    scalars.keep = static_cast<float>(1.0 - group.lr * group.weight_decay);
  } else {
    scalars.l2 = static_cast<float>(group.weight_decay);
  }
  for (const Slot* slot : slots) {
    const auto& step = slot->state[0];
    step.add_(1);
    const auto t = step.item<double>();
    scalars.step_size = static_cast<float>(group.lr / (1.0 - std::pow(beta1, t)));
    scalars.root_correction = static_cast<float>(std::sqrt(1.0 - std::pow(beta2, t)));
    with_flat(*slot, /*first_moment=*/1, /*moments=*/2,
              is_quantised(slot->parameter, options_.min_values),
              [&](const Flat& vectors) { update_flat(vectors, scalars); });
  }
}

SGD8bit::SGD8bit(std::vector<at::Tensor> parameters, const SGD8bitOptions& options)
    : SGD8bit(std::vector<ParameterGroup>{{.parameters = std::move(parameters),
                                           .lr = options.lr,
                                           .weight_decay = options.weight_decay}},
              options) {}

SGD8bit::SGD8bit(std::vector<ParameterGroup> groups, const SGD8bitOptions& options)
    : Optimizer("sgd8bit", std::move(groups), {"momentum", "dampening"}), options_(options) {
  GRADUS_CHECK(component(), options.min_values >= 0, "min_values must be >= 0; got ",
               options.min_values);
  check_groups();
}

void SGD8bit::check_group(const ParameterGroup& group) const {
  const double momentum = option_of(group, "momentum", options_.momentum);
  const double dampening = option_of(group, "dampening", options_.dampening);
  GRADUS_CHECK(
      component(), std::isfinite(momentum) && momentum > 0.0,
      "momentum must be finite and > 0: without it SGD has no state to shrink, so use SGD; "
      "got ",
      momentum);
  GRADUS_CHECK(component(), std::isfinite(dampening), "dampening must be finite; got ", dampening);
  GRADUS_CHECK(component(), !options_.nesterov || dampening == 0.0,
               "nesterov needs dampening 0; got ", dampening);
  check_parameters(component(), group);
}

std::vector<NamedOption> SGD8bit::options_of(const ParameterGroup& group) const {
  return {{"lr", group.lr},
          {"momentum", option_of(group, "momentum", options_.momentum)},
          {"dampening", option_of(group, "dampening", options_.dampening)},
          {"weight_decay", group.weight_decay},
          {"nesterov", options_.nesterov},
          {"maximize", options_.maximize}};
}

std::vector<Optimizer::StateSpec> SGD8bit::state_specs(const at::Tensor& parameter) const {
  const auto sizes = parameter.sizes().vec();
  if (!is_quantised(parameter, options_.min_values))
    return {{"momentum_buffer", sizes, at::kFloat, kRowMajor}};
  return {{"momentum_buffer", sizes, at::kByte, kRowMajor},
          {"momentum_buffer_absmax", {internal::block_count(parameter.numel())}, at::kFloat}};
}

void SGD8bit::check_slot(const Slot& slot) const {
  check_parameter(component(), slot.name, slot.parameter);
}

void SGD8bit::update(const ParameterGroup& group, std::span<Slot* const> slots) {
  const auto momentum = static_cast<float>(option_of(group, "momentum", options_.momentum));
  const double dampening = option_of(group, "dampening", options_.dampening);
  for (const Slot* slot : slots) {
    // The first buffer is the gradient itself, undampened.
    const SgdScalars scalars{
        .lr = static_cast<float>(group.lr),
        .kept = slot->first_update ? 0.0F : momentum,
        .added = slot->first_update ? 1.0F : static_cast<float>(1.0 - dampening),
        .of_gradient = options_.nesterov ? 1.0F : 0.0F,
        .of_buffer = options_.nesterov ? momentum : 1.0F,
        .l2 = static_cast<float>(group.weight_decay),
        .sign = options_.maximize ? -1.0F : 1.0F};
    with_flat(*slot, /*first_moment=*/0, /*moments=*/1,
              is_quantised(slot->parameter, options_.min_values),
              [&](const Flat& vectors) { update_flat(vectors, scalars); });
  }
}

}  // namespace gradus::optim
