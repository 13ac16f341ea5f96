#include <gradus/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <gradus/base/error.h>
#include <gradus/optim/internal/non_finite.h>

namespace gradus::optim {
namespace {

void check_rate(const std::string& component, const char* what, double value) {
  GRADUS_CHECK(component, std::isfinite(value) && value >= 0.0, what,
               " must be finite and >= 0; got ", value);
}

void check_parameter(const std::string& component, const std::string& name,
                     const at::Tensor& parameter) {
  GRADUS_CHECK(component, parameter.defined(), "parameter '", name, "' must be a defined tensor");
  GRADUS_CHECK(component, at::isFloatingType(parameter.scalar_type()), "parameter '", name,
               "' must have a real floating dtype; got ", parameter.scalar_type());
  GRADUS_CHECK(component, parameter.layout() == at::kStrided, "parameter '", name,
               "' must be dense; got layout ", parameter.layout());
  GRADUS_CHECK(component, parameter.is_leaf(), "parameter '", name,
               "' must be a leaf: it is the result of an operation, so its gradient is never kept");
  GRADUS_CHECK(component, !parameter.is_inference(), "parameter '", name,
               "' must not be an inference tensor: those have no version to bump; make it outside "
               "InferenceMode");
}

constexpr const char* kChangedCure =
    ". The parameter changed (set_data, Module::to) after its first step: convert the model first, "
    "then construct the optimizer, or drop the state by load_state({})";

// The strides of a state tensor beside the parameter as it is now.
std::vector<std::int64_t> state_strides(const at::Tensor& parameter,
                                        const std::vector<std::int64_t>& sizes, bool row_major) {
  if (!row_major && at::IntArrayRef(sizes) == parameter.sizes() &&
      parameter.is_non_overlapping_and_dense()) {
    return parameter.strides().vec();
  }
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t i = sizes.size(); i-- > 1;) {
    strides[i - 1] = strides[i] * std::max<std::int64_t>(sizes[i], 1);
  }
  return strides;
}

// True where torch.optim has the narrower dtype: the state of 16-bit parameters in 16 bits.
bool widens(at::ScalarType from, at::ScalarType to) {
  return at::isFloatingType(from) && at::isFloatingType(to) &&
         c10::elementSize(from) < c10::elementSize(to);
}

}  // namespace

Optimizer::Optimizer(std::string component, std::vector<ParameterGroup> groups,
                     std::vector<std::string> group_options)
    : component_(std::move(component)), group_options_(std::move(group_options)) {
  for (auto& group : groups) {
    check_and_append(group, slots_);
    groups_.push_back(std::move(group));
  }
  GRADUS_CHECK(component_, !slots_.empty(), "there must be at least one parameter; got none");
}

void Optimizer::check_options(const ParameterGroup& group) const {
  check_rate(component_, "lr", group.lr);
  check_rate(component_, "weight_decay", group.weight_decay);
  for (const auto& [name, value] : group.options) {
    std::string known = "lr, weight_decay";
    for (const auto& option : group_options_) known += ", " + option;
    GRADUS_CHECK(
        component_,
        std::find(group_options_.begin(), group_options_.end(), name) != group_options_.end(),
        "a group's options may be ", known, "; got '", name, "'");
    GRADUS_CHECK(component_, std::isfinite(value), "option '", name, "' must be finite; got ",
                 value);
  }
}

void Optimizer::check_and_append(const ParameterGroup& group, std::vector<Slot>& slots) const {
  check_options(group);
  GRADUS_CHECK(component_, group.names.empty() || group.names.size() == group.parameters.size(),
               "group ", groups_.size(), " must have one name a parameter, or none; got ",
               group.names.size(), " names for ", group.parameters.size(), " parameters");
  std::unordered_set<const void*> seen;
  std::unordered_set<std::string> names;
  for (const auto& slot : slots) {
    seen.insert(slot.parameter.unsafeGetTensorImpl());
    names.insert(slot.name);
  }
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    Slot slot{.parameter = group.parameters[i],
              .name = group.names.empty() ? std::to_string(slots.size()) : group.names[i],
              .group = groups_.size()};
    check_parameter(component_, slot.name, slot.parameter);
    GRADUS_CHECK(component_, seen.insert(slot.parameter.unsafeGetTensorImpl()).second,
                 "parameter '", slot.name,
                 "' must be given once: a second time would update it twice a step");
    GRADUS_CHECK(component_, names.insert(slot.name).second, "parameter names must differ; got '",
                 slot.name, "' twice");
    slots.push_back(std::move(slot));
  }
}

void Optimizer::check_groups() const {
  for (const auto& group : groups_) check_group(group);
}

void Optimizer::add_group(ParameterGroup group) {
  GRADUS_CHECK(component_, !in_backward_,
               "groups must be added before an OptimizerInBackward takes the optimizer: the new "
               "parameters would not be stepped in backward");
  GRADUS_CHECK(component_, !group.parameters.empty(),
               "an added group must have at least one parameter; got none");
  check_group(group);
  auto slots = slots_;
  check_and_append(group, slots);
  groups_.push_back(std::move(group));
  slots_ = std::move(slots);
}

void Optimizer::set_option(std::size_t group, const std::string& name, double value) {
  GRADUS_CHECK(component_, group < groups_.size(), "group must be below ", groups_.size(), "; got ",
               group);
  ParameterGroup changed{.parameters = {},
                         .lr = groups_[group].lr,
                         .weight_decay = groups_[group].weight_decay,
                         .options = groups_[group].options};
  if (name == "lr") {
    changed.lr = value;
  } else if (name == "weight_decay") {
    changed.weight_decay = value;
  } else {
    changed.options[name] = value;
    const auto old = groups_[group].options.find(name);
    GRADUS_CHECK(
        component_,
        !fixes_state(name) || (old != groups_[group].options.end() && old->second == value), "'",
        name, "' of group ", group,
        " must stay as it was constructed, because it decides which state there is; got ", value,
        ". Construct the optimizer anew, or add_group the parameters to one");
  }
  check_options(changed);
  check_group(changed);
  groups_[group].lr = changed.lr;
  groups_[group].weight_decay = changed.weight_decay;
  groups_[group].options = std::move(changed.options);
}

double Optimizer::option_of(const ParameterGroup& group, const std::string& name, double fallback) {
  const auto found = group.options.find(name);
  return found == group.options.end() ? fallback : found->second;
}

std::vector<NamedOption> Optimizer::options_of(const ParameterGroup& group) const {
  std::vector<NamedOption> result{{"lr", group.lr}, {"weight_decay", group.weight_decay}};
  for (const auto& [name, value] : group.options) result.push_back({name, value});
  return result;
}

std::vector<NamedOption> Optimizer::hyperparameters(std::size_t group) const {
  GRADUS_CHECK(component_, group < groups_.size(), "group must be below ", groups_.size(), "; got ",
               group);
  return options_of(groups_[group]);
}

std::vector<std::string> Optimizer::option_names() const {
  std::vector<std::string> result{"lr", "weight_decay"};
  result.insert(result.end(), group_options_.begin(), group_options_.end());
  return result;
}

std::vector<at::Tensor> Optimizer::parameters() const {
  std::vector<at::Tensor> result;
  for (const auto& slot : slots_) result.push_back(slot.parameter);
  return result;
}

std::vector<std::string> Optimizer::parameter_names() const {
  std::vector<std::string> result;
  for (const auto& slot : slots_) result.push_back(slot.name);
  return result;
}

void Optimizer::check_gradient(const Slot& slot) const {
  const auto& gradient = slot.parameter.grad();
  GRADUS_CHECK(component_, gradient.layout() == at::kStrided, "gradient of parameter '", slot.name,
               "' must be dense; got layout ", gradient.layout(),
               ". Build the embedding with sparse(false), or make the gradient dense first");
  GRADUS_CHECK(component_, gradient.sizes() == slot.parameter.sizes(), "gradient of parameter '",
               slot.name, "' must have the parameter's shape ", slot.parameter.sizes(), "; got ",
               gradient.sizes());
  GRADUS_CHECK(component_, gradient.scalar_type() == slot.parameter.scalar_type(),
               "gradient of parameter '", slot.name, "' must have the parameter's dtype ",
               slot.parameter.scalar_type(), "; got ", gradient.scalar_type());
  GRADUS_CHECK(component_, gradient.device() == slot.parameter.device(), "gradient of parameter '",
               slot.name, "' must be on the parameter's device ", slot.parameter.device(), "; got ",
               gradient.device());
  check_slot(slot);
  check_state(slot);
}

void Optimizer::check_state(const Slot& slot) const {
  if (slot.state.empty()) return;
  const auto specs = slot_state_specs(slot);
  GRADUS_CHECK(component_, specs.size() == slot.state.size(), "state of parameter '", slot.name,
               "' must be ", specs.size(), " tensors for shape ", slot.parameter.sizes(),
               " of the parameter; got ", slot.state.size(), kChangedCure);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto& [name, sizes, dtype, row_major] = specs[i];
    const auto& state = slot.state[i];
    GRADUS_CHECK(component_, state.sizes() == at::IntArrayRef(sizes), "state '", slot.name, ".",
                 name, "' must have shape ", at::IntArrayRef(sizes), " for shape ",
                 slot.parameter.sizes(), " of the parameter; got ", state.sizes(), kChangedCure);
    GRADUS_CHECK(component_, state.scalar_type() == dtype, "state '", slot.name, ".", name,
                 "' must have dtype ", dtype, " for dtype ", slot.parameter.scalar_type(),
                 " of the parameter; got ", state.scalar_type(), kChangedCure);
    GRADUS_CHECK(component_, state.device() == slot.parameter.device(), "state '", slot.name, ".",
                 name, "' must be on device ", slot.parameter.device(), " of the parameter; got ",
                 state.device(), kChangedCure);
  }
}

void Optimizer::lay_state_out(Slot& slot) const {
  const auto specs = slot_state_specs(slot);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    auto& state = slot.state[i];
    const auto strides = state_strides(slot.parameter, specs[i].sizes, specs[i].row_major);
    if (state.strides() == at::IntArrayRef(strides)) continue;
    // The tensor stays the same one for those who hold it.
    state.set_data(at::empty_strided(state.sizes(), strides, state.options()).copy_(state));
  }
}

std::vector<Optimizer::Slot*> Optimizer::slots_with_gradient() {
  std::vector<Slot*> result;
  for (auto& slot : slots_) {
    if (!slot.parameter.grad().defined()) continue;
    check_gradient(slot);
    result.push_back(&slot);
  }
  return result;
}

void Optimizer::create_state(Slot& slot) {
  const auto& parameter = slot.parameter;
  std::vector<at::Tensor> state;
  for (const auto& spec : slot_state_specs(slot)) {
    const auto options = at::TensorOptions().dtype(spec.dtype).device(parameter.device());
    state.push_back(
        at::empty_strided(spec.sizes, state_strides(parameter, spec.sizes, spec.row_major), options)
            .zero_());
  }
  slot.state = std::move(state);
}

void Optimizer::set_non_finite_policy(NonFinitePolicy policy) {
  GRADUS_CHECK(component_, !in_backward_ || policy != NonFinitePolicy::skip,
               "gradients that are not finite cannot skip a step in backward: other parameters are "
               "updated by then. Use refuse, or step after backward");
  non_finite_policy_ = policy;
}

StepResult Optimizer::step() {
  GRADUS_CHECK(component_, !in_backward_,
               "an OptimizerInBackward holds this optimizer and steps it during backward: call the "
               "OptimizerInBackward's step()");
  return update_all(slots_with_gradient());
}

StepResult Optimizer::update_all(const std::vector<Slot*>& ready) {
  const at::NoGradGuard no_grad;
  StepResult result;
  if (non_finite_policy_ != NonFinitePolicy::pass) {
    std::vector<at::Tensor> gradients;
    for (const Slot* slot : ready) gradients.push_back(slot->parameter.grad());
    if (const auto first = internal::first_non_finite(gradients)) {
      result.non_finite = ready[*first]->name;
      GRADUS_CHECK(component_, non_finite_policy_ != NonFinitePolicy::refuse,
                   "gradient of parameter '", result.non_finite,
                   "' must be finite; got NaN or infinity. A loss or an activation overflowed: "
                   "lower the learning rate or the loss scale, or set NonFinitePolicy::skip");
      result.skipped = true;
      return result;
    }
  }
  using Key = std::tuple<std::size_t, at::ScalarType, c10::DeviceType, c10::DeviceIndex>;
  std::map<Key, std::vector<Slot*>> buckets;
  for (Slot* slot : ready) {
    const auto device = slot->parameter.device();
    buckets[{slot->group, slot->parameter.scalar_type(), device.type(), device.index()}].push_back(
        slot);
  }
  // All memory is taken before anything is written, so that running out of it changes no parameter.
  for (Slot* slot : ready) {
    if (slot->state.empty()) {
      create_state(*slot);
    } else {
      lay_state_out(*slot);
    }
  }
  for (const auto& [key, bucket] : buckets) {
    update(groups_[std::get<0>(key)], bucket);
    for (Slot* slot : bucket) {
      slot->first_update = false;
      ++result.updated;
      // The fused kernels write without telling autograd (measured on LibTorch 2.13): without this
      // a backward pass through the old value silently uses the new one.
      slot->parameter.unsafeGetTensorImpl()->bump_version();
    }
  }
  return result;
}

void Optimizer::zero_grad(bool set_to_none) {
  const at::NoGradGuard no_grad;
  for (auto& slot : slots_) {
    auto& gradient = slot.parameter.mutable_grad();
    if (!gradient.defined()) continue;
    if (set_to_none) {
      gradient.reset();
    } else {
      if (gradient.grad_fn()) gradient = gradient.detach();
      gradient.zero_();
    }
  }
}

void Optimizer::set_learning_rate(double lr) {
  check_rate(component_, "lr", lr);
  for (auto& group : groups_) group.lr = lr;
}

void Optimizer::set_learning_rate(std::size_t group, double lr) {
  GRADUS_CHECK(component_, group < groups_.size(), "group must be below ", groups_.size(), "; got ",
               group);
  check_rate(component_, "lr", lr);
  groups_[group].lr = lr;
}

std::vector<NamedState> Optimizer::state() const {
  std::vector<NamedState> result;
  for (const auto& slot : slots_) {
    if (slot.state.empty()) continue;
    const auto specs = slot_state_specs(slot);
    check_state(slot);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      result.push_back({base::join(slot.name, '.', specs[i].name), slot.state[i]});
    }
  }
  return result;
}

std::vector<at::Tensor> Optimizer::state_tensors() const {
  std::vector<at::Tensor> result;
  for (const auto& slot : slots_) result.insert(result.end(), slot.state.begin(), slot.state.end());
  return result;
}

void Optimizer::load_state(const std::vector<NamedState>& entries) {
  std::unordered_map<std::string, at::Tensor> by_name;
  for (const auto& entry : entries) {
    GRADUS_CHECK(component_, by_name.emplace(entry.name, entry.tensor).second,
                 "state names must differ; got '", entry.name, "' twice");
  }
  const at::NoGradGuard no_grad;
  std::vector<std::vector<at::Tensor>> loaded(slots_.size());
  for (std::size_t s = 0; s < slots_.size(); ++s) {
    const auto& slot = slots_[s];
    const auto specs = slot_state_specs(slot);
    std::optional<std::string> missing;
    std::optional<std::string> present;
    for (const auto& spec : specs) {
      const auto name = base::join(slot.name, '.', spec.name);
      const auto found = by_name.find(name);
      if (found == by_name.end()) {
        missing = name;
        continue;
      }
      present = name;
      const auto source = found->second;
      by_name.erase(found);
      GRADUS_CHECK(component_, source.defined() && source.sizes() == at::IntArrayRef(spec.sizes),
                   "state '", name, "' must have shape ", at::IntArrayRef(spec.sizes), "; got ",
                   source.defined() ? base::join(source.sizes()) : "an undefined tensor");
      GRADUS_CHECK(component_,
                   source.scalar_type() == spec.dtype || widens(source.scalar_type(), spec.dtype),
                   "state '", name, "' must have dtype ", spec.dtype, "; got ",
                   source.scalar_type());
      loaded[s].push_back(source);
    }
    GRADUS_CHECK(component_, !present || !missing, "state of parameter '", slot.name,
                 "' must be complete; got '", present.value_or(""), "' but no '",
                 missing.value_or(""), "'");
  }
  GRADUS_CHECK(component_, by_name.empty(), "state '", by_name.begin()->first,
               "' must belong to a parameter of this optimizer; the model or the optimizer differs "
               "from the one that "
               "was saved");
  // Copies are made into fresh slots first, so that running out of memory midway changes nothing.
  auto fresh = slots_;
  for (std::size_t s = 0; s < fresh.size(); ++s) {
    fresh[s].state.clear();
    fresh[s].first_update = loaded[s].empty();
    if (loaded[s].empty()) continue;
    create_state(fresh[s]);
    for (std::size_t i = 0; i < loaded[s].size(); ++i) fresh[s].state[i].copy_(loaded[s][i]);
  }
  slots_ = std::move(fresh);
}

bool fused_kernel_takes(const at::Tensor& parameter) {
  const auto dtype = parameter.scalar_type();
  return (parameter.is_cpu() || parameter.is_cuda()) &&
         (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
          dtype == at::kBFloat16) &&
         parameter.is_non_overlapping_and_dense();
}

at::Tensor gradient_laid_out_as(const at::Tensor& parameter) {
  const auto& gradient = parameter.grad();
  if (gradient.strides() == parameter.strides() || !parameter.is_non_overlapping_and_dense())
    return gradient;
  return at::empty_strided(parameter.sizes(), parameter.strides(), gradient.options())
      .copy_(gradient);
}

}  // namespace gradus::optim
