#include <gradus/train/private_options.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

#include <gradus/base/error.h>

namespace gradus::train {
namespace {

// The configuration's names, which validate() has checked.
template <typename Value, std::size_t N>
Value named(const std::array<std::pair<const char*, Value>, N>& known, const std::string& name) {
  for (const auto& [each, value] : known)
    if (name == each) return value;
  throw InternalError("[train] a name that validate() let pass: " + name);
}

}  // namespace

privacy::PrivacyOptions privacy_options(const TrainConfig& config) {
  using privacy::AccountantKind;
  using privacy::Clipping;
  static constexpr std::array<std::pair<const char*, Clipping>, 4> kClippings{
      {{"flat", Clipping::flat},
       {"per-layer", Clipping::per_layer},
       {"automatic", Clipping::automatic},
       {"adaptive", Clipping::adaptive}}};
  static constexpr std::array<std::pair<const char*, AccountantKind>, 3> kAccountants{
      {{"pld", AccountantKind::kPld},
       {"rdp", AccountantKind::kRdp},
       {"prv", AccountantKind::kPrv}}};
  privacy::PrivacyOptions options;
  options.clipping.policy = named(kClippings, config.privacy.clipping);
  options.clipping.max_norm = config.privacy.max_grad_norm;
  options.accountant.kind = named(kAccountants, config.privacy.accountant);
  if (!config.privacy.secure) {
    options.seed = static_cast<std::uint64_t>(config.train.seed);
    options.sample.graph.reproducible = true;
  }
  // What bfloat16 computes of a batch and of one example alone differs by its rounding, whatever
  // the parameters are in.
  if (config.train.precision != "fp32" && config.train.precision != "O0")
    options.sample.tolerance_float32 = options.sample.tolerance_16bit;
  // A memory plan is for the calls that were measured: choices by time might be others later.
  if (!config.memory.limit.empty()) options.sample.graph.reproducible = true;
  return options;
}

std::string privacy_inputs(const TrainConfig& config, std::int64_t examples, std::int64_t steps) {
  const auto& privacy = config.privacy;
  if (!privacy.enabled) return "none";
  return base::join("epsilon ", privacy.epsilon, ", delta ", privacy.delta, ", noise multiplier ",
                    privacy.noise_multiplier, ", largest norm ", privacy.max_grad_norm,
                    ", clipping ", privacy.clipping, ", accountant ", privacy.accountant,
                    ", secure ", privacy.secure ? "true" : "false", ", batch ", config.train.batch,
                    ", examples ", examples, ", steps ", steps);
}

std::string epsilon_text(double epsilon) {
  if (!std::isfinite(epsilon)) return "infinite";
  if (epsilon <= 0.0) return "0";
  const double unit = std::pow(10.0, std::floor(std::log10(epsilon)) - 2.0);
  std::array<char, 32> text{};
  // A figure that is round already stays: 2.7 / 0.01 may be a hair above 270.
  std::snprintf(text.data(), text.size(), "%.3g", std::ceil(epsilon / unit - 1e-9) * unit);
  return text.data();
}

}  // namespace gradus::train
