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
#include <gradus/train/plan.h>

namespace gradus::train {

/// Measures steps without training: forward, backward and an optimizer step at learning rate 0, on
/// real data, under whatever memory limit is on. Weights and random state stay as they are, bit for
/// bit.
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
  StepTrials(models::Gpt gpt, data::Batch batch, std::unique_ptr<optim::Optimizer> probe,
             base::Clock clock);
  ~StepTrials();

  /// As a TrialRunner does.
  std::optional<Trial> run(std::int64_t size, std::int64_t recomputed, bool accumulating);

 private:
  void micro_batch(accumulate::GradientWindow& window, std::int64_t size, std::int64_t recomputed);
  void optimizer_step();

  models::Gpt gpt_;
  data::Batch batch_;
  std::unique_ptr<optim::Optimizer> probe_;
  base::Clock clock_;
  std::vector<at::Tensor> weights_;  // copies, in host memory
  bool ready_ = false;
};

}  // namespace gradus::train
