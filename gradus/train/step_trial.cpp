#include <gradus/train/step_trial.h>

#include <algorithm>

#include <ATen/ops/zeros_like.h>
#include <torch/nn/module.h>

#include <gradus/base/memory_tracker.h>
#include <gradus/base/rng.h>
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
      clock_(std::move(clock)) {}

StepTrials::~StepTrials() { probe_->zero_grad(); }

void StepTrials::micro_batch(std::int64_t size, std::int64_t recomputed) {
  const at::Device device = gpt_->parameters().front().device();
  const auto take = [&](const at::Tensor& all) {
    const base::MemoryCategoryScope inputs(base::MemoryCategory::inputs);
    if (size <= all.size(0)) return all.narrow(0, 0, size).to(device);
    return all.repeat({(size + all.size(0) - 1) / all.size(0), 1}).narrow(0, 0, size).to(device);
  };
  language_model_loss(*gpt_, take(batch_.inputs), take(batch_.targets), recomputed).backward();
}

void StepTrials::make_state() {
  for (const at::Tensor& parameter : gpt_->parameters())
    parameter.mutable_grad() = at::zeros_like(parameter);
  {
    const base::MemoryCategoryScope state(base::MemoryCategory::optimizer_state);
    probe_->step();
  }
  probe_->zero_grad();
}

std::optional<Trial> StepTrials::run(std::int64_t size, std::int64_t recomputed,
                                     bool accumulating) {
  base::MemoryTracker& tracker = base::MemoryTracker::install();
  const base::RngGuard rng;
  try {
    if (!ready_) {
      make_state();
      micro_batch(
          1,
          recomputed);  // kernels are compiled and caches filled at first use; not part of a step
      probe_->zero_grad();
      ready_ = true;
    }
    Trial trial;
    const auto timed = [&](base::MemoryTimeline& timeline) {
      tracker.start_timeline(kTimelinePoints);
      const double start = clock_();
      try {
        micro_batch(size, recomputed);
      } catch (...) {
        tracker.stop_timeline();
        throw;
      }
      const double seconds = clock_() - start;
      timeline = tracker.stop_timeline();
      return seconds;
    };
    trial.seconds = timed(trial.first);
    if (accumulating) trial.seconds = std::min(trial.seconds, timed(trial.second));
    tracker.reset_peak();
    probe_->step();
    trial.optimizer_peak_bytes = tracker.peak().total();
    probe_->zero_grad();
    return trial;
  } catch (const MemoryLimitError&) {
    probe_->zero_grad();
    return std::nullopt;
  }
}

}  // namespace gradus::train
