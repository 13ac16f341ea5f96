#include <gradus/report/internal/chart.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include <gradus/report/internal/text.h>

namespace gradus::report::internal {
namespace {

constexpr std::size_t kMaxPoints = 1000;
constexpr double kUnits = 1000.0;  // the SVG's own coordinates run from 0 to this on both axes
constexpr int kTicksX = 8;
constexpr int kTicksY = 5;

/// A coordinate with one decimal, without "-0.0" and trailing zeros.
std::string coordinate(double share) {
  const long tenths = std::lround(share * kUnits * 10.0);
  std::string text = std::to_string(tenths / 10);
  if (tenths % 10 != 0) text += "." + std::to_string(tenths % 10);
  return text;
}

std::string percent(double share) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2f%%", 100.0 * share);
  return text.data();
}

std::string json_number(double value) {
  if (!std::isfinite(value)) return "null";
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.9g", value);
  return text.data();
}

std::string json_array(const auto& values, auto project) {
  std::string text = "[";
  for (const auto& value : values) {
    if (text.size() > 1) text += ',';
    text += json_number(project(value));
  }
  return text + "]";
}

std::string color(const std::string& name) { return "var(--" + name + ")"; }

/// Lowest and highest finite value seen.
struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  void take(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool empty() const { return low > high; }
};

/// A reference line far above the data would flatten it: past this multiple it is named at the top
/// edge instead.
constexpr double kFarReference = 2.0;
/// Above a reference line there must be room for its label.
constexpr double kLabelRoom = 1.1;

void include_references(Range& y, const std::vector<ReferenceLine>& references) {
  std::vector<double> values;
  for (const auto& reference : references) values.push_back(reference.value);
  std::sort(values.begin(), values.end());
  for (const double value : values) {
    if (value <= kFarReference * y.high) y.take(kLabelRoom * value);
  }
}

std::string path(const std::vector<Point>& points, const Axis& x, const Axis& y) {
  std::string d;
  bool pen_down = false;
  for (const auto& point : points) {
    if (!std::isfinite(point.y) || (y.logarithmic && point.y <= 0.0)) {
      pen_down = false;
      continue;
    }
    d += pen_down ? "L" : "M";
    d += coordinate(x.position(point.x)) + " " + coordinate(1.0 - y.position(point.y));
    // With round caps a line of no length is a dot: a point between two gaps stays visible.
    if (!pen_down) d += "h0";
    pen_down = true;
  }
  return d;
}

std::string svg_path(const std::string& d, const std::string& stroke, const char* style_class) {
  return "<path class=\"" + std::string(style_class) + "\" style=\"stroke:" + stroke + "\" d=\"" +
         d + "\"/>";
}

struct Drawing {
  Axis x;
  Axis y;
  std::string shapes{};  // SVG
  std::string legend{};  // list items
  std::string data{};    // JSON of the series
  bool integral_x = false;
  bool stacked = false;
};

std::string legend_item(const std::string& name, const std::string& color_name, const char* kind) {
  return "<li><i class=\"" + std::string(kind) + "\" style=\"--c:" + color(color_name) + "\"></i>" +
         escape_html(name) + "</li>";
}

std::string reference_lines(const std::vector<ReferenceLine>& references, const Axis& y,
                            std::string& labels) {
  std::string lines;
  bool to_the_left = false;
  for (const auto& reference : references) {
    const bool beyond = reference.value > y.high;
    const double top = 1.0 - y.position(reference.value);
    if (!beyond) {
      lines += svg_path("M0 " + coordinate(top) + "H1000", color(reference.color), "reference");
    }
    // Labels alternate between the right and the left end, so that two close lines do not share a
    // place.
    labels += "<span class=\"reference-label" + std::string(to_the_left ? " left" : "") +
              (beyond ? " below" : "") + "\" style=\"top:" + percent(top) +
              ";--c:" + color(reference.color) + (beyond ? "\" title=\"above this scale" : "") +
              "\">" + escape_html(reference.label) + (beyond ? " &#8593;" : "") + "</span>";
    to_the_left = !to_the_left;
  }
  return lines;
}

std::string phase_marks(const std::vector<Phase>& phases, const Axis& x, std::string& labels) {
  constexpr std::size_t kTooMany = 40;
  constexpr double kLeastLabelled = 0.06;  // of the chart's width
  constexpr double kWideOnPhones = 0.2;
  std::string lines;
  if (phases.size() > kTooMany) return lines;
  for (const auto& phase : phases) {
    const double left = x.position(phase.begin);
    const double right = x.position(phase.end);
    if (left > 0.0) lines += svg_path("M" + coordinate(left) + " 0V1000", "var(--axis)", "phase");
    if (right - left < kLeastLabelled) continue;
    labels += "<span class=\"phase-label" +
              std::string(right - left < kWideOnPhones ? " narrow" : "") +
              "\" style=\"left:" + percent(left) + ";width:" + percent(right - left) + "\">" +
              escape_html(phase.name) + "</span>";
  }
  return lines;
}

std::string frame_start(const ChartText& text, const std::string& unit, const std::string& legend) {
  const std::string y_label = text.y_label + (unit.empty() ? "" : ", " + unit);
  return "<figure class=\"chart\" id=\"" + text.id + "\"><figcaption>" + escape_html(text.title) +
         "</figcaption><div class=\"chart-head\"><span class=\"y-label\">" + escape_html(y_label) +
         "</span><ul class=\"legend\">" + legend + "</ul></div>";
}

std::string empty_figure(const ChartText& text) {
  return frame_start(text, "", "") + "<p class=\"empty\">No data</p></figure>\n";
}

/// Puts axes, labels and hover data around the shapes.
std::string figure(const ChartText& text, const Drawing& drawing,
                   const std::vector<ReferenceLine>& references, const std::vector<Phase>& phases) {
  std::string grid, y_ticks, x_ticks, labels;
  for (const auto& tick : drawing.y.ticks) {
    const double top = 1.0 - drawing.y.position(tick.value);
    grid += svg_path("M0 " + coordinate(top) + "H1000", "var(--grid)", "grid");
    y_ticks += "<span style=\"top:" + percent(top) + "\">" + escape_html(tick.label) + "</span>";
  }
  std::size_t tick_number = 0;
  for (const auto& tick : drawing.x.ticks) {
    if (drawing.integral_x && tick.value != std::round(tick.value)) continue;
    x_ticks += "<span" + std::string(tick_number++ % 2 == 1 ? " class=\"odd\"" : "") +
               " style=\"left:" + percent(drawing.x.position(tick.value)) + "\">" +
               escape_html(tick.label) + "</span>";
  }
  const std::string phase_lines = phase_marks(phases, drawing.x, labels);
  const std::string lines = reference_lines(references, drawing.y, labels);
  const std::string scale =
      "\"x0\":" + json_number(drawing.x.low) + ",\"x1\":" + json_number(drawing.x.high) +
      ",\"y0\":" + json_number(drawing.y.low) + ",\"y1\":" + json_number(drawing.y.high) +
      ",\"log\":" + (drawing.y.logarithmic ? "1" : "0") +
      ",\"bytes\":" + (drawing.y.unit.empty() ? "0" : "1") +
      ",\"stacked\":" + (drawing.stacked ? "1" : "0") + ",\"xl\":" + json_string(text.x_label);
  return frame_start(text, drawing.y.unit, drawing.legend) + "<div class=\"axes" +
         (labels.find("phase-label") == std::string::npos ? "" : " with-phases") +
         "\"><div class=\"y-axis\">" + y_ticks +
         "</div><div class=\"plot\" tabindex=\"0\" role=\"img\" aria-label=\"" +
         escape_html(text.title) +
         "\"><svg viewBox=\"0 0 1000 1000\" preserveAspectRatio=\"none\" aria-hidden=\"true\">" +
         grid + drawing.shapes + phase_lines + lines + "</svg>" + labels +
         "</div><div class=\"x-axis\">" + x_ticks + "</div></div><div class=\"x-label\">" +
         escape_html(text.x_label) + "</div>" +
         (text.note.empty() ? "" : "<p class=\"note\">" + escape_html(text.note) + "</p>") +
         "<script type=\"application/json\">{" + scale + ",\"series\":[" + drawing.data +
         "]}</script></figure>\n";
}

void add_data(Drawing& drawing, const std::string& name, const std::string& color_name,
              const std::string& x_json, const std::string& y_json) {
  if (!drawing.data.empty()) drawing.data += ',';
  drawing.data += "{\"name\":" + json_string(name) +
                  ",\"color\":" + json_string(color(color_name)) + ",\"x\":" + x_json +
                  ",\"y\":" + y_json + "}";
}

}  // namespace

std::string render(const LineChart& chart) {
  Range x, y;
  bool integral_x = true;
  for (const auto& series : chart.series) {
    for (const auto& point : series.points) {
      x.take(point.x);
      if (chart.y_kind != AxisKind::logarithmic || point.y > 0.0) y.take(point.y);
      integral_x = integral_x && point.x == std::round(point.x);
    }
  }
  if (y.empty()) return empty_figure(chart.text);
  include_references(y, chart.references);
  if (chart.from_zero) y.take(0.0);
  Drawing drawing{.x = exact_axis(x.low, x.high, kTicksX),
                  .y = rounded_axis(chart.y_kind, y.low, y.high, kTicksY)};
  drawing.integral_x = integral_x;
  for (const auto& series : chart.series) {
    const auto points = downsample(series.points, kMaxPoints);
    if (points.empty()) continue;
    const char* style = series.style == SeriesStyle::faint ? "faint" : "line";
    if (series.style != SeriesStyle::marks) {
      drawing.shapes += svg_path(path(points, drawing.x, drawing.y), color(series.color), style);
    }
    if (series.style == SeriesStyle::dots || series.style == SeriesStyle::marks) {
      std::string dots;
      for (const auto& point : points) {
        const std::string dot = path({point}, drawing.x, drawing.y);
        dots += dot;
      }
      drawing.shapes += svg_path(dots, color(series.color), "dots");
    }
    drawing.legend += legend_item(series.name, series.color, style);
    add_data(drawing, series.name, series.color,
             json_array(points, [](const Point& p) { return p.x; }),
             json_array(points, [](const Point& p) { return p.y; }));
  }
  return figure(chart.text, drawing, chart.references, {});
}

std::string render(const StackedChart& chart) {
  if (chart.x.empty()) return empty_figure(chart.text);
  std::vector<double> totals(chart.x.size(), 0.0);
  for (const auto& layer : chart.layers) {
    for (std::size_t i = 0; i < totals.size(); ++i) totals[i] += layer.values[i];
  }
  const auto kept = downsample(totals, kMaxPoints);
  Range y{.low = 0.0, .high = *std::max_element(totals.begin(), totals.end())};
  include_references(y, chart.references);
  Drawing drawing{.x = exact_axis(chart.x.front(), chart.x.back(), kTicksX),
                  .y = rounded_axis(AxisKind::bytes, 0.0, y.high, kTicksY)};
  drawing.stacked = true;
  const auto chosen = [&](const std::vector<double>& all) {
    std::vector<double> result;
    for (const std::size_t i : kept) result.push_back(all[i]);
    return result;
  };
  const auto xs = chosen(chart.x);
  const std::string x_json = json_array(xs, [](double v) { return v; });
  std::vector<double> tops(kept.size(), 0.0);
  std::vector<std::string> areas;
  for (const auto& layer : chart.layers) {
    const auto values = chosen(layer.values);
    std::string d = "M" + coordinate(drawing.x.position(xs.front())) + " 1000";
    for (std::size_t i = 0; i < xs.size(); ++i) {
      tops[i] += values[i];
      d += "H" + coordinate(drawing.x.position(xs[i])) + "V" +
           coordinate(1.0 - drawing.y.position(tops[i]));
    }
    // Each area reaches down to zero; the lower ones are painted over it.
    areas.push_back("<path class=\"area\" style=\"color:" + color(layer.color) + "\" d=\"" + d +
                    "V1000Z\"/>");
    add_data(drawing, layer.name, layer.color, x_json,
             json_array(values, [](double v) { return v; }));
  }
  for (auto area = areas.rbegin(); area != areas.rend(); ++area) drawing.shapes += *area;
  for (auto layer = chart.layers.rbegin(); layer != chart.layers.rend(); ++layer) {
    drawing.legend += legend_item(layer->name, layer->color, "swatch");
  }
  return figure(chart.text, drawing, chart.references, chart.phases);
}

}  // namespace gradus::report::internal
