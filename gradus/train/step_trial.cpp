#include <gradus/train/step_trial.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <gradus/base/memory_tracker.h>
#include <gradus/base/rng.h>
#include <gradus/optim/clip.h>
#include <gradus/train/language_model.h>

namespace gradus::train {
namespace {

// Enough for every allocation of a step, so that points of two trials match one to one.
constexpr std::size_t kTimelinePoints = std::size_t{1} << 20;

}  // namespace

StepTrials::StepTrials(models::Gpt gpt, data::Batch batch, std::unique_ptr<optim::Optimizer> probe,
                       base::Clock clock)
    : gpt_(std::move(gpt)),
      batch_(std::move(batch)),
      probe_(std::move(probe)),
      clock_(std::move(clock)) {
  const base::ArenaScope host(base::Arena::host);
  for (const at::Tensor& parameter : gpt_->parameters())
    weights_.push_back(parameter.detach().clone());
}

StepTrials::~StepTrials() {
  probe_->zero_grad();
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> parameters = gpt_->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(weights_[i]);
}

void StepTrials::micro_batch(accumulate::GradientWindow& window, std::int64_t size,
                             std::int64_t recomputed) {
  const at::Device device = gpt_->parameters().front().device();
  const auto take = [&](const at::Tensor& all) {
    const base::MemoryCategoryScope inputs(base::MemoryCategory::inputs);
    if (size <= all.size(0)) return all.narrow(0, 0, size).to(device);
    return all.repeat({(size + all.size(0) - 1) / all.size(0), 1}).narrow(0, 0, size).to(device);
  };
  const at::Tensor inputs = take(batch_.inputs), targets = take(batch_.targets);
  window.backward(language_model_loss(*gpt_, inputs, targets, recomputed),
                  static_cast<double>(inputs.numel()));
}

void StepTrials::optimizer_step() {
  optim::gradient_norm(gpt_->parameters());
  const base::MemoryCategoryScope state(base::MemoryCategory::optimizer_state);
  probe_->step();
}

std::optional<Trial> StepTrials::run(std::int64_t size, std::int64_t recomputed,
                                     bool accumulating) {
  base::MemoryTracker& tracker = base::MemoryTracker::install();
  const base::RngGuard rng;
  try {
    accumulate::GradientWindow window(
        gpt_->parameters(),
        {.micro_batches = 3, .normalisation = accumulate::Normalisation::tokens});
    if (!ready_) {
      // The optimizer's state is made, kernels are compiled and caches filled at first use: not
      // part of a step.
      micro_batch(window, 1, recomputed);
      optimizer_step();
      window.reset();
      ready_ = true;
    }
    const auto timed = [&](base::MemoryTimeline& timeline) {
      tracker.start_timeline(kTimelinePoints);
      const double start = clock_();
      try {
        micro_batch(window, size, recomputed);
      } catch (...) {
        tracker.stop_timeline();
        throw;
      }
      const double seconds = clock_() - start;
      timeline = tracker.stop_timeline();
      return seconds;
    };
    Trial trial;
    trial.seconds = timed(trial.first);
    if (accumulating) {
      // The least of three: other programs on the machine make a trial slower, never faster.
      trial.seconds = std::min(trial.seconds, timed(trial.second));
      base::MemoryTimeline third;
      trial.seconds = std::min(trial.seconds, timed(third));
    }
    window.finish();
    tracker.reset_peak();
    optimizer_step();
    trial.optimizer_peak_bytes = tracker.peak().total();
    probe_->zero_grad();
    return trial;
  } catch (const MemoryLimitError&) {
    probe_->zero_grad();
    return std::nullopt;
  }
}

}  // namespace gradus::train
