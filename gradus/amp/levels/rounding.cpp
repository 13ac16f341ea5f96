#include <gradus/amp/levels/rounding.h>

#include <algorithm>
#include <bit>
#include <cstddef>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <gradus/base/error.h>

namespace gradus::amp {
namespace {

constexpr const char* kComponent = "amp_levels";

// SplitMix64's output function (Steele et al. 2014): one well-mixed number for each counter, so
// that any thread can make those of its elements.
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ULL;
constexpr std::int64_t kLanes = 4;  // 16 random bits an element, of a number of 64.

// Adding a uniform number below 2^16 to the bits carries into the upper half with just the
// probability that the lower half is of 2^16: a float's bits are sign and magnitude.
std::uint16_t round_up_or_down(float value, std::uint32_t noise) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const bool finite = (bits & 0x7F800000U) != 0x7F800000U;
  // A NaN whose upper half alone is an infinity keeps its quiet bit.
  const std::uint32_t special = (bits & 0x007FFFFFU) != 0 ? bits | 0x00400000U : bits;
  return static_cast<std::uint16_t>((finite ? bits + noise : special) >> 16);
}

void round_range(const float* source, std::uint16_t* target, std::int64_t begin, std::int64_t end,
                 std::uint64_t key) {
  for (std::int64_t group = begin; group < end; group += kLanes) {
    std::uint64_t noise = mix(key + static_cast<std::uint64_t>(group / kLanes + 1) * kGolden);
    const std::int64_t stop = std::min(group + kLanes, end);
    for (std::int64_t i = group; i < stop; ++i, noise >>= 16) {
      target[i] = round_up_or_down(source[i], static_cast<std::uint32_t>(noise & 0xFFFFU));
    }
  }
}

}  // namespace

void round_stochastically(const at::Tensor& source, const at::Tensor& target,
                          RoundingStream& stream) {
  GRADUS_CHECK(kComponent,
               source.scalar_type() == at::kFloat && target.scalar_type() == at::kBFloat16,
               "stochastic rounding must go from float32 to bfloat16; got ", source.scalar_type(),
               " to ", target.scalar_type());
  GRADUS_CHECK(kComponent, source.sizes() == target.sizes() && source.device() == target.device(),
               "source and target of stochastic rounding must have one shape and device; got ",
               source.sizes(), " on ", source.device(), " and ", target.sizes(), " on ",
               target.device());
  GRADUS_CHECK(kComponent, target.is_non_overlapping_and_dense(),
               "target of stochastic rounding must have no gaps in memory; got strides ",
               target.strides());
  const at::NoGradGuard no_grad;
  const std::uint64_t key = mix(stream.seed + mix(++stream.uses * kGolden));
  // Both as flat arrays, in the order of the target's memory.
  const bool same_order = source.strides() == target.strides();
  const at::Tensor values =
      (same_order ? source : at::empty_like(target, at::kFloat).copy_(source)).cpu();
  at::Tensor rounded = target.is_cpu() ? target : at::empty_like(target, at::kCPU);
  const auto* const from = values.const_data_ptr<float>();
  auto* const to = reinterpret_cast<std::uint16_t*>(rounded.mutable_data_ptr<at::BFloat16>());
  const std::int64_t groups = (source.numel() + kLanes - 1) / kLanes;
  at::parallel_for(0, groups, /*grain_size=*/4096, [&](std::int64_t first, std::int64_t last) {
    round_range(from, to, first * kLanes, std::min(last * kLanes, source.numel()), key);
  });
  if (target.is_cpu()) {
    target.unsafeGetTensorImpl()->bump_version();
  } else {
    target.copy_(rounded);
  }
}

}  // namespace gradus::amp
