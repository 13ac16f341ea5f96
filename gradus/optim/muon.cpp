#include <gradus/optim/muon.h>

#include <algorithm>
#include <cmath>

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <gradus/base/error.h>
#include <gradus/optim/internal/working_set.h>

namespace gradus::optim {
namespace {

// Brings the singular values of a matrix near 1: Jordan 2024, "NewtonSchulz5", in the order of
// operations of torch.optim.Muon.
at::Tensor orthogonalise(const at::Tensor& update, const MuonOptions& options) {
  const auto [a, b, c] = options.coefficients;
  const bool tall = update.size(0) > update.size(1);
  auto x = update.to(options.iteration_dtype, /*non_blocking=*/false, /*copy=*/true);
  if (tall) x = x.t();  // the Gram matrix of the shorter side
  x.div_(x.norm().clamp_min(options.eps));
  for (std::int64_t i = 0; i < options.iterations; ++i) {
    const auto gram = at::mm(x, x.t());
    x = at::addmm(x, at::addmm(gram, gram, gram, b, c), x, a);
  }
  return tall ? x.t() : x;
}

double rate_factor(MuonRate rate, const at::Tensor& matrix) {
  const auto rows = static_cast<double>(matrix.size(0));
  const auto columns = static_cast<double>(matrix.size(1));
  return rate == MuonRate::original ? std::sqrt(std::max(1.0, rows / columns))
                                    : 0.2 * std::sqrt(std::max(rows, columns));
}

}  // namespace

Muon::Muon(std::vector<at::Tensor> parameters, const MuonOptions& options)
    : Muon(std::vector<ParameterGroup>{{.parameters = std::move(parameters),
                                        .lr = options.lr,
                                        .weight_decay = options.weight_decay}},
           options) {}

Muon::Muon(std::vector<ParameterGroup> groups, const MuonOptions& options)
    : Optimizer("muon", std::move(groups), {"momentum"}), options_(options) {
  check_ranges(component(), options_);
  check_groups();
}

void Muon::check_ranges(const std::string& component, const MuonOptions& options) {
  GRADUS_CHECK(component, options.momentum >= 0.0 && options.momentum <= 1.0,
               "momentum must be in [0, 1]; got ", options.momentum);
  GRADUS_CHECK(component, std::isfinite(options.eps) && options.eps > 0.0,
               "eps must be finite and > 0; got ", options.eps);
  GRADUS_CHECK(component, options.iterations >= 1 && options.iterations < 100,
               "iterations must be in [1, 99]; got ", options.iterations);
  for (const double coefficient : options.coefficients) {
    GRADUS_CHECK(component, std::isfinite(coefficient), "coefficients must be finite; got ",
                 coefficient);
  }
  const auto dtype = options.iteration_dtype;
  GRADUS_CHECK(component, dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble,
               "iteration_dtype must be bfloat16, float32 or float64; got ", dtype);
}

void Muon::check_matrices(const std::string& component, const ParameterGroup& group) {
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    const auto& parameter = group.parameters[i];
    GRADUS_CHECK(component, !parameter.defined() || parameter.dim() == 2, "parameter '",
                 i < group.names.size() ? group.names[i] : std::to_string(i),
                 "' must be a matrix; got shape ", parameter.sizes(),
                 ". Put it in an AdamW group (MuonWithAdamW with use_muon = 0), or reshape a "
                 "convolution's weight to two dimensions");
  }
}

MuonOptions Muon::with_group(const MuonOptions& options, const ParameterGroup& group) {
  auto own = options;
  own.momentum = option_of(group, "momentum", own.momentum);
  return own;
}

void Muon::check_group(const ParameterGroup& group) const {
  check_ranges(component(), with_group(options_, group));
  check_matrices(component(), group);
}

std::vector<NamedOption> Muon::named_options(const MuonOptions& options,
                                             const ParameterGroup& group) {
  const auto own = with_group(options, group);
  const auto& c = own.coefficients;
  return {{"lr", group.lr},
          {"weight_decay", group.weight_decay},
          {"momentum", own.momentum},
          {"nesterov", own.nesterov},
          {"ns_coefficients", std::vector<double>{c[0], c[1], c[2]}},
          {"eps", own.eps},
          {"ns_steps", own.iterations},
          {"adjust_lr_fn",
           std::string(own.rate == MuonRate::original ? "original" : "match_rms_adamw")}};
}

std::vector<NamedOption> Muon::options_of(const ParameterGroup& group) const {
  return named_options(options_, group);
}

std::vector<Optimizer::StateSpec> Muon::specs_of(const at::Tensor& parameter) {
  return {{"momentum_buffer", parameter.sizes().vec(), internal::working_dtype(parameter)}};
}

std::vector<Optimizer::StateSpec> Muon::state_specs(const at::Tensor& parameter) const {
  return specs_of(parameter);
}

void Muon::check_slot(const Slot& slot) const {
  internal::check_working_dtype(component(), slot.name, slot.parameter);
}

void Muon::apply(const MuonOptions& options, const ParameterGroup& group,
                 std::span<Slot* const> slots) {
  const auto own = with_group(options, group);
  for (Slot* const& slot : slots) {
    if (slot->parameter.numel() == 0) continue;
    const internal::WorkingSet work(std::span<Slot* const>(&slot, 1));
    const auto& parameter = work.parameters[0];
    const auto& gradient = work.gradients[0];
    const auto& buffer = slot->state[0];
    buffer.lerp_(gradient, 1.0 - own.momentum);
    const auto update =
        orthogonalise(own.nesterov ? gradient.lerp(buffer, own.momentum) : buffer, own);
    parameter.mul_(1.0 - group.lr * group.weight_decay);
    parameter.add_(update, -group.lr * rate_factor(own.rate, parameter));
    work.store();
  }
}

void Muon::update(const ParameterGroup& group, std::span<Slot* const> slots) {
  apply(options_, group, slots);
}

MuonWithAdamW::MuonWithAdamW(std::vector<ParameterGroup> groups,
                             const MuonWithAdamWOptions& options)
    : Optimizer("muon_with_adamw", std::move(groups),
                {"use_muon", "momentum", "beta1", "beta2", "eps"}),
      options_(options) {
  Muon::check_ranges(component(), options_.muon);
  AdamW::check_ranges(component(), options_.adamw);
  check_groups();
}

bool MuonWithAdamW::use_muon(const ParameterGroup& group) {
  return option_of(group, "use_muon", 0.0) != 0.0;
}

void MuonWithAdamW::check_group(const ParameterGroup& group) const {
  GRADUS_CHECK(component(), group.options.contains("use_muon"),
               "each group must have the option use_muon, 1 for matrices of hidden layers and 0 "
               "for the rest; one of ",
               group.parameters.size(), " parameters has none. muon_groups() makes such groups");
  const bool muon = use_muon(group);
  for (const auto& [name, value] : group.options) {
    const bool of_muon = name == "momentum";
    GRADUS_CHECK(component(), name == "use_muon" || of_muon == muon, "option '", name,
                 "' must not be given in a group with use_muon = ", muon ? 1 : 0);
  }
  if (muon) {
    Muon::check_ranges(component(), Muon::with_group(options_.muon, group));
    Muon::check_matrices(component(), group);
  } else {
    AdamW::check_ranges(component(), AdamW::with_group(options_.adamw, group));
  }
}

bool MuonWithAdamW::fixes_state(const std::string& option) const { return option == "use_muon"; }

std::vector<NamedOption> MuonWithAdamW::options_of(const ParameterGroup& group) const {
  auto result = use_muon(group) ? Muon::named_options(options_.muon, group)
                                : AdamW::named_options(options_.adamw, group);
  result.push_back({"use_muon", use_muon(group)});
  return result;
}

std::vector<Optimizer::StateSpec> MuonWithAdamW::state_specs(const at::Tensor&) const {
  GRADUS_INTERNAL_CHECK("muon_with_adamw", false, "the state depends on the parameter's group");
  return {};
}

std::vector<Optimizer::StateSpec> MuonWithAdamW::slot_state_specs(const Slot& slot) const {
  return use_muon(groups()[slot.group]) ? Muon::specs_of(slot.parameter)
                                        : AdamW::specs_of(options_.adamw, slot.parameter);
}

void MuonWithAdamW::check_slot(const Slot& slot) const {
  if (use_muon(groups()[slot.group])) {
    internal::check_working_dtype(component(), slot.name, slot.parameter);
  } else {
    AdamW::check_fused(component(), options_.adamw, slot);
  }
}

void MuonWithAdamW::update(const ParameterGroup& group, std::span<Slot* const> slots) {
  if (use_muon(group)) {
    Muon::apply(options_.muon, group, slots);
  } else {
    AdamW::apply(options_.adamw, group, slots);
  }
}

std::vector<ParameterGroup> muon_groups(
    const std::vector<std::pair<std::string, at::Tensor>>& named_parameters,
    const MuonGroupsOptions& options) {
  const auto& rates = options.rates;
  ParameterGroup muon{.parameters = {},
                      .lr = rates.muon.lr,
                      .weight_decay = rates.muon.weight_decay,
                      .options = {{"use_muon", 1.0}}};
  ParameterGroup adamw{.parameters = {},
                       .lr = rates.adamw.lr,
                       .weight_decay = rates.adamw.weight_decay,
                       .options = {{"use_muon", 0.0}}};
  for (const auto& [name, parameter] : named_parameters) {
    const bool excluded =
        std::any_of(options.adamw_names.begin(), options.adamw_names.end(),
                    [&](const auto& part) { return name.find(part) != std::string::npos; });
    auto& group = parameter.dim() == 2 && !excluded ? muon : adamw;
    group.parameters.push_back(parameter);
    group.names.push_back(name);
  }
  std::vector<ParameterGroup> result;
  for (auto* group : {&muon, &adamw}) {
    if (!group->parameters.empty()) result.push_back(std::move(*group));
  }
  return result;
}

}  // namespace gradus::optim
