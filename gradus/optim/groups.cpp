#include <gradus/optim/groups.h>

#include <algorithm>

#include <gradus/base/error.h>

namespace gradus::optim {

std::vector<ParameterGroup> decay_groups(
    const std::vector<std::pair<std::string, at::Tensor>>& named_parameters,
    const DecayGroupsOptions& options) {
  ParameterGroup decayed{.parameters = {}, .lr = options.lr, .weight_decay = options.weight_decay};
  ParameterGroup plain{.parameters = {}, .lr = options.lr, .weight_decay = 0.0};
  for (const auto& [name, parameter] : named_parameters) {
    GRADUS_CHECK("groups", parameter.defined(), "parameter '", name, "' must be a defined tensor");
    const bool named =
        std::any_of(options.no_decay_names.begin(), options.no_decay_names.end(),
                    [&](const auto& part) { return name.find(part) != std::string::npos; });
    auto& group = parameter.dim() >= options.min_dims && !named ? decayed : plain;
    group.parameters.push_back(parameter);
    group.names.push_back(name);
  }
  std::vector<ParameterGroup> result;
  for (auto* group : {&decayed, &plain}) {
    if (!group->parameters.empty()) result.push_back(std::move(*group));
  }
  return result;
}

}  // namespace gradus::optim
