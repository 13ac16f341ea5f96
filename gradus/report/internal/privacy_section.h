#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <gradus/report/html_report.h>
#include <gradus/report/internal/series.h>

namespace gradus::report::internal {

/// A metric of StepMetrics::extra over the steps that have it.
std::vector<Point> extra_curve(const std::vector<StepMetrics>& steps, const std::string& name);

/// How many values lie between two limits each.
struct Histogram {
  std::vector<double> edges;  ///< One more than counts, ascending.
  std::vector<std::size_t> counts;
};

/// @p bins bins of equal ratio over the positive values; smaller ones and zeros count in the first.
/// Empty without a positive finite value.
Histogram logarithmic_histogram(const std::vector<double>& values, std::size_t bins);

/// Test accuracy by step; "" if no step has it.
std::string accuracy_chart(const ReportData& data);

/// Epsilon, clip fraction, quantiles of gradient norms, their histogram and what keeps the run
/// private; "" for a run that is not private.
std::string privacy_section(const ReportData& data);

}  // namespace gradus::report::internal
