#include <gradus/optim/adam.h>

#include <utility>

namespace gradus::optim {

Adam::Adam(std::vector<at::Tensor> parameters, const AdamOptions& options)
    : Adam(std::vector<ParameterGroup>{{.parameters = std::move(parameters),
                                        .lr = options.lr,
                                        .weight_decay = options.weight_decay}},
           options) {}

Adam::Adam(std::vector<ParameterGroup> groups, const AdamOptions& options)
    : Optimizer("adam", std::move(groups), {"beta1", "beta2", "eps"}),
      options_(options),
      shared_{.lr = options.lr,
              .beta1 = options.beta1,
              .beta2 = options.beta2,
              .eps = options.eps,
              .weight_decay = options.weight_decay,
              .amsgrad = options.amsgrad,
              .maximize = options.maximize,
              .fused = options.fused} {
  AdamW::check_ranges(component(), shared_);
  check_groups();
}

void Adam::check_group(const ParameterGroup& group) const {
  AdamW::check_ranges(component(), AdamW::with_group(shared_, group));
}

std::vector<NamedOption> Adam::options_of(const ParameterGroup& group) const {
  return AdamW::named_options(shared_, group);
}

std::vector<Optimizer::StateSpec> Adam::state_specs(const at::Tensor& parameter) const {
  return AdamW::specs_of(shared_, parameter);
}

void Adam::check_slot(const Slot& slot) const { AdamW::check_fused(component(), shared_, slot); }

void Adam::update(const ParameterGroup& group, std::span<Slot* const> slots) {
  AdamW::apply(shared_, group, slots, /*decoupled=*/false);
}

}  // namespace gradus::optim
