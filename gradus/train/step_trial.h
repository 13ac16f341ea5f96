#pragma once

#include <functional>
#include <memory>
#include <optional>

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
  /// @param batch  Sequences to take micro-batches from; repeated if a larger one is asked for.
  /// @param probe  An optimizer over all of @p gpt's parameters, at learning rate 0, without state.
  StepTrials(models::Gpt gpt, data::Batch batch, std::unique_ptr<optim::Optimizer> probe,
             base::Clock clock);
  ~StepTrials();

  /// As a TrialRunner does.
  std::optional<Trial> run(std::int64_t size, std::int64_t recomputed, bool accumulating);

 private:
  void micro_batch(std::int64_t size, std::int64_t recomputed);
  void make_state();

  models::Gpt gpt_;
  data::Batch batch_;
  std::unique_ptr<optim::Optimizer> probe_;
  base::Clock clock_;
  bool ready_ = false;
};

}  // namespace gradus::train
