#pragma once

#include <cstdint>
#include <map>
#include <string>

#include <gradus/amp/scaler/grad_scaler.h>

namespace gradus::amp::scaler {

/// The scale and the rule that moves it. Lives on the host: a step has to read the overflow there
/// anyway, and so the floor can be an error in the iteration that reaches it.
class LossScale {
 public:
  /// @throws UserError on an option out of its range.
  explicit LossScale(const GradScalerOptions& options);

  /// Takes one iteration's verdict. False if an overflow found the scale at its floor already,
  /// where it stays.
  [[nodiscard]] bool advance(bool overflow);

  /// @throws UserError unless @p scale is finite and within [min_scale, max_scale].
  void set(double scale);

  float value() const { return value_; }
  std::int64_t growth_tracker() const { return growth_tracker_; }
  /// Overflows in a row up to now.
  std::int64_t streak() const { return streak_; }

  std::map<std::string, double> state() const;
  /// @throws UserError, with nothing changed, on a state that is not one.
  void load_state(const std::map<std::string, double>& state);

 private:
  bool back_off();
  void grow();

  double growth_factor_;
  double backoff_factor_;
  std::int64_t growth_interval_;
  double min_scale_;
  double max_scale_;
  std::int64_t hysteresis_;
  Hysteresis hysteresis_counts_;
  bool dynamic_;

  float value_;  // float32, as torch's: the products below round as its kernel's do.
  std::int64_t growth_tracker_ = 0;
  std::int64_t hysteresis_tracker_;  // Overflows left until one backs off.
  std::int64_t streak_ = 0;
};

}  // namespace gradus::amp::scaler
