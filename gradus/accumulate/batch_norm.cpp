#include <gradus/accumulate/batch_norm.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/group_norm.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/normalization.h>

#include <gradus/base/error.h>
#include <gradus/base/rng.h>

namespace gradus::accumulate {
namespace {

using torch::nn::Module;

// What the three BatchNorm types have in common, which LibTorch gives no common base.
struct Norm {
  const Module* module = nullptr;
  std::string type{};
  torch::nn::BatchNormOptions options{1};
  at::Tensor weight{}, bias{}, running_mean{};
  bool exact = false;  // and no class derived from it
};

template <typename Impl>
std::optional<Norm> norm_of(const Module& module, const char* type) {
  const auto* norm = dynamic_cast<const Impl*>(&module);
  if (norm == nullptr) return std::nullopt;
  return Norm{&module,
              type,
              norm->options,
              norm->weight,
              norm->bias,
              norm->running_mean,
              typeid(module) == typeid(Impl)};
}

std::optional<Norm> norm_of(const Module& module) {
  if (auto norm = norm_of<torch::nn::BatchNorm1dImpl>(module, "BatchNorm1d")) return norm;
  if (auto norm = norm_of<torch::nn::BatchNorm2dImpl>(module, "BatchNorm2d")) return norm;
  return norm_of<torch::nn::BatchNorm3dImpl>(module, "BatchNorm3d");
}

// A place in the tree of modules where a BatchNorm layer is registered.
struct Place {
  std::string name{};
  const Module* parent = nullptr;  // null: the root
  std::string key{};               // in the parent
};

struct Layer {
  Norm norm{};
  std::vector<Place> places{};
  long handles = 0;  // shared_ptrs to it
};

// Depth first, as named_modules() goes, but into every place: a shared layer has several.
void collect(const Module& parent, const std::string& prefix, std::vector<Layer>& layers) {
  for (const auto& child : parent.named_children()) {
    const std::string name = prefix.empty() ? child.key() : prefix + "." + child.key();
    if (auto norm = norm_of(*child.value())) {
      auto found = std::ranges::find(layers, norm->module,
                                     [](const Layer& layer) { return layer.norm.module; });
      if (found == layers.end()) {
        layers.push_back({.norm = *norm});
        found = layers.end() - 1;
      }
      found->places.push_back({name, &parent, child.key()});
    }
    collect(*child.value(), name, layers);
  }
}

std::vector<Layer> layers_of(const Module& module) {
  std::vector<Layer> layers;
  if (auto norm = norm_of(module)) layers.push_back({.norm = *norm, .places = {Place{}}});
  collect(module, "", layers);
  for (Layer& layer : layers) {
    const Place& place = layer.places.front();
    if (place.parent == nullptr) continue;
    const auto copies = place.parent->named_children();  // handles more
    layer.handles =
        copies[place.key].use_count() - std::ranges::count_if(copies, [&](const auto& child) {
          return child.value().get() == layer.norm.module;
        });
  }
  return layers;
}

std::string obstacle_of(const Layer& layer) {
  if (!layer.norm.exact)
    return base::join("it is a ", layer.norm.module->name(), ", whose forward may do more");
  for (const Place& place : layer.places) {
    if (place.parent == nullptr) return "it is the model itself, which nothing here holds";
    if (dynamic_cast<const torch::nn::SequentialImpl*>(place.parent) != nullptr) continue;
    if (dynamic_cast<const torch::nn::ModuleListImpl*>(place.parent) != nullptr) {
      return base::join("it stands in a ModuleList, whose user has to cast it to ",
                        layer.norm.type);
    }
    return base::join("the forward of ", place.parent->name(), " calls its own handle, of type ",
                      layer.norm.type, ", and not what is registered as \"", place.key, "\"");
  }
  // A Sequential holds two: what it calls and what it registers.
  if (layer.handles > 2 * static_cast<long>(layer.places.size()))
    return "something outside of the Sequential holds it too, and may call it";
  return "";
}

std::int64_t groups_for(std::int64_t features, std::int64_t groups) {
  // One channel a group would leave nothing of an input [N, C]: each value is its own mean.
  for (std::int64_t count = std::min(groups, features / 2); count > 1; --count) {
    if (features % count == 0) return count;
  }
  return 1;
}

void check_groups(std::int64_t groups) {
  GRADUS_CHECK("batch_norm", groups >= 1, "groups must be >= 1; got ", groups);
}

torch::nn::GroupNorm group_norm_like(const Norm& norm, std::int64_t groups) {
  const at::NoGradGuard no_grad;
  torch::nn::GroupNorm made(
      torch::nn::GroupNormOptions(groups_for(norm.options.num_features(), groups),
                                  norm.options.num_features())
          .eps(norm.options.eps())
          .affine(norm.weight.defined()));
  made->train(norm.module->is_training());
  if (!norm.weight.defined()) return made;
  const auto copy = [](at::Tensor& to, const at::Tensor& from) {
    to.set_data(from.detach().clone());
    to.set_requires_grad(from.requires_grad());
  };
  copy(made->weight, norm.weight);
  copy(made->bias, norm.bias);
  return made;
}

std::string named(const BatchNormLayer& layer) {
  return base::join(layer.name.empty() ? "the model" : layer.name, " (", layer.type, ", ",
                    layer.features, " features)");
}

// Every layer by each tensor that its calls pass.
template <typename Value, typename Fn>
std::unordered_map<const void*, Value> by_tensor(const std::vector<Layer>& layers,
                                                 const Fn& value) {
  std::unordered_map<const void*, Value> map;
  for (const Layer& layer : layers) {
    for (const at::Tensor& tensor : {layer.norm.weight, layer.norm.running_mean}) {
      if (tensor.defined()) map.emplace(tensor.unsafeGetTensorImpl(), value(layer));
    }
  }
  return map;
}

// Arguments of aten::batch_norm.
constexpr std::size_t kInput = 0, kWeight = 1, kBias = 2, kRunningMean = 3, kEps = 7;

at::Tensor tensor_argument(const plane::op::Call& call, std::size_t index) {
  const c10::IValue& value = call.arguments()[index];
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

template <typename Value>
const Value* find_layer(const std::unordered_map<const void*, Value>& map,
                        const plane::op::Call& call) {
  for (const std::size_t index : {kWeight, kRunningMean}) {
    const at::Tensor tensor = tensor_argument(call, index);
    if (!tensor.defined()) continue;
    if (const auto found = map.find(tensor.unsafeGetTensorImpl()); found != map.end())
      return &found->second;
  }
  return nullptr;
}

bool is_batch_norm(const plane::op::Call& call) {
  return call.frame() != plane::op::Frame::autocast && call.name() == "aten::batch_norm";
}

class CallNames final : public plane::op::Handler {
 public:
  explicit CallNames(std::unordered_map<const void*, std::string> names)
      : names_(std::move(names)) {}
  void call(plane::op::Call& call) override {
    if (is_batch_norm(call)) {
      const std::string* name = find_layer(names_, call);
      calls.push_back(name != nullptr ? *name : "a batch_norm of no layer");
    }
    call.proceed();
  }
  std::vector<std::string> calls{};

 private:
  std::unordered_map<const void*, std::string> names_;
};

// A conversion under way: undone unless it is kept.
class Conversion {
 public:
  ~Conversion() {
    if (kept_) return;
    for (auto& done : done_) {
      *done.place = std::move(done.before);
      done.parent->replace_module(done.key, done.place->ptr());
    }
  }
  Conversion() = default;
  Conversion(const Conversion&) = delete;
  Conversion& operator=(const Conversion&) = delete;

  // Both what the Sequential calls and what it has registered.
  void replace(torch::nn::SequentialImpl& parent, const std::string& key,
               const torch::nn::GroupNorm& by) {
    const auto keys = parent.named_children().keys();
    const auto at = parent.begin() + (std::ranges::find(keys, key) - keys.begin());
    done_.push_back({&parent, key, &*at, *at});
    *at = torch::nn::AnyModule(by);
    parent.replace_module(key, by.ptr());
  }
  void keep() { kept_ = true; }

 private:
  struct Done {
    torch::nn::SequentialImpl* parent = nullptr;
    std::string key{};
    torch::nn::AnyModule* place = nullptr;
    torch::nn::AnyModule before{};
  };
  std::vector<Done> done_;
  bool kept_ = false;
};

std::string quoted(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

std::vector<BatchNormLayer> batch_norm_layers(const Module& module) {
  std::vector<BatchNormLayer> result;
  for (const Layer& layer : layers_of(module)) {
    result.push_back({.name = layer.places.front().name,
                      .type = layer.norm.type,
                      .features = layer.norm.options.num_features(),
                      .uses_batch_statistics = layer.norm.module->is_training() ||
                                               !layer.norm.options.track_running_stats(),
                      .obstacle = obstacle_of(layer)});
  }
  return result;
}

std::string batch_norm_warning(const Module& module, std::int64_t micro_batches) {
  if (micro_batches <= 1) return "";
  std::string names;
  bool convertible = true;
  for (const BatchNormLayer& layer : batch_norm_layers(module)) {
    if (!layer.uses_batch_statistics) continue;
    names += (names.empty() ? "" : ", ") + named(layer);
    convertible = convertible && layer.obstacle.empty();
  }
  if (names.empty()) return "";
  return base::join(
      "BatchNorm normalises over a micro-batch, not over the batch of ", micro_batches,
      " micro-batches: training is another than without accumulation. Layers: ", names,
      ". GroupNorm treats each example by itself: ",
      convertible ? "convert_batch_norm_to_group_norm() puts it in place"
                  : "hold a GroupNormGuard, or write it into the model",
      "; or freeze the layers with eval()");
}

bool warn_about_batch_norm(const Module& module, std::int64_t micro_batches) {
  const std::string text = batch_norm_warning(module, micro_batches);
  if (!text.empty()) TORCH_WARN("[batch_norm] ", text);
  return !text.empty();
}

std::vector<std::string> batch_norm_calls(const Module& module,
                                          const std::function<void()>& forward) {
  const auto handler = std::make_shared<CallNames>(by_tensor<std::string>(
      layers_of(module), [](const Layer& layer) { return layer.places.front().name; }));
  const base::RngGuard rng;
  const at::NoGradGuard no_grad;
  const plane::op::Guard guard = plane::op::push(plane::op::Order::profile, handler);
  forward();
  return handler->calls;
}

std::vector<ConvertedLayer> convert_batch_norm_to_group_norm(Module& module,
                                                             const GroupNormOptions& options) {
  check_groups(options.groups);
  const std::vector<Layer> layers = layers_of(module);
  for (const Layer& layer : layers) {
    const std::string obstacle = obstacle_of(layer);
    GRADUS_CHECK("batch_norm", obstacle.empty(), "BatchNorm layer ",
                 layer.places.front().name.empty() ? "<model>" : layer.places.front().name,
                 " cannot be replaced: ", obstacle,
                 ". Hold a GroupNormGuard while the model runs, or put the layer into a "
                 "torch::nn::Sequential of its own; nothing was changed");
  }
  std::vector<ConvertedLayer> converted;
  Conversion conversion;
  for (const Layer& layer : layers) {
    const torch::nn::GroupNorm made = group_norm_like(layer.norm, options.groups);
    for (const Place& place : layer.places) {
      // A handle to a part of `module`, which is not const.
      auto& parent =
          *const_cast<torch::nn::SequentialImpl*>(  // NOLINT(cppcoreguidelines-pro-type-const-cast)
              dynamic_cast<const torch::nn::SequentialImpl*>(place.parent));
      conversion.replace(parent, place.key, made);
    }
    converted.push_back({.name = layer.places.front().name,
                         .features = layer.norm.options.num_features(),
                         .groups = made->options.num_groups()});
  }
  if (options.probe) {
    const std::vector<std::string> left = batch_norm_calls(module, options.probe);
    GRADUS_CHECK("batch_norm", left.empty(),
                 "the model's forward must not normalise over the batch any more; it still calls ",
                 quoted(left), ". Replace those in the model's code; the conversion was undone");
  }
  conversion.keep();
  return converted;
}

class GroupNormGuard::Handler final : public plane::op::Handler {
 public:
  explicit Handler(std::unordered_map<const void*, std::int64_t> groups)
      : groups_(std::move(groups)) {}

  void call(plane::op::Call& call) override {
    const std::int64_t* groups = is_batch_norm(call) ? find_layer(groups_, call) : nullptr;
    if (groups == nullptr) {
      call.proceed();
      return;
    }
    at::Tensor result;
    {
      const plane::op::Call::InnerOperators inner(call);
      result =
          at::group_norm(tensor_argument(call, kInput), *groups, tensor_argument(call, kWeight),
                         tensor_argument(call, kBias), call.arguments()[kEps].toDouble());
    }
    call.replace({result});
    ++calls;
  }
  std::atomic<std::int64_t> calls = 0;

 private:
  std::unordered_map<const void*, std::int64_t> groups_;
};

GroupNormGuard::GroupNormGuard(const Module& module, std::int64_t groups) {
  check_groups(groups);
  const std::vector<Layer> layers = layers_of(module);
  GRADUS_CHECK("batch_norm", !layers.empty(), "the model must have a BatchNorm layer; it has none");
  for (const Layer& layer : layers) {
    GRADUS_CHECK("batch_norm", layer.norm.weight.defined() || layer.norm.running_mean.defined(),
                 "a layer must have a weight or running statistics, to tell its calls by; ",
                 layer.places.front().name, " has neither");
  }
  handler_ = std::make_shared<Handler>(by_tensor<std::int64_t>(layers, [&](const Layer& layer) {
    return groups_for(layer.norm.options.num_features(), groups);
  }));
  // Outermost, so that recordings hold the operators that really run.
  guard_ = plane::op::push(plane::op::Order::profile, handler_);
}

GroupNormGuard::~GroupNormGuard() = default;
std::int64_t GroupNormGuard::calls() const { return handler_->calls; }

}  // namespace gradus::accumulate
