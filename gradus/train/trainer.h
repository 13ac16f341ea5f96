#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>

#include <gradus/base/clock.h>
#include <gradus/report/progress.h>
#include <gradus/train/config.h>
#include <gradus/train/plan.h>

namespace gradus::train {

/// What a trainer uses of the world around it.
struct TrainerEnvironment {
  std::ostream& out;                ///< Progress and summary.
  report::TerminalTraits terminal;  ///< What @ref out is.
  base::Clock clock = base::monotonic_clock();
  std::function<bool()> should_stop = [] { return false; };  ///< Asked after every micro-batch.
  std::string date{};  ///< Shown in the report: "2026-11-29 19:30".
};

struct TrainOutcome {
  bool interrupted = false;  ///< should_stop() said so; the state was saved.
  std::int64_t steps = 0;
  double first_loss = 0.0;
  double last_loss = 0.0;
  std::int64_t skipped_steps = 0;     ///< Of this process: a gradient overflowed at the loss scale.
  std::int64_t peak_bytes = 0;        ///< Highest of the run's steps.
  std::int64_t plain_peak_bytes = 0;  ///< Predicted for plain training; 0 if unknown.
  Plan plan;
  std::string state_path;  ///< The last training state.
  std::string report_path;
  std::string sample;
  std::optional<double> accuracy{};  ///< Of a classifier on the test set, if it was evaluated.
  std::optional<double> epsilon{};   ///< Spent by private training, at privacy.delta.
  double noise_multiplier = 0.0;     ///< Of private training.
};

/// Trains as a configuration says: a language model inside its memory limit, or a classifier
/// (classification.h), with differential privacy where it asks for that.
///
/// With privacy.enabled: Poisson batches, gradients clipped by example (of a language model: a
/// window of text, see text_windows.h), noise, and an accountant
/// (gradus/privacy/training/make_private.h). The epsilon spent never exceeds privacy.epsilon. A run
/// that is interrupted and resumed has spent what the uninterrupted one has; with privacy.secure =
/// false it equals that bit for bit. Losses, norms, clip fractions and accuracies that are printed
/// and logged have no noise: epsilon covers the weights, not those.
///
/// The run directory (train.out) holds config.toml, tokenizer, metrics.jsonl, TensorBoard events,
/// report.html and the last training states. With @p resume the run continues from its newest good
/// state as if it had never stopped, bit for bit, as long as plan and thread count are the same.
/// @throws UserError on bad input, on a memory limit below what the model needs, on a run directory
/// that is
///   in use (without resume) or empty (with it), for privacy options that a resumed run did not
///   begin with, for a layer that breaks privacy, when the loss is no longer finite, and when the
///   disk is full; what was saved before stands.
TrainOutcome train(const TrainConfig& config, bool resume, const TrainerEnvironment& environment);

}  // namespace gradus::train
