#include <examples/compare_page.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <string_view>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>

namespace gradus::examples {
namespace {

constexpr const char* kStyle = R"css(
:root{color-scheme:light dark;--page:#f6f6f4;--surface:#fff;--ink:#16181d;--soft:#5b606b;--border:#e2e3e6;--a:#e0662f;--b:#2a78d6}
@media(prefers-color-scheme:dark){:root{--page:#101216;--surface:#181b21;--ink:#eceef2;--soft:#a5abb7;--border:#2b2f38;--a:#dd6c3c;--b:#4a94ee}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
main{max-width:960px;margin:0 auto;padding:32px 20px 48px}
h1{font-size:25px;line-height:1.25;margin:0 0 20px}
h2{font-size:17px;margin:0 0 12px}
section{background:var(--surface);border:1px solid var(--border);border-radius:10px;padding:18px 20px;margin-top:18px;overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:7px 14px 7px 0;border-bottom:1px solid var(--border)}
tr:last-child>*{border-bottom:0}
tbody th{font-weight:400;color:var(--soft)}
tr.main td{font-weight:650}
i{display:inline-block;width:16px;height:3px;border-radius:2px;margin-right:8px;vertical-align:middle}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font-size:12px}
svg .grid{stroke:var(--border)}
svg path{fill:none;stroke-width:2;stroke-linejoin:round}
svg .raw{stroke-width:1;opacity:.3}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0 0 14px;font:13px/1.55 ui-monospace,Menlo,Consolas,monospace}
p{color:var(--soft);margin:8px 0 0}
a{color:var(--b)}
)css";

constexpr std::array<const char*, 2> kColors{"var(--a)", "var(--b)"};

std::string escape(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += c;
    }
  }
  return out;
}

std::string number(double value, const char* format) {
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

std::string grouped(std::int64_t value) {
  std::string digits = std::to_string(value);
  for (std::size_t at = digits.size(); at > 3; at -= 3) digits.insert(at - 3, ",");
  return digits;
}

struct Row {
  std::string name;
  std::vector<std::string> values;
  bool main = false;
};

std::vector<Row> rows_of(const ComparisonText& text, const std::vector<RunResult>& runs) {
  std::vector<Row> rows{{"model", {}},
                        {"depth", {}, true},
                        {"parameters", {}},
                        {"memory limit", {}},
                        {"measured peak", {}},
                        {"time a step, median", {}},
                        {"operators run again", {}},
                        {"training loss at the end", {}},
                        {text.quality_name, {}, true}};
  for (const RunResult& run : runs) {
    const std::array<std::string, 9> values{
        run.model,
        std::to_string(run.depth),
        grouped(run.parameters),
        run.limit_bytes > 0 ? base::format_bytes(run.limit_bytes) : std::string("none"),
        base::format_bytes(run.peak_bytes),
        number(run.step_ms, "%.0f ms"),
        grouped(run.replayed),
        number(run.last_loss, "%.4f"),
        run.quality};
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i].values.push_back(values[i]);
  }
  return rows;
}

/// Running mean: an average that forgets.
std::vector<double> smoothed(const std::vector<report::StepMetrics>& steps) {
  std::vector<double> result;
  double sum = 0.0;
  double weight = 0.0;
  for (const report::StepMetrics& step : steps) {
    if (std::isfinite(step.loss)) {
      sum = 0.9 * sum + step.loss;
      weight = 0.9 * weight + 1.0;
    }
    result.push_back(weight > 0.0 ? sum / weight : 0.0);
  }
  return result;
}

struct Frame {
  double left = 48.0;
  double right = 880.0;
  double top = 12.0;
  double bottom = 292.0;
  double steps = 1.0;
  double low = 0.0;
  double high = 1.0;

  std::string point(double step, double loss) const {
    const double share = std::clamp((loss - low) / (high - low), 0.0, 1.0);
    return number(left + (right - left) * step / steps, "%.1f") + " " +
           number(bottom - (bottom - top) * share, "%.1f");
  }
};

constexpr int kTicks = 5;

/// The least of 1, 2, 2.5 and 5 times a power of ten that is not below @p value.
double round_step(double value) {
  const double power = std::pow(10.0, std::floor(std::log10(std::max(value, 1e-9))));
  for (const double factor : {1.0, 2.0, 2.5, 5.0})
    if (factor * power >= value) return factor * power;
  return 10.0 * power;
}

Frame frame_of(const std::vector<RunResult>& runs) {
  Frame frame;
  double low = INFINITY;
  double high = -INFINITY;
  for (const RunResult& run : runs) {
    for (const report::StepMetrics& step : run.steps) {
      if (!std::isfinite(step.loss)) continue;
      low = std::min(low, step.loss);
      high = std::max(high, step.loss);
      frame.steps = std::max(frame.steps, static_cast<double>(step.step));
    }
  }
  if (low > high) return frame;
  frame.low = std::min(0.0, low);
  frame.high = frame.low + kTicks * round_step((high - frame.low) / kTicks);
  return frame;
}

std::string path_of(const Frame& frame, const std::vector<report::StepMetrics>& steps,
                    const std::vector<double>& losses, const char* color, const char* kind) {
  std::string path;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (!std::isfinite(losses[i])) continue;
    path += (path.empty() ? "M" : "L") +
            frame.point(static_cast<double>(steps[i].step), losses[i]) + " ";
  }
  return base::join("<path class=\"", kind, "\" style=\"stroke:", color, "\" d=\"", path, "\"/>\n");
}

std::string loss_chart(const std::vector<RunResult>& runs) {
  const Frame frame = frame_of(runs);
  std::string svg = "<svg viewBox=\"0 0 900 320\" role=\"img\" aria-label=\"Loss over steps\">\n";
  for (int i = 0; i <= kTicks; ++i) {
    const double share = static_cast<double>(i) / kTicks;
    const double y = frame.bottom - (frame.bottom - frame.top) * share;
    const double x = frame.left + (frame.right - frame.left) * share;
    svg += base::join("<line class=\"grid\" x1=\"", frame.left, "\" x2=\"", frame.right, "\" y1=\"",
                      number(y, "%.1f"), "\" y2=\"", number(y, "%.1f"), "\"/>\n",
                      "<text text-anchor=\"end\" x=\"40\" y=\"", number(y + 4.0, "%.1f"), "\">",
                      number(frame.low + (frame.high - frame.low) * share, "%.2f"), "</text>\n",
                      "<text text-anchor=\"middle\" x=\"", number(x, "%.1f"), "\" y=\"310\">",
                      number(std::round(frame.steps * share), "%.0f"), "</text>\n");
  }
  for (std::size_t i = 0; i < runs.size(); ++i) {
    std::vector<double> raw;
    for (const report::StepMetrics& step : runs[i].steps) raw.push_back(step.loss);
    const char* color = kColors[i % kColors.size()];
    svg += path_of(frame, runs[i].steps, raw, color, "raw");
    svg += path_of(frame, runs[i].steps, smoothed(runs[i].steps), color, "mean");
  }
  return svg + "</svg>\n";
}

std::string heading(const std::vector<RunResult>& runs, std::size_t i) {
  return base::join("<i style=\"background:", kColors[i % kColors.size()], "\"></i>",
                    escape(runs[i].name));
}

std::string samples(const std::vector<RunResult>& runs) {
  std::string html;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].sample.empty()) continue;
    html += "<h2>" + heading(runs, i) + "</h2><pre>" + escape(runs[i].sample) + "</pre>\n";
  }
  return html.empty() ? html : "<section>" + html + "</section>\n";
}

}  // namespace

std::string comparison_page(const ComparisonText& text, const std::vector<RunResult>& runs) {
  std::string table = "<table><thead><tr><th></th>";
  for (std::size_t i = 0; i < runs.size(); ++i) table += "<th>" + heading(runs, i) + "</th>";
  table += "</tr></thead><tbody>\n";
  for (const Row& row : rows_of(text, runs)) {
    table +=
        base::join(row.main ? "<tr class=\"main\">" : "<tr>", "<th>", escape(row.name), "</th>");
    for (const std::string& value : row.values) table += "<td>" + escape(value) + "</td>";
    table += "</tr>\n";
  }
  table += "<tr><th>details</th>";
  for (const RunResult& run : runs) {
    table += run.report_path.empty()
                 ? "<td></td>"
                 : "<td><a href=\"" + escape(run.report_path) + "\">memory and metrics</a></td>";
  }
  table += "</tr></tbody></table>\n";
  return base::join(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>",
      escape(text.title), "</title><style>", kStyle, "</style></head>\n<body><main><h1>",
      escape(text.title), "</h1>\n<section>", table, "</section>\n<section><h2>",
      escape(text.loss_label), " by step</h2>", loss_chart(runs),
      "<p>Thin: each batch. Thick: average over about ten steps.</p></section>\n", samples(runs),
      "</main></body></html>\n");
}

std::string comparison_table(const ComparisonText& text, const std::vector<RunResult>& runs) {
  std::vector<Row> rows = rows_of(text, runs);
  Row names{"", {}};
  for (const RunResult& run : runs) names.values.push_back(run.name);
  rows.insert(rows.begin(), names);
  const auto pad = [](const std::string& value, std::size_t width) {
    return value + std::string(width > value.size() ? width - value.size() : 1, ' ');
  };
  std::string out;
  for (const Row& row : rows) {
    std::string line = pad(row.name, 28);
    for (const std::string& value : row.values) line += pad(value, 40);
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
  }
  return out;
}

}  // namespace gradus::examples
