#pragma once

#include <optional>

#include <gradus/data/batches.h>
#include <gradus/models/gpt.h>
#include <gradus/offload/offload.h>
#include <gradus/train/config.h>
#include <gradus/train/plan_choice.h>
#include <gradus/train/trainer.h>

namespace gradus::train {

/// Where plans may move activations, as memory.offload says; unset for none.
std::optional<offload::OffloadOptions> offload_options(const TrainConfig& config);

/// Chooses how to train @p gpt inside a memory limit that is on, by trial steps on its next batch.
/// Weights, random state and the stream stay as they are.
/// @throws UserError if no plan fits, and if environment.should_stop() says so between trials.
PlanChoice plan_training(const TrainConfig& config, const models::Gpt& gpt,
                         data::BatchStream& training, const PlanChoiceOptions& options,
                         const TrainerEnvironment& environment);

}  // namespace gradus::train
