#include <gradus/accumulate/learning_rate.h>

#include <cmath>

#include <gradus/base/error.h>

namespace gradus::accumulate {
namespace {

constexpr double kWarmupEpochs = 5.0;
// Up to which Goyal et al. (2017, figure 1) found ImageNet's error unchanged.
constexpr std::int64_t kLargestProvenBatch = 8192;

double factor_of(RateRule rule, double k) {
  switch (rule) {
    case RateRule::none:
      return 1.0;
    case RateRule::linear:
      return k;
    case RateRule::square_root:
      return std::sqrt(k);
  }
  return 1.0;
}

std::string advice(const RateOptions& options, const ScaledRate& scaled, double k) {
  if (options.rule == RateRule::none || k <= 1.0) return "";
  std::string text = base::join("; warm up from ", options.rate, " over ");
  text += scaled.warmup_steps > 0 ? base::join(scaled.warmup_steps, " steps (five epochs)")
                                  : std::string("the first five epochs");
  if (options.rule == RateRule::linear && options.effective_batch > kLargestProvenBatch) {
    text += base::join("; the linear rule is known to fail somewhere beyond ", kLargestProvenBatch,
                       " examples a step");
  }
  return text;
}

}  // namespace

ScaledRate scale_learning_rate(const RateOptions& options) {
  GRADUS_CHECK("learning_rate", std::isfinite(options.rate) && options.rate > 0.0,
               "rate must be finite and > 0; got ", options.rate);
  GRADUS_CHECK("learning_rate", options.base_batch >= 1, "base_batch must be >= 1; got ",
               options.base_batch, ". It is the batch that the rate was tuned for");
  GRADUS_CHECK("learning_rate", options.effective_batch >= 1, "effective_batch must be >= 1; got ",
               options.effective_batch);
  GRADUS_CHECK("learning_rate", options.epoch_examples >= 0, "epoch_examples must be >= 0; got ",
               options.epoch_examples);
  const double k =
      static_cast<double>(options.effective_batch) / static_cast<double>(options.base_batch);
  ScaledRate scaled{.factor = factor_of(options.rule, k)};
  scaled.rate = options.rate * scaled.factor;
  if (options.rule != RateRule::none && k > 1.0 && options.epoch_examples > 0) {
    scaled.warmup_steps = static_cast<std::int64_t>(
        std::ceil(kWarmupEpochs * static_cast<double>(options.epoch_examples) /
                  static_cast<double>(options.effective_batch)));
  }
  const std::string batches =
      base::join("(", options.base_batch, " -> ", options.effective_batch, " examples)");
  if (options.rule == RateRule::none) {
    scaled.explanation = base::join("learning rate ", options.rate,
                                    " kept: no scaling with the effective batch ", batches);
    return scaled;
  }
  scaled.explanation = base::join(
      "learning rate ", options.rate, " -> ", scaled.rate, ": x ", scaled.factor,
      options.rule == RateRule::linear ? ", linear in the effective batch "
                                       : ", the square root of the effective batch's growth ",
      batches, advice(options, scaled, k));
  return scaled;
}

}  // namespace gradus::accumulate
