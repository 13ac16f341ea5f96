#include <gradus/amp/scaler/internal/loss_scale.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <gradus/base/error.h>

namespace gradus::amp::scaler {
namespace {

constexpr const char* kComponent = "amp_scaler";
constexpr const char* kHysteresisKey = "_hysteresis_tracker";
constexpr std::array kTorchKeys = {"scale", "growth_factor", "backoff_factor", "growth_interval",
                                   "_growth_tracker"};

void check_factors(double growth, double backoff) {
  GRADUS_CHECK(kComponent, std::isfinite(growth) && growth > 1.0,
               "growth_factor must be finite and > 1; got ", growth);
  GRADUS_CHECK(kComponent, backoff > 0.0 && backoff < 1.0, "backoff_factor must be in (0, 1); got ",
               backoff);
}

void check_scale(double scale, double lowest, double highest) {
  GRADUS_CHECK(kComponent, std::isfinite(static_cast<float>(scale)),
               "the scale must be a finite float32; got ", scale);
  GRADUS_CHECK(kComponent, scale >= lowest && scale <= highest, "the scale must be within [",
               lowest, ", ", highest, "] (min_scale, max_scale); got ", scale);
}

std::int64_t whole_number(const std::string& key, double value, double lowest) {
  GRADUS_CHECK(kComponent, value >= lowest && value <= 0x1p53 && value == std::floor(value),
               "state '", key, "' must be a whole number >= ", lowest, "; got ", value);
  return static_cast<std::int64_t>(value);
}

}  // namespace

LossScale::LossScale(const GradScalerOptions& options)
    : growth_factor_(options.growth_factor),
      backoff_factor_(options.backoff_factor),
      growth_interval_(options.growth_interval),
      min_scale_(options.min_scale),
      max_scale_(options.max_scale),
      hysteresis_(options.hysteresis),
      hysteresis_counts_(options.hysteresis_counts),
      dynamic_(options.dynamic),
      value_(static_cast<float>(options.init_scale)),
      hysteresis_tracker_(options.hysteresis) {
  check_factors(growth_factor_, backoff_factor_);
  GRADUS_CHECK(kComponent, growth_interval_ >= 1, "growth_interval must be >= 1; got ",
               growth_interval_);
  GRADUS_CHECK(kComponent, hysteresis_ >= 1, "hysteresis must be >= 1; got ", hysteresis_);
  // The inverse of a smaller one is infinite in float32.
  GRADUS_CHECK(kComponent, min_scale_ >= std::numeric_limits<float>::min(),
               "min_scale must be >= ", std::numeric_limits<float>::min(), "; got ", min_scale_);
  GRADUS_CHECK(kComponent, max_scale_ >= min_scale_, "max_scale must be >= min_scale ", min_scale_,
               "; got ", max_scale_);
  check_scale(options.init_scale, min_scale_, max_scale_);
}

void LossScale::set(double scale) {
  check_scale(scale, min_scale_, max_scale_);
  value_ = static_cast<float>(scale);
}

bool LossScale::advance(bool overflow) {
  streak_ = overflow ? streak_ + 1 : 0;
  if (!dynamic_) return true;
  if (overflow) {
    growth_tracker_ = 0;
    hysteresis_tracker_ = std::max<std::int64_t>(hysteresis_tracker_ - 1, 0);
    return hysteresis_tracker_ > 0 || back_off();
  }
  if (hysteresis_counts_ == Hysteresis::consecutive) hysteresis_tracker_ = hysteresis_;
  // A loaded tracker may be past a shorter interval; torch, which compares for equality, would then
  // never grow again.
  if (++growth_tracker_ >= growth_interval_) grow();
  return true;
}

bool LossScale::back_off() {
  const auto lowest = static_cast<float>(min_scale_);
  if (value_ <= lowest) return false;
  value_ = std::max(static_cast<float>(static_cast<double>(value_) * backoff_factor_), lowest);
  return true;
}

void LossScale::grow() {
  growth_tracker_ = 0;
  hysteresis_tracker_ = hysteresis_;
  const auto grown = static_cast<float>(static_cast<double>(value_) * growth_factor_);
  // As torch: a product that is not a float32 leaves the scale.
  if (!std::isfinite(grown)) return;
  value_ = std::max(value_, static_cast<float>(std::min<double>(grown, max_scale_)));
}

std::map<std::string, double> LossScale::state() const {
  std::map<std::string, double> state{{"scale", value_},
                                      {"growth_factor", growth_factor_},
                                      {"backoff_factor", backoff_factor_},
                                      {"growth_interval", static_cast<double>(growth_interval_)},
                                      {"_growth_tracker", static_cast<double>(growth_tracker_)}};
  if (hysteresis_ > 1) state[kHysteresisKey] = static_cast<double>(hysteresis_tracker_);
  return state;
}

void LossScale::load_state(const std::map<std::string, double>& state) {
  for (const auto* key : kTorchKeys) {
    GRADUS_CHECK(kComponent, state.contains(key), "the state must have '", key, "'; it has ",
                 state.size(), " entries, without it",
                 state.empty() ? ": it is that of a scaler that was not enabled" : "");
  }
  for (const auto& [key, value] : state) {
    GRADUS_CHECK(kComponent,
                 key == kHysteresisKey ||
                     std::find(kTorchKeys.begin(), kTorchKeys.end(), key) != kTorchKeys.end(),
                 "the state has an entry '", key, "' that a scaler does not have");
  }
  check_scale(state.at("scale"), min_scale_, max_scale_);
  check_factors(state.at("growth_factor"), state.at("backoff_factor"));
  const auto interval = whole_number("growth_interval", state.at("growth_interval"), 1);
  const auto tracker = whole_number("_growth_tracker", state.at("_growth_tracker"), 0);
  auto left = hysteresis_;
  if (const auto entry = state.find(kHysteresisKey); entry != state.end()) {
    // A run with more hysteresis than this one may have written it.
    left = std::min(left, whole_number(kHysteresisKey, entry->second, 0));
  }
  value_ = static_cast<float>(state.at("scale"));
  growth_factor_ = state.at("growth_factor");
  backoff_factor_ = state.at("backoff_factor");
  growth_interval_ = interval;
  growth_tracker_ = tracker;
  hysteresis_tracker_ = left;
  streak_ = 0;
}

}  // namespace gradus::amp::scaler
