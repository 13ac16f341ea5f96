#include <gradus/train/planning.h>

#include <algorithm>

#include <gradus/amp/levels/levels.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/plan/store_stash.h>
#include <gradus/train/optimizers.h>
#include <gradus/train/private_options.h>
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

std::optional<compress::CompressOptions> compress_options(const TrainConfig& config,
                                                          std::int64_t step) {
  if (config.memory.compress == "none") return std::nullopt;
  compress::CompressOptions options;
  options.lossy = parse_lossy(config.memory.compress);
  options.allow_lossy = options.lossy != compress::Lossy::none;
  // Probes run on small micro-batches, and what is small there may be large in training. What is
  // too small to be worth it the plan leaves alone.
  options.min_bytes = 1 << 10;
  constexpr std::uint64_t kTensorsOfAStep = std::uint64_t{1} << 32;
  options.rounding = {.seed = static_cast<std::uint64_t>(config.train.seed),
                      .calls = static_cast<std::uint64_t>(step) * kTensorsOfAStep};
  return options;
}

namespace {

// What a private pass calls between its layers may grow with its sequences, and two sizes then do
// not foretell a third, so that choose_plan() knows no size above the traced ones. Larger ones are
// planned from traces of their own, twice as large each time, while that makes a step faster.
PlanChoice choose_private_plan(const PlanChoiceOptions& options, const TrialRunner& run,
                               const TrainerEnvironment& environment) {
  const auto exactly = [&](std::int64_t micro_batches) {
    PlanChoiceOptions with = options;
    with.only = Plan{.micro_batches = micro_batches, .budget = true};
    return choose_plan(with, run);
  };
  if (options.micro_batches > 0) return exactly(options.micro_batches);
  PlanChoice best = choose_plan(options, run);
  std::int64_t size = best.plan.largest(options.batch);
  while (size < options.batch) {
    size = std::min(2 * size, options.batch);
    try {
      PlanChoice larger = exactly((options.batch + size - 1) / size);
      if (larger.trial_seconds >= best.trial_seconds) break;
      larger.plain_peak_bytes = best.plain_peak_bytes;
      larger.plain_seconds = best.plain_seconds;
      best = std::move(larger);
    } catch (const UserError&) {
      if (environment.should_stop()) throw;
      break;  // no plan of that size fits
    }
  }
  return best;
}

PlanChoice plan_for(const TrainConfig& config, const models::Gpt& gpt, amp::Amp& amp,
                    data::BatchStream& training, const PlanChoiceOptions& options,
                    const std::shared_ptr<recompute::Stash>& stash,
                    const TrainerEnvironment& environment) {
  const data::DataPosition position = training.position();
  std::optional<privacy::PrivacyOptions> privacy;
  if (config.privacy.enabled) privacy = privacy_options(config);
  StepTrials trials(gpt, amp, training.next(), make_optimizer(config, amp, *gpt, 0.0),
                    {.limit_bytes = options.limit_bytes,
                     .clock = environment.clock,
                     .stash = stash,
                     .compression = compress_options(config, 0),
                     .privacy = privacy});
  training.seek(position);
  const TrialRunner run = [&](const TrialRequest& request) {
    if (environment.should_stop())
      throw UserError("[train] interrupted while planning; nothing was trained");
    return trials.run(request);
  };
  return privacy && !options.only ? choose_private_plan(options, run, environment)
                                  : choose_plan(options, run);
}

}  // namespace

PlannedTraining plan_training(const TrainConfig& config, const models::Gpt& gpt, amp::Amp& amp,
                              data::BatchStream& training, const PlanChoiceOptions& options,
                              const TrainerEnvironment& environment) {
  PlanChoiceOptions with = options;
  with.compress = config.memory.compress != "none";
  with.micro_batches = config.train.accumulate;
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
  const auto plan = [&](const std::string& optimizer) {
    TrainConfig of = config;
    of.optimizer.kind = optimizer;
    return PlannedTraining{plan_for(of, gpt, amp, training, with, stash, environment), optimizer};
  };
  const std::string& kind = config.optimizer.kind;
  if (config.memory.optimizer_state == "exact" || with.only) return plan(kind);

  std::optional<PlannedTraining> exact;
  try {
    exact.emplace(plan(kind));
  } catch (const MemoryLimitError&) {
    throw;
  } catch (const UserError&) {
    if (environment.should_stop()) throw;
  }
  PlannedTraining small = plan(*eight_bit_kind(kind));
  constexpr double kWorthRounding = 0.95;  // of the exact step's time
  if (exact && small.choice.trial_seconds > kWorthRounding * exact->choice.trial_seconds) {
    exact->choice.reason += "; with the optimizer's state in 8 bits a step is no faster";
    return std::move(*exact);
  }
  small.choice.reason +=
      exact ? "; the optimizer's state is in 8 bits, which is faster"
            : "; the optimizer's state is in 8 bits: with exact state nothing fits";
  return small;
}

}  // namespace gradus::train
