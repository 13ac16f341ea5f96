#include <gradus/amp/scaler/internal/iteration.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <utility>

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include <gradus/amp/scaler/internal/unscale.h>
#include <gradus/base/error.h>
#include <gradus/optim/optimizer.h>

namespace gradus::amp {
namespace {

using scaler::Candidate;
using scaler::Gradient;
using scaler::Record;
using scaler::Stage;
using scaler::WeakTensor;

constexpr const char* kComponent = "amp_scaler";

WeakTensor weak(const at::Tensor& tensor) { return WeakTensor(tensor.getIntrusivePtr()); }

const void* key_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl(); }

std::vector<Candidate> with_gradient(const optim::Optimizer& optimizer) {
  std::vector<Candidate> result;
  std::size_t index = 0;
  for (const auto& group : optimizer.groups()) {
    for (std::size_t i = 0; i < group.parameters.size(); ++i, ++index) {
      if (!group.parameters[i].grad().defined()) continue;
      result.push_back(
          {group.parameters[i], group.names.empty() ? std::to_string(index) : group.names[i]});
    }
  }
  return result;
}

std::vector<WeakTensor> weak_parameters(const optim::Optimizer& optimizer) {
  std::vector<WeakTensor> result;
  for (const auto& parameter : optimizer.parameters()) result.push_back(weak(parameter));
  return result;
}

void check_options(const GradScalerOptions& options) {
  GRADUS_CHECK(kComponent, options.warn_skip_rate >= 0.0 && options.warn_skip_rate <= 1.0,
               "warn_skip_rate must be in [0, 1]; got ", options.warn_skip_rate);
  GRADUS_CHECK(kComponent, options.skip_window >= 1, "skip_window must be >= 1; got ",
               options.skip_window);
}

}  // namespace

GradScaler::Impl::Impl(GradScalerOptions given) : options(std::move(given)), scale(options) {
  check_options(options);
}

Record& GradScaler::Impl::record_of(const optim::Optimizer& optimizer) {
  auto& record = records[&optimizer];
  auto parameters = weak_parameters(optimizer);
  const auto same = [](const WeakTensor& a, const WeakTensor& b) {
    return a._unsafe_get_target() == b._unsafe_get_target();
  };
  // Other parameters, but for groups added at the end: another optimizer, at the address of one
  // that is gone.
  if (record == nullptr || record->parameters.size() > parameters.size() ||
      !std::equal(record->parameters.begin(), record->parameters.end(), parameters.begin(), same)) {
    if (record != nullptr) replaced.push_back(std::move(record));
    record = std::make_unique<Record>();
    record->number = next_number++;
  }
  record->parameters = std::move(parameters);
  return *record;
}

std::string GradScaler::Impl::name_of(const Record& record) const {
  return base::join("optimizer ", record.number, " (in the order of first use)");
}

void GradScaler::Impl::check_may_unscale(const Record& record) const {
  GRADUS_CHECK(kComponent, record.stage != Stage::unscaled, name_of(record),
               " must be unscaled once an iteration: it was unscaled already since the last "
               "update(), and a second time would divide its gradients twice");
  GRADUS_CHECK(kComponent, record.stage != Stage::stepped, name_of(record),
               " must be unscaled before its step: it has stepped already since the last update()");
  GRADUS_CHECK(kComponent, !options.skip_together || !any_stepped, "with skip_together, ",
               name_of(record),
               " must be unscaled before any optimizer steps, for its overflow is the others' too: "
               "call unscale for each first, or step them by one call");
}

void GradScaler::Impl::check_gradients(const std::vector<Candidate>& candidates) const {
  for (const auto& [parameter, name] : candidates) {
    const auto& gradient = parameter.grad();
    GRADUS_CHECK(kComponent, gradient.scalar_type() != at::kHalf, "gradient of parameter '", name,
                 "' must not be float16, which has no room for unscaled values: keep parameters in "
                 "float32 and run forward under autocast, or keep float32 master weights");
    GRADUS_CHECK(kComponent, at::isFloatingType(gradient.scalar_type()), "gradient of parameter '",
                 name, "' must have a real floating dtype; got ", gradient.scalar_type());
    // Written in place, one value once an element of the tensor.
    GRADUS_CHECK(kComponent,
                 gradient.layout() != at::kStrided ||
                     at::has_internal_overlap(gradient) != at::MemOverlap::Yes,
                 "gradient of parameter '", name,
                 "' must not be an expanded tensor, whose elements share memory: give it memory of "
                 "its own with contiguous(); got sizes ",
                 gradient.sizes(), " with strides ", gradient.strides());
    if (const auto entry = unscaled.find(key_of(gradient)); entry != unscaled.end()) {
      // Written to, after another loss: clipped, or a mixture of unscaled and scaled parts.
      GRADUS_CHECK(kComponent,
                   gradient._version() == entry->second.version || losses == entry->second.losses,
                   "gradient of parameter '", name,
                   "' was unscaled with another optimizer's and changed after another loss was "
                   "scaled, which may have added to it: run every backward before the first "
                   "unscale, or clear it with zero_grad(true) before the second loss");
    }
    const auto entry = outdated.find(key_of(gradient));
    // Another version: zeroed in place meanwhile, or accumulated into; these cannot be told apart.
    if (entry == outdated.end() || gradient._version() != entry->second.version) continue;
    GRADUS_CHECK(kComponent, false, "gradient of parameter '", name, "' was made at the scale ",
                 entry->second.scale, ", and the scale is ", scale.value(),
                 " now: step every optimizer whose gradients are pending before update(), or clear "
                 "them with zero_grad");
  }
}

void GradScaler::Impl::begin_check(Record& record) {
  record.stage = Stage::unscaled;
  record.overflow.reset();
  record.found.clear();
  record.losses.reset();
  loss_pending = false;
}

void GradScaler::Impl::note_backward() {
  for (auto& [key, entry] : unscaled) {
    if (!entry.before_backward.has_value()) continue;
    const auto impl = entry.gradient.lock();
    if (impl.defined() && at::Tensor(impl)._version() != *entry.before_backward) entry.mixed = true;
    entry.before_backward.reset();
  }
}

void GradScaler::Impl::check_not_mixed(const optim::Optimizer& optimizer,
                                       const Record& record) const {
  if (record.stage != Stage::unscaled || record.losses.value_or(losses) == losses) return;
  for (const auto& [parameter, name] : with_gradient(optimizer)) {
    const auto entry = unscaled.find(key_of(parameter.grad()));
    GRADUS_CHECK(kComponent, entry != unscaled.end() && !entry->second.mixed,
                 "gradient of parameter '", name,
                 "' must not change after its unscale but by clipping: a loss was scaled since "
                 "then, and its backward may have added gradients that are still scaled. Unscale "
                 "once a window, after the last backward; to abandon this iteration, zero the "
                 "gradients and call load_state(state())");
  }
}

void GradScaler::Impl::unscale(const optim::Optimizer& optimizer, Record& record) {
  check_may_unscale(record);
  GRADUS_CHECK(
      kComponent, !optimizer.steps_in_backward(), name_of(record),
      " must not step within backward: whether a gradient overflowed is known at the end of "
      "backward only. Use bfloat16, which needs no scaler, or a plain optimizer");
  const auto candidates = with_gradient(optimizer);
  // Another rank may hold the gradients, and waits for this one in the reduction.
  GRADUS_CHECK(kComponent, !candidates.empty() || options.reduce_found_inf, name_of(record),
               " must have a gradient: run backward on the scaled loss first");
  check_gradients(candidates);
  begin_check(record);
  record.losses = losses;
  std::unordered_set<const void*> seen;  // Parameters may share one gradient tensor.
  std::vector<at::Tensor> fresh;         // To be divided.
  std::vector<at::Tensor> shared;        // Divided by another optimizer's unscale: only looked at.
  std::vector<const Record*> shared_with;
  for (const auto& candidate : candidates) {
    auto& gradient = candidate.parameter.mutable_grad();
    // Values of one index may overflow only when added up, so check the sums. (torch does this for
    // float16 only.)
    if (gradient.is_sparse() && !gradient.is_coalesced()) gradient = gradient.coalesce();
    if (!seen.insert(key_of(gradient)).second) continue;
    const auto values = gradient.is_sparse() ? gradient._values() : gradient;
    const auto entry = unscaled.find(key_of(gradient));
    if (entry == unscaled.end()) {
      fresh.push_back(values);
    } else if (gradient._version() == entry->second.version) {
      shared.push_back(values);
    } else {
      // Clipping may have turned its infinity into a number: take the other's verdict.
      shared_with.push_back(entry->second.record);
    }
  }
  scaler::unscale_in_place(fresh, scale.value(), record.found);
  scaler::unscale_in_place(shared, 1.0, record.found);
  for (const auto* other : shared_with) {
    if (other == &record) continue;
    if (other->overflow.has_value()) {
      record.found.push_back(at::full({}, *other->overflow ? 1.0F : 0.0F, at::kFloat));
    } else {
      record.found.insert(record.found.end(), other->found.begin(), other->found.end());
    }
  }
  for (const auto& candidate : candidates) {
    const auto& gradient = candidate.parameter.grad();
    outdated.erase(key_of(gradient));
    unscaled.try_emplace(key_of(gradient), Gradient{.gradient = weak(gradient),
                                                    .version = gradient._version(),
                                                    .record = &record,
                                                    .losses = losses});
  }
}

void GradScaler::Impl::resolve(const std::vector<Record*>& wanted) {
  std::vector<Record*> open;
  std::ranges::copy_if(wanted, std::back_inserter(open),
                       [](const Record* record) { return !record->overflow.has_value(); });
  if (open.empty()) return;
  std::vector<at::Tensor> sums;
  for (const Record* record : open) {
    const auto sum = scaler::sum_of_found(record->found);
    sums.push_back(sums.empty() ? sum : sum.to(sums.front().device(), true));
  }
  auto found = at::stack(sums);
  if (options.reduce_found_inf) options.reduce_found_inf(found);
  GRADUS_CHECK(kComponent,
               found.defined() && found.numel() == static_cast<std::int64_t>(open.size()),
               "reduce_found_inf must keep one element an optimizer, ", open.size(), "; it left ",
               found.defined() ? found.numel() : 0);
  const auto host = found.to(at::kCPU, at::kFloat).contiguous();
  for (std::size_t i = 0; i < open.size(); ++i) {
    // A NaN counts: it is no zero.
    open[i]->overflow = host.const_data_ptr<float>()[i] != 0.0F;
    open[i]->found.clear();
  }
}

bool GradScaler::Impl::finish_step(optim::Optimizer& optimizer, Record& record, bool skip) {
  // The optimizer's own policy may skip too, for what the caller wrote since unscale.
  const bool stepped = !skip && !optimizer.step().skipped;
  record.stage = Stage::stepped;
  any_stepped = true;
  record.skips.count(!stepped, options.skip_window);
  return stepped;
}

void GradScaler::Impl::warn_if_due(Record& record) {
  if (!record.skips.due(options.skip_window, options.warn_skip_rate)) return;
  const auto skips = record.skips.recent_skips();
  const auto rate = static_cast<double>(skips) / static_cast<double>(options.skip_window);
  SkipWarning warning{.optimizer = record.number, .rate = rate, .window = options.skip_window};
  warning.message =
      base::join("[", kComponent, "] ", name_of(record), " skipped ", skips, " of its last ",
                 options.skip_window, " steps, more than ", 100.0 * options.warn_skip_rate,
                 "%: these batches were not learned from. The scale is ", scale.value(),
                 "; look for a loss that is not finite, or grow it less often (growth_interval ",
                 options.growth_interval, ")");
  if (options.warn) {
    options.warn(warning);
  } else {
    TORCH_WARN(warning.message);
  }
}

std::vector<Record*> GradScaler::Impl::checked_records() {
  std::vector<Record*> result;
  for (auto& [optimizer, record] : records) {
    if (record->stage != Stage::ready) result.push_back(record.get());
  }
  // Ranks must reduce in one order, whatever the addresses.
  std::ranges::sort(result, {}, &Record::number);
  return result;
}

void GradScaler::Impl::note_pending(double old_scale) {
  std::erase_if(outdated, [](const auto& entry) { return entry.second.gradient.expired(); });
  for (const auto& [optimizer, record] : records) {
    if (record->stage != Stage::ready) continue;
    for (const auto& parameter : record->parameters) {
      const auto impl = parameter.lock();
      if (!impl.defined()) continue;
      const at::Tensor gradient = at::Tensor(impl).grad();
      if (!gradient.defined() || unscaled.contains(key_of(gradient))) continue;
      outdated.try_emplace(
          key_of(gradient),
          Gradient{.gradient = weak(gradient), .version = gradient._version(), .scale = old_scale});
    }
  }
}

void GradScaler::Impl::start_iteration() {
  for (auto& [optimizer, record] : records) {
    record->stage = Stage::ready;
    record->found.clear();
    record->overflow.reset();
    record->losses.reset();
  }
  unscaled.clear();
  replaced.clear();
  loss_pending = false;
  any_stepped = false;
}

}  // namespace gradus::amp
