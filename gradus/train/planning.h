#pragma once

#include <optional>

#include <gradus/compress/policy.h>
#include <gradus/data/batches.h>
#include <gradus/models/gpt.h>
#include <gradus/offload/offload.h>
#include <gradus/train/config.h>
#include <gradus/train/plan_choice.h>
#include <gradus/train/trainer.h>

namespace gradus::amp {
class Amp;
}

namespace gradus::train {

/// Where plans may move activations, as memory.offload says; unset for none.
std::optional<offload::OffloadOptions> offload_options(const TrainConfig& config);

/// How plans may compress activations, as memory.compress says; unset for not at all. Stochastic
/// rounding draws other numbers at each @p step, and the same ones when it is run again.
std::optional<compress::CompressOptions> compress_options(const TrainConfig& config,
                                                          std::int64_t step);

/// A plan, and the optimizer that it is for.
struct PlannedTraining {
  PlanChoice choice{};
  std::string optimizer{};  ///< Kind: optimizer.kind, or its 8-bit form where that is allowed.
};

/// Chooses how to train @p gpt inside a memory limit that is on, by trial steps on its next batch.
/// With memory.optimizer_state = 8bit it plans for the 8-bit form of the optimizer too, and takes
/// that if nothing else fits or its steps are faster by a twentieth. Weights, random state, loss
/// scales and the stream stay as they are.
/// @throws UserError if no plan fits, and if environment.should_stop() says so between trials.
PlannedTraining plan_training(const TrainConfig& config, const models::Gpt& gpt, amp::Amp& amp,
                              data::BatchStream& training, const PlanChoiceOptions& options,
                              const TrainerEnvironment& environment);

}  // namespace gradus::train
