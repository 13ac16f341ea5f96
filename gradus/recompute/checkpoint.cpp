#include <gradus/recompute/checkpoint.h>

#include <mutex>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/SmallVector.h>

#include <gradus/base/error.h>
#include <gradus/base/names.h>
#include <gradus/plane/op/op_plane.h>
#include <gradus/plane/saved/saved_plane.h>
#include <gradus/recompute/internal/reentrant.h>
#include <gradus/recompute/internal/region.h>
#include <gradus/recompute/internal/surroundings.h>

namespace gradus::recompute {
namespace {

// Of this thread: options in force, and the group of backward passes.
thread_local CheckpointOverride::Options overrides;
thread_local int current_group = 0;  // 0: none; else below -1, which no backward pass has
thread_local int groups_made = 0;
thread_local std::vector<std::function<void()>> group_ends;

CheckpointOptions in_force(CheckpointOptions options) {
  options.early_stop = overrides.early_stop.value_or(options.early_stop);
  options.debug = overrides.debug.value_or(options.debug);
  return options;
}

}  // namespace

CheckpointOverride::CheckpointOverride(const Options& options) : outer_(overrides) {
  if (options.early_stop) overrides.early_stop = options.early_stop;
  if (options.debug) overrides.debug = options.debug;
}

CheckpointOverride::~CheckpointOverride() { overrides = outer_; }

BackwardGroup::BackwardGroup() {
  GRADUS_CHECK("checkpoint", current_group == 0,
               "backward groups do not nest; this thread is in "
               "one already");
  current_group = -2 - groups_made++;
}

BackwardGroup::~BackwardGroup() {
  current_group = 0;
  for (const auto& end : std::exchange(group_ends, {})) end();
}

namespace internal {
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
      : options_(options), again_(std::move(again)), surroundings_(options) {}

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
    c10::SmallVector<std::int64_t, 5> sizes;
    at::ScalarType dtype;
    bool released = false;
    at::Tensor made;  // by the run for made_for_
  };

  Compare compare() const {
    return options_.determinism_check == DeterminismCheck::none ? Compare::nothing : Compare::steps;
  }
  void run_again();
  void note_changed_inputs(const std::vector<at::Tensor>& inputs);
  std::vector<at::Tensor> inputs_again() const;
  void forget();

  const CheckpointOptions options_;
  const std::function<void(std::vector<at::Tensor>)> again_;
  std::vector<Input> inputs_;
  RegionRecord record_;
  const Surroundings surroundings_;
  std::mutex mutex_;  // backward passes of several threads may share a graph
  std::vector<Place> places_;
  int made_for_ = -1;  // the backward pass whose run filled the places
  // While the first run is under way: a backward pass inside the region may want places.
  Recorder* recorder_ = nullptr;
  const std::vector<at::Tensor>* first_inputs_ = nullptr;
};

// First run: a place number stands for each saved tensor, which is dropped.
class CheckpointFrame::FirstHooks final : public plane::saved::Hooks {
 public:
  FirstHooks(std::shared_ptr<CheckpointFrame> frame, std::shared_ptr<Recorder> recorder)
      : frame_(std::move(frame)), recorder_(std::move(recorder)) {}
  bool reads_data() const override { return false; }
  std::optional<Packed> pack(const Value& value) override {
    const std::size_t place = frame_->places_.size();
    const auto sizes = value.tensor.sizes();
    frame_->places_.push_back(
        {{sizes.begin(), sizes.end()}, value.tensor.scalar_type(), false, {}});
    recorder_->saved(value);
    // Released when autograd drops the saved tensor, which ends the last copy of the function
    // below.
    auto lease = std::make_shared<Lease>(frame_, place);
    return Packed{{}, [lease = std::move(lease)](auto) { return lease->frame->get(lease->place); }};
  }

 private:
  struct Lease {
    Lease(std::shared_ptr<CheckpointFrame> of, std::size_t number)
        : frame(std::move(of)), place(number) {}
    ~Lease() { frame->release(place); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    const std::shared_ptr<CheckpointFrame> frame;
    const std::size_t place;
  };

  std::shared_ptr<CheckpointFrame> frame_;
  std::shared_ptr<Recorder> recorder_;
};

// Second run: fills the places in the same order.
class CheckpointFrame::AgainHooks final : public plane::saved::Hooks, public Places {
 public:
  AgainHooks(CheckpointFrame& frame, Replayer& replayer) : frame_(frame), replayer_(replayer) {}
  std::optional<Packed> pack(const Value& value) override {
    fill(value.tensor);
    // The second run's own graph is never used, unless the region runs a backward pass inside
    // itself.
    return Packed{{}, [tensor = value.tensor](auto) { return tensor; }};
  }
  void fill(const at::Tensor& tensor) override {
    const std::size_t place = next_++;
    if (place < frame_.places_.size()) {
      Place& wanted = frame_.places_[place];
      if (frame_.options_.determinism_check != DeterminismCheck::none) {
        if (tensor.sizes() != at::IntArrayRef(wanted.sizes) ||
            tensor.scalar_type() != wanted.dtype) {
          replayer_.report_difference();
          throw UserError(base::join(
              "[checkpoint] a checkpointed region must save the same tensors again; number ", place,
              " was ", wanted.dtype, " ", at::IntArrayRef(wanted.sizes), " and is now ",
              base::describe_tensor(tensor)));
        }
      }
      if (!wanted.released) wanted.made = tensor;
    }
    if (early_stop_ && next_ >= frame_.places_.size()) replayer_.stop();
  }
  // The region is only half run the first time: what follows is not for backward to see.
  void stop_early() { early_stop_ = true; }
  std::size_t count() const override { return next_; }

 private:
  CheckpointFrame& frame_;
  Replayer& replayer_;
  bool early_stop_ = frame_.options_.early_stop;
  std::size_t next_ = 0;
};

void CheckpointFrame::run_first(std::vector<at::Tensor> inputs,
                                const std::function<void(std::vector<at::Tensor>)>& first) {
  // Through the hooks of an outer checkpoint, if any: what lies inside that one is dropped and made
  // again too.
  inputs_.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    Input& kept = inputs_.emplace_back();
    kept.defined = input.defined();
    if (!kept.defined) continue;
    kept.requires_grad = input.requires_grad();
    kept.held = Held(input);
  }
  const auto recorder =
      std::make_shared<Recorder>(record_, Recorder::Options{.debug = options_.debug,
                                                            .keep_rng = options_.preserve_rng_state,
                                                            .compare = compare(),
                                                            .policy = options_.selective});
  recorder_ = recorder.get();
  first_inputs_ = &inputs;
  struct Done {
    CheckpointFrame& frame;
    ~Done() {
      frame.recorder_ = nullptr;
      frame.first_inputs_ = nullptr;
    }
  };
  {
    const Done done{*this};
    const InnermostRegion innermost(recorder.get());
    const auto watch = plane::op::push(plane::op::Order::record, recorder);
    const auto hooks =
        plane::saved::push(plane::saved::Order::checkpoint,
                           std::make_shared<FirstHooks>(shared_from_this(), recorder));
    const std::shared_ptr<void> context =
        options_.context ? options_.context(RegionRun::first) : nullptr;
    first(inputs);
  }
  recorder->finish();
  note_changed_inputs(inputs);
}

void CheckpointFrame::note_changed_inputs(const std::vector<at::Tensor>& inputs) {
  if (record_.changed.empty()) return;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs_[i].changed || !inputs_[i].defined || !inputs[i].has_storage()) continue;
    const auto changed = record_.changed.find(inputs[i].storage().unsafeGetStorageImpl());
    if (changed == record_.changed.end()) continue;
    // Each argument would get a copy of its own the second time.
    for (std::size_t k = 0; k < inputs.size(); ++k) {
      GRADUS_CHECK("checkpoint",
                   k == i || !inputs[k].defined() || !inputs[k].has_storage() ||
                       inputs[k].storage().unsafeGetStorageImpl() !=
                           inputs[i].storage().unsafeGetStorageImpl(),
                   "a region must not change an argument in place that shares its memory with "
                   "another argument; "
                   "arguments ",
                   i, " and ", k, " do. Pass a clone");
    }
    const at::NoGradGuard no_grad;
    inputs_[i].changed = true;
    inputs_[i].held = Held(over_bytes(inputs[i], changed->second.bytes_before));
  }
}

void CheckpointFrame::forget() {
  for (Place& place : places_) place.made = at::Tensor();
  made_for_ = -1;
}

std::vector<at::Tensor> CheckpointFrame::inputs_again() const {
  std::vector<at::Tensor> inputs;
  inputs.reserve(inputs_.size());
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
  return inputs;
}

void CheckpointFrame::run_again() {
  forget();
  const bool inside_first = recorder_ != nullptr;
  struct Resume {
    Recorder* recorder;
    ~Resume() {
      if (recorder != nullptr) recorder->pause(false);
    }
  };
  const Resume resume{recorder_};
  if (inside_first) {
    recorder_->pause(true);
    note_changed_inputs(*first_inputs_);
  } else {
    check_unchanged(record_);
  }
  std::vector<at::Tensor> inputs = inputs_again();
  // What a run inside the first saves after this comes after what backward wants now.
  const std::size_t wanted = places_.size();
  const auto replayer = std::make_shared<Replayer>(record_, this, compare(), options_.debug);
  const auto again_hooks = std::make_shared<AgainHooks>(*this, *replayer);
  replayer->set_places(again_hooks.get());
  if (inside_first) again_hooks->stop_early();
  {
    const Surroundings::Scope entered(surroundings_, record_);
    const GradientsAside gradients(record_);
    const at::AutoGradMode grad(true);
    const InnermostRegion innermost(replayer.get());
    const auto watch = plane::op::push(plane::op::Order::record, replayer);
    const auto hooks = plane::saved::push(plane::saved::Order::checkpoint, again_hooks);
    const std::shared_ptr<void> context =
        options_.context ? options_.context(RegionRun::second) : nullptr;
    try {
      again_(std::move(inputs));
      replayer->finish();
    } catch (const StopRegion& stopped) {
      if (stopped.frame != this) throw;
      replayer->report_difference();
    }
  }
  if (again_hooks->count() < wanted) {
    forget();
    throw UserError(base::join(
        "[checkpoint] a checkpointed region must save the same tensors again; it saved ", wanted,
        " and now ", again_hooks->count(), ". Did the module switch between train() and eval()?"));
  }
}

at::Tensor CheckpointFrame::get(std::size_t place) {
  const std::lock_guard lock(mutex_);
  const int pass = current_group != 0 ? current_group : plane::saved::current_backward();
  if (!places_[place].made.defined() || made_for_ != pass) {
    try {
      run_again();
    } catch (...) {
      forget();
      throw;
    }
    made_for_ = pass;
    if (pass != -1) {
      // A graph that is kept keeps no recomputed tensors beyond the pass, or the group of passes.
      std::function<void()> end = [weak = weak_from_this(), pass] {
        const auto frame = weak.lock();
        if (frame == nullptr) return;
        const std::lock_guard frame_lock(frame->mutex_);
        if (frame->made_for_ == pass) frame->forget();
      };
      if (current_group != 0) {
        group_ends.push_back(std::move(end));
      } else {
        plane::saved::on_backward_end(std::move(end));
      }
    }
  }
  at::Tensor tensor = places_[place].made;
  if (pass == -1) forget();
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
  const auto frame = std::make_shared<CheckpointFrame>(in_force(options), std::move(again));
  frame->run_first(std::move(inputs), first);
}

std::vector<at::Tensor> run_reentrant(
    const CheckpointOptions& options, std::vector<at::Tensor> inputs,
    const std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)>& first,
    std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)> again) {
  return run_reentrant_node(in_force(options), std::move(inputs), first, std::move(again));
}

}  // namespace internal

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
