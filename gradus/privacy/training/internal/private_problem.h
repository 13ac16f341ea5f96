#pragma once

// A small private problem for tests: a model in float64, rows, a loss an example, and the clipped
// sum by a loop over examples.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <torch/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <gradus/persample/engine/sample_gradients.h>
#include <gradus/privacy/training/losses.h>

namespace gradus::privacy::testing {

inline torch::nn::Sequential small_model(std::uint64_t seed = 7) {
  torch::manual_seed(seed);
  torch::nn::Sequential model(torch::nn::Linear(6, 5), torch::nn::Tanh(),
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({5})),
                              torch::nn::Linear(5, 3));
  model->to(torch::kDouble);
  return model;
}

inline persample::Batch small_rows(std::int64_t examples, std::uint64_t seed = 11) {
  torch::manual_seed(seed);
  return {3.0 * torch::randn({examples, 6}, torch::kDouble), torch::randint(3, {examples})};
}

inline persample::Batch rows_at(const persample::Batch& rows,
                                const std::vector<std::int64_t>& indices) {
  const at::Tensor places = torch::tensor(indices, torch::kLong);
  return {rows[0].index_select(0, places), rows[1].index_select(0, places)};
}

inline persample::LossFunction loss_of(torch::nn::Sequential model) {
  return [model](const persample::Batch& batch) mutable {
    return cross_entropy_per_example(model->forward(batch[0]), batch[1]);
  };
}

// One list of gradients an example, each by a backward pass of its own.
inline std::vector<std::vector<at::Tensor>> gradients_by_loop(const torch::nn::Sequential& model,
                                                              const persample::Batch& rows) {
  std::vector<std::vector<at::Tensor>> result;
  for (std::int64_t i = 0; i < rows[0].size(0); ++i) {
    const at::Tensor loss =
        loss_of(model)({rows[0].narrow(0, i, 1), rows[1].narrow(0, i, 1)}).sum();
    result.push_back(torch::autograd::grad({loss}, model->parameters()));
  }
  return result;
}

inline double norm_of(const std::vector<at::Tensor>& gradients) {
  double squares = 0.0;
  for (const at::Tensor& each : gradients) squares += each.square().sum().item<double>();
  return std::sqrt(squares);
}

inline std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& each : tensors) result.push_back(each.detach().clone());
  return result;
}

// The largest relative difference of two lists of tensors.
inline double difference(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  double worst = a.size() == b.size() ? 0.0 : 1e300;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) {
    const double scale = std::max(b[i].abs().max().item<double>(), 1e-300);
    const double error = (a[i] - b[i]).abs().max().item<double>() / scale;
    worst = error <= worst ? worst : error;  // NaN counts
  }
  return worst;
}

inline bool identical(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!torch::equal(a[i], b[i])) return false;
  }
  return true;
}

}  // namespace gradus::privacy::testing
