#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <gradus/amp/scaler/grad_scaler.h>

namespace gradus::amp::scaler {

/// Counts the steps of one optimizer, and tells once when too many of the last ones were skipped.
struct SkipRate {
  StepCounts counts = {};
  std::vector<bool> recent = {};  // Ring of the last steps: was it skipped?
  bool warned = false;

  void count(bool skipped, std::int64_t window) {
    const auto place = static_cast<std::size_t>(counts.steps % window);
    if (recent.size() <= place) recent.resize(place + 1);
    recent[place] = skipped;
    ++counts.steps;
    if (skipped) ++counts.skipped;
  }

  std::int64_t recent_skips() const { return std::ranges::count(recent, true); }

  /// True the first time that more than @p highest of the last @p window steps were skipped.
  bool due(std::int64_t window, double highest) {
    if (warned || counts.steps < window) return false;
    warned = static_cast<double>(recent_skips()) / static_cast<double>(window) > highest;
    return warned;
  }
};

}  // namespace gradus::amp::scaler
