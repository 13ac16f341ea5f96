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

#include <gradus/accumulate/wide_gradients.h>
#include <gradus/base/error.h>

namespace gradus::accumulate {
namespace {

bool positive(double value) { return std::isfinite(value) && value > 0.0; }

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
  OpenWindow open() const {
    return {.micro_batches = options_.effective_batch ? 0 : options_.micro_batches,
            .held = count(),
            .in_last_backward = in_last_backward_,
            .remaining_factor = in_last_backward_ ? last_factor_ : 1.0};
  }

 private:
  void check_options() const;
  void check_ready(const at::Tensor& loss, double weight) const;
  void check_cleared() const;
  std::optional<std::int64_t> examples_of(double weight, const MicroBatch& micro_batch) const;
  void choose_reference(double weight, std::optional<std::int64_t> examples);
  double seed_for(double weight) const;
  at::Tensor seed_of(const at::Tensor& loss, double weight);
  double total_weight() const { return std::accumulate(weights_.begin(), weights_.end(), 0.0); }
  double remaining_factor(std::int64_t count, double weight) const;
  double loss_scale() const;
  std::vector<at::Tensor> gradients() const;
  void start_next();

  std::vector<at::Tensor> parameters_;
  WindowOptions options_;
  std::unique_ptr<WideGradients> wide_;
  double reference_ = 1.0;  // What weights are divided by as they come.
  bool expected_ = false;   // ... which is the total weight that is expected.
  std::optional<double> stated_;
  // Detached; read back only in finish(), so that no micro-batch waits for a device.
  std::vector<at::Tensor> losses_, scales_;
  std::vector<double> weights_;
  std::int64_t examples_ = 0;
  bool examples_known_ = true;
  bool closed_ = false;  // The caller announced the last micro-batch.
  bool exchanged_ = false;
  bool broken_ = false;
  bool in_last_backward_ = false;
  double last_factor_ = 1.0;
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
  start_next();
  const std::lock_guard lock(registry().mutex);
  for (const void* parameter : seen) registry().windows.emplace(parameter, this);
}

GradientWindow::State::~State() {
  const std::lock_guard lock(registry().mutex);
  std::erase_if(registry().windows, [&](const auto& entry) { return entry.second == this; });
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
  expected_ = stated_.has_value();
  reference_ = stated_.value_or(1.0);
  const WindowHooks& hooks = options_.hooks;
  if (expected_ || hooks.before_backward || hooks.reduce || hooks.sum_weights) return;
  if (options_.effective_batch && options_.normalisation == Normalisation::examples) {
    expected_ = true;
    reference_ = static_cast<double>(*options_.effective_batch);
    return;
  }
  const double total =
      options_.effective_batch
          ? weight * static_cast<double>(*options_.effective_batch) / static_cast<double>(*examples)
          : weight * static_cast<double>(options_.micro_batches);
  if (positive(total)) reference_ = std::exp2(std::ceil(std::log2(total)));
}

double GradientWindow::State::seed_for(double weight) const {
  if (weighs(options_.normalisation)) return weight / reference_;
  if (options_.normalisation == Normalisation::mean)
    return 1.0 / static_cast<double>(options_.micro_batches);
  return 1.0;
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

// What gradients must still be multiplied by once the window holds `count` losses of `weight`.
double GradientWindow::State::remaining_factor(std::int64_t count, double weight) const {
  if (options_.normalisation == Normalisation::mean)
    return static_cast<double>(options_.micro_batches) / static_cast<double>(count);
  if (!weighs(options_.normalisation)) return 1.0;
  const double factor = reference_ / weight;
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
  }
  const bool last = micro_batch.last || fills(examples);
  const bool exchange = last && !options_.fp32_gradients;
  at::Tensor seed, value;
  {
    const at::NoGradGuard no_grad;
    seed = seed_of(loss, weight);
    value = loss.detach().clone();
  }
  broken_ = true;
  if (options_.hooks.before_backward) options_.hooks.before_backward(exchange);
  last_factor_ = last ? remaining_factor(count() + 1, total_weight() + weight) : 1.0;
  in_last_backward_ = last;
  if (wide_) wide_->collect(true);
  try {
    loss.backward(seed);
  } catch (...) {
    in_last_backward_ = false;
    if (wide_) wide_->collect(false);
    throw;
  }
  in_last_backward_ = false;
  if (wide_) wide_->collect(false);
  broken_ = false;
  losses_.push_back(std::move(value));
  weights_.push_back(weight);
  examples_ += examples.value_or(0);
  examples_known_ = examples_known_ && examples.has_value();
  closed_ = micro_batch.last;
  exchanged_ = exchange && options_.hooks.before_backward != nullptr;
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
  const double factor = remaining_factor(result.micro_batches, weight);
  if (factor != 1.0) multiply(accumulated, factor);
  result.skipped = options_.skip_non_finite && !all_finite(accumulated);
  if (result.skipped) {
    reset();
    return result;
  }
  if (wide_) wide_->write();
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
  return state_->wide()->gradient(parameter);
}

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
