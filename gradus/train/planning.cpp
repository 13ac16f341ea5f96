#include <gradus/train/planning.h>

#include <gradus/base/error.h>
#include <gradus/train/language_model.h>
#include <gradus/train/step_trial.h>

namespace gradus::train {

PlanChoice plan_training(const TrainConfig& config, const models::Gpt& gpt,
                         data::BatchStream& training, const PlanChoiceOptions& options,
                         const TrainerEnvironment& environment) {
  const data::DataPosition position = training.position();
  StepTrials trials(gpt, training.next(), make_optimizer(config.optimizer, *gpt, 0.0),
                    options.limit_bytes, environment.clock);
  training.seek(position);
  return choose_plan(options, [&](const TrialRequest& request) {
    if (environment.should_stop())
      throw UserError("[train] interrupted while planning; nothing was trained");
    return trials.run(request);
  });
}

}  // namespace gradus::train
