#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/optim/optimizer.h>

namespace gradus::optim {

struct DecayGroupsOptions {
  double lr = 1e-3;            ///< Of both groups. Finite, >= 0.
  double weight_decay = 1e-2;  ///< Of the group that decays. Finite, >= 0.
  std::int64_t min_dims = 2;   ///< Parameters of fewer dimensions do not decay: biases and norms.
  /// Parameters with one of these in their name do not decay either, whatever their dimensions.
  std::vector<std::string> no_decay_names = {"bias", "norm"};
};

/// Divides parameters (name and tensor) into a group that decays and one that does not, in this
/// order, each in the order given and with its names. A group that would be empty is left out.
std::vector<ParameterGroup> decay_groups(
    const std::vector<std::pair<std::string, at::Tensor>>& named_parameters,
    const DecayGroupsOptions& options = {});

}  // namespace gradus::optim
