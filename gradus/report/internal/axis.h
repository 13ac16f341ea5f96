#pragma once

#include <string>
#include <vector>

namespace gradus::report::internal {

enum class AxisKind { linear, logarithmic, bytes };

struct Tick {
  double value = 0.0;
  std::string label;  ///< Without the unit.
};

/// The range of a chart's axis and where it is labelled.
struct Axis {
  double low = 0.0;
  double high = 1.0;
  bool logarithmic = false;
  std::string unit;  ///< For bytes: "MiB", the unit of the labels; else empty.
  std::vector<Tick> ticks;

  /// Where @p value stands, 0 at low, 1 at high; clamped to [0, 1].
  double position(double value) const;
};

/// An axis that covers [low, high] and ends on round numbers, with about @p target ticks.
Axis rounded_axis(AxisKind kind, double low, double high, int target);

/// An axis from low to high exactly, with round ticks inside.
Axis exact_axis(double low, double high, int target);

}  // namespace gradus::report::internal
