#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/stack.h>

#include <gradus/base/error.h>
#include <gradus/optim/optimizer.h>

namespace gradus::optim::internal {

/// The dtype in which a parameter is updated and its state is kept: float32 for 16 bits, where the
/// squares of usual gradients are not numbers or vanish, else the parameter's own.
inline at::ScalarType working_dtype(const at::Tensor& parameter) {
  const auto dtype = parameter.scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

inline void check_working_dtype(const std::string& component, const std::string& name,
                                const at::Tensor& parameter) {
  const auto dtype = parameter.scalar_type();
  GRADUS_CHECK(
      component,
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
      "parameter '", name,
      "' must be float32, float64, float16 or bfloat16 (16 bits are updated in float32); "
      "got ",
      dtype, ". Keep a float32 copy of it and optimise that");
}

/// Parameters and gradients of some slots of one dtype in the working dtype: the tensors
/// themselves, or float32 copies of 16-bit ones that store() rounds back.
struct WorkingSet {
  std::vector<at::Tensor> originals, parameters, gradients;

  template <typename Slot>
  explicit WorkingSet(std::span<Slot* const> slots) {
    for (const auto* slot : slots) {
      const auto dtype = working_dtype(slot->parameter);
      originals.push_back(slot->parameter);
      parameters.push_back(slot->parameter.detach().to(dtype));
      gradients.push_back(gradient_laid_out_as(slot->parameter).to(dtype));
    }
  }

  void store() const {
    if (!originals.empty() && originals[0].scalar_type() != parameters[0].scalar_type()) {
      at::_foreach_copy_(originals, parameters);
    }
  }
};

/// Calls @p fn on runs of @p slots, each of about @p max_elements elements or one slot, so that the
/// temporaries of list operations stay small beside the model. Parameters without elements are left
/// out.
template <typename Slot, typename Fn>
void for_each_run(std::span<Slot* const> slots, const Fn& fn,
                  std::int64_t max_elements = std::int64_t{1} << 22) {
  std::vector<Slot*> run;
  std::int64_t elements = 0;
  const auto flush = [&] {
    if (!run.empty()) fn(std::span<Slot* const>(run));
    run.clear();
    elements = 0;
  };
  for (Slot* slot : slots) {
    const auto count = slot->parameter.numel();
    if (count == 0) continue;
    if (elements + count > max_elements) flush();
    run.push_back(slot);
    elements += count;
  }
  flush();
}

/// The values of scalar tensors on one device, in one transfer.
inline std::vector<double> values_of(const std::vector<at::Tensor>& scalars) {
  std::vector<double> result;
  const auto all = at::stack(scalars).to(at::kCPU, at::kDouble);
  const auto values = all.accessor<double, 1>();
  for (std::int64_t i = 0; i < all.numel(); ++i) result.push_back(values[i]);
  return result;
}

}  // namespace gradus::optim::internal
