#include <gradus/amp/scaler/grad_scaler.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>

#include <gradus/amp/scaler/internal/iteration.h>
#include <gradus/base/error.h>
#include <gradus/optim/optimizer.h>

namespace gradus::amp {
namespace {

using scaler::Record;
using scaler::Stage;

constexpr const char* kComponent = "amp_scaler";

}  // namespace

GradScaler::GradScaler(GradScalerOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))) {}
GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

at::Tensor GradScaler::scale(const at::Tensor& output) {
  if (!enabled()) return output;
  GRADUS_CHECK(kComponent, output.defined() && at::isFloatingType(output.scalar_type()),
               "scale takes a defined tensor of a real floating dtype; got ",
               output.defined() ? c10::toString(output.scalar_type()) : "an undefined one");
  // A float32 tensor and no number: it turns a float16 scalar into float32, where 65536 fits.
  auto scaled = at::mul(output, at::full({}, impl_->scale.value(), at::kFloat));
  // Not in a NoGradGuard, where it leaves no gradients behind (a validation loss, say). One that
  // requires none still counts: it may be backward's seed.
  if (at::GradMode::is_enabled()) {
    impl_->note_backward();
    for (auto& [key, entry] : impl_->unscaled) {
      const auto gradient = entry.gradient.lock();
      if (gradient.defined()) entry.before_backward = at::Tensor(gradient)._version();
    }
    impl_->loss_pending = true;
    ++impl_->losses;
  }
  return scaled;
}

std::vector<at::Tensor> GradScaler::scale(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> scaled;
  scaled.reserve(outputs.size());
  for (const auto& output : outputs) scaled.push_back(scale(output));
  return scaled;
}

void GradScaler::unscale(optim::Optimizer& optimizer) {
  if (!enabled()) return;
  impl_->note_backward();
  impl_->unscale(optimizer, impl_->record_of(optimizer));
}

void GradScaler::set_unscaled(optim::Optimizer& optimizer, const at::Tensor& found_inf) {
  if (!enabled()) return;
  GRADUS_CHECK(kComponent, found_inf.defined() && found_inf.numel() == 1,
               "found_inf must have one element; got ",
               found_inf.defined() ? found_inf.numel() : 0);
  auto& record = impl_->record_of(optimizer);
  impl_->check_may_unscale(record);
  impl_->begin_check(record);
  record.found.push_back(found_inf.detach().reshape({}).to(at::kFloat));
}

bool GradScaler::step(optim::Optimizer& optimizer) {
  optim::Optimizer* const one = &optimizer;
  return step(std::span<optim::Optimizer* const>(&one, 1)).front();
}

std::vector<bool> GradScaler::step(std::span<optim::Optimizer* const> optimizers) {
  std::vector<bool> stepped;
  if (!enabled()) {
    for (auto* optimizer : optimizers) stepped.push_back(!optimizer->step().skipped);
    return stepped;
  }
  impl_->note_backward();
  std::vector<Record*> records;
  for (auto* optimizer : optimizers) {
    auto& record = impl_->record_of(*optimizer);
    GRADUS_CHECK(kComponent, record.stage != Stage::stepped, impl_->name_of(record),
                 " must step once an iteration: it has stepped already since the last update()");
    GRADUS_CHECK(kComponent, std::ranges::find(records, &record) == records.end(),
                 impl_->name_of(record), " must be given once to a step");
    impl_->check_not_mixed(*optimizer, record);
    records.push_back(&record);
  }
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (records[i]->stage == Stage::ready) impl_->unscale(*optimizers[i], *records[i]);
  }
  const auto together = impl_->options.skip_together ? impl_->checked_records() : records;
  impl_->resolve(together);
  const bool any = std::ranges::any_of(together, [](const Record* r) { return *r->overflow; });
  for (std::size_t i = 0; i < records.size(); ++i) {
    const bool skip = impl_->options.skip_together ? any : *records[i]->overflow;
    stepped.push_back(impl_->finish_step(*optimizers[i], *records[i], skip));
  }
  for (auto* record : records) impl_->warn_if_due(*record);
  return stepped;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!enabled()) return;
  GRADUS_CHECK(kComponent, !impl_->loss_pending,
               "update() must not come inside an accumulation window: a loss was scaled since the "
               "last unscale or step, and its gradients would be unscaled by another scale. Step "
               "first; update once a window, after the last step");
  const auto checked = impl_->checked_records();
  const double old_scale = impl_->scale.value();
  bool in_range = true;
  if (new_scale.has_value()) {
    impl_->scale.set(*new_scale);
  } else {
    GRADUS_CHECK(kComponent, !checked.empty(),
                 "update() must follow a step: no optimizer was unscaled or stepped since the last "
                 "one, so there is nothing to judge the scale by");
    impl_->resolve(checked);
    in_range = impl_->scale.advance(
        std::ranges::any_of(checked, [](const Record* r) { return *r->overflow; }));
  }
  if (impl_->scale.value() != old_scale) impl_->note_pending(old_scale);
  impl_->start_iteration();
  GRADUS_CHECK(
      kComponent, in_range, "the scale reached its floor ", old_scale,
      ", and gradients still overflow: the loss is NaN or infinite in every step, whatever "
      "the scale (",
      impl_->scale.streak(),
      " iterations in a row). No step was taken in them; look for what is not finite in "
      "the loss, or lower min_scale");
}

double GradScaler::get_scale() const { return enabled() ? impl_->scale.value() : 1.0; }
std::int64_t GradScaler::growth_tracker() const { return impl_->scale.growth_tracker(); }
bool GradScaler::enabled() const { return impl_->options.enabled; }
const GradScalerOptions& GradScaler::options() const { return impl_->options; }

StepCounts GradScaler::counts(const optim::Optimizer& optimizer) const {
  const auto entry = impl_->records.find(&optimizer);
  return entry == impl_->records.end() ? StepCounts{} : entry->second->skips.counts;
}

StepCounts GradScaler::counts() const {
  StepCounts total;
  for (const auto& [optimizer, record] : impl_->records) {
    total.steps += record->skips.counts.steps;
    total.skipped += record->skips.counts.skipped;
  }
  return total;
}

std::map<std::string, double> GradScaler::state() const {
  if (!enabled()) return {};
  return impl_->scale.state();
}

void GradScaler::load_state(const std::map<std::string, double>& state) {
  if (!enabled()) return;
  impl_->scale.load_state(state);
  impl_->start_iteration();
  impl_->outdated.clear();
}

}  // namespace gradus::amp
