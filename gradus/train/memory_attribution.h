#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/plane/grad/grad_plane.h>
#include <gradus/plane/saved/saved_plane.h>

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace gradus::train {

/// Tells the memory tracker what the tensors of a training loop hold, while it lives: parameters
/// and buffers of a module, gradients as they are accumulated, and what autograd saves as
/// activations. Optimizer state and inputs are told by whoever makes them
/// (base::MemoryCategoryScope). Costs about a microsecond a saved tensor. Only this thread's saved
/// tensors are seen.
class MemoryAttribution {
 public:
  explicit MemoryAttribution(const torch::nn::Module& module);

 private:
  std::vector<plane::grad::Hook> gradients_;
  plane::saved::Guard activations_;
};

/// The same for what autograd saves under a recompute::MemoryBudget, which takes saved tensors
/// before MemoryAttribution sees them: what is saved counts as activations until it is freed,
/// dropped or not. Values made again count as workspace.
class BudgetAttribution {
 public:
  explicit BudgetAttribution(const torch::nn::Module& module);

 private:
  plane::saved::Guard activations_;
};

}  // namespace gradus::train
