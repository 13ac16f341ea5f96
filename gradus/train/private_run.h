#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/privacy/training/make_private.h>
#include <gradus/report/html_report.h>
#include <gradus/report/metrics.h>
#include <gradus/train/config.h>
#include <gradus/train/trainer.h>
#include <gradus/train/training_state.h>

namespace gradus::train {

/// What is trained privately.
struct PrivateSubject {
  std::shared_ptr<torch::nn::Module> model{};
  std::int64_t examples = 0;  ///< N.
  std::int64_t steps = 0;     ///< Of the whole run.
  std::string example{};      ///< What an example is, in the singular: "image".
  /// As in privacy::PrivacyOptions, of models whose weights have masters.
  std::vector<at::Tensor> targets{};
  std::function<optim::StepResult()> apply{};
};

/// The private part of a run, as the privacy table of its configuration says: draws its batches,
/// clips and adds noise, counts epsilon, and tells of it in progress, metrics and report.
class PrivateRun {
 public:
  using Indices = std::vector<std::int64_t>;

  /// Finds the noise, or takes @p noise_multiplier where it is above 0: what a resumed run began
  /// with. A search on another machine might differ in the last bits, and the budget must not.
  /// @throws UserError for a layer that breaks privacy, by name.
  PrivateRun(const TrainConfig& config, const PrivateSubject& subject, optim::Optimizer& optimizer,
             double noise_multiplier, const TrainerEnvironment& environment,
             std::function<void(const std::string&)> log);

  double noise_multiplier() const { return noise_multiplier_; }
  double epsilon() const { return training_.epsilon(config_.privacy.delta); }

  /// Fills in what the report says of privacy, and tells people before the first step.
  void describe(report::ReportData& report, std::ostream& out);

  /// The examples of the next logical batch.
  Indices next_batch();
  /// Adds the clipped gradients of a micro-batch. @return The losses, [B], on the CPU.
  at::Tensor accumulate(const persample::LossFunction& loss, const persample::Batch& rows);
  /// Noise and the optimizer's step, @p step of the run, also of an empty batch. Tells the clipped
  /// share and the norms of the examples.
  void step(report::StepMetrics& metrics, report::ReportData& report, std::int64_t step);
  /// Takes note of what the steps up to @p step spent; at some of them tells epsilon.
  void spend(std::int64_t step, report::StepMetrics& metrics);
  /// "epsilon 1.24": spent once the steps are done that spend() was told of, rounded up.
  std::string remark() const;

  /// Remembers the step boundary that abandon() goes back to.
  void hold() { held_ = training_.sampler().state(); }
  void abandon();

  /// What a training state holds besides the optimizer's own tensors.
  std::vector<std::pair<std::string, at::Tensor>> entries() const;
  /// Replaces all of it, and the optimizer's state.
  void load(const SavedState& state);

 private:
  const TrainConfig& config_;
  const PrivateSubject subject_;
  privacy::PrivateTraining training_;
  const double noise_multiplier_;
  privacy::StateEntries held_;
  std::int64_t epsilon_step_ = 0;  // epsilon_ is what is spent once this step is done
  double epsilon_ = 0.0;
};

}  // namespace gradus::train
