#include <gradus/amp/levels/levels.h>

#include <algorithm>
#include <limits>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/amp/autocast/internal/operator_table.h>
#include <gradus/amp/levels/internal/impl.h>
#include <gradus/base/error.h>
#include <gradus/optim/optimizer.h>

namespace gradus::amp {
namespace {

constexpr const char* kComponent = "amp_levels";

template <typename BatchNorm>
bool is_affine(const torch::nn::Module& module) {
  const auto* const norm = module.as<BatchNorm>();
  return norm != nullptr && norm->options.affine();
}

bool is_affine_batch_norm(const torch::nn::Module& module) {
  return is_affine<torch::nn::BatchNorm1dImpl>(module) ||
         is_affine<torch::nn::BatchNorm2dImpl>(module) ||
         is_affine<torch::nn::BatchNorm3dImpl>(module);
}

// A tensor of that shape whose values are all one NaN, to be given memory during a step.
at::Tensor make_stand_in(const at::Tensor& parameter) {
  auto stand_in = at::empty({0}, parameter.options().dtype(at::kFloat).requires_grad(false));
  stand_in.set_data(at::full({}, std::numeric_limits<double>::quiet_NaN(), stand_in.options())
                        .expand(parameter.sizes()));
  return stand_in.set_requires_grad(true);
}

at::Tensor make_master(const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  return parameter.detach().clone().set_requires_grad(true);
}

// Gives stand-ins memory and the weights' values while it lives.
class FilledStandIns {
 public:
  explicit FilledStandIns(const std::vector<Weight>& weights) {
    const at::NoGradGuard no_grad;
    for (const auto& weight : weights) {
      if (weight.kind != Weight::Kind::stand_in || !weight.target.grad().defined()) continue;
      filled_.push_back({&weight, weight.target.detach()});
      at::Tensor target = weight.target;
      target.set_data(weight.parameter.detach().to(at::kFloat).contiguous());
    }
  }
  ~FilledStandIns() {
    for (auto& [weight, empty] : filled_) {
      at::Tensor target = weight->target;
      target.set_data(empty);
    }
  }
  FilledStandIns(const FilledStandIns&) = delete;
  FilledStandIns& operator=(const FilledStandIns&) = delete;

  void write_back(RoundingStream& stream) const {
    for (const auto& [weight, empty] : filled_) {
      round_stochastically(weight->target.detach(), weight->parameter, stream);
    }
  }

 private:
  std::vector<std::pair<const Weight*, at::Tensor>> filled_;
};

GradScalerOptions scaler_options(const Properties& properties, const LevelOptions& options) {
  GradScalerOptions result;
  result.enabled = properties.enabled;
  result.dynamic = properties.loss_scale.is_dynamic();
  result.init_scale =
      properties.loss_scale.number.value_or(std::min(result.init_scale, options.max_loss_scale));
  if (result.dynamic) {
    result.max_scale = options.max_loss_scale;
    result.min_scale =
        options.min_loss_scale.value_or(std::min(result.min_scale, options.max_loss_scale));
    result.init_scale = std::max(result.init_scale, result.min_scale);
  } else {
    result.min_scale = std::min(result.min_scale, result.init_scale);
  }
  return result;
}

}  // namespace

at::Tensor cast_floating(const at::Tensor& tensor, std::optional<c10::ScalarType> dtype) {
  if (!dtype || !tensor.defined() || !at::isFloatingType(tensor.scalar_type())) return tensor;
  return tensor.to(*dtype);
}

struct Region::Impl {
  std::optional<AutocastGuard> autocast = std::nullopt;
  plane::op::Guard align = {};
};

Region::Region(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Region::Region(Region&&) noexcept = default;
Region::~Region() = default;

void Amp::Impl::add_parameter(const std::string& name, at::Tensor& parameter, bool cast) {
  if (!at::isFloatingType(parameter.scalar_type())) return;
  GRADUS_CHECK(kComponent, parameter.layout() == at::kStrided, "parameter '", name,
               "' must be dense; got layout ", parameter.layout());
  Weight weight{.name = name, .parameter = parameter, .target = parameter};
  if (cast) {
    weight.frozen = !parameter.requires_grad();
    const bool trained = !options.inference && !weight.frozen;
    if (trained && properties.master_weights) {
      weight.kind = Weight::Kind::master;
      weight.target = make_master(parameter);
    } else if (trained && properties.stochastic_rounding) {
      weight.kind = Weight::Kind::stand_in;
      weight.target = make_stand_in(parameter);
    }
    parameter.mutable_grad().reset();
    parameter.set_data(parameter.detach().to(*properties.cast_model_type));
  }
  by_parameter.emplace(parameter.unsafeGetTensorImpl(), weights.size());
  by_target.emplace(weight.target.unsafeGetTensorImpl(), weights.size());
  weights.push_back(std::move(weight));
}

void Amp::Impl::add_model(torch::nn::Module& model, const std::string& prefix) {
  // Not named_modules with the model itself: that wants it in a shared_ptr.
  add_module(model, prefix);
  for (const auto& item : model.named_modules(/*name_prefix=*/"", /*include_self=*/false)) {
    add_module(*item.value(), prefix + item.key() + ".");
  }
}

void Amp::Impl::add_module(torch::nn::Module& module, const std::string& path) {
  const bool keep = properties.keep_batchnorm_fp32 && is_affine_batch_norm(module);
  const bool cast = properties.casts_to_half() && !keep;
  for (auto& parameter : module.named_parameters(/*recurse=*/false)) {
    if (by_parameter.contains(parameter.value().unsafeGetTensorImpl())) continue;
    add_parameter(path + parameter.key(), parameter.value(), cast);
  }
  if (!cast) return;
  for (auto& buffer : module.named_buffers(/*recurse=*/false)) {
    at::Tensor& tensor = buffer.value();
    if (!tensor.defined() || !at::isFloatingType(tensor.scalar_type())) continue;
    tensor.set_data(tensor.detach().to(*properties.cast_model_type));
  }
}

void Amp::Impl::make_region() {
  const auto dtype = *properties.cast_model_type;
  std::vector<at::Tensor> cast;
  for (const auto& weight : weights) {
    if (weight.parameter.scalar_type() == dtype) cast.push_back(weight.parameter);
  }
  align = internal::align_with(std::move(cast), dtype);
  products.emplace();
  products->set_all(OperatorLists::of_torch(device()).operators(Policy::lower_precision),
                    Policy::lower_precision);
  internal::OperatorTable::of(*products);  // Guards copy the lists; this makes their table once.
}

const Weight* Amp::Impl::find(const at::Tensor& parameter) const {
  const auto found = by_parameter.find(parameter.unsafeGetTensorImpl());
  return found == by_parameter.end() ? nullptr : &weights[found->second];
}

const Weight& Amp::Impl::require(const std::string& name, const at::Tensor& parameter) const {
  const Weight* const weight = find(parameter);
  GRADUS_CHECK(kComponent, weight != nullptr, "parameter '", name,
               "' must belong to a model that was given to initialize()");
  GRADUS_CHECK(kComponent, !options.inference,
               "models given to initialize() for inference must not be trained; set "
               "LevelOptions::inference to false");
  check_unfrozen(*weight);
  return *weight;
}

void Amp::Impl::check_unfrozen(const Weight& weight) const {
  GRADUS_CHECK(kComponent,
               !weight.frozen || !weight.parameter.requires_grad() ||
                   !(properties.master_weights || properties.stochastic_rounding),
               "parameter '", weight.name,
               "' must have wanted a gradient at initialize(): it was frozen then and cast to ",
               weight.parameter.scalar_type(), ", so it has no master weight. Unfreeze it before");
}

bool Amp::Impl::is_plain() const {
  return !properties.enabled || (properties.loss_scale == LossScaling(1.0) &&
                                 !properties.master_weights && !properties.stochastic_rounding);
}

bool Amp::Impl::checks() const {
  return !(properties.loss_scale == LossScaling(1.0)) || properties.cast_model_type == at::kHalf;
}

Amp::Amp(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Amp::Amp(Amp&&) noexcept = default;
Amp& Amp::operator=(Amp&&) noexcept = default;
Amp::~Amp() = default;

Amp initialize(torch::nn::Module& model, const LevelOptions& options) {
  return initialize(std::vector<std::reference_wrapper<torch::nn::Module>>{model}, options);
}

Amp initialize(std::vector<std::reference_wrapper<torch::nn::Module>> models,
               const LevelOptions& options) {
  auto impl = std::make_unique<Amp::Impl>();
  impl->options = options;
  impl->properties = resolve(options);
  impl->rounding.seed = options.rounding_seed;
  GRADUS_CHECK(kComponent, !models.empty(), "there must be at least one model; got none");
  const auto prefix_of = [&](std::size_t i) {
    return models.size() == 1 ? std::string() : base::join("models.", i, ".");
  };
  // Everything is looked at before anything is cast.
  if (options.enabled) {
    for (std::size_t i = 0; i < models.size(); ++i) {
      for (const auto& item : models[i].get().named_parameters()) {
        const auto dtype = item.value().scalar_type();
        GRADUS_CHECK(kComponent, !at::isFloatingType(dtype) || dtype == at::kFloat, "parameter '",
                     prefix_of(i), item.key(), "' must be float32 at initialize(); got ", dtype,
                     ". A model needs no cast before, whatever the opt_level");
      }
    }
  } else {
    impl->properties.cast_model_type = impl->properties.cast_model_outputs = std::nullopt;
    impl->properties.patch_functions = impl->properties.master_weights = false;
    impl->properties.stochastic_rounding = impl->properties.keep_batchnorm_fp32 = false;
    impl->properties.loss_scale = LossScaling(1.0);
  }
  for (std::size_t i = 0; i < models.size(); ++i) impl->add_model(models[i], prefix_of(i));
  for (std::size_t i = 0; i < options.num_losses; ++i) {
    impl->losses.push_back({GradScaler(scaler_options(impl->properties, options))});
  }
  if (impl->properties.casts_to_half()) impl->make_region();
  impl->report(describe(impl->properties, options));
  return Amp(std::move(impl));
}

const Properties& Amp::properties() const { return impl_->properties; }

std::vector<at::Tensor> Amp::parameters(const torch::nn::Module& model) const {
  std::vector<at::Tensor> result;
  for (const auto& item : model.named_parameters()) {
    const bool floating = at::isFloatingType(item.value().scalar_type());
    result.push_back(floating ? impl_->require(item.key(), item.value()).target : item.value());
  }
  return result;
}

std::vector<optim::ParameterGroup> Amp::groups(std::vector<optim::ParameterGroup> groups) const {
  for (auto& group : groups) {
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      const auto name = i < group.names.size() ? group.names[i] : std::to_string(i);
      group.parameters[i] = impl_->require(name, group.parameters[i]).target;
    }
  }
  return groups;
}

std::vector<at::Tensor> Amp::master_params(const optim::Optimizer& optimizer) const {
  return optimizer.parameters();
}

Region Amp::region() const {
  auto inside = std::make_unique<Region::Impl>();
  const auto& p = impl_->properties;
  if (p.patch_functions) {
    inside->autocast.emplace(
        AutocastOptions{.device = impl_->device(), .dtype = p.patch_functions_type});
  } else if (impl_->align) {
    // No cache: what it would keep of a 16-bit weight is a float32 copy, twice the weight's bytes.
    inside->autocast.emplace(AutocastOptions{.device = impl_->device(),
                                             .dtype = p.cast_model_type,
                                             .cache = false,
                                             .lists = impl_->products});
    // Behind autocast, before recordings.
    inside->align = plane::op::push(plane::op::Order::profile, impl_->align);
  }
  return Region(std::move(inside));
}

bool Amp::step(optim::Optimizer& optimizer) {
  impl_->throw_pending();
  auto& record = *impl_->record_of(optimizer);
  GRADUS_CHECK(kComponent, !record.open,
               "step() must come after the ScaledLoss of its optimizer has ended");
  GRADUS_CHECK(kComponent, !record.still_scaled,
               "step() must come after the gradients were unscaled: end a ScaledLoss of this "
               "optimizer without delay_unscale first");
  for (const auto& weight : record.weights) {
    impl_->check_unfrozen(weight);
    impl_->check_no_stray(weight);
    GRADUS_CHECK(kComponent,
                 weight.kind == Weight::Kind::self || !weight.parameter.grad().defined(),
                 "parameter '", weight.name,
                 "' must have its gradient in its master weight at step(); it has one of its own, "
                 "from a backward outside a ScaledLoss of this optimizer");
  }
  const auto& options = impl_->losses.front().scaler.options();
  if (std::exchange(record.skip, false)) {
    record.skips.count(true, options.skip_window);
    impl_->warn_if_due(record);
    return false;
  }
  const FilledStandIns filled(record.weights);
  const bool skipped = optimizer.step().skipped;
  record.skips.count(skipped, options.skip_window);
  if (skipped) {
    impl_->warn_if_due(record);
    return false;
  }
  const at::NoGradGuard no_grad;
  filled.write_back(impl_->rounding);
  for (const auto& weight : record.weights) {
    if (weight.kind == Weight::Kind::master && weight.target.grad().defined()) {
      weight.parameter.copy_(weight.target);
    }
  }
  return true;
}

void Amp::zero_grad(optim::Optimizer& optimizer) {
  auto& record = *impl_->record_of(optimizer);
  optimizer.zero_grad();
  for (auto& weight : record.weights) weight.parameter.mutable_grad().reset();
  record.aside.clear();
  record.still_scaled.reset();
  // What was found in the gradients that are gone is no verdict on those to come.
  record.skip = false;
  for (auto& loss : impl_->losses) loss.forget(record);
}

void Amp::copy_masters_to_models() {
  const at::NoGradGuard no_grad;
  for (const auto& weight : impl_->weights) {
    if (weight.kind == Weight::Kind::master) weight.parameter.copy_(weight.target);
  }
}

StepCounts Amp::counts(const optim::Optimizer& optimizer) const {
  const auto found = impl_->records.find(&optimizer);
  return found == impl_->records.end() ? StepCounts{} : found->second->skips.counts;
}

double Amp::loss_scale(std::size_t loss_id) const {
  GRADUS_CHECK(kComponent, loss_id < impl_->losses.size(), "loss_id must be below num_losses, ",
               impl_->losses.size(), "; got ", loss_id);
  return impl_->losses[loss_id].scaler.get_scale();
}

}  // namespace gradus::amp
