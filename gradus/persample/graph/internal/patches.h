#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/persample/graph/convolution_term.h>

namespace gradus::persample::internal {

/// Values for the last three dimensions; a missing dimension is one of extent 1.
using Triple = std::array<std::int64_t, 3>;

/// Correlation with three spatial dimensions, and the extents of its factors.
struct Grid {
  Triple kernel{1, 1, 1};
  Triple stride{1, 1, 1};
  Triple padding{0, 0, 0};
  Triple dilation{1, 1, 1};
  Triple wide{1, 1, 1};
  Triple narrow{1, 1, 1};
};
Grid grid_of(const Correlation& correlation, const at::Tensor& wide, const at::Tensor& narrow);
std::int64_t product_of(const Triple& values);

/// values[n, i, c, stride t + offset] for each t below @p extents and each of @p offsets, zero
/// outside: [n, C, offsets, I, *extents]. @p values [n, I, C, *extents of its own], float32 or
/// float64.
at::Tensor gather_windows(const at::Tensor& values, const Triple& stride,
                          const std::vector<Triple>& offsets, const Triple& extents);
/// The same by operators that any device has.
at::Tensor gather_windows_by_operators(const at::Tensor& values, const Triple& stride,
                                       const std::vector<Triple>& offsets, const Triple& extents);

/// Sums of products of shifted squares: for each example n, sum over shifts of
/// sum_{t, s < M} wide[n, t + shift, s + shift] narrow[n, t, s], float64 [n]. @p wide [n, P, P] and
/// @p narrow [n, M, M] are symmetric, of one dtype, on the CPU; M + max(shifts) <= P. What lies
/// left of their diagonals is not read.
at::Tensor shifted_products(const at::Tensor& wide, const at::Tensor& narrow,
                            const std::vector<std::int64_t>& shifts);

}  // namespace gradus::persample::internal
