#pragma once

// How the tests compare engines; not installed.

#include <cmath>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <gradus/base/error.h>
#include <gradus/persample/vmap/examples.h>

namespace gradus::persample::tests {

inline std::vector<NamedParameter> named(const torch::nn::Module& module) {
  std::vector<NamedParameter> parameters;
  for (const auto& item : module.named_parameters()) {
    parameters.push_back({.name = item.key(), .tensor = item.value()});
  }
  return parameters;
}

/// "" if @p got is @p want to @p relative (norm of the difference over the norm), parameter by
/// parameter, else what differs.
inline std::string gap(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want,
                       double relative = 1e-9) {
  if (got.size() != want.size()) return "another number of parameters";
  for (std::size_t k = 0; k < got.size(); ++k) {
    if (got[k].defined() != want[k].defined()) return base::join("parameter ", k, " defined?");
    if (!got[k].defined()) continue;
    if (got[k].sizes() != want[k].sizes() || got[k].dtype() != want[k].dtype()) {
      return base::join("parameter ", k, ": ", got[k].sizes(), " for ", want[k].sizes());
    }
    const double norm = want[k].norm().item<double>();
    const double difference = (got[k] - want[k]).norm().item<double>();
    if (!(difference <= relative * norm)) {
      return base::join("parameter ", k, ": differs by ", difference, " of ", norm);
    }
  }
  return "";
}

/// True if at least one gradient is not zero, so that a comparison says something.
inline bool any_nonzero(const std::vector<at::Tensor>& gradients) {
  for (const at::Tensor& gradient : gradients) {
    if (gradient.defined() && gradient.abs().sum().item<double>() > 0) return true;
  }
  return false;
}

}  // namespace gradus::persample::tests
