#pragma once

#include <cstdint>
#include <string>

namespace gradus::accumulate {

/// How the learning rate follows the batch, k = effective batch / base batch.
enum class RateRule : std::uint8_t {
  none,    ///< Keep the rate.
  linear,  ///< rate * k: k small steps and one of k times the batch go equally far (Goyal et al.
           ///< 2017, section 2.1). For SGD.
  square_root,  ///< rate * sqrt(k): keeps the variance of the step (Krizhevsky 2014, "One weird
                ///< trick"; Hoffer et al. 2017, "Train longer"). For Adam and its kin.
};

struct RateOptions {
  double rate = 0.0;            ///< The rate that suits base_batch. Finite, > 0.
  std::int64_t base_batch = 0;  ///< Examples a step that `rate` was tuned for. >= 1.
  std::int64_t effective_batch =
      0;  ///< Examples a step now: all micro-batches, all processes. >= 1.
  RateRule rule = RateRule::linear;
  /// Examples of an epoch, to give the warm-up in steps; 0: unknown.
  std::int64_t epoch_examples = 0;
};

/// A scaled rate, and what was done.
struct ScaledRate {
  double rate = 0.0;
  double factor = 1.0;  ///< rate / the rate given.
  /// Steps to grow from the given rate to this one: five epochs where the batch grew (Goyal et al.
  /// 2017, section 2.2); 0 where none is advised or the epoch is unknown.
  std::int64_t warmup_steps = 0;
  /// "learning rate 0.1 -> 0.4: x 4, linear in the effective batch (256 -> 1024 examples); ..."
  std::string explanation{};
};

/// Applies @p options.rule. The effective batch is that of a step, whatever micro-batches it was
/// cut into: memory never changes the rate.
/// @throws UserError on a number out of its range.
ScaledRate scale_learning_rate(const RateOptions& options);

}  // namespace gradus::accumulate
