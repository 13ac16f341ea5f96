#include <gradus/report/internal/series.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include <gradus/base/error.h>

namespace gradus::report::internal {

std::vector<std::size_t> downsample(const std::vector<double>& values, std::size_t max_count) {
  GRADUS_INTERNAL_CHECK("report", max_count >= 5, "downsample needs room for 5 points; got ",
                        max_count);
  std::vector<std::size_t> kept;
  const std::size_t count = values.size();
  if (count <= max_count) {
    kept.resize(count);
    std::iota(kept.begin(), kept.end(), std::size_t{0});
    return kept;
  }
  const bool has_gaps =
      std::any_of(values.begin(), values.end(), [](double y) { return !std::isfinite(y); });
  const std::size_t stretches = (max_count - 2) / (has_gaps ? 3 : 2);
  kept.push_back(0);
  for (std::size_t stretch = 0; stretch < stretches; ++stretch) {
    const std::size_t begin = 1 + (count - 2) * stretch / stretches;
    const std::size_t end = 1 + (count - 2) * (stretch + 1) / stretches;
    std::size_t low = end, high = end, gap = end;
    for (std::size_t i = begin; i < end; ++i) {
      if (!std::isfinite(values[i])) {
        if (gap == end) gap = i;
        continue;
      }
      if (low == end || values[i] < values[low]) low = i;
      if (high == end || values[i] > values[high]) high = i;
    }
    for (const std::size_t i : {low, high, gap}) {
      if (i != end) kept.push_back(i);
    }
  }
  kept.push_back(count - 1);
  std::sort(kept.begin(), kept.end());
  kept.erase(std::unique(kept.begin(), kept.end()), kept.end());
  return kept;
}

std::vector<Point> downsample(const std::vector<Point>& points, std::size_t max_count) {
  std::vector<double> values;
  std::transform(points.begin(), points.end(), std::back_inserter(values),
                 [](const Point& p) { return p.y; });
  std::vector<Point> result;
  for (const std::size_t i : downsample(values, max_count)) result.push_back(points[i]);
  return result;
}

std::vector<Point> smooth(const std::vector<Point>& points, double time_constant) {
  const double keep = std::exp(-1.0 / time_constant);
  double sum = 0.0;
  double weight = 0.0;
  std::vector<Point> result = points;
  for (auto& point : result) {
    if (!std::isfinite(point.y)) continue;
    sum = keep * sum + (1.0 - keep) * point.y;
    weight = keep * weight + (1.0 - keep);
    point.y = sum / weight;
  }
  return result;
}

}  // namespace gradus::report::internal
