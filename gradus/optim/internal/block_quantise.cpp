#include <gradus/optim/internal/block_quantise.h>

#include <cmath>
#include <limits>
#include <vector>

#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include <gradus/base/error.h>

namespace gradus::optim::internal {
namespace {

constexpr const char* kComponent = "block_quantise";

constexpr int kDecades = 7;

// The middle between two neighbours of the map, rounded up: from there on the upper one is at least
// as near.
float midpoint(float below, float above) {
  // Exact: a sum of two floats of like size fits a double.
  const double middle = (double{below} + double{above}) / 2.0;
  const auto rounded = static_cast<float>(middle);
  return double{rounded} < middle ? std::nextafter(rounded, std::numeric_limits<float>::infinity())
                                  : rounded;
}

// Cells of decade 1 to 7; a place in it is cells + the number of the cell.
int cells_of(int decade, bool is_signed) { return 1 << (is_signed ? decade - 1 : decade); }

CodeMap make_map(bool is_signed) {
  CodeMap map;
  map.is_signed = is_signed;
  std::vector<float> upward{0.0F};  // from zero up
  for (int decade = 1; decade <= kDecades; ++decade) {
    const int cells = cells_of(decade, is_signed);
    const double top = std::pow(10.0, decade - kDecades);
    map.places[decade] = static_cast<float>(cells / (0.9 * top));
    map.zero_places[decade] = static_cast<float>(cells * 8.0 / 9.0);
    map.least[decade] = static_cast<float>(cells);
    const int exponent = is_signed ? decade - 1 : decade;
    map.widths[exponent] = static_cast<float>(0.9 * top);
    map.firsts[exponent] = static_cast<float>(top * (0.1 + 0.45 / cells));
    for (int cell = 0; cell < cells; ++cell) {
      // In float32, as the loops that need no table do it.
      const float fraction = static_cast<float>(cell) / static_cast<float>(cells);
      const float share = map.widths[exponent] * fraction;
      const float value = share + map.firsts[exponent];
      if (cell == 0) map.thresholds[decade - 1] = midpoint(upward.back(), value);
      upward.push_back(value);
    }
  }
  map.thresholds[kDecades] = midpoint(upward.back(), 1.0F);
  upward.push_back(1.0F);
  if (is_signed) {
    map.firsts[kDecades] = 1.0F;  // place 128
  } else {
    map.least[0] = 1.0F;  // zero is place 1
  }
  std::size_t code = 0;
  if (is_signed) {
    for (std::size_t i = upward.size() - 2; i > 0; --i) map.values[code++] = -upward[i];
  }
  for (const float value : upward) map.values[code++] = value;
  GRADUS_INTERNAL_CHECK(kComponent, code == 256, "the map must have 256 values; got ", code);
  return map;
}

// The numbers of a table on a device.
at::Tensor on_device(const float* numbers, std::int64_t count, const at::Device& device) {
  return at::tensor(at::ArrayRef<float>(numbers, static_cast<std::size_t>(count)), at::kFloat)
      .to(device);
}

at::Tensor padded_blocks(const at::Tensor& x) {
  const std::int64_t blocks = block_count(x.numel());
  return at::constant_pad_nd(x, {0, blocks * kBlock - x.numel()}).view({blocks, kBlock});
}

}  // namespace

const CodeMap& dynamic_map(bool is_signed) {
  static const CodeMap with_sign = make_map(true), without = make_map(false);
  return is_signed ? with_sign : without;
}

void quantise_by_operations(const at::Tensor& x, bool is_signed, const at::Tensor& codes,
                            const at::Tensor& absmax) {
  const auto& map = dynamic_map(is_signed);
  const auto blocks = padded_blocks(x);
  const auto tops = blocks.abs().amax(1);
  absmax.copy_(tops);
  const auto divisors = at::where(tops.eq(0), at::ones_like(tops), tops).unsqueeze(1);
  const auto shares = blocks.div(divisors).view(-1).slice(0, 0, x.numel()).abs();
  const auto table = [&](const float* numbers) { return on_device(numbers, 8, x.device()); };
  // right = true: a share equal to a threshold has reached it.
  const auto decades = at::bucketize(shares, table(map.thresholds).slice(0, 0, kDecades),
                                     /*out_int32=*/true, /*right=*/true);
  const auto first = table(map.least).index_select(0, decades);
  const auto last = at::maximum(first.add(first).sub_(1.0), first);
  const auto places =
      at::minimum(at::maximum(table(map.places)
                                  .index_select(0, decades)
                                  .mul_(shares)
                                  .add_(table(map.zero_places).index_select(0, decades)),
                              first),
                  last);
  auto found = places.to(at::kInt).add_(shares.ge(map.thresholds[kDecades]));
  if (is_signed) {
    found = at::where(x.lt(0), found.clamp_max(127).neg().add(127), found.add(127));
  } else {
    // As in the loops: what is positive stays so.
    found = at::where(x.gt(0), found.clamp_min(2), found).sub(1);
  }
  codes.copy_(found);
}

at::Tensor dequantise_by_operations(const at::Tensor& codes, bool is_signed,
                                    const at::Tensor& absmax) {
  const auto values = on_device(dynamic_map(is_signed).values, 256, codes.device());
  const auto flat = values.index_select(0, codes.to(at::kInt));
  return padded_blocks(flat).mul(absmax.unsqueeze(1)).view(-1).slice(0, 0, codes.numel());
}

}  // namespace gradus::optim::internal
