#include <gradus/report/internal/axis.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include <gradus/report/internal/text.h>

namespace gradus::report::internal {
namespace {

/// The smallest of 1, 2, 2.5, 5 times a power of ten that is at least @p rough.
double round_step(double rough) {
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 2.5, 5.0}) {
    if (rough <= factor * power * (1.0 + 1e-9)) return factor * power;
  }
  return 10.0 * power;
}

std::string linear_label(double value, double step) {
  if (std::abs(value) < step * 1e-6) return "0";
  if (std::abs(value) >= 1e7) return short_count(std::abs(value)).insert(0, value < 0 ? "-" : "");
  if (step < 1e-5) return significant(value, 3);
  if (step >= 1.0 && std::abs(step - std::round(step)) < 1e-9)
    return group_digits(std::llround(value));
  // 0.25 needs one digit more than its power of ten says.
  int decimals = std::max(0, static_cast<int>(-std::floor(std::log10(step) + 1e-9)));
  const double scaled = step * std::pow(10.0, decimals);
  if (std::abs(scaled - std::round(scaled)) > 1e-6) ++decimals;
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), "%.*f", decimals, value);
  return text.data();
}

void add_linear_ticks(Axis& axis, double step, double scale) {
  const auto first = static_cast<long long>(std::ceil(axis.low / scale / step - 1e-6));
  const auto last = static_cast<long long>(std::floor(axis.high / scale / step + 1e-6));
  for (long long i = first; i <= last; ++i) {
    const double value = static_cast<double>(i) * step;
    axis.ticks.push_back({value * scale, linear_label(value, step)});
  }
}

Axis logarithmic_axis(double low, double high) {
  Axis axis;
  axis.logarithmic = true;
  const double first = std::floor(std::log10(low) + 1e-9);
  const double last = std::max(first + 1.0, std::ceil(std::log10(high) - 1e-9));
  axis.low = std::pow(10.0, first);
  axis.high = std::pow(10.0, last);
  const int decades = static_cast<int>(last - first);
  const int stride = std::max(1, decades / 5);
  for (int decade = 0; decade <= decades; decade += stride) {
    for (const double factor : {1.0, 2.0, 5.0}) {
      if (factor > 1.0 && (decades > 2 || decade == decades)) break;
      const double value = factor * std::pow(10.0, first + decade);
      axis.ticks.push_back({value, value >= 1e4 ? short_count(value) : significant(value, 3)});
    }
  }
  return axis;
}

/// Makes room around a flat or empty range.
void widen(double& low, double& high) {
  if (high - low > 1e-12 * std::max(std::abs(low), std::abs(high))) return;
  const double room = low == 0.0 ? 1.0 : 0.1 * std::abs(low);
  low -= room;
  high += room;
}

}  // namespace

double Axis::position(double value) const {
  const double share = logarithmic ? std::log(std::max(value, low) / low) / std::log(high / low)
                                   : (value - low) / (high - low);
  return std::clamp(share, 0.0, 1.0);
}

Axis rounded_axis(AxisKind kind, double low, double high, int target) {
  if (kind == AxisKind::logarithmic) return logarithmic_axis(low, high);
  widen(low, high);
  Axis axis;
  double scale = 1.0;
  if (kind == AxisKind::bytes) {
    static constexpr std::array<const char*, 5> units{"B", "KiB", "MiB", "GiB", "TiB"};
    std::size_t unit = 0;
    for (; high / scale >= 1024.0 && unit + 1 < units.size(); ++unit) scale *= 1024.0;
    axis.unit = units[unit];
    low = std::max(low, 0.0);
  }
  const double step = round_step((high - low) / scale / target);
  axis.low = std::floor(low / scale / step + 1e-9) * step * scale;
  axis.high = std::ceil(high / scale / step - 1e-9) * step * scale;
  add_linear_ticks(axis, step, scale);
  return axis;
}

Axis exact_axis(double low, double high, int target) {
  widen(low, high);
  Axis axis;
  axis.low = low;
  axis.high = high;
  add_linear_ticks(axis, round_step((high - low) / target), 1.0);
  return axis;
}

}  // namespace gradus::report::internal
