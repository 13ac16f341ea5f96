#pragma once

#include <gradus/train/config.h>
#include <gradus/train/trainer.h>

namespace gradus::train {

/// Trains the classifier of data.task; train() calls it and says what holds.
TrainOutcome train_classifier(const TrainConfig& config, bool resume,
                              const TrainerEnvironment& environment);

}  // namespace gradus::train
