#pragma once

#include <gradus/train/config.h>
#include <gradus/train/trainer.h>

namespace gradus::train {

/// Trains the classifier of data.task; train() calls it. Run directory, training states and files
/// for people are those of the language model's trainer.
///
/// With privacy.enabled: Poisson batches, gradients clipped by example, noise, and an accountant
/// (gradus/privacy/training/make_private.h). The epsilon spent never exceeds privacy.epsilon. A run
/// that is interrupted and resumed has spent what the uninterrupted one has; with privacy.secure =
/// false it equals that bit for bit. Losses, norms, clip fractions and accuracies that are printed
/// and logged have no noise: epsilon covers the weights, not those.
/// @throws UserError as train(); for privacy options that a resumed run did not begin with; for a
/// layer that breaks privacy, by name, before anything is trained.
TrainOutcome train_classifier(const TrainConfig& config, bool resume,
                              const TrainerEnvironment& environment);

}  // namespace gradus::train
