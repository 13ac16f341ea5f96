#include <gradus/optim/internal/loops.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#if defined(__x86_64__) && (defined(__clang__) || defined(__GNUC__))
#include <immintrin.h>
#define GRADUS_OPTIM_AVX2 1
#endif

namespace gradus::optim::internal {
namespace {

namespace baseline {
#include <gradus/optim/internal/adafactor_loops_impl.h>
#include <gradus/optim/internal/block_quantise_impl.h>
}  // namespace baseline

// The same loops once more for processors with 256-bit integers, which nearly all are, though the
// library is built for any.
#ifdef GRADUS_OPTIM_AVX2
#define GRADUS_OPTIM_PERMUTE 1
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#pragma GCC optimize("tree-vectorize")
#endif
namespace avx2 {
#include <gradus/optim/internal/adafactor_loops_impl.h>
#include <gradus/optim/internal/block_quantise_impl.h>
}  // namespace avx2
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef GRADUS_OPTIM_PERMUTE

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}
#endif

}  // namespace

template <typename Value>
const AdafactorLoops<Value>& adafactor_loops([[maybe_unused]] bool widest) {
#ifdef GRADUS_OPTIM_AVX2
  if (widest && has_avx2()) return avx2::kAdafactorLoops<Value>;
#endif
  return baseline::kAdafactorLoops<Value>;
}

template <typename Value>
const BlockLoops<Value>& block_loops([[maybe_unused]] bool widest) {
#ifdef GRADUS_OPTIM_AVX2
  if (widest && has_avx2()) return avx2::kBlockLoops<Value>;
#endif
  return baseline::kBlockLoops<Value>;
}

const CodeLoops& code_loops([[maybe_unused]] bool widest) {
#ifdef GRADUS_OPTIM_AVX2
  if (widest && has_avx2()) return avx2::kCodeLoops;
#endif
  return baseline::kCodeLoops;
}

template const AdafactorLoops<float>& adafactor_loops(bool);
template const AdafactorLoops<double>& adafactor_loops(bool);
template const AdafactorLoops<c10::Half>& adafactor_loops(bool);
template const AdafactorLoops<c10::BFloat16>& adafactor_loops(bool);
template const BlockLoops<float>& block_loops(bool);
template const BlockLoops<c10::Half>& block_loops(bool);
template const BlockLoops<c10::BFloat16>& block_loops(bool);

}  // namespace gradus::optim::internal
