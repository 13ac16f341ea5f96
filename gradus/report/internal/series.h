#pragma once

#include <cstddef>
#include <vector>

namespace gradus::report::internal {

/// One point of a curve; a non-finite y is a gap.
struct Point {
  double x = 0.0;
  double y = 0.0;
};

/// Indices, ascending, of at most @p max_count elements of @p values that draw the same curve: the
/// first and the last, and of each of equal stretches the lowest, the highest and (so that gaps
/// stay) one non-finite element.
/// @param max_count  At least 5.
std::vector<std::size_t> downsample(const std::vector<double>& values, std::size_t max_count);

/// The same for a curve.
std::vector<Point> downsample(const std::vector<Point>& points, std::size_t max_count);

/// Exponential moving average with a time constant of @p time_constant points (> 0), corrected for
/// its start; a non-finite value is a gap in the result and does not enter later ones.
std::vector<Point> smooth(const std::vector<Point>& points, double time_constant);

}  // namespace gradus::report::internal
