#include <gradus/report/html_report.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <string_view>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/report/internal/chart.h>
#include <gradus/report/internal/page.h>
#include <gradus/report/internal/privacy_section.h>
#include <gradus/report/internal/series.h>
#include <gradus/report/internal/text.h>
#include <gradus/state/atomic_file.h>

namespace gradus::report {
namespace {

using base::format_bytes;
using base::join;
using internal::escape_html;
using internal::fixed;
using internal::group_digits;
using internal::key_list;
using internal::Point;
using internal::section;
using internal::significant;
using internal::tile;

constexpr std::array<const char*, base::kMemoryCategoryCount> kCategoryColors{
    "blue", "aqua", "yellow", "violet", "orange", "gray"};

double ratio(std::int64_t part, std::int64_t whole) {
  return static_cast<double>(part) / static_cast<double>(whole);
}

std::string percent_of(std::int64_t part, std::int64_t whole) {
  return fixed(100.0 * ratio(part, whole), 1) + "%";
}

/// What several parts of the report need, worked out once.
struct Findings {
  std::int64_t peak_bytes = 0;
  base::MemoryBreakdown breakdown;
  double elapsed_s = 0.0;
  std::int64_t tokens = 0;
  double tokens_per_s = 0.0;  // median of the steps
  std::size_t nonfinite_losses = 0;
  std::vector<Point> loss, smooth_loss, validation, lr, grad_norm, throughput, peaks, loss_scale,
      skipped;
};

double median_of_finite(const std::vector<Point>& points) {
  std::vector<double> values;
  for (const auto& point : points) {
    if (std::isfinite(point.y)) values.push_back(point.y);
  }
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

base::MemoryBreakdown highest_of(const base::MemoryTimeline& timeline) {
  base::MemoryBreakdown highest;
  for (const auto& point : timeline) {
    if (point.live.total() > highest.total()) highest = point.live;
  }
  return highest;
}

Findings examine(const ReportData& data) {
  Findings found;
  found.peak_bytes = data.peak_bytes;
  for (const auto& step : data.steps) {
    const auto x = static_cast<double>(step.step);
    found.loss.push_back({x, step.loss});
    if (step.validation_loss) found.validation.push_back({x, *step.validation_loss});
    found.lr.push_back({x, step.lr});
    found.grad_norm.push_back({x, step.grad_norm});
    found.throughput.push_back({x, step.tokens_per_s});
    if (step.loss_scale) {
      found.loss_scale.push_back({x, *step.loss_scale});
      if (step.skipped) found.skipped.push_back({x, *step.loss_scale});
    }
    found.peaks.push_back({x, static_cast<double>(step.peak_bytes)});
    found.tokens += step.tokens;
    found.nonfinite_losses += std::isfinite(step.loss) ? 0 : 1;
    if (data.peak_bytes == 0) found.peak_bytes = std::max(found.peak_bytes, step.peak_bytes);
  }
  const double time_constant =
      std::clamp(static_cast<double>(data.steps.size()) / 100.0, 2.0, 50.0);
  found.smooth_loss = internal::smooth(found.loss, time_constant);
  found.breakdown =
      data.peak_breakdown.total() > 0 ? data.peak_breakdown : highest_of(data.step_timeline);
  found.elapsed_s =
      data.elapsed_s > 0 || data.steps.empty() ? data.elapsed_s : data.steps.back().elapsed_s;
  found.tokens_per_s = median_of_finite(found.throughput);
  return found;
}

const Point* first_finite(const std::vector<Point>& points) {
  for (const auto& point : points) {
    if (std::isfinite(point.y)) return &point;
  }
  return nullptr;
}

const Point* last_finite(const std::vector<Point>& points) {
  for (auto point = points.rbegin(); point != points.rend(); ++point) {
    if (std::isfinite(point->y)) return &*point;
  }
  return nullptr;
}

std::string loss_change(const Findings& found) {
  return fixed(first_finite(found.loss)->y, 3) + " \xE2\x86\x92 " +
         fixed(last_finite(found.smooth_loss)->y, 3);
}

std::string skipped_steps(const ReportData& data, const Findings& found) {
  return join(found.skipped.size(), " of ", data.steps.size(), " (",
              fixed(100.0 * static_cast<double>(found.skipped.size()) /
                        static_cast<double>(data.steps.size()),
                    1),
              "%): a gradient was not finite at the loss scale of the step");
}

std::string tiles(const ReportData& data, const Findings& found) {
  std::string html;
  if (found.peak_bytes > 0) {
    html += tile("Peak memory", format_bytes(found.peak_bytes),
                 data.limit_bytes > 0 ? "limit " + format_bytes(data.limit_bytes) + " (" +
                                            percent_of(found.peak_bytes, data.limit_bytes) + ")"
                                      : "no limit was set");
  }
  if (data.plain_peak_bytes > 0) {
    html += tile("Plain training needs", format_bytes(data.plain_peak_bytes),
                 found.peak_bytes > 0 ? fixed(ratio(data.plain_peak_bytes, found.peak_bytes), 1) +
                                            " times this run's peak"
                                      : data.plain_source);
  }
  if (first_finite(found.loss) != nullptr) {
    const Point* validation = last_finite(found.validation);
    html += tile("Training loss", loss_change(found),
                 validation != nullptr ? "validation " + fixed(validation->y, 3)
                                       : "first step, smoothed last");
  }
  if (const auto accuracy = internal::extra_curve(data.steps, "accuracy"); !accuracy.empty()) {
    html += tile("Test accuracy", fixed(100.0 * accuracy.back().y, 2) + "%",
                 join("after step ", static_cast<std::int64_t>(accuracy.back().x)));
  }
  if (const auto epsilon = internal::extra_curve(data.steps, "epsilon"); !epsilon.empty()) {
    html += tile("Epsilon spent", significant(epsilon.back().y, 3),
                 join("after step ", static_cast<std::int64_t>(epsilon.back().x)));
  }
  if (found.tokens_per_s > 0) {
    html += tile("Throughput", internal::short_count(found.tokens_per_s),
                 escape_html(data.item) + "s/s, median step");
  }
  if (found.elapsed_s > 0) {
    html += tile("Time", internal::spoken_time(found.elapsed_s),
                 group_digits(data.steps.empty() ? 0 : data.steps.back().step) + " steps, " +
                     internal::short_count(static_cast<double>(found.tokens)) + " " +
                     escape_html(data.item) + "s");
  }
  return html.empty() ? "" : "<div class=\"tiles\">" + html + "</div>\n";
}

std::string summary(const ReportData& data, const Findings& found) {
  std::string rows;
  const auto row = [&](const char* name, const std::string& value) {
    if (!value.empty())
      rows += "<tr><th scope=\"row\">" + std::string(name) + "</th><td>" + escape_html(value) +
              "</td></tr>";
  };
  const auto if_known = [](std::int64_t value, const auto& text) {
    return value > 0 ? text() : std::string();
  };
  row("Model", data.model);
  row("Parameters",
      if_known(data.parameter_count, [&] { return group_digits(data.parameter_count); }));
  row("Plan", data.plan);
  row("Why this plan", data.plan_reason);
  row("Precision", data.precision);
  row("Optimizer", data.optimizer);
  row("Effective batch",
      if_known(data.effective_batch, [&] { return join(data.effective_batch, " examples"); }));
  row("Micro-batch", if_known(data.microbatch_size, [&] {
        std::string text = join(data.microbatch_size, " examples");
        if (data.microbatches_per_step > 0)
          text += join(", ", data.microbatches_per_step, " per step");
        return text;
      }));
  row("Recomputed segments", if_known(data.segments, [&] {
        return join(data.recomputed_segments, " of ", data.segments);
      }));
  row("Memory limit", if_known(data.limit_bytes, [&] { return format_bytes(data.limit_bytes); }));
  row("Measured peak", if_known(found.peak_bytes, [&] {
        return format_bytes(found.peak_bytes) +
               (data.limit_bytes > 0
                    ? " (" + percent_of(found.peak_bytes, data.limit_bytes) + " of the limit)"
                    : "");
      }));
  row("Plain training would need", if_known(data.plain_peak_bytes, [&] {
        return format_bytes(data.plain_peak_bytes) +
               (data.plain_source.empty() ? "" : " (" + data.plain_source + ")");
      }));
  if (first_finite(found.loss) != nullptr)
    row("Training loss", loss_change(found) + " (first step, smoothed last step)");
  if (found.tokens_per_s > 0) {
    row("Throughput",
        internal::short_count(found.tokens_per_s) + " " + data.item + "s/s (median of the steps)");
  }
  if (!found.loss_scale.empty()) row("Skipped steps", skipped_steps(data, found));
  if (found.elapsed_s > 0) row("Training time", internal::spoken_time(found.elapsed_s));
  return rows.empty() ? "" : section("Summary", "<table><tbody>" + rows + "</tbody></table>");
}

/// Peak, limit and plain requirement as bars to one scale.
std::string memory_bars(const ReportData& data, const Findings& found) {
  const std::int64_t widest = std::max({found.peak_bytes, data.limit_bytes, data.plain_peak_bytes});
  if (found.peak_bytes == 0 || widest == found.peak_bytes) return "";
  std::string html;
  const auto bar = [&](const char* name, std::int64_t bytes, const char* color) {
    if (bytes <= 0) return;
    html += "<span>" + std::string(name) +
            "</span><span class=\"value\"><i class=\"fill\" style=\"width:" +
            fixed(78.0 * ratio(bytes, widest), 2) + "%;--c:var(--" + color + ")\"></i><em>" +
            format_bytes(bytes) + "</em></span>";
  };
  bar("This run's peak", found.peak_bytes, "blue");
  bar("Limit", data.limit_bytes, "limit");
  bar("Plain training", data.plain_peak_bytes, "gray");
  return section("Memory needed", "<div class=\"bars\">" + html + "</div>");
}

std::vector<internal::ReferenceLine> references(const ReportData& data) {
  std::vector<internal::ReferenceLine> lines;
  if (data.limit_bytes > 0) {
    lines.push_back({"limit " + format_bytes(data.limit_bytes),
                     static_cast<double>(data.limit_bytes), "limit"});
  }
  if (data.plain_peak_bytes > 0) {
    lines.push_back({"plain training needs " + format_bytes(data.plain_peak_bytes),
                     static_cast<double>(data.plain_peak_bytes), "plain"});
  }
  return lines;
}

std::string timeline_chart(const ReportData& data) {
  double span_s = 0.0, start_s = 0.0;
  if (!data.step_timeline.empty()) {
    start_s = data.step_timeline.front().time_s;
    span_s = data.step_timeline.back().time_s - start_s;
  }
  const bool in_ms = span_s < 10.0;
  const double scale = in_ms ? 1e3 : 1.0;
  internal::StackedChart chart;
  chart.text = {.id = "timeline",
                .title = "Memory during one step" +
                         (data.timeline_label.empty() ? "" : " (" + data.timeline_label + ")"),
                .x_label = in_ms ? "Time, ms" : "Time, s",
                .y_label = "Live memory",
                .note = ""};
  for (std::size_t i = 0; i < base::kMemoryCategoryCount; ++i) {
    chart.layers.push_back({std::string(base::kMemoryCategoryNames[i]), kCategoryColors[i], {}});
  }
  for (const auto& point : data.step_timeline) {
    chart.x.push_back((point.time_s - start_s) * scale);
    for (std::size_t i = 0; i < base::kMemoryCategoryCount; ++i) {
      chart.layers[i].values.push_back(static_cast<double>(point.live.bytes[i]));
    }
  }
  for (const auto& phase : data.phases) {
    chart.phases.push_back(
        {(phase.begin_s - start_s) * scale, (phase.end_s - start_s) * scale, phase.name});
  }
  chart.references = references(data);
  return "<section class=\"wide\">" + render(chart) + "</section>\n";
}

std::string loss_chart(const ReportData& data, const Findings& found) {
  internal::LineChart chart;
  chart.text = {
      .id = "loss", .title = "Loss", .x_label = "Step", .y_label = data.loss_label, .note = ""};
  if (found.nonfinite_losses > 0) {
    chart.text.note =
        join("The loss was not finite in ", found.nonfinite_losses,
             found.nonfinite_losses == 1 ? " step" : " steps", "; the curve has a gap there.");
  }
  chart.series.push_back({"training, each step", "blue", internal::SeriesStyle::faint, found.loss});
  chart.series.push_back(
      {"training, smoothed", "blue", internal::SeriesStyle::line, found.smooth_loss});
  chart.series.push_back({"validation", "orange", internal::SeriesStyle::dots, found.validation});
  return "<section class=\"wide\">" + render(chart) + "</section>\n";
}

std::string small_chart(const char* id, const char* title, const std::string& y_label,
                        const std::string& series, const char* color,
                        const std::vector<Point>& points, internal::AxisKind kind) {
  internal::LineChart chart;
  chart.text = {.id = id, .title = title, .x_label = "Step", .y_label = y_label, .note = ""};
  chart.y_kind = kind;
  chart.from_zero = kind == internal::AxisKind::linear;
  chart.series.push_back({series, color, internal::SeriesStyle::line, points});
  return "<section>" + render(chart) + "</section>\n";
}

/// Logarithmic where one spike would flatten everything else.
internal::AxisKind grad_norm_axis(const std::vector<Point>& points) {
  double highest = 0.0;
  bool positive = true;
  for (const auto& point : points) {
    if (!std::isfinite(point.y)) continue;
    highest = std::max(highest, point.y);
    positive = positive && point.y > 0.0;
  }
  return positive && highest > 20.0 * median_of_finite(points) ? internal::AxisKind::logarithmic
                                                               : internal::AxisKind::linear;
}

/// Powers of two: logarithmic. Skipped steps stand on the curve as dots.
std::string loss_scale_chart(const Findings& found) {
  if (found.loss_scale.empty()) return "";
  internal::LineChart chart;
  chart.text = {.id = "lossscale",
                .title = "Loss scale",
                .x_label = "Step",
                .y_label = "Factor of the loss",
                .note = ""};
  chart.y_kind = internal::AxisKind::logarithmic;
  chart.series.push_back({"loss scale", "blue", internal::SeriesStyle::line, found.loss_scale});
  if (!found.skipped.empty()) {
    chart.series.push_back(
        {"skipped steps", "orange", internal::SeriesStyle::marks, found.skipped});
  }
  return "<section class=\"wide\">" + render(chart) + "</section>\n";
}

std::string peak_chart(const ReportData& data, const Findings& found) {
  internal::LineChart chart;
  chart.text = {.id = "peaks",
                .title = "Peak memory of each step",
                .x_label = "Step",
                .y_label = "Memory",
                .note = ""};
  chart.y_kind = internal::AxisKind::bytes;
  chart.from_zero = true;
  chart.series.push_back({"peak", "blue", internal::SeriesStyle::line, found.peaks});
  if (data.limit_bytes > 0) chart.references = {references(data).front()};
  return "<section>" + render(chart) + "</section>\n";
}

std::string breakdown_table(const ReportData& data, const Findings& found) {
  const std::int64_t total = found.breakdown.total();
  if (total <= 0) return "";
  std::string rows;
  for (std::size_t i = 0; i < base::kMemoryCategoryCount; ++i) {
    const std::int64_t bytes = found.breakdown.bytes[i];
    const std::string color = std::string("--c:var(--") + kCategoryColors[i] + ")";
    rows += "<tr><th scope=\"row\"><i class=\"swatch\" style=\"" + color + "\"></i>" +
            escape_html(base::kMemoryCategoryNames[i]) + "</th><td class=\"number\">" +
            format_bytes(bytes) + "</td><td class=\"number\">" + percent_of(bytes, total) +
            "</td><td class=\"share\"><span class=\"track\"><i class=\"fill\" style=\"width:" +
            fixed(100.0 * ratio(bytes, total), 2) + "%;" + color + "\"></i></span></td></tr>";
  }
  return section(
      "Memory at the peak",
      "<table class=\"breakdown\"><thead><tr><th>Category</th><th class=\"number\">Live</th><th "
      "class=\"number\">Share</th><th class=\"share\"></th></tr></thead><tbody>" +
          rows + "</tbody><tfoot><tr><th scope=\"row\">total</th><td class=\"number\">" +
          format_bytes(total) +
          "</td><td class=\"number\">100.0%</td><td class=\"share\"></td></tr></tfoot></table>");
}

std::string sample(const ReportData& data) {
  if (data.sample_text.empty()) return "";
  return section(
      "Text that the model wrote",
      "<pre>" +
          (data.sample_prompt.empty()
               ? ""
               : "<span class=\"prompt\">" + escape_html(data.sample_prompt) + "</span>") +
          escape_html(data.sample_text) + "</pre>");
}

std::string header(const ReportData& data) {
  std::string line = data.model;
  if (!data.created.empty()) line += (line.empty() ? "" : " \xC2\xB7 ") + data.created;
  return internal::page_header(data.title, data.status, data.status.starts_with("finished"), line);
}

}  // namespace

std::string html_report(const ReportData& data) {
  const Findings found = examine(data);
  const auto pair = [](const std::string& left, const std::string& right) {
    return "<div class=\"pair\">" + left + right + "</div>\n";
  };
  using internal::AxisKind;
  std::string html;
  html += header(data);
  html += tiles(data, found);
  html += summary(data, found);
  html += memory_bars(data, found);
  html += loss_chart(data, found);
  html += internal::accuracy_chart(data);
  html += internal::privacy_section(data);
  html += timeline_chart(data);
  html += breakdown_table(data, found);
  html += pair(peak_chart(data, found),
               small_chart("throughput", "Throughput", "Throughput, " + data.item + "s per second",
                           data.item + "s/s", "aqua", found.throughput, AxisKind::linear));
  html += pair(small_chart("lr", "Learning rate", "Learning rate", "learning rate", "violet",
                           found.lr, AxisKind::linear),
               small_chart("gradnorm", "Gradient norm", "L2 norm before clipping", "gradient norm",
                           "orange", found.grad_norm, grad_norm_axis(found.grad_norm)));
  html += loss_scale_chart(found);
  html += sample(data);
  html += key_list("Configuration", data.configuration);
  html += key_list("Environment", data.environment);
  return internal::page(data.title, html);
}

void write_html_report(const std::filesystem::path& path, const ReportData& data) {
  state::write_file_atomically(path.string(), html_report(data));
}

}  // namespace gradus::report
