#include <gradus/compress/internal/kernels.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#if defined(__x86_64__) && (defined(__clang__) || defined(__GNUC__))
#define GRADUS_COMPRESS_AVX2 1
#endif

namespace gradus::compress::internal {
namespace {

namespace baseline {
#include <gradus/compress/internal/kernels_impl.h>
}  // namespace baseline

// The same loops once more for processors with 256-bit integers, which nearly all are, though the
// library is built for any.
#ifdef GRADUS_COMPRESS_AVX2
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,popcnt"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,popcnt")
#pragma GCC optimize("tree-vectorize")
#endif
namespace avx2 {
#include <gradus/compress/internal/kernels_impl.h>
}  // namespace avx2
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt");
  return has;
}
#endif

}  // namespace

template <typename Word>
const WordKernels<Word>& word_kernels([[maybe_unused]] bool widest) {
#ifdef GRADUS_COMPRESS_AVX2
  if (widest && has_avx2()) return avx2::kWordKernels<Word>;
#endif
  return baseline::kWordKernels<Word>;
}

template <typename Value>
const RealKernels<Value>& real_kernels([[maybe_unused]] bool widest) {
#ifdef GRADUS_COMPRESS_AVX2
  if (widest && has_avx2()) return avx2::kRealKernels<Value>;
#endif
  return baseline::kRealKernels<Value>;
}

template const WordKernels<std::uint8_t>& word_kernels(bool);
template const WordKernels<std::uint16_t>& word_kernels(bool);
template const WordKernels<std::uint32_t>& word_kernels(bool);
template const WordKernels<std::uint64_t>& word_kernels(bool);
template const RealKernels<float>& real_kernels(bool);
template const RealKernels<double>& real_kernels(bool);
template const RealKernels<c10::Half>& real_kernels(bool);
template const RealKernels<c10::BFloat16>& real_kernels(bool);

}  // namespace gradus::compress::internal
