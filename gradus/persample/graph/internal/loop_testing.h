#pragma once

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <gradus/persample/graph/graph_gradients.h>
#include <gradus/plane/grad/grad_plane.h>

// Of the tests: per-sample gradients against a batch of one at a time, where a batch is more than
// tensors whose first dimension counts examples.

namespace gradus::persample::internal {

/// How many random configurations a test draws: @p usual, ten times as many under
/// GRADUS_LONG_TESTS=1.
inline int random_trials(int usual = 500) {
  return std::getenv("GRADUS_LONG_TESTS") != nullptr ? 10 * usual : usual;
}

inline std::vector<NamedParameter> named(const torch::nn::Module& module) {
  std::vector<NamedParameter> result;
  for (const auto& each : module.named_parameters()) result.push_back({each.key(), each.value()});
  return result;
}

inline double relative(const at::Tensor& got, const at::Tensor& want) {
  const double scale = want.to(at::kDouble).norm().item<double>();
  const double error = (got.to(at::kDouble) - want.to(at::kDouble)).norm().item<double>();
  return scale == 0 ? error : error / scale;
}

inline bool uses(const at::Tensor& losses, const std::string& node) {
  for (const auto& each : plane::grad::walk({losses})) {
    if (each.name() == node) return true;
  }
  return false;
}

/// A model, and the truth about it: perhaps itself, perhaps its copy in float64.
struct Comparison {
  std::vector<NamedParameter> parameters{};
  std::function<at::Tensor()> losses{};  ///< Of the batch, [B].
  std::vector<NamedParameter> true_parameters{};
  std::function<at::Tensor(std::int64_t)> loss{};  ///< Of one example alone.
};

inline void expect_equals_loop(const Comparison& model, double tolerance,
                               GraphOptions options = {}) {
  GraphGradients table(model.parameters, options);
  const at::Tensor losses = model.losses();
  const std::int64_t examples = losses.size(0);
  std::vector<at::Tensor> leaves;
  for (const NamedParameter& each : model.true_parameters) {
    if (each.tensor.requires_grad()) leaves.push_back(each.tensor);
  }
  std::vector<std::vector<at::Tensor>> rows(leaves.size());
  for (std::int64_t b = 0; b < examples; ++b) {
    const at::Tensor loss = model.loss(b).sum();
    for (std::size_t i = 0; i < leaves.size(); ++i) rows[i].push_back(at::zeros_like(leaves[i]));
    if (!loss.requires_grad()) continue;
    const auto gradients = torch::autograd::grad({loss}, leaves, {}, false, false, true);
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      if (!gradients[i].defined()) continue;
      rows[i].back() = gradients[i].is_sparse() ? gradients[i].to_dense() : gradients[i];
    }
  }
  table.backward(losses);
  const at::Tensor weights = at::linspace(0.5, 2.0, examples, at::kDouble);
  at::Tensor squared = at::zeros({examples}, at::kDouble);
  std::size_t next = 0;
  for (std::size_t i = 0; i < model.parameters.size(); ++i) {
    SCOPED_TRACE(model.parameters[i].name);
    if (!model.parameters[i].tensor.requires_grad()) {
      EXPECT_FALSE(table.gradients(i).defined());
      continue;
    }
    const at::Tensor want = at::stack(rows[next++]).to(at::kDouble);
    const at::Tensor norms = want.reshape({examples, -1}).norm(2, 1);
    squared += norms.square();
    EXPECT_LE(relative(table.gradients(i), want), tolerance);
    EXPECT_LE(relative(table.norms(i), norms), tolerance);
    EXPECT_LE(relative(table.weighted_sum(i, weights), at::tensordot(weights, want, {0}, {0})),
              tolerance);
  }
  EXPECT_LE(relative(table.norms(), squared.sqrt()), tolerance);
}

}  // namespace gradus::persample::internal
