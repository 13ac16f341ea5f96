#include <gradus/train/planning.h>

#include <algorithm>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/plan/store_stash.h>
#include <gradus/train/language_model.h>
#include <gradus/train/step_trial.h>

namespace gradus::train {

std::optional<offload::OffloadOptions> offload_options(const TrainConfig& config) {
  if (config.memory.offload == "none") return std::nullopt;
  offload::OffloadOptions options;
  if (config.memory.offload != "host") {
    options.target = offload::Target::disk;
    options.disk.directory = config.memory.offload;
  }
  return options;
}

PlanChoice plan_training(const TrainConfig& config, const models::Gpt& gpt,
                         data::BatchStream& training, const PlanChoiceOptions& options,
                         const TrainerEnvironment& environment) {
  PlanChoiceOptions with = options;
  std::shared_ptr<recompute::Stash> stash;
  if (const auto offload = offload_options(config)) {
    stash = plan::make_stash(*offload);
    if (!with.offload) {
      // Before anything is trained, with buffers that are small beside the limit; a limit of a few
      // MiB, as of tests, has no room for them.
      const base::MemoryLimit unlimited({});
      const std::int64_t bytes =
          std::clamp<std::int64_t>(options.limit_bytes / 16, 1 << 20, 16 << 20);
      with.offload = offload::measure_bandwidth(*offload, {.bytes = bytes});
    }
  }
  const data::DataPosition position = training.position();
  StepTrials trials(gpt, training.next(), make_optimizer(config.optimizer, *gpt, 0.0),
                    options.limit_bytes, environment.clock, stash);
  training.seek(position);
  return choose_plan(with, [&](const TrialRequest& request) {
    if (environment.should_stop())
      throw UserError("[train] interrupted while planning; nothing was trained");
    return trials.run(request);
  });
}

}  // namespace gradus::train
