#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/nn/module.h>

#include <gradus/amp/levels/internal/impl.h>
#include <gradus/amp/levels/levels.h>
#include <gradus/base/error.h>

namespace gradus::amp {
namespace {

constexpr const char* kComponent = "amp_levels";
constexpr const char* kRounding = "stochastic_rounding";

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

at::Tensor copy_in_float(const at::Tensor& tensor) {
  const bool floating = at::isFloatingType(tensor.scalar_type());
  return tensor.detach().to(floating ? at::kFloat : tensor.scalar_type(), /*non_blocking=*/false,
                            /*copy=*/true);
}

// @p state by name; the names are those of @p wanted, each once.
std::unordered_map<std::string, at::Tensor> by_name(const NamedTensors& state,
                                                    const std::vector<std::string>& wanted) {
  std::unordered_map<std::string, at::Tensor> result;
  for (const auto& [name, tensor] : state) {
    GRADUS_CHECK(kComponent, tensor.defined(), "state '", name, "' must be a defined tensor");
    GRADUS_CHECK(kComponent, result.emplace(name, tensor).second, "state names must differ; got '",
                 name, "' twice");
  }
  for (const auto& name : wanted) {
    GRADUS_CHECK(kComponent, result.contains(name), "state must have '", name, "'; got none");
  }
  for (const auto& [name, tensor] : state) {
    GRADUS_CHECK(kComponent, std::ranges::find(wanted, name) != wanted.end(), "state '", name,
                 "' must belong to this model or level; the one that was saved differs");
  }
  return result;
}

NamedTensors tensors_of(const torch::nn::Module& model) {
  NamedTensors result;
  for (const auto& item : model.named_parameters()) result.emplace_back(item.key(), item.value());
  for (const auto& item : model.named_buffers()) {
    if (item.value().defined()) result.emplace_back(item.key(), item.value());
  }
  return result;
}

std::string scaler_name(std::size_t number) { return base::join("loss_scaler", number, "."); }

}  // namespace

NamedTensors Amp::model_state(const torch::nn::Module& model) const {
  NamedTensors result;
  for (const auto& [name, tensor] : tensors_of(model)) {
    const Weight* const weight = impl_->find(tensor);
    const bool master = weight != nullptr && weight->kind == Weight::Kind::master;
    result.emplace_back(name, copy_in_float(master ? weight->target : tensor));
  }
  return result;
}

void Amp::load_model_state(torch::nn::Module& model, const NamedTensors& state) {
  const auto tensors = tensors_of(model);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors) names.push_back(name);
  const auto loaded = by_name(state, names);
  for (const auto& [name, tensor] : tensors) {
    GRADUS_CHECK(kComponent, loaded.at(name).sizes() == tensor.sizes(), "state '", name,
                 "' must have shape ", tensor.sizes(), "; got ", loaded.at(name).sizes());
  }
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : tensors) {
    const Weight* const weight = impl_->find(tensor);
    if (weight != nullptr && weight->kind == Weight::Kind::master) {
      weight->target.copy_(loaded.at(name));
    }
    tensor.copy_(loaded.at(name));
  }
}

NamedTensors Amp::state() const {
  for (const auto& [optimizer, record] : impl_->records) {
    GRADUS_CHECK(kComponent, !record->skip && !record->open && !record->still_scaled,
                 "state() must be taken between a step and the next backward: an optimizer has "
                 "gradients that wait for a step. Step it, or drop them with amp.zero_grad");
  }
  NamedTensors result;
  if (!impl_->properties.enabled) return result;
  for (std::size_t i = 0; i < impl_->losses.size(); ++i) {
    for (const auto& [key, value] : impl_->losses[i].scaler.state()) {
      result.emplace_back(scaler_name(i) + key, at::full({}, value, at::kDouble));
    }
  }
  if (impl_->properties.stochastic_rounding) {
    auto stream = at::empty({2}, at::kLong);
    stream.mutable_data_ptr<std::int64_t>()[0] = static_cast<std::int64_t>(impl_->rounding.seed);
    stream.mutable_data_ptr<std::int64_t>()[1] = static_cast<std::int64_t>(impl_->rounding.uses);
    result.emplace_back(kRounding, stream);
  }
  return result;
}

void Amp::load_state(const NamedTensors& state) {
  std::vector<std::string> names;
  std::vector<std::map<std::string, double>> scalers;
  if (impl_->properties.enabled) {
    for (std::size_t i = 0; i < impl_->losses.size(); ++i) {
      scalers.push_back(impl_->losses[i].scaler.state());
      for (const auto& [key, value] : scalers.back()) names.push_back(scaler_name(i) + key);
    }
    if (impl_->properties.stochastic_rounding) names.emplace_back(kRounding);
  }
  const auto loaded = by_name(state, names);
  for (std::size_t i = 0; i < scalers.size(); ++i) {
    for (auto& [key, value] : scalers[i]) {
      const auto& tensor = loaded.at(scaler_name(i) + key);
      GRADUS_CHECK(kComponent, tensor.numel() == 1, "state '", scaler_name(i), key,
                   "' must have one element; got shape ", tensor.sizes());
      value = tensor.item<double>();
    }
  }
  at::Tensor stream;
  if (const auto found = loaded.find(kRounding); found != loaded.end()) {
    GRADUS_CHECK(kComponent, found->second.scalar_type() == at::kLong && found->second.numel() == 2,
                 "state '", kRounding, "' must be int64 [2]; got ", found->second.scalar_type(),
                 found->second.sizes());
    stream = found->second.cpu().contiguous();
  }
  // A value that a later scaler refuses must not leave the earlier ones changed.
  std::vector<std::map<std::string, double>> before;
  for (auto& loss : impl_->losses) before.push_back(loss.scaler.state());
  std::size_t done = 0;
  try {
    for (; done < scalers.size(); ++done) impl_->losses[done].scaler.load_state(scalers[done]);
  } catch (...) {
    for (std::size_t i = 0; i < done; ++i) impl_->losses[i].scaler.load_state(before[i]);
    throw;
  }
  if (stream.defined()) {
    impl_->rounding.seed = static_cast<std::uint64_t>(stream.const_data_ptr<std::int64_t>()[0]);
    impl_->rounding.uses = static_cast<std::uint64_t>(stream.const_data_ptr<std::int64_t>()[1]);
  }
  for (auto& loss : impl_->losses) {
    loss.found.clear();
    loss.unjudged.clear();
  }
  for (auto& [optimizer, record] : impl_->records) {
    record->skip = false;
    if (record->still_scaled) record->drop_scaled();
  }
}

}  // namespace gradus::amp
