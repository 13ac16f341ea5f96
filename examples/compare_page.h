#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <gradus/report/metrics.h>

namespace gradus::examples {

/// A finished run, as a comparison shows it.
struct RunResult {
  std::string name = {};   ///< "plain", "budget".
  std::string model = {};  ///< "ResNet-50, width 16".
  std::int64_t depth = 0;
  std::int64_t parameters = 0;
  std::int64_t limit_bytes = 0;
  std::int64_t peak_bytes = 0;
  double step_ms = 0.0;       ///< Median.
  std::int64_t replayed = 0;  ///< Operators run again.
  double last_loss = 0.0;     ///< Mean of the last steps.
  std::string quality = {};   ///< "86.1 %".
  std::string sample = {};
  std::string report_path = {};  ///< Relative to the page; empty: none.
  std::vector<report::StepMetrics> steps = {};
};

/// What a comparison is about.
struct ComparisonText {
  std::string title = {};
  std::string quality_name = {};
  std::string loss_label = {};
};

/// The comparison as one HTML document that needs no network: a table with a column a run, both
/// loss curves over the steps, samples.
std::string comparison_page(const ComparisonText& text, const std::vector<RunResult>& runs);

/// The same table as plain text.
std::string comparison_table(const ComparisonText& text, const std::vector<RunResult>& runs);

}  // namespace gradus::examples
