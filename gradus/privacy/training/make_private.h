#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gradus/privacy/accountant/accountant.h>
#include <gradus/privacy/training/dp_optimizer.h>
#include <gradus/privacy/training/sampling.h>
#include <gradus/privacy/training/validator.h>

namespace gradus::privacy {

/// What is trained on, and for how long. Give a batch size or a sample rate, epochs or steps.
struct DataDescription {
  std::int64_t examples = 0;                              ///< N, of all ranks together. >= 1.
  std::optional<std::int64_t> batch_size = std::nullopt;  ///< Expected; q is this over N exactly.
  std::optional<double> sample_rate = std::nullopt;       ///< q, in (0, 1].
  std::optional<double> epochs = std::nullopt;  ///< Of N expected examples each, rounded to steps.
  std::optional<std::int64_t> steps = std::nullopt;  ///< Logical steps.
  std::int64_t max_batch_size = 0;                   ///< SamplerOptions::max_batch_size.
};

struct PrivacyOptions {
  double noise_multiplier = 1.0;  ///< Sigma; not read by make_private_with_epsilon.
  ClippingOptions clipping{};     ///< Its max_norm is C.
  Sampling sampling = Sampling::poisson;
  /// PLD by default. kGdpApproximation is no bound: its epsilon may be below the true one.
  AccountantOptions accountant{};
  History spent{};  ///< Releases about the same data before this run: they count.
  optim::Schedule noise_schedule = nullptr;  ///< Factors, as in DPOptimizerOptions.
  optim::Schedule clip_schedule = nullptr;
  /// Makes sampling and noise repeatable, and neither private from who knows the seed: for tests.
  std::optional<std::uint64_t> seed = std::nullopt;
  Reduction reduction{};
  std::function<void(const at::Tensor&)> broadcast = nullptr;  ///< SamplerOptions::broadcast.
  persample::SampleOptions sample{};
  ValidatorOptions validator{};
  std::vector<at::Tensor> targets{};                   ///< As in DPOptimizerOptions.
  std::function<optim::StepResult()> apply = nullptr;  ///< As in DPOptimizerOptions.
  bool allow_buffer_updates = false;
  std::function<void(const std::string&)> log = nullptr;  ///< Told of the validator's advice.
};

/// A private training run: sampler, optimizer and accountant that belong together.
class PrivateTraining {
 public:
  /// Gives the rows of the data set at some indices: the micro-batch.
  using Fetch = std::function<persample::Batch(const std::vector<std::int64_t>& indices)>;

  PrivateTraining(std::unique_ptr<Sampler> sampler, std::unique_ptr<DPOptimizer> optimizer,
                  std::shared_ptr<Accountant> accountant);

  Sampler& sampler() { return *sampler_; }
  DPOptimizer& optimizer() { return *optimizer_; }
  const Accountant& accountant() const { return *accountant_; }

  /// Epsilon spent so far at @p delta, in [0, infinity].
  double epsilon(double delta) const { return accountant_->epsilon(delta); }
  /// Epsilon at the end of all steps.
  double final_epsilon(double delta) const;

  /// One logical step: draws a batch, accumulates it in micro-batches of at most @p micro_batch
  /// examples, and steps, also if it is empty. Nothing after the last. What @p loss or @p
  /// fetch throws drops the batch: what is released then is the step of an empty one, noised and
  /// counted, and the exception goes on. What the step itself throws, as
  /// DPOptimizer::step.
  std::optional<DPStep> step(const persample::LossFunction& loss, const Fetch& fetch,
                             std::int64_t micro_batch);

  /// Sampler, thresholds, noise, history and optimizer state; the model's own state is the plain
  /// module's. Seeded, a resumed run equals the uninterrupted one bit for bit; secure, it goes on
  /// with fresh randomness. @throws UserError inside a logical batch.
  StateEntries state() const;
  /// @throws UserError, with nothing changed, on the state of another N, q, sigma, clipping, kind
  /// of sampling or generator, by name.
  void load_state(const StateEntries& entries);

 private:
  std::unique_ptr<Sampler> sampler_;
  std::unique_ptr<DPOptimizer> optimizer_;
  std::shared_ptr<Accountant> accountant_;
};

/// Makes the training of an unmodified model private. The model is validated first, and is not
/// wrapped or changed: its state keeps the keys of the plain module.
///
///     auto training = make_private(model.ptr(), optimizer, {.examples = 60000, .batch_size = 512,
///                                                           .epochs = 10}, {.noise_multiplier
///                                                           = 1.1});
///     while (const auto done = training.step(loss, rows, 64)) {
///       std::cout << done->step << ": epsilon " << training.epsilon(1e-5) << '\n';
///     }
///
/// @param optimizer  Over the model's parameters; outlives the result.
/// @throws UserError as validate(), make_sampler() and DPOptimizer; on a description that says too
/// little or contradicts itself.
PrivateTraining make_private(std::shared_ptr<torch::nn::Module> model, optim::Optimizer& optimizer,
                             const DataDescription& data, const PrivacyOptions& options = {});

/// The same with the least noise, to a relative 1e-4, that keeps epsilon <= @p budget.epsilon at
/// budget.delta to the end of all steps, with what was spent and the noise schedule.
/// final_epsilon(budget.delta) never exceeds it.
PrivateTraining make_private_with_epsilon(std::shared_ptr<torch::nn::Module> model,
                                          optim::Optimizer& optimizer, const DataDescription& data,
                                          double epsilon, double delta,
                                          const PrivacyOptions& options = {});

}  // namespace gradus::privacy
