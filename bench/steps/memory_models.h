#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace torch::nn {
class Module;
}

namespace gradus::bench {

/// A model, one batch, and the loss of the one on the other.
struct MemoryModel {
  std::shared_ptr<torch::nn::Module> module = nullptr;
  std::vector<at::Tensor> batch = {};
  std::function<at::Tensor()> loss = nullptr;  ///< Runs the forward pass.
  double learning_rate = 1e-3;                 ///< Large enough that the loss moves.
};

/// The models that the memory comparisons measure, sized so that a plain step takes some tenths of
/// a second on one core. bench/steps/memory_models.py has the same.
const std::vector<std::string>& memory_model_names();

/// Builds the model @p name. Weights are drawn parameter by parameter in the order of their names,
/// then the batch, all from @p generator.
/// @throws UserError on an unknown name.
MemoryModel make_memory_model(const std::string& name, at::Generator generator);

}  // namespace gradus::bench
