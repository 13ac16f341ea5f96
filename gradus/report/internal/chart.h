#pragma once

#include <string>
#include <utility>
#include <vector>

#include <gradus/report/internal/axis.h>
#include <gradus/report/internal/series.h>

namespace gradus::report::internal {

enum class SeriesStyle {
  line,   ///< A line.
  faint,  ///< A thin pale line behind others (raw values behind their average).
  dots,   ///< A line with a dot at each point (rare measurements).
  marks,  ///< Dots alone (events).
};

struct Series {
  std::string name;
  std::string color;  ///< Name of a CSS variable of the report: "blue".
  SeriesStyle style = SeriesStyle::line;
  std::vector<Point> points;  ///< x ascending.
};

/// A horizontal line across the chart.
struct ReferenceLine {
  std::string label;
  double value = 0.0;
  std::string color;
};

/// A stretch of the x axis with a name, marked by a line at its start.
struct Phase {
  double begin = 0.0;
  double end = 0.0;
  std::string name;
};

struct ChartText {
  std::string id;  ///< Unique in the document; letters and digits.
  std::string title;
  std::string x_label;  ///< With its unit: "Step", "Time, ms".
  std::string y_label;  ///< Without the unit of bytes, which the axis adds.
  std::string note;     ///< Below the chart; may be empty.
};

struct LineChart {
  ChartText text;
  AxisKind y_kind = AxisKind::linear;
  bool from_zero = false;
  std::vector<Series> series;
  std::vector<ReferenceLine> references;
};

/// Areas on top of each other, in the order given from the bottom; y in bytes; each value holds
/// until the next point.
struct StackedChart {
  ChartText text;
  std::vector<double> x;
  struct Layer {
    std::string name;
    std::string color;
    std::vector<double> values;  ///< As many as x.
  };
  std::vector<Layer> layers;
  std::vector<ReferenceLine> references;
  std::vector<Phase> phases;
};

/// A figure element: the curves as SVG that stretches with the page, all text as HTML of constant
/// size over it, and the numbers for the hover box as JSON. Curves are down-sampled; all text is
/// escaped.
std::string render(const LineChart& chart);
std::string render(const StackedChart& chart);

}  // namespace gradus::report::internal
