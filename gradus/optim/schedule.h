#pragma once

#include <cstdint>
#include <functional>

namespace gradus::optim {

/// A learning rate by optimizer step, counted from 0. Pure: a resumed run needs the step number and
/// nothing else.
using Schedule = std::function<double(std::int64_t step)>;

/// The same rate at every step. @throws UserError unless @p lr is finite and >= 0.
Schedule constant_schedule(double lr);

struct WarmupCosineOptions {
  double peak_lr = 1e-3;          ///< The highest rate. Finite, >= 0.
  std::int64_t warmup_steps = 0;  ///< Steps below the peak. In [0, total_steps).
  std::int64_t total_steps = 1;   ///< Step at which the rate has come down to its floor. >= 1.
  double min_ratio = 0.1;         ///< Floor as a share of the peak. In [0, 1].
};

/// Linear warm-up, then half a cosine down to min_ratio * peak_lr (Loshchilov and Hutter 2017),
/// then that floor.
///
/// Step s < warmup_steps has peak_lr * (s + 1) / (warmup_steps + 1), so no step is lost at rate 0;
/// step warmup_steps has the peak; from step total_steps on the floor holds.
/// @throws UserError on an option out of its range; the schedule throws on a negative step.
Schedule warmup_cosine_schedule(const WarmupCosineOptions& options);

}  // namespace gradus::optim
