#include <gradus/privacy/nn/internal/plain_slots.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <torch/nn/module.h>

#include <gradus/base/error.h>
#include <gradus/privacy/nn/multihead_attention.h>

namespace gradus::privacy::nn::internal {

at::Tensor PlainSlot::value() const {
  const at::NoGradGuard no_grad;
  if (parts.size() > 1) return at::cat(parts, 0);
  const at::Tensor value = parts[0].detach();
  return value.sizes() == at::IntArrayRef(shape) ? value : value.reshape(shape);
}

std::string PlainSlot::fault(const at::Tensor& value) const {
  const at::ScalarType dtype = parts[0].scalar_type();
  if (!value.defined()) return name + " must be defined; got an undefined tensor";
  if (value.sizes() != at::IntArrayRef(shape)) {
    return base::join(name, " must have shape ", at::IntArrayRef(shape), "; got ", value.sizes());
  }
  if (value.scalar_type() != dtype) {
    return base::join(name, " must have dtype ", dtype, "; got ", value.scalar_type(),
                      ": convert it, or the module, by .to(dtype)");
  }
  return "";
}

void PlainSlot::set(const at::Tensor& value) const {
  const at::NoGradGuard no_grad;
  if (parts.size() == 1) {
    at::Tensor(parts[0]).copy_(value.reshape(parts[0].sizes()));
    return;
  }
  std::int64_t row = 0;
  for (at::Tensor part : parts) {
    part.copy_(value.narrow(0, row, part.size(0)));
    row += part.size(0);
  }
}

bool PlainSlot::requires_grad() const {
  return std::any_of(parts.begin(), parts.end(),
                     [](const at::Tensor& part) { return part.requires_grad(); });
}

void PlainSlot::set_requires_grad(bool requires_grad) const {
  for (at::Tensor part : parts) part.set_requires_grad(requires_grad);
}

std::vector<PlainSlot> attention_slots(const DPMultiheadAttentionImpl& module) {
  const std::int64_t E = module.options.embed_dim();
  std::vector<PlainSlot> slots;
  const auto add = [&](const char* name, const at::Tensor& part) {
    slots.push_back({.name = name, .shape = part.sizes().vec(), .parts = {part}});
  };
  if (module.options.kdim() == E && module.options.vdim() == E) {
    slots.push_back({.name = "in_proj_weight",
                     .shape = {3 * E, E},
                     .parts = {module.q_proj_weight, module.k_proj_weight, module.v_proj_weight}});
  } else {
    add("q_proj_weight", module.q_proj_weight);
    add("k_proj_weight", module.k_proj_weight);
    add("v_proj_weight", module.v_proj_weight);
  }
  if (module.options.bias()) {
    slots.push_back({.name = "in_proj_bias",
                     .shape = {3 * E},
                     .parts = {module.q_proj_bias, module.k_proj_bias, module.v_proj_bias}});
  }
  if (module.bias_k) {
    slots.push_back({.name = "bias_k", .shape = {1, 1, E}, .parts = {module.bias_k->bias}});
    slots.push_back({.name = "bias_v", .shape = {1, 1, E}, .parts = {module.bias_v->bias}});
  }
  return slots;
}

std::vector<PlainSlot> plain_slots(const torch::nn::Module& module) {
  std::vector<PlainSlot> slots;
  const auto* attention = module.as<DPMultiheadAttentionImpl>();
  if (attention != nullptr) {
    slots = attention_slots(*attention);
  } else {
    for (const auto& items : {module.named_parameters(false), module.named_buffers(false)}) {
      for (const auto& item : items) {
        slots.push_back(
            {.name = item.key(), .shape = item.value().sizes().vec(), .parts = {item.value()}});
      }
    }
  }
  for (const auto& child : module.named_children()) {
    // bias_k and bias_v are among the layer's own slots.
    if (attention != nullptr && child.value().get() != attention->out_proj.get()) continue;
    for (auto& slot : plain_slots(*child.value())) {
      slot.name = child.key() + "." + slot.name;
      slots.push_back(std::move(slot));
    }
  }
  return slots;
}

}  // namespace gradus::privacy::nn::internal
