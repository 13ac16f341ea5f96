#include <gradus/privacy/training/dp_optimizer.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/instancenorm.h>

#include <gradus/base/error.h>
#include <gradus/privacy/training/internal/state_codec.h>

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

// Sums are as wide as SampleGradients gives them.
at::ScalarType sum_dtype(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

template <typename Impl>
bool updates_statistics(const Module& module) {
  const auto* norm = dynamic_cast<const Impl*>(&module);
  return norm != nullptr && norm->is_training() && norm->options.track_running_stats();
}

double scheduled(const optim::Schedule& schedule, std::int64_t step, double value,
                 const char* what) {
  if (!schedule) return value;
  const double factor = schedule(step);
  GRADUS_CHECK(kComponent, std::isfinite(factor) && factor >= 0.0, "the ", what,
               " schedule must be finite and >= 0; got ", factor, " at step ", step);
  return value * factor;
}

// Bit by bit, so that a NaN equals itself.
bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type() || a.device() != b.device() ||
      a.layout() != b.layout()) {
    return false;
  }
  if (a.layout() != at::kStrided) return same_bits(a.to_dense(), b.to_dense());
  const auto bytes = [](const at::Tensor& tensor) {
    return tensor.resolve_conj().resolve_neg().contiguous().reshape({-1}).view(at::kByte);
  };
  return bytes(a).equal(bytes(b));
}

// What a forward pass must leave as it was: buffers by value, since not every way of writing is
// counted by versions.
class BufferWatch {
 public:
  void take(const Module& model) {
    const at::NoGradGuard no_grad;
    saved_.clear();
    for (const auto& buffer : model.named_buffers()) {
      if (buffer.value().defined() && !buffer.value().is_inference())
        saved_.push_back({buffer.key(), buffer.value(), buffer.value().detach().clone()});
    }
  }
  // The name of a buffer that changed, or none. All that changed are put back.
  std::optional<std::string> restore(const Module& model) const {
    if (saved_.empty()) return std::nullopt;
    const at::NoGradGuard no_grad;
    const auto buffers = model.named_buffers();
    std::optional<std::string> changed;
    for (const Saved& each : saved_) {
      const at::Tensor* now = buffers.find(each.name);
      at::Tensor buffer = now != nullptr && now->defined() ? *now : each.buffer;
      if (same_bits(buffer, each.value)) continue;
      changed = each.name;
      // In place where it can be, so that views of the buffer see it.
      if (buffer.sizes() == each.value.sizes() &&
          buffer.scalar_type() == each.value.scalar_type() && buffer.layout() == at::kStrided) {
        buffer.copy_(each.value);
      } else {
        buffer.set_data(each.value.clone());
      }
    }
    return changed;
  }

 private:
  struct Saved {
    std::string name{};
    at::Tensor buffer{};
    at::Tensor value{};
  };
  std::vector<Saved> saved_;
};

void refuse_buffer(const std::optional<std::string>& changed) {
  GRADUS_CHECK(kComponent, !changed, "buffer '", *changed,
               "' must not change in a forward pass of private training: it goes into the saved "
               "model without noise. It has its old value again. Switch the update off, or, if it "
               "does not depend on the examples, set allow_buffer_updates");
}

// Of each distinct kind of step the larger count: what was released stays released, whatever state
// is loaded.
History at_least(const History& loaded, const History& now) {
  const auto count_in = [](const History& history, const GaussianSteps& kind) -> std::int64_t {
    for (GaussianSteps entry : history.entries()) {
      const std::int64_t steps = std::exchange(entry.steps, kind.steps);
      if (entry == kind) return steps;
    }
    return 0;
  };
  History result;
  for (GaussianSteps entry : loaded.entries()) {
    entry.steps = std::max(entry.steps, count_in(now, entry));
    result.add(entry);
  }
  for (const GaussianSteps& entry : now.entries()) {
    if (count_in(loaded, entry) == 0) result.add(entry);
  }
  return result;
}

}  // namespace

class DPOptimizer::State {
 public:
  State(optim::Optimizer& optimizer, std::shared_ptr<Module> model,
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
    set_live();
    // An impossible count_noise fails here and not at the first step.
    (void)clipper_.shares(scheduled(options_.noise_schedule, 0, options_.noise_multiplier, "noise"),
                          options_.expected_batch_size);
    watch_buffers();
  }

  at::Tensor accumulate(const LossFunction& loss, const Batch& batch);
  void accumulate(const at::Tensor& losses);
  DPStep step(bool empty);
  void zero_grad() {
    drop();
    optimizer_.zero_grad();
  }
  void save(internal::StateWriter& write) const;
  void load(internal::StateReader& read);

  optim::Optimizer& optimizer_;
  std::shared_ptr<Module> model_;
  std::shared_ptr<Accountant> accountant_;
  DPOptimizerOptions options_;
  persample::SampleGradients table_;
  Clipper clipper_;
  NoiseGenerator noise_;
  std::vector<at::Tensor> targets_;
  std::int64_t steps_ = 0;
  at::Tensor last_norms_ = at::empty({0}, at::kDouble);

  // The logical batch.
  struct Pending {
    std::vector<at::Tensor> sums{};  // one a parameter; undefined: nothing yet
    at::Tensor unclipped = at::zeros({}, at::kDouble);
    double sensitivity = 0.0;  // the largest that a micro-batch was clipped to
    std::int64_t examples = 0;
    std::int64_t clipped = 0;
    std::int64_t non_finite = 0;
    std::vector<at::Tensor> norms{};
  };
  Pending pending_;

 private:
  // What one micro-batch adds.
  using Contribution = Pending;

  static std::vector<std::string> names_of(const std::vector<NamedParameter>& parameters) {
    std::vector<std::string> names;
    for (const NamedParameter& parameter : parameters) names.push_back(parameter.name);
    return names;
  }
  void match_targets();
  void check_targets() const;
  void set_live();
  at::Tensor layers_entry() const;
  void watch_buffers() {
    if (!options_.allow_buffer_updates) buffers_.take(*model_);
  }
  at::Tensor contribute(const LossFunction& loss, const Batch& batch, Contribution& contribution);
  void drop() {
    pending_ = Pending{};
    table_.clear();  // holds something only after an exception
  }
  void check_statistics() const;
  double scale_thresholds();
  std::vector<at::Tensor> group_norms() const;
  std::vector<at::Tensor> sums(const ClipWeights& weights);
  std::vector<at::Tensor> finite_sums(const ClipWeights& weights);
  void count(const ClipWeights& weights, Contribution& into) const;
  void add(Contribution contribution);
  void complete_sums();
  void release(DPStep& done);

  BufferWatch buffers_;
};

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

void DPOptimizer::State::set_live() {
  std::vector<bool> live;
  for (const NamedParameter& parameter : table_.parameters())
    live.push_back(parameter.tensor.requires_grad());
  clipper_.set_live(live);
}

// A running statistic is a sum over examples without noise, which goes into the saved model.
void DPOptimizer::State::check_statistics() const {
  for (const auto& module : model_->named_modules("", /*include_self=*/true)) {
    const bool updates = updates_statistics<torch::nn::InstanceNorm1dImpl>(*module.value()) ||
                         updates_statistics<torch::nn::InstanceNorm2dImpl>(*module.value()) ||
                         updates_statistics<torch::nn::InstanceNorm3dImpl>(*module.value());
    GRADUS_CHECK(kComponent, !updates, "layer '", module.key(), "' (", module.value()->name(),
                 ") must not keep running statistics in private training: they hold sums over "
                 "examples without noise. Construct it with track_running_stats(false), or use "
                 "privacy::fix(model)");
  }
}

double DPOptimizer::State::scale_thresholds() {
  set_live();
  clipper_.set_scale(scheduled(options_.clip_schedule, steps_, 1.0, "clip"));
  return clipper_.sensitivity();
}

std::vector<at::Tensor> DPOptimizer::State::group_norms() const {
  if (clipper_.groups() == 1) return {table_.norms()};
  std::vector<at::Tensor> squares(clipper_.groups());
  for (std::size_t i = 0; i < table_.parameters().size(); ++i) {
    if (!table_.parameters()[i].tensor.requires_grad()) continue;
    at::Tensor& sum = squares[clipper_.group_of(i)];
    const at::Tensor square = table_.norms(i).square();
    sum = sum.defined() ? sum + square : square;
  }
  for (at::Tensor& sum : squares) {
    sum = sum.defined() ? sum.sqrt() : at::zeros({table_.examples()}, at::kDouble);
  }
  return squares;
}

std::vector<at::Tensor> DPOptimizer::State::sums(const ClipWeights& weights) {
  if (clipper_.groups() == 1) return table_.weighted_sums(weights.groups[0]);
  std::vector<at::Tensor> result;
  for (std::size_t i = 0; i < table_.parameters().size(); ++i) {
    result.push_back(table_.weighted_sum(i, weights.groups[clipper_.group_of(i)]));
  }
  return result;
}

// Zero times infinity is NaN: the rows themselves must go.
std::vector<at::Tensor> DPOptimizer::State::finite_sums(const ClipWeights& weights) {
  const at::Tensor rows = weights.finite.nonzero().flatten();
  std::vector<at::Tensor> result;
  for (std::size_t i = 0; i < table_.parameters().size(); ++i) {
    const NamedParameter& parameter = table_.parameters()[i];
    if (!parameter.tensor.requires_grad()) {
      result.emplace_back();
      continue;
    }
    const at::ScalarType dtype = sum_dtype(parameter.tensor);
    const at::Tensor kept = table_.gradients(i).to(dtype).index_select(0, rows).flatten(1);
    const at::Tensor factors =
        weights.groups[clipper_.group_of(i)].index_select(0, rows).to(kept.device(), dtype);
    result.push_back(factors.matmul(kept).reshape(parameter.tensor.sizes()));
  }
  return result;
}

void DPOptimizer::State::count(const ClipWeights& weights, Contribution& into) const {
  into.clipped += weights.clipped.sum().item<std::int64_t>();
  into.unclipped = into.unclipped + clipper_.count(weights).cpu();
}

// All memory is there before the first sum is touched, so that an exception leaves them as they
// were.
void DPOptimizer::State::add(Contribution contribution) {
  std::vector<at::Tensor>& sums = pending_.sums;
  sums.resize(targets_.size());
  contribution.sums.resize(targets_.size());
  pending_.norms.reserve(pending_.norms.size() + contribution.norms.size());
  for (std::size_t i = 0; i < sums.size(); ++i) {
    if (!contribution.sums[i].defined()) continue;
    if (sums[i].defined()) {
      sums[i].add_(contribution.sums[i]);
    } else {
      sums[i] = std::move(contribution.sums[i]);
    }
  }
  pending_.unclipped = contribution.unclipped + pending_.unclipped;
  pending_.sensitivity = std::max(pending_.sensitivity, contribution.sensitivity);
  pending_.examples += contribution.examples;
  pending_.clipped += contribution.clipped;
  pending_.non_finite += contribution.non_finite;
  for (at::Tensor& norms : contribution.norms) pending_.norms.push_back(std::move(norms));
}

at::Tensor DPOptimizer::State::accumulate(const LossFunction& loss, const Batch& batch) {
  check_statistics();
  Contribution contribution{.sensitivity = scale_thresholds(),
                            .examples = persample::count_examples(batch)};
  std::vector<std::uint32_t> versions;
  for (const NamedParameter& parameter : table_.parameters())
    versions.push_back(parameter.tensor.is_inference() ? 0 : parameter.tensor._version());
  // What changed before this call is the caller's, as a state that was loaded.
  watch_buffers();
  at::Tensor losses;
  try {
    losses = contribute(loss, batch, contribution);
  } catch (...) {
    table_.clear();
    buffers_.restore(*model_);
    throw;
  }
  table_.clear();
  const auto changed = buffers_.restore(*model_);
  for (std::size_t i = 0; i < versions.size(); ++i) {
    const auto& [name, tensor] = table_.parameters()[i];
    GRADUS_CHECK(kComponent, tensor.is_inference() || tensor._version() == versions[i],
                 "parameter '", name,
                 "' must not be written in a forward pass of private training: what is written "
                 "depends on the examples and has no noise. It holds that now, so load the model "
                 "again. embedding with max_norm does this: switch max_norm off");
  }
  refuse_buffer(changed);
  add(std::move(contribution));
  return losses;
}

at::Tensor DPOptimizer::State::contribute(const LossFunction& loss, const Batch& batch,
                                          Contribution& contribution) {
  at::Tensor losses;
  Batch current = batch;
  while (persample::count_examples(current) > 0) {
    table_.clear();
    const at::Tensor these = table_.backward(loss, current);
    if (!losses.defined()) losses = these;
    const at::NoGradGuard no_grad;
    const ClipWeights weights = clipper_.weights(group_norms());
    const at::Tensor kept = weights.finite.nonzero().flatten().cpu();
    const bool all = kept.numel() == persample::count_examples(current);
    if (contribution.norms.empty()) contribution.norms.push_back(table_.norms().cpu());
    if (all) {
      count(weights, contribution);
      contribution.sums = sums(weights);
      break;
    }
    // The others once more, without those: a weight of 0 does not make their products finite.
    const auto left_out = persample::count_examples(current) - kept.numel();
    contribution.non_finite += left_out;
    contribution.unclipped =
        contribution.unclipped - at::full({}, 0.5 * static_cast<double>(left_out), at::kDouble);
    if (kept.numel() == 0) break;
    const auto* index = kept.const_data_ptr<std::int64_t>();
    current =
        persample::examples_at(current, std::vector<std::int64_t>(index, index + kept.numel()));
  }
  return losses;
}

void DPOptimizer::State::accumulate(const at::Tensor& losses) {
  GRADUS_CHECK(kComponent, losses.defined() && losses.dim() == 1,
               "losses must be one for each example, [B]; got ",
               losses.defined() ? base::join("shape ", losses.sizes()) : "an undefined tensor");
  check_statistics();
  // The forward pass is over: the buffers must be as this last saw them.
  refuse_buffer(buffers_.restore(*model_));
  const double sensitivity = scale_thresholds();
  table_.clear();
  table_.backward(losses);
  const at::NoGradGuard no_grad;
  const ClipWeights weights = clipper_.weights(group_norms());
  Contribution contribution{.sensitivity = sensitivity, .examples = losses.size(0)};
  contribution.non_finite = weights.finite.logical_not().sum().item<std::int64_t>();
  contribution.norms.push_back(table_.norms().cpu());
  count(weights, contribution);
  contribution.sums = contribution.non_finite == 0 ? sums(weights) : finite_sums(weights);
  table_.clear();
  add(std::move(contribution));
}

// Parameters that nothing was accumulated for get noise like all others.
void DPOptimizer::State::complete_sums() {
  pending_.sums.resize(targets_.size());
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    const at::Tensor& parameter = table_.parameters()[i].tensor;
    at::Tensor& sum = pending_.sums[i];
    if (!parameter.requires_grad()) {
      sum = at::Tensor();
    } else if (!sum.defined()) {
      sum = at::zeros(parameter.sizes(), parameter.options().dtype(sum_dtype(parameter)));
    }
  }
}

DPStep DPOptimizer::State::step(bool empty) {
  GRADUS_CHECK(kComponent, !empty || pending_.examples == 0,
               "step_empty() is for a batch without examples; ", pending_.examples,
               " were accumulated. Call step()");
  GRADUS_CHECK(
      kComponent, empty || pending_.examples > 0,
      "step() needs a logical batch; nothing was accumulated. The noise of an empty batch is "
      "added by step_empty()");
  check_targets();
  DPStep done{.step = steps_ + 1,
              .examples = pending_.examples,
              .clipped = pending_.clipped,
              .non_finite = pending_.non_finite};
  // A schedule that changed its mind since must not leave a gradient above its noise.
  done.max_norm = std::max(scale_thresholds(), pending_.sensitivity);
  done.noise_multiplier =
      scheduled(options_.noise_schedule, steps_, options_.noise_multiplier, "noise");
  // Fails before anything is counted or drawn.
  (void)clipper_.shares(done.noise_multiplier, options_.expected_batch_size);
  const at::NoGradGuard no_grad;
  complete_sums();
  const at::Tensor norms =
      pending_.norms.empty() ? at::empty({0}, at::kDouble) : at::cat(pending_.norms);
  accountant_->add(options_.accounted ? options_.accounted(done.noise_multiplier)
                                      : GaussianSteps{.noise_multiplier = done.noise_multiplier,
                                                      .sample_rate = 1.0});
  // Counted is taken, also if the release fails: the next step has the next one's noise.
  ++steps_;
  try {
    release(done);
  } catch (...) {
    drop();
    throw;
  }
  drop();
  last_norms_ = norms;
  done.applied = options_.apply ? options_.apply() : optimizer_.step();
  return done;
}

// Adds noise once, whatever the number of ranks: rank 0's sums carry it.
void DPOptimizer::State::release(DPStep& done) {
  const auto shares = clipper_.shares(done.noise_multiplier, options_.expected_batch_size);
  done.noise_deviation = shares.gradients * done.max_norm;
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& sum : pending_.sums) {
    if (sum.defined()) tensors.push_back(sum);
  }
  at::Tensor unclipped = pending_.unclipped;
  if (options_.reduction.rank == 0) {
    noise_.add_gaussian_(tensors, done.noise_deviation);
    if (shares.count > 0.0) noise_.add_gaussian_(unclipped, shares.count);
  }
  if (options_.reduction.ranks > 1) {
    if (options_.clipping.policy == Clipping::adaptive) tensors.push_back(unclipped);
    options_.reduction.sum(tensors);
  }
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    at::Tensor& sum = pending_.sums[i];
    // What the optimizer sees is from here, or nothing: not an old gradient of a frozen parameter.
    targets_[i].mutable_grad().reset();
    if (!sum.defined()) continue;
    sum.div_(options_.expected_batch_size);
    // Rounded to 16 bits once, after the noise: that is post-processing.
    targets_[i].mutable_grad() = sum.to(targets_[i].device(), targets_[i].scalar_type());
    sum = at::Tensor();
  }
  if (options_.clipping.policy == Clipping::adaptive)
    clipper_.adapt(unclipped.item<double>(), options_.expected_batch_size);
}

// Each parameter's group and that group's norm, as given: [P, 2]; none without explicit layers.
at::Tensor DPOptimizer::State::layers_entry() const {
  const std::vector<ClippedLayer>& layers = options_.clipping.layers;
  const auto n = static_cast<std::int64_t>(layers.empty() ? 0 : targets_.size());
  at::Tensor entry = at::empty({n, 2}, at::kDouble);
  auto* value = entry.mutable_data_ptr<double>();
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
    const std::size_t group = clipper_.group_of(i);
    *value++ = static_cast<double>(group);
    *value++ = layers[group].max_norm;
  }
  return entry;
}

void DPOptimizer::State::save(internal::StateWriter& write) const {
  GRADUS_CHECK(kComponent, pending_.examples == 0, "a state must be taken between logical steps; ",
               pending_.examples, " examples are accumulated. Call step() or zero_grad() first");
  write.number("noise_multiplier", options_.noise_multiplier);
  write.number("expected_batch_size", options_.expected_batch_size);
  write.number("clipping", static_cast<double>(options_.clipping.policy));
  write.number("max_norm", options_.clipping.max_norm);
  const ClippingOptions& clipping = options_.clipping;
  write.number("clipping.target_quantile", clipping.target_quantile);
  write.number("clipping.adaptation_rate", clipping.adaptation_rate);
  write.number("clipping.count_noise", clipping.count_noise.value_or(0.0));
  write.number("clipping.least_norm", clipping.least_norm);
  write.number("clipping.greatest_norm", clipping.greatest_norm);
  write.number("clipping.stability", clipping.stability);
  write.tensor("clipping.layers", layers_entry());
  write.count("logical_steps", steps_);
  write.number("adapted_norm", clipper_.adapted_norm());
  write.noise("noise", noise_);
  write.history(accountant_->history());
  for (const optim::NamedState& entry : optimizer_.state())
    write.tensor("optimizer." + entry.name, entry.tensor);
}

void DPOptimizer::State::load(internal::StateReader& read) {
  read.expect("noise_multiplier", options_.noise_multiplier, "noise multiplier");
  read.expect("expected_batch_size", options_.expected_batch_size, "expected batch size");
  read.expect("clipping", static_cast<double>(options_.clipping.policy),
              "clipping (0 flat, 1 per layer, 2 adaptive, 3 automatic)");
  read.expect("max_norm", options_.clipping.max_norm, "clipping norm");
  const ClippingOptions& clipping = options_.clipping;
  read.expect("clipping.target_quantile", clipping.target_quantile, "target_quantile of clipping");
  read.expect("clipping.adaptation_rate", clipping.adaptation_rate, "adaptation_rate of clipping");
  read.expect("clipping.count_noise", clipping.count_noise.value_or(0.0),
              "count_noise of clipping (0 unset)");
  read.expect("clipping.least_norm", clipping.least_norm, "least_norm of clipping");
  read.expect("clipping.greatest_norm", clipping.greatest_norm, "greatest_norm of clipping");
  read.expect("clipping.stability", clipping.stability, "stability of clipping");
  const at::Tensor layers = layers_entry();
  GRADUS_CHECK(kComponent,
               read.tensor("clipping.layers", at::kDouble, layers.sizes()).equal(layers),
               "the clipped layers of the state must be those of this run, with their norms; they "
               "are others");
  const std::int64_t steps = read.count("logical_steps");
  GRADUS_CHECK(kComponent, steps >= 0, "state 'logical_steps' must be >= 0; got ", steps);
  const double norm = read.number("adapted_norm");
  const bool adaptive = clipping.policy == Clipping::adaptive;
  GRADUS_CHECK(kComponent,
               norm == clipping.max_norm ||
                   (adaptive && norm >= clipping.least_norm && norm <= clipping.greatest_norm),
               "state 'adapted_norm' must be ", clipping.max_norm,
               adaptive ? " or from least_norm to greatest_norm" : "", "; got ", norm);
  const auto noise = read.noise("noise", noise_.is_secure());
  Accountant accountant(accountant_->options(), at_least(read.history(), accountant_->history()));
  std::vector<optim::NamedState> optimizer;
  for (auto& [name, tensor] : read.under("optimizer.")) {
    GRADUS_CHECK(kComponent,
                 !at::isFloatingType(tensor.scalar_type()) || tensor.element_size() < 2 ||
                     tensor.isfinite().all().item<bool>(),
                 "state 'optimizer.", name, "' must be finite; it holds NaN or infinity");
    optimizer.push_back({name, tensor});
  }
  read.finish();
  Clipper clipper = clipper_;
  clipper.set_adapted_norm(norm);
  optimizer_.load_state(optimizer);
  clipper_ = std::move(clipper);
  *accountant_ = std::move(accountant);
  if (noise) noise_.load(*noise);
  steps_ = steps;
  watch_buffers();
  zero_grad();
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
