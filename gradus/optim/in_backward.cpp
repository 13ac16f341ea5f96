#include <gradus/optim/in_backward.h>

#include <cmath>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>

#include <gradus/accumulate/backward_steps.h>
#include <gradus/accumulate/window.h>
#include <gradus/base/error.h>
#include <gradus/optim/clip.h>
#include <gradus/optim/internal/in_backward_registry.h>
#include <gradus/optim/internal/working_set.h>
#include <gradus/plane/grad/grad_plane.h>

namespace gradus::optim {
namespace {

constexpr const char* kComponent = "in_backward";

// What the hooks do with a gradient that is complete.
enum class Mode : std::uint8_t {
  hold,     // Leave it: the window goes on.
  fire,     // Update and free.
  measure,  // Take its norm and free: the first of two passes.
  refuse,   // A backward pass that cannot be right.
};

void check_options(const InBackwardOptions& options) {
  GRADUS_CHECK(kComponent, !options.accumulation || !options.clip_norm,
               "clip_norm must not be combined with accumulation: the norm is that of the whole "
               "window's gradient, which would have to be computed twice. Clip by value, or step "
               "after backward");
  GRADUS_CHECK(kComponent, !options.clip_norm || *options.clip_norm >= 0.0,
               "clip_norm must be >= 0; got ", options.clip_norm.value_or(0.0));
  GRADUS_CHECK(
      kComponent,
      !options.clip_value || (std::isfinite(*options.clip_value) && *options.clip_value >= 0.0),
      "clip_value must be finite and >= 0; got ", options.clip_value.value_or(0.0));
  GRADUS_CHECK(kComponent, std::isfinite(options.loss_scale) && options.loss_scale > 0.0,
               "loss_scale must be finite and > 0; got ", options.loss_scale);
}

at::Tensor norm_of(const at::Tensor& gradient) {
  return at::linalg_vector_norm(gradient, 2, at::OptionalIntArrayRef(), false,
                                internal::working_dtype(gradient));
}

// Leaves of others keep their gradients through a backward pass that is only for measuring.
// (Backward's `inputs` would leave them out too, but not see weights inside a reentrant region.)
class SetAsideGradients {
 public:
  explicit SetAsideGradients(std::vector<at::Tensor> leaves) : leaves_(std::move(leaves)) {
    for (const auto& leaf : leaves_) gradients_.push_back(std::exchange(leaf.mutable_grad(), {}));
  }
  ~SetAsideGradients() {
    for (std::size_t i = 0; i < leaves_.size(); ++i) {
      leaves_[i].mutable_grad() = std::move(gradients_[i]);
    }
  }
  SetAsideGradients(const SetAsideGradients&) = delete;
  SetAsideGradients& operator=(const SetAsideGradients&) = delete;

 private:
  std::vector<at::Tensor> leaves_, gradients_;
};

}  // namespace

struct OptimizerInBackward::Impl {
  Optimizer& optimizer;
  InBackwardOptions options;
  std::mutex mutex;  // hooks of several devices run on several threads
  Mode mode = Mode::hold;
  double coefficient = 1.0;       // of the norm's clipping, in the second pass
  std::vector<bool> fired;        // by parameter, in this step
  std::vector<at::Tensor> norms;  // by parameter; undefined where none was measured
  std::int64_t fired_count = 0;
  std::vector<plane::grad::Hook> hooks;
  std::size_t registered = 0;
  std::vector<at::Tensor> parameters;  // of the optimizer
  std::optional<accumulate::BackwardSteps> declared;

  Impl(Optimizer& optimizer, const InBackwardOptions& options)
      : optimizer(optimizer), options(options) {}

  Mode resting_mode() const {
    if (options.clip_norm) return Mode::refuse;
    return options.accumulation ? Mode::hold : Mode::fire;
  }

  void begin_step() {
    mode = resting_mode();
    coefficient = 1.0;
    fired.assign(optimizer.slots_.size(), false);
    norms.assign(optimizer.slots_.size(), {});
    fired_count = 0;
  }

  const std::string& name_of(std::size_t index) const { return optimizer.slots_[index].name; }

  // Brings a gradient to what the optimizer shall see.
  void prepare(std::size_t index, at::Tensor gradient) {
    if (options.loss_scale != 1.0) gradient.mul_(1.0 / options.loss_scale);
    if (options.measure_norm && !options.clip_norm) norms[index] = norm_of(gradient);
    if (coefficient != 1.0) gradient.mul_(coefficient);
    if (options.clip_value) gradient.clamp_(-*options.clip_value, *options.clip_value);
  }

  void measure(std::size_t index, const at::Tensor& leaf) {
    GRADUS_CHECK(kComponent, !norms[index].defined(), "parameter '", name_of(index),
                 "' must get its gradient in one part; got a second one in one backward pass. A "
                 "reentrant recomputed block uses it as well as other code: recompute without "
                 "reentrance, or step after backward");
    norms[index] = norm_of(leaf.grad()) / options.loss_scale;
    leaf.mutable_grad().reset();
  }

  // What the window multiplies gradients by, if its last backward pass is running; nothing if the
  // gradient has to wait.
  std::optional<double> window_factor(std::size_t index, const at::Tensor& leaf) const {
    const auto pass = accumulate::window_pass({leaf});
    if (mode == Mode::hold) return pass && pass->last ? std::optional(pass->factor) : std::nullopt;
    GRADUS_CHECK(kComponent, !pass || pass->last, "parameter '", name_of(index),
                 "' must step in the last backward pass of its GradientWindow; got a step before. "
                 "The window knows its last pass: leave begin_last_pass() out, give "
                 "MicroBatch{.last = true} to end a window early, and run no backward pass but the "
                 "window's before finish()");
    return pass ? pass->factor : 1.0;
  }

  void fire(std::size_t index, const at::Tensor& leaf, double factor) {
    GRADUS_CHECK(
        kComponent, !fired[index], "parameter '", name_of(index),
        "' must get one gradient a step; got another after it was updated. Call step() after each "
        "backward pass; to accumulate over several, set accumulation and call begin_last_pass() "
        "before the last; a reentrant recomputed block that shares the parameter cannot step in "
        "backward");
    auto& slot = optimizer.slots_[index];
    optimizer.check_gradient(slot);
    if (factor != 1.0) leaf.mutable_grad().mul_(factor);
    prepare(index, leaf.grad());
    optimizer.update_all({&slot});
    leaf.mutable_grad().reset();
    fired[index] = true;
    ++fired_count;
  }

  void on_gradient(std::size_t index, const at::Tensor& leaf) {
    const at::NoGradGuard no_grad;
    const std::lock_guard lock(mutex);
    switch (mode) {
      case Mode::hold:
      case Mode::fire:
        if (const auto factor = window_factor(index, leaf)) fire(index, leaf, *factor);
        return;
      case Mode::measure:
        measure(index, leaf);
        return;
      case Mode::refuse: {
        const double norm = options.clip_norm.value_or(0.0);
        leaf.mutable_grad().reset();
        GRADUS_CHECK(kComponent, mode != Mode::refuse, "with clip_norm = ", norm,
                     " the backward pass must be run by OptimizerInBackward::backward(loss), once "
                     "a step: it needs the norm of all gradients before the first is used");
      }
    }
  }

  // Leaves that backward from `loss` reaches and this optimizer does not own.
  std::vector<at::Tensor> other_leaves(const at::Tensor& loss) const {
    std::unordered_set<const void*> own;
    for (const auto& slot : optimizer.slots_) own.insert(slot.parameter.unsafeGetTensorImpl());
    std::vector<at::Tensor> result;
    for (const auto& node : plane::grad::walk({loss})) {
      auto leaf = node.leaf();
      if (leaf.defined() && !own.contains(leaf.unsafeGetTensorImpl())) {
        result.push_back(std::move(leaf));
      }
    }
    return result;
  }

  std::optional<double> total_norm() const {
    std::vector<at::Tensor> measured;
    for (const auto& norm : norms) {
      if (norm.defined()) measured.push_back(norm.to(at::kCPU, at::kDouble));
    }
    if (measured.empty()) return std::nullopt;
    return at::linalg_vector_norm(at::stack(measured)).item<double>();
  }

  void check_finite() const {
    for (std::size_t i = 0; i < norms.size(); ++i) {
      GRADUS_CHECK(kComponent, !norms[i].defined() || std::isfinite(norms[i].item<double>()),
                   "gradient of parameter '", name_of(i),
                   "' must be finite; got NaN or infinity. A loss or an activation overflowed: "
                   "lower the learning rate or the loss scale");
    }
  }

  void release() {
    hooks.clear();
    declared.reset();
    for (std::size_t i = 0; i < registered; ++i) {
      internal::unregister_in_backward(optimizer.slots_[i].parameter);
    }
    optimizer.in_backward_ = false;
  }
};

OptimizerInBackward::OptimizerInBackward(Optimizer& optimizer, const InBackwardOptions& options) {
  check_options(options);
  GRADUS_CHECK(kComponent, !optimizer.in_backward_, "the optimizer '", optimizer.component(),
               "' must be held by one OptimizerInBackward; another one holds it");
  GRADUS_CHECK(kComponent, optimizer.non_finite_policy() != NonFinitePolicy::skip,
               "the optimizer '", optimizer.component(),
               "' must not have NonFinitePolicy::skip: when a gradient that is not finite comes, "
               "other parameters are updated already. Use refuse, or step after backward");
  for (const auto& slot : optimizer.slots_) {
    GRADUS_CHECK(kComponent, !slot.parameter.grad().defined(), "parameter '", slot.name,
                 "' must not have a gradient yet: it would become part of the first step. Call "
                 "zero_grad() first");
  }
  impl_ = std::make_unique<Impl>(optimizer, options);
  impl_->begin_step();
  for (const auto& slot : optimizer.slots_) impl_->parameters.push_back(slot.parameter);
  impl_->declared.emplace(impl_->parameters, options.accumulation);
  try {
    for (std::size_t i = 0; i < optimizer.slots_.size(); ++i) {
      const auto& slot = optimizer.slots_[i];
      GRADUS_CHECK(kComponent, internal::register_in_backward(slot.parameter), "parameter '",
                   slot.name,
                   "' must be stepped in backward by one optimizer; another one steps it already");
      impl_->registered = i + 1;
      // A frozen parameter gets no gradient; one that is thawed later is updated in step().
      if (!slot.parameter.requires_grad()) continue;
      impl_->hooks.push_back(plane::grad::on_accumulated(
          slot.parameter,
          [impl = impl_.get(), i](const at::Tensor& leaf) { impl->on_gradient(i, leaf); }));
    }
  } catch (...) {
    impl_->release();
    throw;
  }
  optimizer.in_backward_ = true;
}

OptimizerInBackward::~OptimizerInBackward() { impl_->release(); }

Optimizer& OptimizerInBackward::optimizer() const { return impl_->optimizer; }
const InBackwardOptions& OptimizerInBackward::options() const { return impl_->options; }

void OptimizerInBackward::backward(const at::Tensor& loss) {
  if (!impl_->options.clip_norm) {
    loss.backward();
    return;
  }
  struct ModeScope {
    Impl& impl;
    ~ModeScope() { impl.mode = Mode::refuse; }
  } scope{*impl_};
  GRADUS_CHECK(kComponent, impl_->fired_count == 0,
               "step() must be called after each backward pass with clip_norm; ",
               impl_->fired_count, " parameters were updated since");
  impl_->norms.assign(impl_->norms.size(), {});
  impl_->mode = Mode::measure;
  {
    const SetAsideGradients others(impl_->other_leaves(loss));
    loss.backward({}, /*keep_graph=*/true);
  }
  if (impl_->optimizer.non_finite_policy() == NonFinitePolicy::refuse) impl_->check_finite();
  impl_->coefficient =
      clip_coefficient(impl_->total_norm().value_or(0.0), *impl_->options.clip_norm);
  impl_->mode = Mode::fire;
  loss.backward();
}

void OptimizerInBackward::begin_last_pass() {
  GRADUS_CHECK(kComponent, impl_->options.accumulation,
               "begin_last_pass() must be used with the option accumulation; without it each "
               "backward pass is the last one");
  impl_->mode = Mode::fire;
}

InBackwardResult OptimizerInBackward::step() {
  const at::NoGradGuard no_grad;
  auto& optimizer = impl_->optimizer;
  GRADUS_CHECK(kComponent, !accumulate::window_pass(impl_->parameters),
               "step() must come after finish(), or reset(), of the GradientWindow over the "
               "parameters, which has still to normalise gradients of parameters that did not step "
               "in its last backward pass");
  const auto left = optimizer.slots_with_gradient();
  GRADUS_CHECK(kComponent, left.empty() || !impl_->options.clip_norm, "parameter '",
               left.empty() ? std::string() : left.front()->name,
               "' must not have a gradient outside backward(loss) with clip_norm; call reset()");
  for (const auto* slot : left) {
    const auto index = static_cast<std::size_t>(slot - optimizer.slots_.data());
    GRADUS_CHECK(kComponent, !impl_->fired[index], "parameter '", slot->name,
                 "' must get one gradient a step; got another after it was updated: the backward "
                 "pass failed. Call reset()");
  }
  for (const auto* slot : left) {
    impl_->prepare(static_cast<std::size_t>(slot - optimizer.slots_.data()),
                   slot->parameter.grad());
  }
  InBackwardResult result{.in_backward = impl_->fired_count};
  result.updated = result.in_backward + optimizer.update_all(left).updated;
  for (const auto* slot : left) slot->parameter.mutable_grad().reset();
  result.gradient_norm = impl_->total_norm();
  impl_->begin_step();
  return result;
}

void OptimizerInBackward::reset() {
  impl_->optimizer.zero_grad();
  impl_->begin_step();
}

bool steps_in_backward(const at::Tensor& parameter) {
  return internal::steps_in_backward(parameter);
}

}  // namespace gradus::optim
