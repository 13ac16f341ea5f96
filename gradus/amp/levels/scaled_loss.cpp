#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <unordered_set>
#include <utility>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <gradus/amp/levels/internal/impl.h>
#include <gradus/amp/levels/levels.h>
#include <gradus/base/error.h>
#include <gradus/optim/optimizer.h>

namespace gradus::amp {
namespace {

constexpr const char* kComponent = "amp_levels";

// Whether @p a begins as @p b does, to its end: an optimizer may get further groups.
bool extends(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return a.size() >= b.size() &&
         std::equal(b.begin(), b.end(), a.begin(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.is_same(y); });
}

bool any_non_zero(const std::vector<at::Tensor>& found) {
  return std::ranges::any_of(found,
                             [](const at::Tensor& each) { return each.item<float>() != 0.0F; });
}

}  // namespace

void OptimizerRecord::bring_back_aside() {
  const at::NoGradGuard no_grad;
  for (auto& [parameter, gradient] : aside) {
    at::Tensor& now = parameter.mutable_grad();
    now = now.defined() ? now.add_(gradient) : gradient;
  }
  aside.clear();
}

void OptimizerRecord::drop_scaled() {
  for (auto& weight : weights) weight.parameter.mutable_grad().reset();
  still_scaled.reset();
  bring_back_aside();
}

std::vector<Weight> Amp::Impl::weights_of(const optim::Optimizer& optimizer) const {
  std::vector<Weight> result;
  const auto names = optimizer.parameter_names();
  for (const auto& parameter : optimizer.parameters()) {
    const auto target = by_target.find(parameter.unsafeGetTensorImpl());
    if (target != by_target.end()) {
      result.push_back(weights[target->second]);
      continue;
    }
    const Weight* const weight = find(parameter);
    GRADUS_CHECK(kComponent, weight == nullptr,
                 "the optimizer must step on the float32 weights of '", weight->name,
                 "', not on the model's ", parameter.scalar_type(),
                 " ones: make it from amp.parameters(model) or amp.groups(groups)");
    result.push_back({.name = names[result.size()], .parameter = parameter, .target = parameter});
  }
  return result;
}

std::shared_ptr<OptimizerRecord> Amp::Impl::record_of(const optim::Optimizer& optimizer) {
  auto parameters = optimizer.parameters();
  auto& record = records[&optimizer];
  // Other parameters: another optimizer, at the address of one that is gone.
  const bool same = record != nullptr && extends(parameters, record->parameters);
  if (!same || parameters.size() != record->parameters.size()) {
    auto weights_now = weights_of(optimizer);
    if (!same) record = std::make_shared<OptimizerRecord>();
    record->parameters = std::move(parameters);
    record->weights = std::move(weights_now);
  }
  return record;
}

void LossRecord::forget(const OptimizerRecord& record) {
  for (std::size_t i = unjudged.size(); i-- > 0;) {
    if (unjudged[i].get() != &record) continue;
    unjudged.erase(unjudged.begin() + static_cast<std::ptrdiff_t>(i));
    found.erase(found.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void Amp::Impl::check_no_stray(const Weight& weight) {
  const auto stray = strays.find(weight.parameter.unsafeGetTensorImpl());
  if (stray == strays.end()) return;
  const auto& gradient = weight.parameter.grad();
  // Another tensor came after zero_grad(); the same one may have been zeroed in place.
  const bool gone = !gradient.defined() ||
                    gradient.unsafeGetTensorImpl() != stray->second.gradient._unsafe_get_target() ||
                    (gradient.layout() == at::kStrided && !gradient.any().item<bool>());
  if (gone) {
    strays.erase(stray);
    return;
  }
  GRADUS_CHECK(
      kComponent, false, "parameter '", weight.name,
      "' must get its gradients from ScaledLosses that have its optimizer: the backward of "
      "loss ",
      stray->second.loss_id,
      " added to them, scaled, and did not unscale them. Give this optimizer to that "
      "ScaledLoss too, or call amp.zero_grad(optimizer) after it");
}

void Amp::Impl::warn_if_due(OptimizerRecord& record) const {
  const auto& limits = losses.front().scaler.options();
  if (!record.skips.due(limits.skip_window, limits.warn_skip_rate)) return;
  const auto message = base::join(
      "[", kComponent, "] an optimizer skipped ", record.skips.recent_skips(), " of its last ",
      limits.skip_window, " steps, more than ", 100.0 * limits.warn_skip_rate,
      "%: these batches were not learned from. The loss scale is ",
      losses.front().scaler.get_scale(), properties.loss_scale.is_dynamic() ? "" : " and fixed",
      "; look for a loss that is not finite, or lower the scale");
  if (options.report) {
    options.report(message + "\n");
  } else {
    TORCH_WARN(message);
  }
}

void Amp::Impl::throw_pending() {
  if (thrown_at_end) std::rethrow_exception(std::exchange(thrown_at_end, nullptr));
}

struct ScaledLoss::Impl {
  Amp::Impl& amp;
  ScaledLossOptions options;
  at::Tensor loss;
  std::vector<optim::Optimizer*> optimizers;
  std::vector<std::shared_ptr<OptimizerRecord>> records;
  int exceptions_before = std::uncaught_exceptions();
  bool ended = false;
  // What the parameters of other optimizers had for gradients before: parameter, tensor, version.
  struct Other {
    at::Tensor parameter;
    const void* gradient = nullptr;
    std::int64_t version = 0;
  };
  std::vector<Other> others = {};
  // A checkpoint's second run meets cast parameters in backward.
  plane::op::Guard align = {};

  LossRecord& loss_record() const { return amp.losses[options.loss_id]; }

  void check_may_begin(const OptimizerRecord& record) const;
  void set_aside(OptimizerRecord& record) const;
  void note_others();
  void mark_strays();
  void close();
  void abandon();
  const Weight* first_unfit() const;
  bool any_gradient() const;
  at::Tensor unscale(OptimizerRecord& record, double scale,
                     std::unordered_set<const void*>& done) const;
  bool judge();
  bool end();
};

void ScaledLoss::Impl::check_may_begin(const OptimizerRecord& record) const {
  GRADUS_CHECK(kComponent, !record.open,
               "a ScaledLoss of an optimizer must end before the next one begins");
  for (const auto& weight : record.weights) {
    amp.check_unfrozen(weight);
    if (weight.kind == Weight::Kind::self) amp.check_no_stray(weight);
  }
  const double scale = amp.losses[options.loss_id].scaler.get_scale();
  if (record.still_scaled) {
    GRADUS_CHECK(kComponent, record.still_scaled->loss_id == options.loss_id,
                 "gradients that delay_unscale left scaled by loss ", record.still_scaled->loss_id,
                 " must be unscaled by a ScaledLoss of the same loss_id; got ", options.loss_id,
                 ", whose scale is another");
    GRADUS_CHECK(kComponent, record.still_scaled->scale == scale,
                 "gradients that delay_unscale left scaled must be unscaled before the scale "
                 "changes; it was ",
                 record.still_scaled->scale, " and is ", scale,
                 ". Give all optimizers of a window to one ScaledLoss at its end");
    return;
  }
  for (const auto& weight : record.weights) {
    GRADUS_CHECK(kComponent,
                 weight.kind == Weight::Kind::self || !weight.parameter.grad().defined(),
                 "parameter '", weight.name,
                 "' must have no gradient before its ScaledLoss; it has one from another backward, "
                 "whose scale is not known. Call amp.zero_grad(optimizer), or give this optimizer "
                 "to that loss's ScaledLoss too");
  }
}

// What a parameter has collected unscaled must not be mixed with what now comes scaled.
void ScaledLoss::Impl::set_aside(OptimizerRecord& record) const {
  if (record.still_scaled) return;
  for (auto& weight : record.weights) {
    at::Tensor& gradient = weight.parameter.mutable_grad();
    if (!gradient.defined()) continue;
    record.aside.emplace_back(weight.parameter, std::exchange(gradient, at::Tensor()));
  }
}

// Gradients that masters step on are looked for where the master's optimizer steps.
void ScaledLoss::Impl::note_others() {
  std::unordered_set<const void*> known;
  for (const auto& record : records) {
    for (const auto& weight : record->weights) known.insert(weight.parameter.unsafeGetTensorImpl());
  }
  const auto note = [&](const Weight& weight) {
    if (weight.kind != Weight::Kind::self || !weight.parameter.requires_grad() ||
        !known.insert(weight.parameter.unsafeGetTensorImpl()).second) {
      return;
    }
    const auto& gradient = weight.parameter.grad();
    others.push_back(
        {.parameter = weight.parameter,
         .gradient = gradient.defined() ? gradient.unsafeGetTensorImpl() : nullptr,
         .version = gradient.defined() ? static_cast<std::int64_t>(gradient._version()) : 0});
  };
  for (const auto& weight : amp.weights) note(weight);
  for (const auto& [optimizer, record] : amp.records) {
    for (const auto& weight : record->weights) note(weight);
  }
}

void ScaledLoss::Impl::mark_strays() {
  for (const auto& [parameter, before, version] : others) {
    const auto& gradient = parameter.grad();
    if (!gradient.defined() ||
        (gradient.unsafeGetTensorImpl() == before && gradient._version() == version)) {
      continue;
    }
    using Weak = decltype(StrayGradient::gradient);
    amp.strays.insert_or_assign(
        parameter.unsafeGetTensorImpl(),
        StrayGradient{.gradient = Weak(gradient.getIntrusivePtr()), .loss_id = options.loss_id});
  }
  others.clear();
}

// What unscale would refuse, when some gradients were unscaled and others not.
const Weight* ScaledLoss::Impl::first_unfit() const {
  for (const auto& record : records) {
    for (const auto& weight : record->weights) {
      const auto& gradient = weight.parameter.grad();
      if (gradient.defined() &&
          (gradient.layout() != at::kStrided || !at::isFloatingType(gradient.scalar_type()) ||
           at::has_internal_overlap(gradient) == at::MemOverlap::Yes)) {
        return &weight;
      }
    }
  }
  return nullptr;
}

void ScaledLoss::Impl::close() {
  ended = true;
  mark_strays();
  align = {};
  for (const auto& record : records) record->open = false;
}

void ScaledLoss::Impl::abandon() {
  close();
  if (amp.is_plain()) return;
  for (const auto& record : records) record->drop_scaled();
}

bool ScaledLoss::Impl::any_gradient() const {
  return std::ranges::any_of(records, [](const auto& record) {
    return std::ranges::any_of(
        record->weights, [](const Weight& weight) { return weight.parameter.grad().defined(); });
  });
}

// Moves the gradients to where the optimizer steps, unscaled. Returns non-zero if one is not
// finite, undefined where nobody looks.
at::Tensor ScaledLoss::Impl::unscale(OptimizerRecord& record, double scale,
                                     std::unordered_set<const void*>& done) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients(record.weights.size());
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    auto& weight = record.weights[i];
    at::Tensor& gradient = weight.parameter.mutable_grad();
    // A parameter of two optimizers is unscaled once.
    if (!gradient.defined() || !done.insert(weight.parameter.unsafeGetTensorImpl()).second) {
      continue;
    }
    if (weight.kind == Weight::Kind::self) {
      // Nor is a tensor that two parameters have for their gradient divided twice.
      if (done.insert(gradient.unsafeGetTensorImpl()).second) gradients[i] = gradient;
    } else {
      gradients[i] = gradient.detach().to(at::kFloat);
      gradient.reset();  // Its memory goes before the next one's copy is made.
    }
  }
  at::Tensor found;
  if (amp.checks()) found = unscale_gradients(gradients, scale);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined() || record.weights[i].kind == Weight::Kind::self) continue;
    at::Tensor& sum = record.weights[i].target.mutable_grad();
    sum = sum.defined() ? sum.add_(gradients[i]) : gradients[i];
  }
  record.still_scaled.reset();
  return found;
}

bool ScaledLoss::Impl::judge() {
  auto& loss_of = loss_record();
  const bool overflow = any_non_zero(loss_of.found);
  const auto found = loss_of.found.front().new_full({}, overflow ? 1.0 : 0.0);
  loss_of.found.clear();
  for (const auto& record : std::exchange(loss_of.unjudged, {})) record->skip |= overflow;
  loss_of.scaler.set_unscaled(*optimizers.front(), found);
  const double before = loss_of.scaler.get_scale();
  loss_of.scaler.update();  // Throws when an overflow comes at the floor.
  if (overflow) {
    amp.report(base::join("gradient overflow in loss ", options.loss_id,
                          ": its optimizers skip a step; the loss scale was ", before,
                          " and is now ", loss_of.scaler.get_scale(), "\n"));
  }
  return !overflow;
}

bool ScaledLoss::Impl::end() {
  if (amp.is_plain()) {
    close();
    return true;
  }
  if (!any_gradient()) {
    abandon();
    GRADUS_CHECK(kComponent, false,
                 "a ScaledLoss must end after backward on its loss: no parameter of its optimizers "
                 "has a gradient. Call backward() inside");
  }
  if (const Weight* const unfit = amp.checks() ? first_unfit() : nullptr; unfit != nullptr) {
    const auto gradient = unfit->parameter.grad();
    abandon();
    GRADUS_CHECK(kComponent, false, "gradient of parameter '", unfit->name,
                 "' must be dense, real and in memory of its own to be unscaled; got layout ",
                 gradient.layout(), ", ", gradient.scalar_type(),
                 gradient.layout() == at::kStrided ? ", with elements that may share memory" : "",
                 ". The gradients of this loss were dropped");
  }
  close();
  auto& loss_of = loss_record();
  const double scale = loss_of.scaler.get_scale();
  if (options.delay_unscale) {
    for (const auto& record : records) {
      record->still_scaled = StillScaled{.loss_id = options.loss_id, .scale = scale};
    }
    return true;
  }
  std::unordered_set<const void*> done;
  for (const auto& record : records) {
    const auto found = unscale(*record, scale, done);
    if (!found.defined()) continue;
    loss_of.found.push_back(found);
    loss_of.unjudged.push_back(record);
  }
  // Only now: what comes back is not scaled.
  for (const auto& record : records) record->bring_back_aside();
  if (options.delay_overflow_check || loss_of.found.empty()) return true;
  return judge();
}

ScaledLoss::ScaledLoss(Amp& amp, const at::Tensor& loss, std::vector<optim::Optimizer*> optimizers,
                       ScaledLossOptions options)
    : impl_(std::make_unique<Impl>(*amp.impl_, options)) {
  auto& all = *amp.impl_;
  all.throw_pending();
  GRADUS_CHECK(kComponent, options.loss_id < all.losses.size(),
               "loss_id must be below num_losses, ", all.losses.size(), "; got ", options.loss_id);
  GRADUS_CHECK(kComponent, loss.defined() && at::isFloatingType(loss.scalar_type()),
               "the loss must be a floating tensor; got ",
               loss.defined() ? c10::toString(loss.scalar_type()) : "an undefined one");
  GRADUS_CHECK(kComponent, !all.options.inference,
               "models given to initialize() for inference must not be trained; set "
               "LevelOptions::inference to false");
  GRADUS_CHECK(kComponent, !optimizers.empty(),
               "a ScaledLoss must know the optimizers whose gradients it makes; got none");
  impl_->optimizers = std::move(optimizers);
  if (all.properties.enabled) {
    for (auto* optimizer : impl_->optimizers) {
      GRADUS_CHECK(kComponent, optimizer != nullptr, "optimizers must not be null");
      GRADUS_CHECK(kComponent, all.is_plain() || !optimizer->steps_in_backward(),
                   "an optimizer under ", name(all.properties.opt_level),
                   " must not step in backward, where its gradients are scaled or not in its "
                   "master weights yet");
      auto record = all.record_of(*optimizer);
      GRADUS_CHECK(kComponent, std::ranges::find(impl_->records, record) == impl_->records.end(),
                   "an optimizer must be given once to a ScaledLoss");
      impl_->check_may_begin(*record);
      impl_->records.push_back(std::move(record));
    }
  }
  if (all.align) impl_->align = plane::op::push(plane::op::Order::profile, all.align);
  if (all.is_plain()) {
    impl_->loss = all.properties.enabled ? loss.to(at::kFloat) : loss;
    return;
  }
  auto& scaler = all.losses[options.loss_id].scaler;
  impl_->loss = scaler.get_scale() == 1.0 && !all.properties.loss_scale.is_dynamic()
                    ? loss.to(at::kFloat)
                    : scaler.scale(loss);
  for (const auto& record : impl_->records) {
    impl_->set_aside(*record);
    record->open = true;
  }
  if (all.checks() && scaler.get_scale() != 1.0) impl_->note_others();
}

ScaledLoss::~ScaledLoss() {
  if (impl_->ended) return;
  try {
    if (std::uncaught_exceptions() > impl_->exceptions_before) {
      impl_->abandon();
    } else {
      impl_->end();
    }
  } catch (...) {
    impl_->amp.thrown_at_end = std::current_exception();
  }
}

const at::Tensor& ScaledLoss::loss() const { return impl_->loss; }

void ScaledLoss::backward(bool retain_graph, bool create_graph) {
  impl_->loss.backward({}, retain_graph, create_graph);
}

bool ScaledLoss::finish() {
  GRADUS_CHECK(kComponent, !impl_->ended, "finish() must be called once");
  return impl_->end();
}

}  // namespace gradus::amp
