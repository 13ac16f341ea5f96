#pragma once

#include <cstdint>
#include <functional>
#include <vector>

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

/// Puts a linear warm-up before @p schedule: step s < warmup_steps has schedule(0) * (s + 1) /
/// (warmup_steps + 1), so that no step is lost at rate 0; step s >= warmup_steps has schedule(s -
/// warmup_steps).
/// @throws UserError unless warmup_steps >= 0; the schedule throws on a negative step.
Schedule with_warmup(std::int64_t warmup_steps, Schedule schedule);

/// Plays schedules one after the other, each from its own step 0: schedules[i] until step
/// milestones[i], the last one for good. torch's SequentialLR.
/// @throws UserError unless there is one milestone less than schedules and they are >= 0 and
/// ascend.
Schedule sequential_schedule(std::vector<Schedule> schedules, std::vector<std::int64_t> milestones);

struct CosineOptions {
  double peak_lr = 1e-3;         ///< Rate at step 0. Finite, >= 0.
  std::int64_t total_steps = 1;  ///< Step at which min_lr is reached; it holds from there. >= 1.
  double min_lr = 0.0;           ///< Finite, >= 0.
};

/// Half a cosine from peak_lr to min_lr (Loshchilov and Hutter 2017, equation 5). Equals torch's
/// CosineAnnealingLR up to total_steps, after which torch's rises again.
Schedule cosine_schedule(const CosineOptions& options);

struct LinearOptions {
  double lr = 1e-3;              ///< Rate that the factors multiply. Finite, >= 0.
  double start_factor = 1.0;     ///< At step 0. Finite, >= 0.
  double end_factor = 0.0;       ///< From total_steps on. Finite, >= 0.
  std::int64_t total_steps = 1;  ///< >= 1.
};

/// A straight line from lr * start_factor to lr * end_factor, as torch's LinearLR.
Schedule linear_schedule(const LinearOptions& options);

struct InverseSquareRootOptions {
  double peak_lr = 1e-3;          ///< The highest rate, at step warmup_steps - 1. Finite, >= 0.
  std::int64_t warmup_steps = 1;  ///< >= 1.
};

/// peak_lr * min((s + 1) / W, sqrt(W / (s + 1))) with W = warmup_steps: Vaswani et al. 2017,
/// equation 3, which has peak_lr = 1 / sqrt(d_model * W).
Schedule inverse_square_root_schedule(const InverseSquareRootOptions& options);

/// lr * gamma^floor(step / step_size), as torch's StepLR.
/// @throws UserError unless step_size >= 1 and lr and gamma are finite and >= 0.
Schedule step_schedule(double lr, std::int64_t step_size, double gamma = 0.1);

/// lr * gamma^(milestones <= step), as torch's MultiStepLR; a milestone given twice counts twice.
/// @throws UserError unless the milestones are >= 0 and ascend, and lr and gamma are finite and
/// >= 0.
Schedule multistep_schedule(double lr, std::vector<std::int64_t> milestones, double gamma = 0.1);

/// lr * gamma^step, as torch's ExponentialLR. @throws UserError as step_schedule does.
Schedule exponential_schedule(double lr, double gamma);

/// lr * (1 - min(step, total_steps) / total_steps)^power, as torch's PolynomialLR.
/// @throws UserError unless total_steps >= 1 and lr and power are finite and >= 0.
Schedule polynomial_schedule(double lr, std::int64_t total_steps, double power = 1.0);

struct OneCycleOptions {
  double max_lr = 1e-3;           ///< The highest rate. Finite, >= 0.
  std::int64_t total_steps = 1;   ///< Steps of the cycle, which ends at total_steps - 1. >= 1.
  double warmup_share = 0.3;      ///< Part of the cycle that rises (torch's pct_start). In [0, 1].
  bool cosine = true;             ///< Rise and fall along half cosines; false: straight lines.
  double div_factor = 25.0;       ///< The cycle starts at max_lr / div_factor. Finite, > 0.
  double final_div_factor = 1e4;  ///< It ends at the start / final_div_factor. Finite, > 0.
  bool three_phase = false;       ///< Fall back to the start as long as it rose, then to the end.
};

/// Up from max_lr / div_factor to max_lr and down far below the start (Smith and Topin 2018), as
/// torch's OneCycleLR (of the rate; torch cycles the momentum as well unless told not to). The last
/// rate holds after the cycle, where torch raises an error.
Schedule one_cycle_schedule(const OneCycleOptions& options);

}  // namespace gradus::optim
