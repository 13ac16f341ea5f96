#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include <gradus/amp/levels/levels.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/rng.h>
#include <gradus/optim/schedule.h>
#include <gradus/train/private_run.h>
#include <gradus/train/run_lock.h>
#include <gradus/train/run_log.h>
#include <gradus/train/trainer.h>
#include <gradus/train/training_state.h>

namespace gradus::train {

/// A run of any task from its first step to its last, or to where it is told to stop: run
/// directory and its lock, training states, resuming, the update of the weights, privately if
/// asked, interrupted steps, metrics, progress and report. A subclass is a task: it says what a
/// batch is and computes its gradients.
///
/// Its constructor makes data and model, calls take_model(), decides how a step is computed and
/// calls make_update().
class RunLoop {
 public:
  virtual ~RunLoop() = default;
  RunLoop(const RunLoop&) = delete;
  RunLoop& operator=(const RunLoop&) = delete;

  /// Trains. Once. @throws UserError as train().
  TrainOutcome execute();

 protected:
  /// Holds the run directory, and has the state that the run goes on from in state().
  RunLoop(const TrainConfig& config, bool resume, const TrainerEnvironment& environment);

  // --- For the constructor of a task, in this order.

  /// Takes over what the run computes with: weights of a resumed run are loaded into @p model, and
  /// the precision is made.
  void take_model(std::shared_ptr<torch::nn::Module> model);
  struct Update {
    std::int64_t steps = 0;         ///< Of the whole run.
    std::int64_t examples = 0;      ///< Trained on; only read by private training.
    std::string example{};          ///< What one is: "image".
    std::string privacy_further{};  ///< Of what privacy rests on, beside privacy_inputs().
  };
  /// Makes the optimizer (of kind state().optimizer) with its schedule, and the private part; a
  /// resumed run goes on with theirs, and with its random numbers.
  /// @throws UserError if the run began with other privacy.
  void make_update(const Update& update);

  // --- What a task is.

  /// Fills in title, model and what else of the report is the task's own.
  /// @return What people are told before the first step besides the model: whole lines.
  virtual std::string describe(report::ReportData& report) = 0;
  /// Computes the gradients of the next batch and tells its loss and its tokens.
  /// @return False if it was told to stop.
  virtual bool gradients(report::StepMetrics& metrics) = 0;
  /// Drops gradients that are on their way to the optimizer's.
  virtual void drop_gradients() {}
  /// Where the data stand, and back to there.
  virtual data::DataPosition position() const = 0;
  virtual void seek(data::DataPosition position) = 0;
  /// Measures the model on data it was not trained on. @return What people are told; empty:
  /// nothing.
  virtual std::string evaluate_now(report::StepMetrics& metrics) = 0;
  /// Adds what the task has to the outcome of a run, interrupted or not.
  virtual void complete(TrainOutcome& outcome) = 0;

  // --- For tasks.

  const TrainConfig& config() const { return config_; }
  const TrainerEnvironment& environment() const { return environment_; }
  at::Device device() const { return device_; }
  std::int64_t limit_bytes() const { return limit_bytes_; }
  std::int64_t steps() const { return steps_; }
  base::MemoryTracker& tracker() { return tracker_; }
  const std::optional<SavedState>& resumed() const { return resumed_; }
  RunState& state() { return state_; }
  const RunState& state() const { return state_; }
  amp::Amp& amp() { return *amp_; }
  optim::Optimizer& optimizer() { return *optimizer_; }
  PrivateRun* private_run() { return private_ ? &*private_ : nullptr; }
  /// The configuration with what the plan chose in its place.
  TrainConfig planned_config() const;
  bool scales_loss() const;
  /// Takes the losses of a batch's examples as its loss. One that is not finite ends a plain run;
  /// of a private one single examples may be so, which are left out, but not all.
  void take_losses(const at::Tensor& losses, report::StepMetrics& metrics);
  /// Begins a phase of the step's timeline, if one is recorded.
  void begin_phase(const std::string& name);
  bool records_timeline() const { return start_ && start_->timeline; }
  /// Ends the run because @p what is not finite, before any weight is written.
  [[noreturn]] void refuse_non_finite(const std::string& what);

 private:
  // What a step is abandoned to.
  struct StepStart {
    base::RngState rng{};
    data::DataPosition position{};
    std::vector<std::pair<std::string, at::Tensor>> precision{};
    bool timeline = false;
  };
  void make_private(const Update& update);
  void start_log();
  bool step();  // false if it was interrupted
  void abandon_step();
  void plain_update(report::StepMetrics& metrics);
  void end_timeline(const base::MemoryBreakdown& peak);
  void finish_step(report::StepMetrics& metrics);
  void save();
  void summarise(TrainOutcome& outcome);
  double elapsed() const { return elapsed_before_ + environment_.clock() - started_; }

  const TrainConfig config_;
  const TrainerEnvironment& environment_;
  const std::int64_t limit_bytes_;
  const at::Device device_;
  base::MemoryTracker& tracker_;
  std::optional<RunLock> lock_;
  std::optional<SavedState> resumed_;
  RunState state_;
  std::int64_t steps_ = 0;
  std::shared_ptr<torch::nn::Module> model_;
  std::optional<amp::Amp> amp_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::optional<PrivateRun> private_;
  optim::Schedule schedule_;
  std::optional<RunLog> log_;
  std::optional<StepStart> start_;
  std::string saved_path_;
  std::int64_t saved_step_ = -1;
  double started_ = 0.0;
  double elapsed_before_ = 0.0;
};

}  // namespace gradus::train
