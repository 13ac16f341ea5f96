#include <gradus/privacy/training/dp_optimizer.h>

#include <cmath>
#include <unordered_set>
#include <utility>

#include <gradus/base/error.h>
#include <gradus/privacy/training/internal/dp_state.h>

namespace gradus::privacy {
namespace {

using internal::kComponent;
using persample::NamedParameter;
using torch::nn::Module;

constexpr std::uint32_t kNoiseStream = 0;

void check(const DPOptimizerOptions& options) {
  GRADUS_CHECK(kComponent,
               std::isfinite(options.noise_multiplier) && options.noise_multiplier >= 0.0,
               "noise_multiplier must be finite and >= 0; got ", options.noise_multiplier);
  GRADUS_CHECK(kComponent,
               std::isfinite(options.expected_batch_size) && options.expected_batch_size > 0.0,
               "expected_batch_size must be finite and > 0; got ", options.expected_batch_size,
               ". It is the sample rate times the number of examples");
  const Reduction& reduction = options.reduction;
  GRADUS_CHECK(kComponent,
               reduction.ranks >= 1 && reduction.rank >= 0 && reduction.rank < reduction.ranks,
               "rank must be in [0, ranks); got rank ", reduction.rank, " of ", reduction.ranks);
  GRADUS_CHECK(
      kComponent, reduction.ranks == 1 || reduction.sum,
      "more than one rank must have a Reduction::sum; got none. Without it each rank would "
      "train a model of its own");
}

double scheduled(const optim::Schedule& schedule, std::int64_t step, double value,
                 const char* what) {
  if (!schedule) return value;
  const double factor = schedule(step);
  GRADUS_CHECK(kComponent, std::isfinite(factor) && factor >= 0.0, "the ", what,
               " schedule must be finite and >= 0; got ", factor, " at step ", step);
  return value * factor;
}

std::vector<std::string> names_of(const std::vector<NamedParameter>& parameters) {
  std::vector<std::string> names;
  for (const NamedParameter& parameter : parameters) names.push_back(parameter.name);
  return names;
}

}  // namespace

DPOptimizer::State::State(optim::Optimizer& optimizer, std::shared_ptr<Module> model,
                          std::shared_ptr<Accountant> accountant, DPOptimizerOptions options)
    : optimizer_(optimizer),
      model_(std::move(model)),
      accountant_(std::move(accountant)),
      options_(std::move(options)),
      table_(model_, options_.sample),
      clipper_(options_.clipping, names_of(table_.parameters())),
      noise_(options_.seed ? NoiseGenerator::seeded(*options_.seed, kNoiseStream)
                           : NoiseGenerator::secure()) {
  match_targets();
  // An impossible count_noise or threshold fails here and not at the first step.
  const double sensitivity = scale_thresholds();
  const double noise = clipper_.shares(scheduled_noise(), options_.expected_batch_size).gradients;
  check_noise(noise * sensitivity);
  if (options_.clipping.policy == Clipping::adaptive) {
    const double per_norm = noise * sensitivity / options_.clipping.max_norm;
    check_noise(per_norm * options_.clipping.least_norm);
    check_noise(per_norm * options_.clipping.greatest_norm);
  }
  watch_buffers();
}

// Every tensor the optimizer steps on must get its gradient from here, or it would step on one that
// is not private; every gradient of the model must be wanted, or it would count in the norms for
// nothing.
void DPOptimizer::State::match_targets() {
  const std::vector<NamedParameter>& parameters = table_.parameters();
  GRADUS_CHECK(kComponent, options_.targets.empty() || options_.targets.size() == parameters.size(),
               "targets must be one tensor for each of the model's ", parameters.size(),
               " parameters, or none; got ", options_.targets.size());
  std::unordered_set<const void*> stepped;
  for (const at::Tensor& each : optimizer_.parameters()) stepped.insert(each.unsafeGetTensorImpl());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    const at::Tensor target = options_.targets.empty() ? tensor : options_.targets[i];
    GRADUS_CHECK(kComponent, target.defined() && target.sizes() == tensor.sizes(),
                 "the target of parameter '", name, "' must have its shape ", tensor.sizes());
    GRADUS_CHECK(kComponent,
                 !tensor.requires_grad() || stepped.contains(target.unsafeGetTensorImpl()),
                 "parameter '", name,
                 "' wants a gradient, so the optimizer must hold it; it does not. Give it to the "
                 "optimizer, or freeze it with requires_grad_(false)");
    targets_.push_back(target);
  }
  check_targets();
}

// Also before each step: groups may have been added to the optimizer, and layers to the model.
void DPOptimizer::State::check_targets() const {
  std::unordered_set<const void*> ours;
  for (const at::Tensor& target : targets_) ours.insert(target.unsafeGetTensorImpl());
  const std::vector<at::Tensor> all = optimizer_.parameters();
  const std::vector<std::string> names = optimizer_.parameter_names();
  for (std::size_t i = 0; i < all.size(); ++i) {
    GRADUS_CHECK(
        kComponent, ours.contains(all[i].unsafeGetTensorImpl()), "parameter '", names[i],
        "' of the optimizer must be one of the model's; it is not, and its gradients would "
        "not be private. Layers that were replaced, or a model that was moved, need a new "
        "optimizer");
  }
  std::unordered_set<const void*> known;
  for (const NamedParameter& parameter : table_.parameters())
    known.insert(parameter.tensor.unsafeGetTensorImpl());
  const std::vector<NamedParameter> now = persample::parameters_of(*model_);
  for (const auto& [name, tensor] : now) {
    GRADUS_CHECK(kComponent, known.contains(tensor.unsafeGetTensorImpl()), "parameter '", name,
                 "' must have been the model's when its training was made private; it is new, and "
                 "its gradients would not be private. Make the DPOptimizer anew");
  }
  GRADUS_CHECK(kComponent, now.size() == known.size(), "the model must keep its ", known.size(),
               " parameters; it has ", now.size(), " now. Make the DPOptimizer anew");
}

// What the sums round to zero or to infinity would be no noise.
void DPOptimizer::State::check_noise(double deviation) const {
  if (deviation == 0.0 && options_.noise_multiplier == 0.0) return;
  for (const auto& [name, tensor] : table_.parameters()) {
    if (!tensor.requires_grad()) continue;
    const NoiseRange range = noise_range(internal::sum_dtype(tensor));
    GRADUS_CHECK(kComponent, deviation >= range.least && deviation <= range.most,
                 "the clipping norm times the noise multiplier must be from ", range.least, " to ",
                 range.most, ", as the gradients of parameter '", name, "' are summed in ",
                 internal::sum_dtype(tensor), "; got ", deviation, " for max_norm ",
                 options_.clipping.max_norm,
                 " (with schedules and adaptation) and noise_multiplier ",
                 options_.noise_multiplier, ". Scale the loss, and max_norm with it");
  }
}

void DPOptimizer::State::set_live() {
  std::vector<bool> live;
  for (const NamedParameter& parameter : table_.parameters())
    live.push_back(parameter.tensor.requires_grad());
  clipper_.set_live(live);
}

double DPOptimizer::State::scale_thresholds() {
  set_live();
  clipper_.set_scale(scheduled(options_.clip_schedule, steps_, 1.0, "clip"));
  return clipper_.sensitivity();
}

double DPOptimizer::State::scheduled_noise() const {
  return scheduled(options_.noise_schedule, steps_, options_.noise_multiplier, "noise");
}

DPOptimizer::DPOptimizer(optim::Optimizer& optimizer, std::shared_ptr<Module> model,
                         std::shared_ptr<Accountant> accountant, DPOptimizerOptions options) {
  check(options);
  GRADUS_CHECK(kComponent, model != nullptr, "a model must be given; got null");
  GRADUS_CHECK(kComponent, accountant != nullptr, "an accountant must be given; got null");
  GRADUS_CHECK(
      kComponent, !optimizer.steps_in_backward(),
      "the optimizer must not step in backward: noise comes after the whole logical batch. "
      "Give it to DPOptimizer alone");
  state_ = std::make_unique<State>(optimizer, std::move(model), std::move(accountant),
                                   std::move(options));
}

DPOptimizer::~DPOptimizer() = default;

at::Tensor DPOptimizer::accumulate(const LossFunction& loss, const Batch& batch) {
  return state_->accumulate(loss, batch);
}
void DPOptimizer::accumulate(const at::Tensor& losses) { state_->accumulate(losses); }
DPStep DPOptimizer::step() { return state_->step(/*empty=*/false); }
DPStep DPOptimizer::step_empty() { return state_->step(/*empty=*/true); }
void DPOptimizer::zero_grad() { state_->zero_grad(); }
std::int64_t DPOptimizer::examples() const { return state_->pending_.examples; }
std::int64_t DPOptimizer::steps() const { return state_->steps_; }
const Clipper& DPOptimizer::clipper() const { return state_->clipper_; }
const DPOptimizerOptions& DPOptimizer::options() const { return state_->options_; }
const Accountant& DPOptimizer::accountant() const { return *state_->accountant_; }
optim::Optimizer& DPOptimizer::optimizer() const { return state_->optimizer_; }
const at::Tensor& DPOptimizer::last_norms() const { return state_->last_norms_; }
std::vector<std::string> DPOptimizer::explain() const { return state_->table_.explain(); }

StateEntries DPOptimizer::state() const {
  StateEntries entries;
  internal::StateWriter write(entries, "");
  state_->save(write);
  return entries;
}

void DPOptimizer::load_state(const StateEntries& entries) {
  internal::StateReader read(entries);
  state_->load(read);
}

}  // namespace gradus::privacy
