#include <gradus/optim/schedule.h>

#include <cmath>
#include <numbers>

#include <gradus/base/error.h>

namespace gradus::optim {
namespace {

void check_step(std::int64_t step) {
  GRADUS_CHECK("schedule", step >= 0, "step must be >= 0; got ", step);
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

}  // namespace gradus::optim
