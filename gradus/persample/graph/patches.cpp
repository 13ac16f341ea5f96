#include <gradus/persample/graph/internal/patches.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <gradus/base/error.h>

namespace gradus::persample::internal {

namespace {

Triple last_three(const std::vector<std::int64_t>& values, std::int64_t missing) {
  Triple result{missing, missing, missing};
  std::copy(values.begin(), values.end(),
            result.end() - static_cast<std::ptrdiff_t>(values.size()));
  return result;
}

std::int64_t up_divided(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

// The indices t in [0, extent) for which stride * t + offset lies in [0, size).
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};
Range inside(std::int64_t stride, std::int64_t offset, std::int64_t size, std::int64_t extent) {
  const std::int64_t begin = offset >= 0 ? 0 : std::min(extent, up_divided(-offset, stride));
  const std::int64_t end = size <= offset ? 0 : std::min(extent, up_divided(size - offset, stride));
  return {begin, std::max(begin, end)};
}

// What a window needs of the planes, whose lines are dealt out by the remainder of an index modulo
// the stride, so that a line of the window lies in one piece.
struct Window {
  Range row{};
  Range column{};
  std::int64_t depth = 0;  ///< Offset in the first dimension.
  std::int64_t first = 0;  ///< Place of the first element of row 0 at depth 0.
};

// Places of lines in a plane that was dealt out.
struct Deal {
  std::int64_t stride = 1;
  std::int64_t lines = 0;
  std::int64_t length = 0;  ///< Of a line of one remainder.
};

Window window_of(const Deal& deal, const Triple& sizes, const Triple& stride, const Triple& offset,
                 const Triple& extents) {
  Window window{.row = inside(stride[1], offset[1], sizes[1], extents[1]),
                .column = inside(stride[2], offset[2], sizes[2], extents[2]),
                .depth = offset[0]};
  if (window.column.begin == window.column.end) window.row.end = window.row.begin;
  const std::int64_t down =
      offset[2] >= 0 ? offset[2] / deal.stride : -up_divided(-offset[2], deal.stride);
  window.first = ((offset[2] - down * deal.stride) * deal.lines + offset[1]) * deal.length + down +
                 window.column.begin;
  return window;
}

template <typename T>
const T* dealt(const T* from, const Triple& sizes, const Deal& deal, std::vector<T>& buffer) {
  if (deal.stride == 1) return from;
  buffer.resize(static_cast<std::size_t>(deal.stride * deal.lines * deal.length));
  for (std::int64_t remainder = 0; remainder < deal.stride; ++remainder) {
    T* to = buffer.data() + remainder * deal.lines * deal.length;
    const std::int64_t count =
        up_divided(std::max<std::int64_t>(0, sizes[2] - remainder), deal.stride);
    for (std::int64_t line = 0; line < deal.lines; ++line, to += deal.length) {
      const T* const values = from + line * sizes[2] + remainder;
      for (std::int64_t i = 0; i < count; ++i) to[i] = values[i * deal.stride];
    }
  }
  return buffer.data();
}

// Lines are short: whole blocks, the last of which may overlap the one before, cost less than a
// loop's remainder.
template <typename T>
void copy_line(const T* from, std::int64_t count, T* to) {
  constexpr std::int64_t kBlock = 8;
  constexpr std::int64_t kHalf = 4;
  if (count >= kBlock) {
    for (std::int64_t i = 0; i + kBlock <= count; i += kBlock) {
      std::memcpy(to + i, from + i, kBlock * sizeof(T));
    }
    std::memcpy(to + count - kBlock, from + count - kBlock, kBlock * sizeof(T));
  } else if (count >= kHalf) {
    std::memcpy(to, from, kHalf * sizeof(T));
    std::memcpy(to + count - kHalf, from + count - kHalf, kHalf * sizeof(T));
  } else {
    for (std::int64_t i = 0; i < count; ++i) to[i] = from[i];
  }
}

template <typename T>
void gather_plane(const T* plane, const Deal& deal, const Triple& sizes, const Triple& stride,
                  const Window& window, const Triple& extents, T* to) {
  const auto [row, column, offset, first] = window;
  const std::int64_t count = column.end - column.begin;
  const std::int64_t width = extents[2];
  const std::int64_t step = stride[1] * deal.length;
  for (std::int64_t a = 0; a < extents[0]; ++a, to += extents[1] * width) {
    const std::int64_t depth = stride[0] * a + offset;
    if (depth < 0 || depth >= sizes[0]) {
      std::fill(to, to + extents[1] * width, T(0));
      continue;
    }
    std::fill(to, to + row.begin * width, T(0));
    const T* line = plane + first + depth * sizes[1] * deal.length + row.begin * step;
    T* place = to + row.begin * width;
    for (std::int64_t b = row.begin; b < row.end; ++b, line += step, place += width) {
      for (std::int64_t c = 0; c < column.begin; ++c) place[c] = 0;
      copy_line(line, count, place + column.begin);
      for (std::int64_t c = column.end; c < width; ++c) place[c] = 0;
    }
    std::fill(place, to + extents[1] * width, T(0));
  }
}

// Sums in lanes, because a sum of floats in order cannot use vector units.
constexpr std::int64_t kLanes = 16;

template <typename T>
void add_products(const T* left, const T* right, std::int64_t count, T* lanes) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += left[i + lane] * right[i + lane];
    }
  }
  for (std::int64_t lane = 0; i + lane < count; ++lane) {
    lanes[lane] += left[i + lane] * right[i + lane];
  }
}

}  // namespace

std::int64_t product_of(const Triple& values) { return values[0] * values[1] * values[2]; }

Grid grid_of(const Correlation& correlation, const at::Tensor& wide, const at::Tensor& narrow) {
  return {.kernel = last_three(correlation.kernel, 1),
          .stride = last_three(correlation.stride, 1),
          .padding = last_three(correlation.padding, 0),
          .dilation = last_three(correlation.dilation, 1),
          .wide = last_three(wide.sizes().slice(3).vec(), 1),
          .narrow = last_three(narrow.sizes().slice(3).vec(), 1)};
}

at::Tensor gather_windows(const at::Tensor& values, const Triple& stride,
                          const std::vector<Triple>& offsets, const Triple& extents) {
  if (!values.is_cpu()) return gather_windows_by_operators(values, stride, offsets, extents);
  const std::int64_t count = values.size(0);
  const std::int64_t images = values.size(1);
  const std::int64_t channels = values.size(2);
  const auto windows = static_cast<std::int64_t>(offsets.size());
  const Triple sizes = last_three(values.sizes().slice(3).vec(), 1);
  const std::int64_t plane = product_of(extents);
  at::Tensor result = at::empty(
      {count, channels, windows, images, extents[0], extents[1], extents[2]}, values.options());
  // Images may lie in any order, each of them in the usual one.
  const at::Tensor source =
      values.select(0, 0).select(0, 0).is_contiguous() ? values : values.contiguous();
  const Deal deal{
      .stride = stride[2], .lines = sizes[0] * sizes[1], .length = up_divided(sizes[2], stride[2])};
  std::vector<Window> prepared;
  for (const Triple& offset : offsets) {
    prepared.push_back(window_of(deal, sizes, stride, offset, extents));
  }
  AT_DISPATCH_FLOATING_TYPES(values.scalar_type(), "gather_windows", [&] {
    const auto* const from = source.const_data_ptr<scalar_t>();
    auto* const to = result.mutable_data_ptr<scalar_t>();
    const std::int64_t grain =
        std::max<std::int64_t>(1, 16384 / std::max<std::int64_t>(1, windows * images * plane));
    at::parallel_for(0, count * channels, grain, [&](std::int64_t begin, std::int64_t end) {
      std::vector<scalar_t> buffer;
      for (std::int64_t each = begin; each < end; ++each) {
        scalar_t* const place = to + each * windows * images * plane;
        for (std::int64_t image = 0; image < images; ++image) {
          const scalar_t* const dealt_plane =
              dealt(from + (each / channels) * source.stride(0) + image * source.stride(1) +
                        (each % channels) * product_of(sizes),
                    sizes, deal, buffer);
          scalar_t* window_place = place + image * plane;
          for (const Window& window : prepared) {
            gather_plane(dealt_plane, deal, sizes, stride, window, extents, window_place);
            window_place += images * plane;
          }
        }
      }
    });
  });
  return result;
}

at::Tensor gather_windows_by_operators(const at::Tensor& values, const Triple& stride,
                                       const std::vector<Triple>& offsets, const Triple& extents) {
  const Triple sizes = last_three(values.sizes().slice(3).vec(), 1);
  const at::Tensor source = values.reshape(
      {values.size(0), values.size(1), values.size(2), sizes[0], sizes[1], sizes[2]});
  std::vector<at::Tensor> windows;
  for (const Triple& offset : offsets) {
    // Padded, or cut, to what the window needs.
    std::vector<std::int64_t> pad;
    for (std::size_t dim = 3; dim-- > 0;) {
      const std::int64_t last = stride[dim] * (extents[dim] - 1) + offset[dim];
      pad.push_back(-offset[dim]);
      pad.push_back(last - (sizes[dim] - 1));
    }
    at::Tensor window = source;
    for (std::size_t dim = 0; dim < 3; ++dim) {
      const std::size_t at = 2 * (2 - dim);
      const auto tensor_dim = static_cast<std::int64_t>(dim) + 3;
      // First zeros, then the cut: a window may lie wholly in the padding.
      std::vector<std::int64_t> zeros(6, 0);
      zeros[at] = std::max<std::int64_t>(pad[at], 0);
      zeros[at + 1] = std::max<std::int64_t>(pad[at + 1], 0);
      window = at::constant_pad_nd(window, zeros, 0);
      const std::int64_t begin = std::max<std::int64_t>(-pad[at], 0);
      window = window.slice(tensor_dim, begin, begin + stride[dim] * (extents[dim] - 1) + 1,
                            stride[dim]);
    }
    windows.push_back(window.transpose(1, 2));  // [n, C, I, *extents]
  }
  return at::stack(windows, 2);
}

at::Tensor shifted_products(const at::Tensor& wide, const at::Tensor& narrow,
                            const std::vector<std::int64_t>& shifts) {
  const std::int64_t count = wide.size(0);
  const std::int64_t positions = wide.size(1);
  const std::int64_t steps = narrow.size(1);
  at::Tensor result = at::empty({count}, wide.options().dtype(at::kDouble));
  const at::Tensor left = wide.contiguous();
  const at::Tensor right = narrow.contiguous();
  AT_DISPATCH_FLOATING_TYPES(wide.scalar_type(), "shifted_products", [&] {
    const auto* const wides = left.const_data_ptr<scalar_t>();
    const auto* const narrows = right.const_data_ptr<scalar_t>();
    auto* const sums = result.mutable_data_ptr<double>();
    at::parallel_for(0, count, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t each = begin; each < end; ++each) {
        const scalar_t* const square = wides + each * positions * positions;
        double sum = 0;
        for (std::int64_t t = 0; t < steps; ++t) {
          const scalar_t* const row = narrows + (each * steps + t) * steps;
          if (row[t] == 0) continue;  // padding: a product of a row with itself
          scalar_t lanes[kLanes] = {};
          scalar_t diagonal = 0;
          for (const std::int64_t shift : shifts) {
            const scalar_t* const shifted = square + (t + shift) * positions + shift;
            diagonal += shifted[t] * row[t];
            add_products(shifted + t + 1, row + t + 1, steps - t - 1, lanes);
          }
          // Both are symmetric: what is right of the diagonal counts twice.
          scalar_t right_of_it = 0;
          for (const scalar_t lane : lanes) right_of_it += lane;
          sum += static_cast<double>(diagonal) + 2 * static_cast<double>(right_of_it);
        }
        sums[each] = sum;
      }
    });
  });
  return result;
}

}  // namespace gradus::persample::internal
