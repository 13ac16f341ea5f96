#include <gradus/privacy/training/validator.h>

#include <algorithm>
#include <optional>
#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/rnn.h>

#include <gradus/accumulate/batch_norm.h>
#include <gradus/base/error.h>
#include <gradus/privacy/training/internal/state_codec.h>

namespace gradus::privacy {
namespace {

using internal::kComponent;
using torch::nn::Module;

std::string named(const std::string& module) { return module.empty() ? "<the model>" : module; }

// Calls fn(name, module) once a module, the root first.
template <typename Fn>
void for_each_module(const Module& model, const Fn& fn) {
  std::vector<const Module*> seen;
  fn(std::string(), const_cast<Module&>(model));  // NOLINT: of the caller, who may change it
  for (const auto& child : model.named_modules("", /*include_self=*/false)) {
    if (std::ranges::find(seen, child.value().get()) != seen.end()) continue;
    seen.push_back(child.value().get());
    fn(child.key(), *child.value());
  }
}

template <typename Impl>
bool switch_statistics(Module& module, bool off) {
  auto* norm = dynamic_cast<Impl*>(&module);
  if (norm == nullptr || !norm->is_training() || !norm->options.track_running_stats()) return false;
  if (off) {
    norm->options.track_running_stats(false);
    // What forward() passes on; the registered buffers stay, so that the state's keys do.
    norm->running_mean = at::Tensor();
    norm->running_var = at::Tensor();
  }
  return true;
}

// "InstanceNorm2d" if the module is one that keeps statistics; switches them off if wanted.
const char* instance_norm(Module& module, bool off) {
  if (switch_statistics<torch::nn::InstanceNorm1dImpl>(module, off)) return "InstanceNorm1d";
  if (switch_statistics<torch::nn::InstanceNorm2dImpl>(module, off)) return "InstanceNorm2d";
  if (switch_statistics<torch::nn::InstanceNorm3dImpl>(module, off)) return "InstanceNorm3d";
  return nullptr;
}

struct EmbeddingFault {
  const char* type = nullptr;
  const char* option = nullptr;
};

template <typename Impl>
void embedding_faults(Module& module, const char* type, bool off,
                      std::vector<EmbeddingFault>& faults) {
  auto* embedding = dynamic_cast<Impl*>(&module);
  if (embedding == nullptr) return;
  if (embedding->options.scale_grad_by_freq()) {
    faults.push_back({type, "scale_grad_by_freq"});
    if (off) embedding->options.scale_grad_by_freq(false);
  }
  if (embedding->options.max_norm().has_value()) {
    faults.push_back({type, "max_norm"});
    if (off) embedding->options.max_norm(std::nullopt);
  }
}

std::vector<EmbeddingFault> embedding_faults(Module& module, bool off) {
  std::vector<EmbeddingFault> faults;
  embedding_faults<torch::nn::EmbeddingImpl>(module, "Embedding", off, faults);
  embedding_faults<torch::nn::EmbeddingBagImpl>(module, "EmbeddingBag", off, faults);
  return faults;
}

void find_embeddings(const std::string& name, Module& module, std::vector<PrivacyIssue>& issues) {
  for (const EmbeddingFault& fault : embedding_faults(module, /*off=*/false)) {
    const bool scales = std::string(fault.option) == "scale_grad_by_freq";
    issues.push_back(
        {.module = name,
         .type = fault.type,
         .reason = scales
                       ? "scale_grad_by_freq divides an example's gradient by how often its rows "
                         "are in the whole batch"
                       : "max_norm changes the rows of the weight that a batch reads, in the "
                         "forward pass and without noise",
         .cure = base::join("Construct it without ", fault.option, ", or call privacy::fix(model)"),
         .fixable = true});
  }
}

void find_batch_norms(const Module& model, std::vector<PrivacyIssue>& issues) {
  for (const accumulate::BatchNormLayer& layer : accumulate::batch_norm_layers(model)) {
    if (!layer.uses_batch_statistics) continue;
    const bool fixable = layer.obstacle.empty();
    std::string cure = base::join("Use GroupNorm(min(32, C), C) with C = ", layer.features);
    cure += fixable
                ? ": privacy::fix(model) puts it in place before the optimizer is made"
                : base::join(
                      " in the model's code (it cannot be replaced from outside: ", layer.obstacle,
                      "), or hold an accumulate::GroupNormGuard wherever the model runs and "
                      "set ValidatorOptions::group_norm_guard");
    cure += "; or freeze its statistics with eval()";
    issues.push_back({.module = layer.name,
                      .type = layer.type,
                      .reason =
                          "it normalises over the batch, so that one example's output depends "
                          "on the others",
                      .cure = std::move(cure),
                      .fixable = fixable});
  }
}

template <typename Impl>
const char* recurrent(const Module& module, const char* type) {
  return dynamic_cast<const Impl*>(&module) != nullptr ? type : nullptr;
}

void find_advice(const std::string& name, const Module& module, const ValidatorOptions& options,
                 std::vector<PrivacyIssue>& issues) {
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const auto live = [](const at::Tensor& each) { return each.defined() && each.requires_grad(); };
  const bool narrow = std::ranges::any_of(parameters, [&](const auto& each) {
    return live(each.value()) && each.value().element_size() == 2;
  });
  if (narrow && !options.master_weights) {
    issues.push_back({.module = name,
                      .type = module.name(),
                      .reason =
                          "its parameters have 16 bits and no master weights: updates smaller "
                          "than their last digit are lost",
                      .cure = "Use amp::initialize and give its masters as targets, or keep the "
                              "parameters in float32 and run under autocast",
                      .refused = false});
  }
  const char* type = recurrent<torch::nn::LSTMImpl>(module, "LSTM");
  if (type == nullptr) type = recurrent<torch::nn::GRUImpl>(module, "GRU");
  if (type == nullptr) type = recurrent<torch::nn::RNNImpl>(module, "RNN");
  const bool cuda = std::ranges::any_of(
      parameters, [&](const auto& each) { return live(each.value()) && each.value().is_cuda(); });
  if (type != nullptr && cuda) {
    issues.push_back({.module = name,
                      .type = type,
                      .reason = "its fused CUDA kernel hides the steps, so that it runs once an "
                                "example",
                      .cure = base::join("Use privacy::nn::DP", type,
                                         ", which has the same weights under the same names: "
                                         "privacy::nn::convert(layer) copies them"),
                      .refused = false});
  }
}

// BatchNorm below one Sequential: all of it or nothing, as accumulate:: converts it.
void fix_sequential(const std::string& name, Module& module, std::vector<std::string>& fixed) {
  const auto layers = accumulate::batch_norm_layers(module);
  const bool convertible = !layers.empty() && std::ranges::all_of(layers, [](const auto& layer) {
    return layer.obstacle.empty() && layer.uses_batch_statistics;
  });
  if (!convertible) return;
  const auto made = accumulate::convert_batch_norm_to_group_norm(module);
  for (std::size_t i = 0; i < made.size(); ++i) {
    const std::string path = name.empty() ? made[i].name : name + "." + made[i].name;
    fixed.push_back(base::join(path, ": ", layers[i].type, " -> GroupNorm(", made[i].groups, ", ",
                               made[i].features, ")"));
  }
}

}  // namespace

std::vector<PrivacyIssue> find_issues(const Module& model, const ValidatorOptions& options) {
  std::vector<PrivacyIssue> issues;
  if (!options.group_norm_guard) find_batch_norms(model, issues);
  for_each_module(model, [&](const std::string& name, Module& module) {
    if (const char* type = instance_norm(module, /*off=*/false)) {
      issues.push_back({.module = name,
                        .type = type,
                        .reason =
                            "its running statistics are sums over examples without noise, which "
                            "go into the saved model",
                        .cure = "Construct it with track_running_stats(false), or call "
                                "privacy::fix(model)",
                        .fixable = true});
    }
    find_embeddings(name, module, issues);
    find_advice(name, module, options, issues);
  });
  std::vector<std::string> order;
  for_each_module(model, [&](const std::string& name, const Module&) { order.push_back(name); });
  const auto place = [&](const PrivacyIssue& issue) {
    return std::ranges::find(order, issue.module) - order.begin();
  };
  std::ranges::stable_sort(issues, {}, place);
  return issues;
}

std::string describe(const PrivacyIssue& issue) {
  return base::join(named(issue.module), " (", issue.type, "): ", issue.reason, ". ", issue.cure);
}

void validate(const Module& model, const ValidatorOptions& options) {
  std::string refused;
  for (const PrivacyIssue& issue : find_issues(model, options)) {
    if (issue.refused) refused += base::join("\n  ", describe(issue));
  }
  GRADUS_CHECK(kComponent, refused.empty(),
               "each layer must treat every example by itself and keep nothing of it; got",
               refused);
}

FixReport fix(Module& model) {
  FixReport report;
  std::vector<std::pair<std::string, Module*>> sequentials;
  for_each_module(model, [&](const std::string& name, Module& module) {
    if (dynamic_cast<torch::nn::SequentialImpl*>(&module) != nullptr)
      sequentials.emplace_back(name, &module);
    if (const char* type = instance_norm(module, /*off=*/true))
      report.fixed.push_back(base::join(named(name), ": ", type, " without running statistics"));
    for (const EmbeddingFault& fault : embedding_faults(module, /*off=*/true))
      report.fixed.push_back(base::join(named(name), ": ", fault.type, " without ", fault.option));
  });
  // The outermost first, which converts what is below it too. By name, as conversion ends layers,
  // not Sequentials.
  for (const auto& [name, module] : sequentials) fix_sequential(name, *module, report.fixed);
  for (const PrivacyIssue& issue : find_issues(model)) {
    if (issue.refused) report.remaining.push_back(issue);
  }
  return report;
}

}  // namespace gradus::privacy
