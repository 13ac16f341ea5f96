#include <algorithm>
#include <exception>
#include <string>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>

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
  for (const auto& group : optimizer.groups()) {
    for (const auto& parameter : group.parameters) {
      const auto target = by_target.find(parameter.unsafeGetTensorImpl());
      if (target != by_target.end()) {
        result.push_back(weights[target->second]);
        continue;
      }
      const Weight* const weight = find(parameter);
      GRADUS_CHECK(kComponent, weight == nullptr,
                   "the optimizer must step on the float32 weights "
                   "of '",
                   weight->name, "', not on the model's ", parameter.scalar_type(),
                   " ones: make it from amp.parameters(model) or amp.groups(groups)");
      result.push_back({.name = names[result.size()], .parameter = parameter, .target = parameter});
    }
  }
  return result;
}

std::shared_ptr<OptimizerRecord> Amp::Impl::record_of(const optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.groups()) {
    parameters.insert(parameters.end(), group.parameters.begin(), group.parameters.end());
  }
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
  // A checkpoint's second run meets cast parameters in backward.
  plane::op::Guard align = {};

  LossRecord& loss_record() const { return amp.losses[options.loss_id]; }

  void check_may_begin(const OptimizerRecord& record) const;
  void set_aside(OptimizerRecord& record) const;
  void close();
  void abandon();
  bool any_gradient() const;
  at::Tensor unscale(OptimizerRecord& record, double scale,
                     std::unordered_set<const void*>& done) const;
  bool judge();
  bool end();
};

void ScaledLoss::Impl::check_may_begin(const OptimizerRecord& record) const {
  GRADUS_CHECK(kComponent, !record.open,
               "a ScaledLoss of an optimizer must end before the next one begins");
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

void ScaledLoss::Impl::close() {
  ended = true;
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
      gradients[i] = gradient;
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
