#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace gradus::privacy::nn {

class DPMultiheadAttentionImpl;

namespace internal {

// One entry of the state that torch::nn's layers would have, and where it lies in the module.
struct PlainSlot {
  std::string name = {};
  std::vector<std::int64_t> shape = {};
  std::vector<at::Tensor> parts = {};  // One below the other they are the entry, but for its shape.

  // Detached; shares memory with a single part.
  at::Tensor value() const;
  // Why @p value cannot go here ("in_proj_bias must have shape ..."), or "".
  std::string fault(const at::Tensor& value) const;
  // Copies @p value, which has no fault, into the parts.
  void set(const at::Tensor& value) const;

  bool requires_grad() const;
  void set_requires_grad(bool requires_grad) const;
};

// Of the layer itself, in torch::nn's order; out_proj, which is no different there, not included.
std::vector<PlainSlot> attention_slots(const DPMultiheadAttentionImpl& module);

// Of a module and all below it, in the order of torch::nn's parameters and buffers.
std::vector<PlainSlot> plain_slots(const torch::nn::Module& module);

}  // namespace internal
}  // namespace gradus::privacy::nn
