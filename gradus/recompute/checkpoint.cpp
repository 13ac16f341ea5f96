#include <gradus/recompute/checkpoint.h>

#include <algorithm>
#include <mutex>

#include <ATen/core/grad_mode.h>

#include <gradus/amp/autocast.h>
#include <gradus/base/error.h>
#include <gradus/base/names.h>
#include <gradus/base/rng.h>
#include <gradus/plane/op/op_plane.h>
#include <gradus/plane/saved/saved_plane.h>
#include <gradus/recompute/internal/region.h>

namespace gradus::recompute::internal {
namespace {

using plane::saved::Held;
using plane::saved::Packed;
using plane::saved::Value;

// One checkpointed call: what is needed to run it again, and what the latest second run made. The
// graph owns it through the places that stand for its saved tensors.
class CheckpointFrame : public std::enable_shared_from_this<CheckpointFrame> {
 public:
  CheckpointFrame(const CheckpointOptions& options,
                  std::function<void(std::vector<at::Tensor>)> again)
      : options_(options), again_(std::move(again)) {}

  void run_first(std::vector<at::Tensor> inputs,
                 const std::function<void(std::vector<at::Tensor>)>& first);

  /// The saved tensor number @p place, for the backward pass now running.
  at::Tensor get(std::size_t place);
  /// Nobody will ask for this place again.
  void release(std::size_t place);

 private:
  class FirstHooks;
  class AgainHooks;

  struct Input {
    Held held;
    bool requires_grad = false;
    bool changed = false;  // by the region itself
    bool defined = false;
  };
  struct Place {
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    bool released = false;
    at::Tensor made;  // by the run for made_for_
  };

  void run_again();
  void check_outside() const;
  void forget();

  const CheckpointOptions options_;
  const std::function<void(std::vector<at::Tensor>)> again_;
  std::vector<Input> inputs_;
  RegionRecord record_;
  std::optional<base::RngState> rng_;
  amp::AutocastState autocast_ = amp::AutocastState::capture();
  std::mutex mutex_;  // backward passes of several threads may share a graph
  std::vector<Place> places_;
  int made_for_ = -1;  // the backward pass whose run filled the places
};

// First run: a place number stands for each saved tensor, which is dropped.
class CheckpointFrame::FirstHooks final : public plane::saved::Hooks {
 public:
  explicit FirstHooks(std::shared_ptr<CheckpointFrame> frame) : frame_(std::move(frame)) {}
  bool reads_data() const override { return false; }
  std::optional<Packed> pack(const Value& value) override {
    const std::size_t place = frame_->places_.size();
    frame_->places_.push_back({value.tensor.sizes().vec(), value.tensor.scalar_type(), false, {}});
    // Released when autograd drops the saved tensor, which ends the last copy of the function
    // below.
    const std::shared_ptr<void> lease(nullptr,
                                      [frame = frame_, place](void*) { frame->release(place); });
    return Packed{{}, [frame = frame_, place, lease](auto) { return frame->get(place); }};
  }

 private:
  std::shared_ptr<CheckpointFrame> frame_;
};

// Second run: fills the places in the same order.
class CheckpointFrame::AgainHooks final : public plane::saved::Hooks {
 public:
  AgainHooks(CheckpointFrame& frame, Replayer& replayer) : frame_(frame), replayer_(replayer) {}
  std::optional<Packed> pack(const Value& value) override {
    const std::size_t place = next_++;
    if (place < frame_.places_.size()) {
      Place& wanted = frame_.places_[place];
      if (frame_.options_.check_determinism) {
        if (value.tensor.sizes() != at::IntArrayRef(wanted.sizes) ||
            value.tensor.scalar_type() != wanted.dtype) {
          throw UserError(base::join(
              "[checkpoint] a checkpointed region must save the same tensors again; number ", place,
              " was ", wanted.dtype, " ", at::IntArrayRef(wanted.sizes), " and is now ",
              base::describe_tensor(value.tensor)));
        }
      }
      if (!wanted.released) wanted.made = value.tensor;
    }
    if (frame_.options_.early_stop && next_ >= frame_.places_.size()) replayer_.stop();
    // The second run's own graph is never used, unless the region runs a backward pass inside
    // itself.
    return Packed{{}, [tensor = value.tensor](auto) { return tensor; }};
  }
  std::size_t count() const { return next_; }

 private:
  CheckpointFrame& frame_;
  Replayer& replayer_;
  std::size_t next_ = 0;
};

void CheckpointFrame::run_first(std::vector<at::Tensor> inputs,
                                const std::function<void(std::vector<at::Tensor>)>& first) {
  // Through the hooks of an outer checkpoint, if any: what lies inside that one is dropped and made
  // again too.
  for (const at::Tensor& input : inputs) {
    Input& kept = inputs_.emplace_back();
    kept.defined = input.defined();
    if (!kept.defined) continue;
    kept.requires_grad = input.requires_grad();
    kept.held = Held(input);
  }
  if (options_.preserve_rng_state) rng_ = base::RngState::capture();
  const auto recorder = std::make_shared<Recorder>(record_);
  {
    const auto watch = plane::op::push(plane::op::Order::record, recorder);
    const auto hooks = plane::saved::push(plane::saved::Order::checkpoint,
                                          std::make_shared<FirstHooks>(shared_from_this()));
    first(inputs);
  }
  recorder->finish();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs_[i].defined || !inputs[i].has_storage()) continue;
    const auto changed = record_.changed.find(inputs[i].storage().unsafeGetStorageImpl());
    if (changed == record_.changed.end()) continue;
    const at::NoGradGuard no_grad;
    inputs_[i].changed = true;
    inputs_[i].held = Held(over_bytes(inputs[i], changed->second.bytes_before));
  }
}

void CheckpointFrame::check_outside() const {
  for (const auto& [storage, outside] : record_.read) {
    if (outside.counter.current_version() == outside.version) continue;
    throw UserError(base::join(
        "[checkpoint] what a checkpointed region reads must not change before backward; ",
        outside.description, " was at version ", outside.version, " and is now at version ",
        outside.counter.current_version(), ". Change it after backward, or change a clone."));
  }
}

void CheckpointFrame::forget() {
  for (Place& place : places_) place.made = at::Tensor();
  made_for_ = -1;
}

void CheckpointFrame::run_again() {
  forget();
  check_outside();
  std::vector<at::Tensor> inputs;
  for (const Input& input : inputs_) {
    if (!input.defined) {
      inputs.emplace_back();
      continue;
    }
    at::Tensor tensor = input.held.get().detach();
    tensor.requires_grad_(input.requires_grad);
    // A region that changes its input needs one that is no leaf, and leaves ours as it is.
    if (input.changed) {
      const at::AutoGradMode grad(true);
      tensor = tensor.clone();
    }
    inputs.push_back(std::move(tensor));
  }
  const auto replayer = std::make_shared<Replayer>(record_, this, options_.check_determinism);
  const auto again_hooks = std::make_shared<AgainHooks>(*this, *replayer);
  {
    std::vector<at::Generator> custom;
    for (const auto& entry : record_.generators) custom.push_back(entry.first);
    std::optional<base::RngGuard> rng;
    if (options_.preserve_rng_state) {
      rng.emplace(custom);
      rng_->restore();
      for (const auto& [generator, state] : record_.generators) {
        at::Generator target = generator;
        const std::lock_guard lock(target.mutex());
        target.set_state(state);
      }
    }
    const amp::AutocastStateGuard autocast(autocast_);
    const at::AutoGradMode grad(true);
    const auto watch = plane::op::push(plane::op::Order::record, replayer);
    const auto hooks = plane::saved::push(plane::saved::Order::checkpoint, again_hooks);
    try {
      again_(std::move(inputs));
      replayer->finish();
    } catch (const StopRegion& stopped) {
      if (stopped.frame != this) throw;
    }
  }
  if (again_hooks->count() < places_.size()) {
    forget();
    throw UserError(
        base::join("[checkpoint] a checkpointed region must save the same tensors again; it saved ",
                   places_.size(), " and now ", again_hooks->count(),
                   ". Did the module switch between train() and eval()?"));
  }
}

at::Tensor CheckpointFrame::get(std::size_t place) {
  const std::lock_guard lock(mutex_);
  const int pass = plane::saved::current_backward();
  if (!places_[place].made.defined() || made_for_ != pass) {
    try {
      run_again();
    } catch (...) {
      forget();
      throw;
    }
    made_for_ = pass;
    if (pass >= 0) {
      // A graph that is kept keeps no recomputed tensors beyond the pass.
      plane::saved::on_backward_end([weak = weak_from_this(), pass] {
        const auto frame = weak.lock();
        if (frame == nullptr) return;
        const std::lock_guard frame_lock(frame->mutex_);
        if (frame->made_for_ == pass) frame->forget();
      });
    }
  }
  at::Tensor tensor = places_[place].made;
  if (pass < 0) forget();
  return tensor;
}

void CheckpointFrame::release(std::size_t place) {
  const std::lock_guard lock(mutex_);
  places_[place].released = true;
  places_[place].made = at::Tensor();
}

}  // namespace

void run_checkpointed(const CheckpointOptions& options, std::vector<at::Tensor> inputs,
                      const std::function<void(std::vector<at::Tensor>)>& first,
                      std::function<void(std::vector<at::Tensor>)> again) {
  if (!at::GradMode::is_enabled()) {
    first(std::move(inputs));
    return;
  }
  const auto frame = std::make_shared<CheckpointFrame>(options, std::move(again));
  frame->run_first(std::move(inputs), first);
}

}  // namespace gradus::recompute::internal

namespace gradus::recompute {

at::Tensor checkpoint_sequential(const std::vector<Stage>& stages, std::int64_t segments,
                                 at::Tensor input, const CheckpointOptions& options) {
  const auto count = static_cast<std::int64_t>(stages.size());
  GRADUS_CHECK("checkpoint", segments >= 1 && segments <= count,
               "segments must be between 1 and the number of stages (", count, "); got ", segments);
  const auto run = [&stages](std::int64_t begin, std::int64_t end) {
    return [part = std::vector<Stage>(stages.begin() + begin, stages.begin() + end)](at::Tensor x) {
      for (const Stage& stage : part) x = stage(std::move(x));
      return x;
    };
  };
  const std::int64_t size = count / segments;
  for (std::int64_t i = 0; i + 1 < segments; ++i) {
    input = checkpoint(options, run(i * size, (i + 1) * size), std::move(input));
  }
  return run((segments - 1) * size, count)(std::move(input));
}

}  // namespace gradus::recompute
