#include <gradus/compress/quantise.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <gradus/base/error.h>
#include <gradus/compress/internal/dense.h>
#include <gradus/compress/internal/kernels.h>

namespace gradus::compress {
namespace {

using internal::DenseLayout;
using internal::kBlock;
using plane::saved::Packed;

template <typename Real>
std::optional<Packed> quantised(const at::Tensor& tensor, DenseLayout layout, int bits,
                                internal::RandomKey key) {
  using Scale = typename internal::RealKernels<Real>::Scale;
  const std::int64_t n = layout.numel();
  const std::int64_t blocks = (n + kBlock - 1) / kBlock;
  const std::int64_t bytes = (n * bits + 7) / 8;
  if (bytes + 2 * blocks * static_cast<std::int64_t>(sizeof(Scale)) >=
      n * static_cast<std::int64_t>(sizeof(Real))) {
    return std::nullopt;  // a few values
  }
  at::Tensor codes = internal::make_array(bytes, at::kByte);
  at::Tensor scales =
      internal::make_array(2 * blocks, std::is_same_v<Scale, double> ? at::kDouble : at::kFloat);
  const auto& kernels = internal::real_kernels<Real>();
  if (!kernels.quantise(static_cast<const Real*>(tensor.const_data_ptr()), n, bits, key,
                        codes.mutable_data_ptr<std::uint8_t>(), scales.mutable_data_ptr<Scale>())) {
    return std::nullopt;
  }
  return Packed{{std::move(codes), std::move(scales)},
                [layout = std::move(layout), bits](std::vector<at::Tensor> payload) {
                  at::Tensor out = layout.make();
                  internal::real_kernels<Real>().dequantise(
                      payload.at(0).const_data_ptr<std::uint8_t>(),
                      payload.at(1).const_data_ptr<Scale>(), layout.numel(), bits,
                      static_cast<Real*>(out.mutable_data_ptr()));
                  return out;
                }};
}

bool repeats(const at::Tensor& tensor) {
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) return true;
  }
  return false;
}

}  // namespace

Quantiser::Quantiser(int bits, RoundingState state)
    : bits_(bits), seed_(state.seed), calls_(state.calls) {
  GRADUS_CHECK("compress", bits == 8 || bits == 4 || bits == 2, "bits must be 8, 4 or 2; got ",
               bits);
}

RoundingState Quantiser::state() const { return {seed_, calls_.load()}; }

std::optional<Packed> Quantiser::pack(const at::Tensor& tensor) {
  if (!internal::readable(tensor) || tensor.numel() == 0 || repeats(tensor)) return std::nullopt;
  const at::ScalarType dtype = tensor.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble && dtype != at::kHalf && dtype != at::kBFloat16) {
    return std::nullopt;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
  auto layout = DenseLayout::of(dense);
  GRADUS_INTERNAL_CHECK("compress", layout.has_value(), "a contiguous tensor is not dense");
  const internal::RandomKey key{seed_, calls_.fetch_add(1)};
  switch (dtype) {
    case at::kFloat:
      return quantised<float>(dense, std::move(*layout), bits_, key);
    case at::kDouble:
      return quantised<double>(dense, std::move(*layout), bits_, key);
    case at::kHalf:
      return quantised<at::Half>(dense, std::move(*layout), bits_, key);
    default:
      return quantised<at::BFloat16>(dense, std::move(*layout), bits_, key);
  }
}

double Quantiser::error_bound(int bits, double low, double high, at::ScalarType dtype) {
  double epsilon = std::numeric_limits<float>::epsilon();
  if (dtype == at::kDouble) epsilon = std::numeric_limits<double>::epsilon();
  if (dtype == at::kHalf) epsilon = 0x1p-10;
  if (dtype == at::kBFloat16) epsilon = 0x1p-7;
  // Half has values that are not normal in a range that activations reach.
  const double least = dtype == at::kHalf ? 0x1p-24 : 0x1p-116;
  return (high - low) / ((1 << bits) - 1) + 2 * epsilon * std::max(std::abs(low), std::abs(high)) +
         least;
}

}  // namespace gradus::compress
