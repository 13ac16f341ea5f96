#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <gradus/accumulate/window.h>
#include <gradus/base/clock.h>
#include <gradus/data/batches.h>
#include <gradus/models/gpt.h>
#include <gradus/optim/optimizer.h>
#include <gradus/train/plan_choice.h>

namespace gradus::recompute {
class Stash;
}

namespace gradus::train {

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
  /// @param probe  An optimizer over all of @p gpt's parameters, at learning rate 0, without state.
  /// @param limit_bytes  The memory limit that is on; 0: none.
  /// @param stash  Where plans move what they offload; may be null.
  StepTrials(models::Gpt gpt, data::Batch batch, std::unique_ptr<optim::Optimizer> probe,
             std::int64_t limit_bytes, base::Clock clock,
             std::shared_ptr<recompute::Stash> stash = nullptr);
  ~StepTrials();

  /// As a TrialRunner does.
  std::optional<Trial> run(const TrialRequest& request);

 private:
  void micro_batch(accumulate::GradientWindow& window, std::int64_t size);
  void warm_up(accumulate::GradientWindow& window, std::int64_t limit_bytes);
  Trial passes(accumulate::GradientWindow& window, const TrialRequest& request,
               std::int64_t limit_bytes);
  void optimizer_step();

  models::Gpt gpt_;
  data::Batch batch_;
  std::unique_ptr<optim::Optimizer> probe_;
  const std::int64_t limit_bytes_;
  base::Clock clock_;
  const std::shared_ptr<recompute::Stash> stash_;
  std::vector<at::Tensor> weights_;  // copies, in host memory
  bool ready_ = false;
};

}  // namespace gradus::train
