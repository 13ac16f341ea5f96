#include <gradus/report/internal/privacy_section.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <gradus/base/error.h>
#include <gradus/report/internal/chart.h>
#include <gradus/report/internal/page.h>
#include <gradus/report/internal/text.h>

namespace gradus::report::internal {
namespace {

constexpr std::size_t kBins = 32;

LineChart chart_of(const char* id, const char* title, const char* y_label) {
  LineChart chart;
  chart.text = {.id = id, .title = title, .x_label = "Step", .y_label = y_label, .note = ""};
  chart.from_zero = true;
  return chart;
}

std::string in_section(const LineChart& chart) {
  return "<section>" + render(chart) + "</section>\n";
}

std::string epsilon_chart(const ReportData& data) {
  LineChart chart = chart_of("epsilon", "Epsilon spent", "Epsilon");
  chart.series.push_back(
      {"epsilon", "violet", SeriesStyle::line, extra_curve(data.steps, "epsilon")});
  return in_section(chart);
}

std::string clip_chart(const ReportData& data) {
  LineChart chart = chart_of("clipped", "Clipped examples", "Share of the batch");
  const std::vector<Point> share = extra_curve(data.steps, "clip_fraction");
  chart.series.push_back({"each step", "blue", SeriesStyle::faint, share});
  chart.series.push_back({"smoothed", "blue", SeriesStyle::line, smooth(share, 10.0)});
  return in_section(chart);
}

std::string norm_chart(const ReportData& data) {
  LineChart chart = chart_of("norms", "Gradient norms of single examples", "L2 norm");
  chart.y_kind = AxisKind::logarithmic;
  chart.from_zero = false;
  const std::vector<std::pair<const char*, const char*>> curves{
      {"norm_p90", "orange"}, {"norm_median", "blue"}, {"norm_p10", "aqua"}, {"max_norm", "limit"}};
  for (const auto& [name, color] : curves) {
    const std::string label = name == std::string("norm_p90")      ? "90% are below"
                              : name == std::string("norm_median") ? "median"
                              : name == std::string("norm_p10")    ? "10% are below"
                                                                   : "clipped to";
    chart.series.push_back({label, color, SeriesStyle::line, extra_curve(data.steps, name)});
  }
  return in_section(chart);
}

std::string histogram_figure(const ReportData& data) {
  const Histogram histogram = logarithmic_histogram(data.example_norms, kBins);
  if (histogram.counts.empty()) return "";
  const auto highest =
      static_cast<double>(*std::max_element(histogram.counts.begin(), histogram.counts.end()));
  constexpr double kWidth = 100.0, kHeight = 40.0;
  const double width = kWidth / static_cast<double>(histogram.counts.size());
  std::string bars;
  for (std::size_t i = 0; i < histogram.counts.size(); ++i) {
    const double height = kHeight * static_cast<double>(histogram.counts[i]) / highest;
    const bool clipped =
        data.norm_threshold > 0.0 &&
        std::sqrt(histogram.edges[i] * histogram.edges[i + 1]) > data.norm_threshold;
    bars += base::join(
        "<rect x=\"", fixed(width * (static_cast<double>(i) + 0.06), 3), "\" y=\"",
        fixed(kHeight - height, 3), "\" width=\"", fixed(0.88 * width, 3), "\" height=\"",
        fixed(height, 3), "\" style=\"fill:var(--", clipped ? "orange" : "blue", ")\"><title>",
        significant(histogram.edges[i], 3), " to ", significant(histogram.edges[i + 1], 3), ": ",
        group_digits(static_cast<std::int64_t>(histogram.counts[i])), "</title></rect>");
  }
  const auto swatch = [](const char* color, const std::string& text) {
    return "<li><i class=\"swatch\" style=\"--c:var(--" + std::string(color) + ")\"></i>" +
           escape_html(text) + "</li>";
  };
  std::string legend = swatch("blue", "as they are");
  if (data.norm_threshold > 0.0)
    legend += swatch("orange", "clipped to " + significant(data.norm_threshold, 3));
  const double middle = std::sqrt(histogram.edges.front() * histogram.edges.back());
  const std::string label = data.norms_label.empty() ? "" : " (" + data.norms_label + ")";
  return "<section>" +
         base::join(
             "<h2>Norms of one batch", escape_html(label), "</h2><ul class=\"legend\">", legend,
             "</ul><svg viewBox=\"0 0 100 40\" preserveAspectRatio=\"none\" role=\"img\" "
             "aria-label=\"Histogram of gradient norms\" "
             "style=\"width:100%;height:13rem;display:block\">",
             bars,
             "</svg><div style=\"display:flex;justify-content:space-between;font-size:12px;"
             "color:var(--soft)\"><span>",
             significant(histogram.edges.front(), 3), "</span><span>", significant(middle, 3),
             "</span><span>", significant(histogram.edges.back(), 3),
             "</span></div><p class=\"note\">L2 norm of an example's gradient, logarithmic; ",
             group_digits(static_cast<std::int64_t>(data.example_norms.size())), " examples.</p>") +
         "</section>\n";
}

}  // namespace

std::vector<Point> extra_curve(const std::vector<StepMetrics>& steps, const std::string& name) {
  std::vector<Point> points;
  for (const StepMetrics& step : steps) {
    const auto found = step.extra.find(name);
    if (found != step.extra.end())
      points.push_back({static_cast<double>(step.step), found->second});
  }
  return points;
}

Histogram logarithmic_histogram(const std::vector<double>& values, std::size_t bins) {
  double least = INFINITY, greatest = 0.0;
  for (const double value : values) {
    if (!std::isfinite(value) || value <= 0.0) continue;
    least = std::min(least, value);
    greatest = std::max(greatest, value);
  }
  if (greatest == 0.0) return {};
  // Equal values are one bin, which needs a width; and a few tiny norms must not squeeze the rest.
  least = std::clamp(least, greatest * 1e-6, greatest / 1.01);
  Histogram histogram;
  const double ratio = std::log(greatest / least) / static_cast<double>(bins);
  for (std::size_t i = 0; i <= bins; ++i)
    histogram.edges.push_back(least * std::exp(ratio * static_cast<double>(i)));
  histogram.counts.resize(bins);
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    const double place = value <= least ? 0.0 : std::log(value / least) / ratio;
    ++histogram.counts[std::min(static_cast<std::size_t>(place), bins - 1)];
  }
  return histogram;
}

std::string accuracy_chart(const ReportData& data) {
  const std::vector<Point> points = extra_curve(data.steps, "accuracy");
  if (points.empty()) return "";
  LineChart chart = chart_of("accuracy", "Test accuracy", "Share that is right");
  chart.from_zero = false;
  chart.series.push_back({"accuracy", "aqua", SeriesStyle::dots, points});
  return "<section class=\"wide\">" + render(chart) + "</section>\n";
}

std::string privacy_section(const ReportData& data) {
  const std::vector<Point> epsilon = extra_curve(data.steps, "epsilon");
  if (data.privacy.empty() && epsilon.empty()) return "";
  std::string rows;
  for (const auto& [name, value] : data.privacy) {
    rows += "<tr><th scope=\"row\">" + escape_html(name) + "</th><td>" + escape_html(value) +
            "</td></tr>";
  }
  if (!epsilon.empty()) {
    rows += "<tr><th scope=\"row\">Epsilon spent</th><td>" + significant(epsilon.back().y, 4) +
            base::join(" after step ", static_cast<std::int64_t>(epsilon.back().x)) + "</td></tr>";
  }
  const auto pair = [](const std::string& left, const std::string& right) {
    return "<div class=\"pair\">" + left + right + "</div>\n";
  };
  return section("Privacy",
                 "<table><tbody>" + rows +
                     "</tbody></table><p class=\"note\">Epsilon covers the weights. Losses, norms, "
                     "clipped shares and accuracies on this page have no noise: a page that leaves "
                     "the house tells of the data what epsilon does not count.</p>") +
         pair(epsilon_chart(data), clip_chart(data)) +
         pair(norm_chart(data), histogram_figure(data));
}

}  // namespace gradus::report::internal
