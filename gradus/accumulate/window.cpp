#include <gradus/accumulate/window.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <gradus/accumulate/internal/accumulators.h>
#include <gradus/accumulate/wide_gradients.h>
#include <gradus/base/error.h>

namespace gradus::accumulate {
namespace {

bool positive(double value) { return std::isfinite(value) && value > 0.0; }

bool sixteen_bits(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// The value that `value` becomes as a tensor of a dtype.
double rounded(double value, at::ScalarType type) {
  const auto single = static_cast<float>(value);
  if (type == at::kHalf) return static_cast<float>(c10::Half(single));
  if (type == at::kBFloat16) return static_cast<float>(c10::BFloat16(single));
  return value;
}

// The largest power of two <= value, and the smallest >= value.
double power_below(double value) { return std::exp2(std::floor(std::log2(value))); }
double power_above(double value) { return std::exp2(std::ceil(std::log2(value))); }

bool weighs(Normalisation normalisation) {
  return normalisation == Normalisation::tokens || normalisation == Normalisation::examples;
}

// Multiplies gradients in place; the dense ones together.
void multiply(const std::vector<at::Tensor>& gradients, double factor) {
  std::vector<at::Tensor> dense;
  for (at::Tensor gradient : gradients) {
    if (!gradient.defined()) continue;
    if (gradient.layout() == at::kStrided) {
      dense.push_back(std::move(gradient));
    } else {
      gradient.mul_(factor);
    }
  }
  if (!dense.empty()) at::_foreach_mul_(dense, at::Scalar(factor));
}

bool all_finite(const std::vector<at::Tensor>& gradients) {
  return std::ranges::all_of(gradients, [](const at::Tensor& gradient) {
    if (!gradient.defined()) return true;
    const at::Tensor values =
        gradient.layout() == at::kStrided ? gradient : gradient.coalesce().values();
    return at::isfinite(values).all().item<bool>();
  });
}

const char* unit_of(Normalisation normalisation) {
  return normalisation == Normalisation::tokens ? "tokens" : "examples";
}

std::string over(Normalisation normalisation) {
  switch (normalisation) {
    case Normalisation::mean:
      return "mean of the micro-batches";
    case Normalisation::sum:
      return "sum of the micro-batches";
    case Normalisation::tokens:
    case Normalisation::examples:
      break;
  }
  return base::join("mean over ", unit_of(normalisation));
}

std::string micro_batches_text(std::int64_t count) {
  return base::join(count, count == 1 ? " micro-batch" : " micro-batches");
}

}  // namespace

class GradientWindow::State {
 public:
  State(std::vector<at::Tensor> parameters, const WindowOptions& options);
  ~State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void backward(const at::Tensor& loss, double weight, const MicroBatch& micro_batch);
  WindowResult finish();
  void expect_total_weight(double weight);
  void reset();

  std::int64_t count() const { return static_cast<std::int64_t>(losses_.size()); }
  bool full() const {
    if (closed_) return true;
    return options_.effective_batch ? examples_ >= *options_.effective_batch
                                    : count() >= options_.micro_batches;
  }
  bool fills(std::optional<std::int64_t> examples) const;
  const WindowOptions& options() const { return options_; }
  const WideGradients* wide() const { return wide_.get(); }
  bool spans_micro_batches() const {
    return options_.effective_batch.has_value() || options_.micro_batches > 1;
  }
  // Both under the registry's mutex.
  OpenWindow open() const {
    return {.micro_batches = options_.effective_batch ? 0 : options_.micro_batches,
            .held = published_.held,
            .in_last_backward = published_.pass.last,
            .remaining_factor = published_.pass.factor};
  }
  std::optional<WindowPass> pass() const {
    if (!published_.unfinished) return std::nullopt;
    return published_.pass;
  }
  at::Tensor wide_gradient(const at::Tensor& parameter) const;
  void scale_gradients(double factor);

 private:
  void check_options() const;
  void check_ready(const at::Tensor& loss, double weight) const;
  void check_cleared() const;
  std::optional<std::int64_t> examples_of(double weight, const MicroBatch& micro_batch) const;
  void choose_reference(double weight, std::optional<std::int64_t> examples);
  void adapt_reference(at::ScalarType loss, double weight);
  internal::Obstacles obstacles() const;
  // Exchanges between processes: seeds must be the same in all of them.
  bool alone() const {
    const WindowHooks& hooks = options_.hooks;
    return !hooks.before_backward && !hooks.reduce && !hooks.sum_weights;
  }
  // What a loss counts for in the normalisation.
  double share(double weight) const { return weighs(options_.normalisation) ? weight : 1.0; }
  double total_share() const {
    return weighs(options_.normalisation) ? total_weight() : static_cast<double>(count());
  }
  double seed_for(double weight) const;
  void publish(WindowPass pass = {});
  void remember_written();
  at::Tensor seed_of(const at::Tensor& loss, double weight);
  double total_weight() const { return std::accumulate(weights_.begin(), weights_.end(), 0.0); }
  double remaining_factor(double share) const;
  double loss_scale() const;
  std::vector<at::Tensor> gradients() const;
  std::vector<at::Tensor> written() const;
  void start_next();

  std::vector<at::Tensor> parameters_;
  WindowOptions options_;
  std::unique_ptr<WideGradients> wide_;
  double reference_ = 1.0;  // What shares are divided by as they come.
  std::optional<double> stated_;
  // Detached; read back only in finish(), so that no micro-batch waits for a device.
  std::vector<at::Tensor> losses_, scales_;
  std::vector<double> weights_;
  std::int64_t examples_ = 0;
  bool examples_known_ = true;
  bool closed_ = false;  // The caller announced the last micro-batch.
  bool exchanged_ = false;
  bool broken_ = false;
  // Of each parameter's .grad, as finish() left it.
  std::vector<std::uint32_t> written_versions_;
  // What other threads may see.
  struct Published {
    std::int64_t held = 0;
    bool unfinished = false;
    WindowPass pass{};
  } published_;
  std::optional<internal::Accumulator> accumulator_;
};

namespace {

// The living windows by parameter, for open_window(). One entry a window and parameter.
struct Registry {
  std::mutex mutex{};
  std::unordered_multimap<const void*, const void*> windows{};
};

Registry& registry() {
  static auto* const kept = new Registry;  // outlives windows of static storage
  return *kept;
}

}  // namespace

GradientWindow::State::State(std::vector<at::Tensor> parameters, const WindowOptions& options)
    : options_(options) {
  std::unordered_set<const void*> seen;
  for (auto& parameter : parameters) {
    GRADUS_CHECK("window", parameter.defined(), "parameters must be defined tensors");
    // A tied weight listed twice must not be divided twice.
    if (seen.insert(parameter.unsafeGetTensorImpl()).second)
      parameters_.push_back(std::move(parameter));
  }
  GRADUS_CHECK("window", !parameters_.empty(), "there must be at least one parameter; got none");
  check_options();
  if (options.fp32_gradients) wide_ = std::make_unique<WideGradients>(parameters_);
  accumulator_.emplace("window", parameters_, obstacles());
  start_next();
  const std::lock_guard lock(registry().mutex);
  for (const void* parameter : seen) registry().windows.emplace(parameter, this);
}

GradientWindow::State::~State() {
  const std::lock_guard lock(registry().mutex);
  std::erase_if(registry().windows, [&](const auto& entry) { return entry.second == this; });
}

internal::Obstacles GradientWindow::State::obstacles() const {
  internal::Obstacles obstacles;
  if (options_.skip_non_finite) {
    obstacles.always = "skip_non_finite looks at all gradients of a GradientWindow before the step";
  } else if (options_.scale_loss) {
    obstacles.always =
        "scale_loss, for a scaler that looks at all gradients of a GradientWindow before the step. "
        "Put a constant factor into the loss and into InBackwardOptions::loss_scale";
  } else if (options_.hooks.reduce || options_.hooks.sum_weights) {
    obstacles.always =
        "hooks.reduce and hooks.sum_weights of a GradientWindow act after its last backward pass";
  } else if (spans_micro_batches()) {
    obstacles.if_each_pass_steps =
        "a GradientWindow of several micro-batches, each of which would step. Set "
        "InBackwardOptions::accumulation (without clip_norm), or step after backward";
  }
  return obstacles;
}

void GradientWindow::State::publish(WindowPass pass) {
  const std::lock_guard lock(registry().mutex);
  published_ = {.held = count(), .unfinished = broken_ || count() > 0, .pass = pass};
}

void GradientWindow::State::check_options() const {
  GRADUS_CHECK("window", options_.micro_batches >= 1, "micro_batches must be >= 1; got ",
               options_.micro_batches);
  if (options_.total_weight) {
    GRADUS_CHECK("window", weighs(options_.normalisation),
                 "total_weight has a meaning with Normalisation::tokens or examples only");
    GRADUS_CHECK("window", positive(*options_.total_weight),
                 "total_weight must be finite and > 0; got ", *options_.total_weight);
  }
  if (options_.effective_batch) {
    GRADUS_CHECK("window", *options_.effective_batch >= 1, "effective_batch must be >= 1; got ",
                 *options_.effective_batch);
    GRADUS_CHECK("window", options_.micro_batches == 1,
                 "effective_batch decides how many micro-batches a window has: leave micro_batches "
                 "out; got ",
                 options_.micro_batches);
    GRADUS_CHECK("window", options_.normalisation != Normalisation::mean,
                 "Normalisation::mean depends on how the effective batch is cut: use examples");
  }
  GRADUS_CHECK("window", !options_.skip_non_finite || !options_.scale_loss,
               "skip_non_finite would hide overflows from the loss scaler, which skips the step "
               "itself: leave one of them out");
  GRADUS_CHECK("window",
               !options_.fp32_gradients || !options_.hooks.before_backward || options_.hooks.reduce,
               "fp32_gradients exist in full only after the window's last backward pass: give "
               "hooks.reduce to exchange them");
}

void GradientWindow::State::check_ready(const at::Tensor& loss, double weight) const {
  GRADUS_CHECK("window", !broken_,
               "the window must be reset() after a backward that threw: its gradients are "
               "incomplete");
  if (options_.effective_batch) {
    GRADUS_CHECK("window", !full(),
                 "the window must be finished before another micro-batch; it holds ", examples_,
                 " of ", *options_.effective_batch, " examples");
  } else {
    GRADUS_CHECK("window", !full(),
                 "the window must be finished before another micro-batch; it holds ", count(),
                 " of ", options_.micro_batches,
                 closed_ ? ", the last of which was announced as its end" : "");
  }
  GRADUS_CHECK("window", positive(weight), "weight must be finite and > 0; got ", weight,
               ". Skip a micro-batch without tokens");
  GRADUS_CHECK("window", loss.defined(), "loss must be a defined tensor");
  GRADUS_CHECK("window", loss.dim() == 0, "loss must be a scalar; got shape ", loss.sizes(),
               ". Take its mean over the micro-batch");
  GRADUS_CHECK("window", at::isFloatingType(loss.scalar_type()),
               "loss must have a real floating dtype; got ", loss.scalar_type());
  GRADUS_CHECK("window", loss.requires_grad(),
               "loss must require a gradient: nothing that does led to it, or it was "
               "computed under NoGradGuard");
  if (count() == 0) check_cleared();
}

void GradientWindow::State::check_cleared() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    GRADUS_CHECK(
        "window", !parameters_[i].grad().defined(),
        "gradients must be cleared before a window begins; "
        "parameter ",
        i, " of shape ", parameters_[i].sizes(),
        " still has one, which would be divided as if it were the window's. Call zero_grad(true)");
  }
}

std::optional<std::int64_t> GradientWindow::State::examples_of(
    double weight, const MicroBatch& micro_batch) const {
  std::optional<std::int64_t> examples = micro_batch.examples;
  if (!examples && options_.normalisation == Normalisation::examples &&
      weight == std::floor(weight)) {
    examples = static_cast<std::int64_t>(weight);
  }
  GRADUS_CHECK("window", !examples || *examples >= 1, "a micro-batch has at least 1 example; got ",
               examples.value_or(0));
  if (!options_.effective_batch) return examples;
  GRADUS_CHECK("window", examples.has_value(),
               "effective_batch counts examples: give MicroBatch::examples with each loss");
  GRADUS_CHECK("window", examples_ + *examples <= *options_.effective_batch,
               "a window holds effective_batch = ", *options_.effective_batch,
               " examples, of which ", *options_.effective_batch - examples_, " are left; got ",
               *examples, ". Cut the batch with split_batch()");
  return examples;
}

bool GradientWindow::State::fills(std::optional<std::int64_t> examples) const {
  if (!options_.effective_batch) return count() + 1 >= options_.micro_batches;
  GRADUS_CHECK("window", examples.has_value(),
               "with effective_batch the micro-batch's number of examples is needed");
  return examples_ + *examples >= *options_.effective_batch;
}

// Weights are divided by a number near their total as they come: seeds of thousands would carry
// fp16 gradients over its range. A power of two, so that no bit of a gradient depends on it. Over
// several processes it has to be the same everywhere, which only 1 is without asking.
void GradientWindow::State::choose_reference(double weight, std::optional<std::int64_t> examples) {
  if (!weighs(options_.normalisation)) {
    reference_ = options_.normalisation == Normalisation::mean
                     ? static_cast<double>(options_.micro_batches)
                     : 1.0;
    return;
  }
  reference_ = stated_.value_or(1.0);
  if (stated_ || !alone()) return;
  if (options_.effective_batch && options_.normalisation == Normalisation::examples) {
    reference_ = static_cast<double>(*options_.effective_batch);
    return;
  }
  const double total =
      options_.effective_batch
          ? weight * static_cast<double>(*options_.effective_batch) / static_cast<double>(*examples)
          : weight * static_cast<double>(options_.micro_batches);
  if (positive(total)) reference_ = power_above(total);
}

// Makes the coming loss's seed one that neither rounds nor carries gradients over their range:
//
// - A loss of 16 bits rounds its seed: it gets a power of two.
// - Seeds beyond 1, and in fp16 sums of them, come of weights that the first one did not announce.
//
// What the window holds is then brought to the new reference, one pass over the gradients.
void GradientWindow::State::adapt_reference(at::ScalarType loss, double weight) {
  if (options_.normalisation == Normalisation::sum) return;
  const double own = share(weight);
  const double seed = own / reference_;
  // A share under 2^-22 of the whole is about the least that fp16 holds, whatever is done.
  const bool rounds = sixteen_bits(loss) && rounded(seed, loss) != seed &&
                      (loss != at::kHalf || seed >= std::exp2(-22.0));
  if (options_.normalisation == Normalisation::mean) {
    // The same in all processes, and in all micro-batches if the first one asked for it.
    if (!rounds) return;
    if (count() == 0) {
      reference_ = power_above(reference_);
      return;
    }
  }
  GRADUS_CHECK("window", alone() || !rounds, "a ", loss, " loss would round its weight, ", weight,
               " of ", reference_,
               ", and with hooks no other can be taken, since all processes take the same. Compute "
               "the loss in float32");
  if (!alone()) return;
  const double total = total_share() + own;
  const auto fp16 = [](const at::Tensor& parameter) {
    return parameter.scalar_type() == at::kHalf;
  };
  const bool overflows =
      seed > 1.0 || (total > reference_ && std::ranges::any_of(parameters_, fp16));
  if (!rounds && !overflows) return;
  const double least = std::max(total, reference_);
  const double next = rounds ? own / power_below(own / least) : power_above(least);
  if (!positive(next)) return;
  const double factor = reference_ / next;
  reference_ = next;
  if (count() == 0) return;
  const at::NoGradGuard no_grad;
  multiply(gradients(), factor);
}

double GradientWindow::State::seed_for(double weight) const {
  return options_.normalisation == Normalisation::sum ? 1.0 : share(weight) / reference_;
}

// As backward's seed the factor costs one scalar; multiplying the loss would add a node to the
// graph.
at::Tensor GradientWindow::State::seed_of(const at::Tensor& loss, double weight) {
  if (!options_.scale_loss) return at::full({}, seed_for(weight), loss.options());
  // In fp32: 65536 is beyond fp16, the seed it becomes part of mostly not.
  const auto wide =
      loss.options().dtype(loss.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  const at::Tensor scale = [&] {
    // A scaler may tell by this that gradients will follow.
    const at::AutoGradMode grad(true);
    return options_.scale_loss(at::ones({}, wide));
  }();
  GRADUS_CHECK("window", scale.defined() && scale.numel() == 1,
               "scale_loss must return the scalar that it was given, scaled");
  scales_.push_back(scale.detach().reshape({}).clone());
  return (scales_.back() * seed_for(weight)).to(loss.options());
}

// What gradients must still be multiplied by once the window holds losses of `share` in all.
double GradientWindow::State::remaining_factor(double share) const {
  if (options_.normalisation == Normalisation::sum) return 1.0;
  const double factor = reference_ / share;
  // Weights are counts in practice; the allowance is for sums of fractions.
  return std::abs(factor - 1.0) <= 1e-12 ? 1.0 : factor;
}

void GradientWindow::State::backward(const at::Tensor& loss, double weight,
                                     const MicroBatch& micro_batch) {
  check_ready(loss, weight);
  const std::optional<std::int64_t> examples = examples_of(weight, micro_batch);
  if (count() == 0) {
    if (wide_) wide_->clear();
    choose_reference(weight, examples);
    written_versions_.clear();
  }
  adapt_reference(loss.scalar_type(), weight);
  const bool last = micro_batch.last || fills(examples);
  const bool exchange = last && !options_.fp32_gradients;
  at::Tensor seed, value;
  {
    const at::NoGradGuard no_grad;
    seed = seed_of(loss, weight);
    value = loss.detach().clone();
  }
  broken_ = true;
  publish();
  if (options_.hooks.before_backward) options_.hooks.before_backward(exchange);
  if (wide_) wide_->collect(true);
  publish({.running = true,
           .last = last,
           .factor = last ? remaining_factor(total_share() + share(weight)) : 1.0});
  try {
    loss.backward(seed);
  } catch (...) {
    publish();
    if (wide_) wide_->collect(false);
    throw;
  }
  if (wide_) wide_->collect(false);
  broken_ = false;
  losses_.push_back(std::move(value));
  weights_.push_back(weight);
  examples_ += examples.value_or(0);
  examples_known_ = examples_known_ && examples.has_value();
  closed_ = micro_batch.last;
  exchanged_ = exchange && options_.hooks.before_backward != nullptr;
  publish();
}

double GradientWindow::State::loss_scale() const {
  if (scales_.empty()) return 1.0;
  const double scale = scales_.front().item<double>();
  for (const at::Tensor& other : scales_) {
    GRADUS_CHECK("window", other.item<double>() == scale,
                 "the loss scale must stay the same within a window; it changed from ", scale,
                 " to ", other.item<double>(),
                 ". Update the scaler after the optimizer step, and reset() this window");
  }
  return scale;
}

std::vector<at::Tensor> GradientWindow::State::gradients() const {
  std::vector<at::Tensor> all;
  all.reserve(parameters_.size());
  for (const at::Tensor& parameter : parameters_) {
    const at::Tensor wide = wide_ ? wide_->gradient(parameter) : at::Tensor();
    all.push_back(wide.defined() ? wide : parameter.grad());
  }
  return all;
}

std::vector<at::Tensor> GradientWindow::State::written() const {
  std::vector<at::Tensor> all;
  all.reserve(parameters_.size());
  for (const at::Tensor& parameter : parameters_) all.push_back(parameter.grad());
  return all;
}

void GradientWindow::State::remember_written() {
  if (!wide_) return;
  written_versions_.clear();
  for (const at::Tensor& gradient : written())
    written_versions_.push_back(gradient.defined() && !gradient.is_inference()
                                    ? static_cast<std::uint32_t>(gradient._version())
                                    : 0);
}

at::Tensor GradientWindow::State::wide_gradient(const at::Tensor& parameter) const {
  const auto wide = wide_->gradient(parameter);
  if (!wide.defined() || written_versions_.empty()) return wide;
  const auto found = std::ranges::find_if(
      parameters_, [&](const at::Tensor& known) { return known.is_same(parameter); });
  const at::Tensor gradient = parameter.grad();
  if (found == parameters_.end() || !gradient.defined() || gradient.is_inference()) return wide;
  const auto index = static_cast<std::size_t>(found - parameters_.begin());
  GRADUS_CHECK("window",
               static_cast<std::uint32_t>(gradient._version()) == written_versions_[index],
               "gradients must not be changed in place between finish() and wide_gradient(), which "
               "would not follow; .grad of parameter ",
               index,
               " was. To clip or unscale both: "
               "scale_gradients(clip_coefficient(gradient_norm(parameters), max_norm))");
  return wide;
}

void GradientWindow::State::scale_gradients(double factor) {
  GRADUS_CHECK("window", count() == 0 && !broken_,
               "gradients are scaled after finish(), before the next window begins; it holds ",
               count(), " micro-batches");
  GRADUS_CHECK("window", std::isfinite(factor), "factor must be finite; got ", factor);
  const at::NoGradGuard no_grad;
  multiply(gradients(), factor);
  for (const at::Tensor& parameter : parameters_) {
    const at::Tensor wide = wide_ ? wide_->gradient(parameter) : at::Tensor();
    if (wide.defined() && parameter.grad().defined()) parameter.mutable_grad().copy_(wide);
  }
  remember_written();
}

WindowResult GradientWindow::State::finish() {
  GRADUS_CHECK("window", !broken_,
               "the window must be reset() after a backward that threw: its gradients are "
               "incomplete");
  GRADUS_CHECK("window", count() > 0,
               "the window must hold a micro-batch to be finished; it is empty");
  const WindowHooks& hooks = options_.hooks;
  GRADUS_CHECK("window", !hooks.before_backward || exchanged_ || hooks.reduce,
               "gradients are exchanged in the window's last backward pass, and none of its ",
               count(),
               " was announced as that: give MicroBatch{.last = true} with the last "
               "one, or hooks.reduce");
  const at::NoGradGuard no_grad;
  WindowResult result{.micro_batches = count(),
                      .normalisation = options_.normalisation,
                      .loss_scale = loss_scale()};
  const bool weighted = weighs(options_.normalisation);
  for (std::size_t i = 0; i < losses_.size(); ++i) {
    result.weight += weights_[i];
    result.loss += losses_[i].item<double>() * (weighted ? weights_[i] : 1.0);
  }
  if (weighted) result.loss /= result.weight;
  if (options_.normalisation == Normalisation::mean)
    result.loss /= static_cast<double>(result.micro_batches);
  if (examples_known_) result.examples = examples_;
  result.partial = options_.effective_batch ? examples_ < *options_.effective_batch
                                            : count() < options_.micro_batches;

  const std::vector<at::Tensor> accumulated = gradients();
  if (hooks.reduce && !exchanged_) hooks.reduce(accumulated);
  double weight = result.weight;
  if (weighted && hooks.sum_weights) {
    weight = hooks.sum_weights(result.weight);
    GRADUS_CHECK("window", positive(weight), "sum_weights must return a total > 0; got ", weight);
  }
  const double factor = remaining_factor(weighted ? weight : total_share());
  if (factor != 1.0) multiply(accumulated, factor);
  if (wide_) wide_->write();
  result.skipped =
      options_.skip_non_finite && (!all_finite(accumulated) || (wide_ && !all_finite(written())));
  if (result.skipped) {
    reset();
    return result;
  }
  remember_written();
  start_next();
  return result;
}

void GradientWindow::State::expect_total_weight(double weight) {
  GRADUS_CHECK("window", count() == 0 && !broken_,
               "the total weight must be stated before the window's first micro-batch; "
               "it holds ",
               count());
  GRADUS_CHECK("window", weighs(options_.normalisation),
               "a total weight has a meaning with Normalisation::tokens or examples only");
  GRADUS_CHECK("window", positive(weight), "the total weight must be finite and > 0; got ", weight);
  stated_ = weight;
}

void GradientWindow::State::reset() {
  for (const auto& parameter : parameters_) parameter.mutable_grad().reset();
  if (wide_) wide_->clear();
  start_next();
}

void GradientWindow::State::start_next() {
  losses_.clear();
  scales_.clear();
  weights_.clear();
  examples_ = 0;
  examples_known_ = true;
  closed_ = false;
  exchanged_ = false;
  broken_ = false;
  stated_ = options_.total_weight;
  publish();
}

GradientWindow::GradientWindow(std::vector<at::Tensor> parameters, const WindowOptions& options)
    : state_(std::make_unique<State>(std::move(parameters), options)) {}
GradientWindow::~GradientWindow() = default;
GradientWindow::GradientWindow(GradientWindow&&) noexcept = default;
GradientWindow& GradientWindow::operator=(GradientWindow&&) noexcept = default;

void GradientWindow::backward(const at::Tensor& loss, double weight) {
  state_->backward(loss, weight, {});
}
void GradientWindow::backward(const at::Tensor& loss, double weight,
                              const MicroBatch& micro_batch) {
  state_->backward(loss, weight, micro_batch);
}
bool GradientWindow::full() const { return state_->full(); }
bool GradientWindow::empty() const { return state_->count() == 0; }
bool GradientWindow::is_last_micro_batch(std::optional<std::int64_t> examples) const {
  return state_->fills(examples);
}
WindowResult GradientWindow::finish() { return state_->finish(); }
void GradientWindow::expect_total_weight(double weight) { state_->expect_total_weight(weight); }
void GradientWindow::reset() { state_->reset(); }

at::Tensor GradientWindow::wide_gradient(const at::Tensor& parameter) const {
  GRADUS_CHECK("window", state_->wide() != nullptr,
               "wide gradients exist with WindowOptions::fp32_gradients only");
  GRADUS_CHECK("window", parameter.defined(), "parameter must be a defined tensor");
  return state_->wide_gradient(parameter);
}

void GradientWindow::scale_gradients(double factor) { state_->scale_gradients(factor); }

std::string GradientWindow::describe() const {
  const WindowOptions& options = state_->options();
  if (options.effective_batch) {
    return base::join("effective batch ", *options.effective_batch,
                      " examples a step, whatever the micro-batch, ", over(options.normalisation));
  }
  return base::join(micro_batches_text(options.micro_batches), " a step, ",
                    over(options.normalisation));
}

std::string describe(const WindowResult& result) {
  std::string text = micro_batches_text(result.micro_batches);
  if (result.examples) text += base::join(", effective batch ", *result.examples, " examples");
  if (result.normalisation == Normalisation::tokens || !result.examples) {
    text += base::join(", ", result.weight,
                       result.normalisation == Normalisation::tokens ? " tokens" : " in weight");
  }
  text += base::join(", loss ", result.loss);
  if (result.loss_scale != 1.0) text += base::join(", loss scale ", result.loss_scale);
  if (result.partial) text += " (partial window)";
  if (result.skipped) text += " (skipped: a gradient was not finite)";
  return text;
}

std::optional<OpenWindow> open_window(const std::vector<at::Tensor>& parameters) {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  for (const at::Tensor& parameter : parameters) {
    const auto [begin, end] = known.windows.equal_range(parameter.unsafeGetTensorImpl());
    for (auto it = begin; it != end; ++it) {
      const auto& window = *static_cast<const GradientWindow::State*>(it->second);
      if (window.spans_micro_batches()) return window.open();
    }
  }
  return std::nullopt;
}

std::optional<WindowPass> window_pass(const std::vector<at::Tensor>& parameters) {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  std::optional<WindowPass> unfinished;
  for (const at::Tensor& parameter : parameters) {
    const auto [begin, end] = known.windows.equal_range(parameter.unsafeGetTensorImpl());
    for (auto it = begin; it != end; ++it) {
      const auto pass = static_cast<const GradientWindow::State*>(it->second)->pass();
      if (!pass) continue;
      if (pass->running) return pass;
      unfinished = pass;
    }
  }
  return unfinished;
}

std::vector<std::int64_t> split_batch(std::int64_t effective_batch, std::int64_t micro_batch) {
  GRADUS_CHECK("window", effective_batch >= 1, "effective_batch must be >= 1; got ",
               effective_batch);
  GRADUS_CHECK("window", micro_batch >= 1, "micro_batch must be >= 1; got ", micro_batch);
  const std::int64_t count = (effective_batch - 1) / micro_batch + 1;
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(count), effective_batch / count);
  for (std::int64_t i = 0; i < effective_batch % count; ++i) ++sizes[static_cast<std::size_t>(i)];
  return sizes;
}

}  // namespace gradus::accumulate
