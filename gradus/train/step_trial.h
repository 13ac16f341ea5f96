#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <gradus/accumulate/window.h>
#include <gradus/amp/levels/levels.h>
#include <gradus/base/clock.h>
#include <gradus/compress/policy.h>
#include <gradus/data/batches.h>
#include <gradus/models/gpt.h>
#include <gradus/optim/optimizer.h>
#include <gradus/privacy/training/make_private.h>
#include <gradus/train/plan_choice.h>

namespace gradus::recompute {
class Stash;
}

namespace gradus::train {

struct StepTrialOptions {
  std::int64_t limit_bytes = 0;  ///< The memory limit that is on; 0: none.
  base::Clock clock = base::monotonic_clock();
  std::shared_ptr<recompute::Stash> stash{};  ///< Where plans move what they offload; may be null.
  /// What plans may leave to compression, and how; unset: nothing is.
  std::optional<compress::CompressOptions> compression{};
  double probing_s = 1.0;  ///< For measuring compression in a pass, at most; > 0.
  /// The steps are those of private training: clipped gradients of single sequences, then noise.
  /// Unset: plain.
  std::optional<privacy::PrivacyOptions> privacy{};
};

/// Measures steps without training: forward, backward and an optimizer step at learning rate 0, on
/// real data, under whatever memory limit is on, plain or under a memory budget. Weights and random
/// state stay as they are, bit for bit.
///
/// Holds an optimizer's worth of state while it lives, as a training step would: end it before the
/// real optimizer makes its own.
class StepTrials {
 public:
  /// Works as the trainer's step does, down to the window and the gradient norm, so that a plan
  /// that passes here fits there. A copy of the weights waits in host memory: a probe's step may
  /// write NaN even at rate 0.
  ///
  /// @param batch  Sequences to take micro-batches from; repeated if a larger one is asked for.
  /// @param amp    What @p gpt computes in. Its state is put back at the end. Must outlive this.
  /// @param probe  An optimizer over all of @p gpt's weights as @p amp keeps them, at learning rate
  /// 0, without state.
  StepTrials(models::Gpt gpt, amp::Amp& amp, data::Batch batch,
             std::unique_ptr<optim::Optimizer> probe, StepTrialOptions options);
  ~StepTrials();

  /// As a TrialRunner does.
  std::optional<Trial> run(const TrialRequest& request);

 private:
  void micro_batch(accumulate::GradientWindow& window, std::int64_t size);
  void reset(accumulate::GradientWindow& window);
  void warm_up(accumulate::GradientWindow& window, const TrialRequest& request,
               std::int64_t limit_bytes);
  Trial passes(accumulate::GradientWindow& window, const TrialRequest& request,
               std::int64_t limit_bytes);
  void optimizer_step();

  std::vector<at::Tensor> written() const;

  models::Gpt gpt_;
  amp::Amp& amp_;
  const std::vector<std::pair<std::string, at::Tensor>> amp_state_;
  data::Batch batch_;
  std::unique_ptr<optim::Optimizer> probe_;
  const StepTrialOptions options_;
  std::vector<at::Tensor> weights_;                // copies, in host memory
  std::unique_ptr<privacy::DPOptimizer> private_;  // null: plain steps
  std::int64_t warmed_up_ = 0;                     // sequences
};

}  // namespace gradus::train
