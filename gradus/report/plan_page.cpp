#include <gradus/report/plan_page.h>

#include <cmath>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/report/internal/chart.h>
#include <gradus/report/internal/page.h>
#include <gradus/report/internal/text.h>
#include <gradus/state/atomic_file.h>

namespace gradus::report {
namespace {

using base::format_bytes;
using internal::escape_html;
using internal::fixed;

std::string milliseconds(double seconds) { return fixed(seconds * 1e3, 1) + " ms"; }

std::string difference(double measured, double predicted) {
  const double per_cent = 100.0 * (predicted / measured - 1.0);
  return "predicted " + std::string(per_cent < 0 ? "\xE2\x88\x92" : "+") +
         fixed(std::abs(per_cent), 1) + "%";
}

std::string tiles(const PlanPageData& data) {
  std::string html;
  const auto bytes = static_cast<double>(data.measured_peak_bytes);
  if (data.limit_bytes > 0) {
    html += internal::tile("Memory limit", format_bytes(data.limit_bytes),
                           data.plain_peak_bytes > 0
                               ? "plain training needs " + format_bytes(data.plain_peak_bytes)
                               : "hard: no allocation passes it");
  }
  if (data.measured_peak_bytes > 0) {
    html += internal::tile("Measured peak", format_bytes(data.measured_peak_bytes),
                           difference(bytes, static_cast<double>(data.predicted_peak_bytes)) +
                               ", " + format_bytes(data.predicted_peak_bytes));
  }
  if (data.measured_seconds > 0.0) {
    html += internal::tile("Measured step", milliseconds(data.measured_seconds),
                           difference(data.measured_seconds, data.predicted_seconds) + ", " +
                               milliseconds(data.predicted_seconds));
  }
  if (data.plain_seconds > 0.0) {
    html += internal::tile("Over a plain step",
                           fixed(data.predicted_seconds / data.plain_seconds, 2) + " \xC3\x97",
                           "predicted; a plain step takes " + milliseconds(data.plain_seconds));
  }
  return html.empty() ? "" : "<div class=\"tiles\">" + html + "</div>\n";
}

std::string timeline(const PlanPageData& data) {
  internal::LineChart chart;
  chart.text = {.id = "timeline",
                .title = "Memory during forward and backward" +
                         (data.timeline_label.empty() ? "" : " of " + data.timeline_label),
                .x_label = "Operator call",
                .y_label = "Live memory, highest during the call",
                .note = ""};
  if (data.backward_begin > 0)
    chart.text.note = base::join("Backward begins with call ", data.backward_begin, ".");
  chart.y_kind = internal::AxisKind::bytes;
  chart.from_zero = true;
  const auto add = [&](const char* name, const char* color,
                       const std::vector<std::int64_t>& bytes) {
    internal::Series series{.name = name, .color = color, .points = {}};
    for (std::size_t i = 0; i < bytes.size(); ++i)
      series.points.push_back({static_cast<double>(i), static_cast<double>(bytes[i])});
    if (!bytes.empty()) chart.series.push_back(std::move(series));
  };
  add("measured", "orange", data.measured_bytes);
  add("planned", "blue", data.planned_bytes);
  if (data.limit_bytes > 0) {
    chart.references.push_back({"limit " + format_bytes(data.limit_bytes),
                                static_cast<double>(data.limit_bytes), "limit"});
  }
  if (chart.series.empty()) return "";
  return "<section class=\"wide\">" + internal::render(chart) + "</section>\n";
}

std::string table(const PageTable& table) {
  std::string head, rows;
  const auto is_text = [&](std::size_t i) {
    return i == 0 || (table.last_is_text && i + 1 == table.columns.size());
  };
  for (std::size_t i = 0; i < table.columns.size(); ++i) {
    head += std::string(is_text(i) ? "<th>" : "<th class=\"number\">") +
            escape_html(table.columns[i]) + "</th>";
  }
  for (const PageTable::Row& row : table.rows) {
    rows += row.marked ? "<tr class=\"chosen\">" : row.pale ? "<tr class=\"pale\">" : "<tr>";
    for (std::size_t i = 0; i < row.cells.size(); ++i) {
      rows += i == 0 ? "<th scope=\"row\">" + std::string(row.marked ? "\xE2\x96\xB8 " : "") +
                           escape_html(row.cells[i]) + "</th>"
                     : std::string(is_text(i) ? "<td>" : "<td class=\"number\">") +
                           escape_html(row.cells[i]) + "</td>";
    }
    rows += "</tr>";
  }
  return internal::section(
      table.title,
      "<div class=\"scroll\"><table class=\"plans\"><thead><tr>" + head + "</tr></thead><tbody>" +
          rows + "</tbody></table></div>" +
          (table.note.empty() ? "" : "<p class=\"note\">" + escape_html(table.note) + "</p>"));
}

}  // namespace

std::string plan_page(const PlanPageData& data) {
  std::string line = data.model;
  if (!data.created.empty()) line += (line.empty() ? "" : " \xC2\xB7 ") + data.created;
  std::string html = internal::page_header(data.title, "", true, line);
  html += tiles(data);
  html += internal::section("Plan", "<table><tbody><tr><th scope=\"row\">Chosen</th><td>" +
                                        escape_html(data.plan) +
                                        "</td></tr><tr><th scope=\"row\">Why</th><td>" +
                                        escape_html(data.reason) + "</td></tr></tbody></table>");
  html += timeline(data);
  for (const PageTable& each : data.tables) html += table(each);
  html += internal::key_list("Configuration", data.configuration);
  return internal::page(data.title, html);
}

void write_plan_page(const std::filesystem::path& path, const PlanPageData& data) {
  state::write_file_atomically(path.string(), plan_page(data));
}

}  // namespace gradus::report
