#include <gradus/optim/schedule.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include <gradus/base/error.h>

namespace gradus::optim {
namespace {

void check_step(std::int64_t step) {
  GRADUS_CHECK("schedule", step >= 0, "step must be >= 0; got ", step);
}

void check_rate(const char* name, double value) {
  GRADUS_CHECK("schedule", std::isfinite(value) && value >= 0.0, name,
               " must be finite and >= 0; got ", value);
}

void check_count(const char* name, std::int64_t value) {
  GRADUS_CHECK("schedule", value >= 1, name, " must be >= 1; got ", value);
}

void check_milestones(const std::vector<std::int64_t>& milestones) {
  GRADUS_CHECK("schedule",
               std::is_sorted(milestones.begin(), milestones.end()) &&
                   (milestones.empty() || milestones.front() >= 0),
               "milestones must be >= 0 and ascend; got ", milestones.size(), " that begin with ",
               milestones.empty() ? 0 : milestones.front());
}

// From `start` to `end` as `progress` goes from 0 to 1.
double between(double start, double end, double progress, bool cosine) {
  return cosine ? end + (start - end) / 2.0 * (std::cos(std::numbers::pi * progress) + 1.0)
                : (end - start) * progress + start;
}

}  // namespace

Schedule constant_schedule(double lr) {
  GRADUS_CHECK("schedule", std::isfinite(lr) && lr >= 0.0, "lr must be finite and >= 0; got ", lr);
  return [lr](std::int64_t step) {
    check_step(step);
    return lr;
  };
}

Schedule warmup_cosine_schedule(const WarmupCosineOptions& options) {
  const auto& o = options;
  GRADUS_CHECK("schedule", std::isfinite(o.peak_lr) && o.peak_lr >= 0.0,
               "peak_lr must be finite and >= 0; got ", o.peak_lr);
  GRADUS_CHECK("schedule", o.total_steps >= 1, "total_steps must be >= 1; got ", o.total_steps);
  GRADUS_CHECK("schedule", o.warmup_steps >= 0 && o.warmup_steps < o.total_steps,
               "warmup_steps must be in [0, total_steps); got ", o.warmup_steps, " of ",
               o.total_steps);
  GRADUS_CHECK("schedule", o.min_ratio >= 0.0 && o.min_ratio <= 1.0,
               "min_ratio must be in [0, 1]; got ", o.min_ratio);
  return [o](std::int64_t step) {
    check_step(step);
    if (step < o.warmup_steps) {
      return o.peak_lr * static_cast<double>(step + 1) / static_cast<double>(o.warmup_steps + 1);
    }
    const double floor = o.peak_lr * o.min_ratio;
    if (step >= o.total_steps) return floor;
    const double progress = static_cast<double>(step - o.warmup_steps) /
                            static_cast<double>(o.total_steps - o.warmup_steps);
    return floor + (o.peak_lr - floor) * 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  };
}

Schedule with_warmup(std::int64_t warmup_steps, Schedule schedule) {
  GRADUS_CHECK("schedule", warmup_steps >= 0, "warmup_steps must be >= 0; got ", warmup_steps);
  GRADUS_CHECK("schedule", schedule != nullptr, "there must be a schedule to warm up to");
  return [warmup_steps, schedule = std::move(schedule)](std::int64_t step) {
    check_step(step);
    if (step >= warmup_steps) return schedule(step - warmup_steps);
    return schedule(0) * static_cast<double>(step + 1) / static_cast<double>(warmup_steps + 1);
  };
}

Schedule sequential_schedule(std::vector<Schedule> schedules,
                             std::vector<std::int64_t> milestones) {
  GRADUS_CHECK("schedule", schedules.size() == milestones.size() + 1,
               "there must be one schedule more than milestones; got ", schedules.size(), " and ",
               milestones.size());
  check_milestones(milestones);
  for (const auto& schedule : schedules) {
    GRADUS_CHECK("schedule", schedule != nullptr, "each schedule must be callable; one is empty");
  }
  return [schedules = std::move(schedules), milestones = std::move(milestones)](std::int64_t step) {
    check_step(step);
    const auto reached = std::upper_bound(milestones.begin(), milestones.end(), step);
    const auto index = static_cast<std::size_t>(reached - milestones.begin());
    return schedules[index](index == 0 ? step : step - milestones[index - 1]);
  };
}

Schedule cosine_schedule(const CosineOptions& options) {
  check_rate("peak_lr", options.peak_lr);
  check_rate("min_lr", options.min_lr);
  check_count("total_steps", options.total_steps);
  return [o = options](std::int64_t step) {
    check_step(step);
    const double progress =
        static_cast<double>(std::min(step, o.total_steps)) / static_cast<double>(o.total_steps);
    return between(o.peak_lr, o.min_lr, progress, true);
  };
}

Schedule linear_schedule(const LinearOptions& options) {
  check_rate("lr", options.lr);
  check_rate("start_factor", options.start_factor);
  check_rate("end_factor", options.end_factor);
  check_count("total_steps", options.total_steps);
  return [o = options](std::int64_t step) {
    check_step(step);
    const double progress =
        static_cast<double>(std::min(step, o.total_steps)) / static_cast<double>(o.total_steps);
    return o.lr * between(o.start_factor, o.end_factor, progress, false);
  };
}

Schedule inverse_square_root_schedule(const InverseSquareRootOptions& options) {
  check_rate("peak_lr", options.peak_lr);
  check_count("warmup_steps", options.warmup_steps);
  return [o = options](std::int64_t step) {
    check_step(step);
    const double t = static_cast<double>(step) + 1.0;
    const auto warmup = static_cast<double>(o.warmup_steps);
    return o.peak_lr * std::min(t / warmup, std::sqrt(warmup / t));
  };
}

Schedule step_schedule(double lr, std::int64_t step_size, double gamma) {
  check_rate("lr", lr);
  check_rate("gamma", gamma);
  check_count("step_size", step_size);
  return [lr, step_size, gamma](std::int64_t step) {
    check_step(step);
    return lr * std::pow(gamma, static_cast<double>(step / step_size));
  };
}

Schedule multistep_schedule(double lr, std::vector<std::int64_t> milestones, double gamma) {
  check_rate("lr", lr);
  check_rate("gamma", gamma);
  check_milestones(milestones);
  return [lr, milestones = std::move(milestones), gamma](std::int64_t step) {
    check_step(step);
    const auto reached = std::upper_bound(milestones.begin(), milestones.end(), step);
    return lr * std::pow(gamma, static_cast<double>(reached - milestones.begin()));
  };
}

Schedule exponential_schedule(double lr, double gamma) { return step_schedule(lr, 1, gamma); }

Schedule polynomial_schedule(double lr, std::int64_t total_steps, double power) {
  check_rate("lr", lr);
  check_rate("power", power);
  check_count("total_steps", total_steps);
  return [lr, total_steps, power](std::int64_t step) {
    check_step(step);
    const double progress =
        static_cast<double>(std::min(step, total_steps)) / static_cast<double>(total_steps);
    return lr * std::pow(1.0 - progress, power);
  };
}

Schedule one_cycle_schedule(const OneCycleOptions& options) {
  const auto& o = options;
  check_rate("max_lr", o.max_lr);
  check_count("total_steps", o.total_steps);
  GRADUS_CHECK("schedule", o.warmup_share >= 0.0 && o.warmup_share <= (o.three_phase ? 0.5 : 1.0),
               "warmup_share must be in [0, 1], and at most 0.5 with three_phase; got ",
               o.warmup_share);
  for (const double factor : {o.div_factor, o.final_div_factor}) {
    GRADUS_CHECK("schedule", std::isfinite(factor) && factor > 0.0,
                 "div_factor and final_div_factor must be finite and > 0; got ", factor);
  }
  struct Phase {
    double end_step;
    double start_lr;
    double end_lr;
  };
  const double initial = o.max_lr / o.div_factor;
  const double last = static_cast<double>(o.total_steps) - 1.0;
  const double top = o.warmup_share * static_cast<double>(o.total_steps) - 1.0;
  std::vector<Phase> phases{{top, initial, o.max_lr}};
  if (o.three_phase) phases.push_back({2.0 * top, o.max_lr, initial});
  phases.push_back({last, phases.back().end_lr, initial / o.final_div_factor});
  return [phases, last, cosine = o.cosine](std::int64_t step) {
    check_step(step);
    const double s = std::min(static_cast<double>(step), last);
    double start = 0.0;
    for (std::size_t i = 0; i < phases.size(); ++i) {
      const auto& phase = phases[i];
      if (s <= phase.end_step || i + 1 == phases.size()) {
        // A phase without length (a very short cycle) is over at once.
        const double length = phase.end_step - start;
        const double progress = length > 0.0 ? (s - start) / length : 1.0;
        return between(phase.start_lr, phase.end_lr, progress, cosine);
      }
      start = phase.end_step;
    }
    return phases.back().end_lr;
  };
}

}  // namespace gradus::optim
