#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/optim/optimizer.h>
#include <gradus/optim/schedule.h>
#include <gradus/persample/engine/sample_gradients.h>
#include <gradus/privacy/accountant/accountant.h>
#include <gradus/privacy/noise/noise.h>
#include <gradus/privacy/training/clipping.h>
#include <gradus/privacy/training/state_entries.h>

namespace torch::nn {
class Module;
}

namespace gradus::privacy {

/// How the clipped sums of several processes become one.
struct Reduction {
  std::int64_t rank = 0;   ///< This process, of `ranks`.
  std::int64_t ranks = 1;  ///< >= 1.
  /// Replaces each tensor, in place, by its sum over all ranks; the same list, in the same order,
  /// on every rank. Needed if ranks > 1.
  std::function<void(const std::vector<at::Tensor>&)> sum = nullptr;
};

struct DPOptimizerOptions {
  double noise_multiplier = 1.0;     ///< Sigma, finite, >= 0; 0 adds none, and epsilon is infinite.
  double expected_batch_size = 0.0;  ///< q N of all ranks, > 0: what the noisy sum is divided by.
  ClippingOptions clipping{};
  /// Factors of the noise multiplier, and of the clipping thresholds, by logical step from 0. Any
  /// of gradus/optim/schedule.h, with 1 for its rate. They must not depend on the data.
  optim::Schedule noise_schedule = nullptr;
  optim::Schedule clip_schedule = nullptr;
  /// Seed of repeatable noise; unset: secure noise. Who knows the seed can take the noise off: for
  /// tests.
  std::optional<std::uint64_t> seed = std::nullopt;
  Reduction reduction{};
  persample::SampleOptions sample{};
  /// What a step with this noise multiplier releases. Unset: nothing is known of how batches are
  /// drawn, so each step counts as one on the full data, without amplification.
  std::function<GaussianSteps(double noise_multiplier)> accounted = nullptr;
  /// What the optimizer steps on, where that is not the model's parameters: one tensor for each of
  /// persample::parameters_of(model), such as amp's master weights (Amp::parameters). Gradients are
  /// written there, in its dtype.
  std::vector<at::Tensor> targets{};
  /// Steps the optimizer, where a call of its step() does not do: `[&] { amp.step(optimizer); }`.
  std::function<optim::StepResult()> apply = nullptr;
  /// Buffers may change in a forward pass. They are then released without noise: only if they do
  /// not depend on the data, as caches and counters.
  bool allow_buffer_updates = false;
};

/// What a logical step did. The counts are this rank's, have no noise, and so are not private.
struct DPStep {
  std::int64_t step = 0;          ///< Logical steps so far, this one included.
  std::int64_t examples = 0;      ///< Examples accumulated.
  std::int64_t clipped = 0;       ///< Those whose gradient was made smaller.
  std::int64_t non_finite = 0;    ///< Those left out because their gradient was NaN or infinite.
  double noise_multiplier = 0.0;  ///< Accounted.
  double max_norm = 0.0;          ///< Sensitivity of the clipped sum.
  double noise_deviation = 0.0;   ///< Standard deviation added to each element of the sum.
  optim::StepResult applied{};    ///< What the optimizer did.
};

/// Makes an optimizer private: clips each example's gradient, sums, adds noise to the sum once,
/// divides by the expected batch size, and steps (Abadi et al. 2016, algorithm 1, with the divisor
/// of Poisson sampling).
///
/// A logical batch of any size is accumulated in micro-batches of the size that fits; noise, step
/// and accountant see the logical batch only.
///
///     DPOptimizer private_adam(adam, model, accountant, {.noise_multiplier = 1.1, ...});
///     for (const auto& piece : micro_batches(batch, 64)) private_adam.accumulate(loss,
///     rows(piece)); batch.empty() ? private_adam.step_empty() : private_adam.step();
///
/// Takes any gradus optimizer, whose learning rates and groups stay its own. Frozen parameters
/// (requires_grad false) cost nothing and get no noise. Not safe from two threads at once.
class DPOptimizer {
 public:
  using LossFunction = persample::LossFunction;
  using Batch = persample::Batch;

  /// @param optimizer  Outlives this. @param accountant  Told of each step before it is taken.
  /// @throws UserError on an option out of its range, a threshold too small or too large
  /// for its noise included; a parameter of the model that wants a
  /// gradient and is not the optimizer's, or the other way round (by name); an optimizer in
  /// backward.
  DPOptimizer(optim::Optimizer& optimizer, std::shared_ptr<torch::nn::Module> model,
              std::shared_ptr<Accountant> accountant, DPOptimizerOptions options);
  ~DPOptimizer();
  DPOptimizer(const DPOptimizer&) = delete;
  DPOptimizer& operator=(const DPOptimizer&) = delete;

  /// Adds the clipped gradients of a micro-batch to the logical batch. Leaves .grad alone.
  /// @param loss  Gives one loss an example, [B] (gradus/persample/vmap/examples.h).
  /// @return The losses, [B], without graph.
  /// An example may be in one accumulate of a logical batch only: in two it counts twice, above the
  /// sensitivity. Two losses of an example are summed in one LossFunction.
  /// @throws UserError as SampleGradients::backward, and if the forward pass changed a buffer of
  /// the model, which has its old value then, or a parameter, which keeps what was written. After
  /// any exception the logical batch holds what it held before: the micro-batch may be tried again.
  at::Tensor accumulate(const LossFunction& loss, const Batch& batch);
  /// The same for losses [B] that are there already, by the graph engine alone: nothing checks that
  /// examples do not mix, or that the forward pass left the parameters alone. Buffers must be as
  /// they were at the last accumulate (or construction, or load_state). Examples whose gradients
  /// are not finite cost the memory of all per-example gradients here.
  void accumulate(const at::Tensor& losses);

  /// Ends the logical batch: noise, division, .grad, the optimizer's step. The accountant counts it
  /// first, and whatever is thrown later the count stays, the step is over and the logical batch is
  /// gone. Noise is that of the largest threshold which the batch was clipped to.
  /// @throws UserError, with nothing changed, if nothing was accumulated: an empty batch is
  /// step_empty(); by name, if the optimizer or the model got a parameter since construction.
  DPStep step();
  /// The same for a batch without examples on this rank: Poisson sampling draws some, and their
  /// noise must be added and counted. @throws UserError if something was accumulated.
  DPStep step_empty();

  /// Drops what was accumulated, and the optimizer's gradients. Nothing is released by that.
  void zero_grad();

  std::int64_t examples() const;  ///< Accumulated in the logical batch.
  std::int64_t steps() const;     ///< Logical steps taken.
  const Clipper& clipper() const;
  const DPOptimizerOptions& options() const;
  const Accountant& accountant() const;
  optim::Optimizer& optimizer() const;
  /// Norms before clipping of the examples of the last logical batch, float64, all groups together;
  /// without noise, and so not private. For reports.
  const at::Tensor& last_norms() const;
  /// Which engine serves each parameter (SampleGradients::explain).
  std::vector<std::string> explain() const;

  /// Steps, thresholds, noise generator (if seeded), releases by run, and the state of the
  /// optimizer. @throws UserError inside a logical batch.
  StateEntries state() const;
  /// The accountant forgets nothing, and counts no release twice: what it holds stays, `spent`
  /// included, and of the state is added what it did not know (gradus/privacy/accountant/ledger.h).
  /// Steps taken after the state by a process that is gone are in no state: they are not counted.
  /// @throws UserError, with nothing changed, on the state of another sigma, clipping (any option)
  /// or expected batch size, of a seeded run for a secure one and vice versa, on an optimizer's
  /// state that is not finite, and as Optimizer::load_state.
  void load_state(const StateEntries& entries);

 private:
  class State;
  std::unique_ptr<State> state_;
};

}  // namespace gradus::privacy
