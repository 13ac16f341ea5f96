#include <gradus/privacy/noise/internal/kernels.h>

#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define GRADUS_NOISE_X86 1
#if !defined(__clang__)
// GCC 12's own header leaves the unused operand of a masked intrinsic uninitialized on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#endif

namespace gradus::privacy::internal {
namespace {

constexpr std::uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;
constexpr std::uint32_t kPhiloxW0 = 0x9E3779B9, kPhiloxW1 = 0xBB67AE85;
constexpr std::uint32_t kChaChaConstants[4] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};

constexpr std::uint64_t kNumbers[8] = {0, 1, 2, 3, 4, 5, 6, 7};
constexpr std::uint64_t kEvenNumbers[8] = {0, 2, 4, 6, 8, 10, 12, 14};
constexpr std::uint32_t kWordNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Bits of 1 and of sqrt(1/2), for mantissas in [sqrt(1/2), sqrt(2)).
constexpr std::uint32_t kFloatOne = 0x3f800000, kFloatRootHalf = 0x3f3504f3;
constexpr std::uint64_t kDoubleOne = 0x3ff0000000000000, kDoubleRootHalf = 0x3fe6a09e667f3bcd;

// Of 32 bits alone the radius would end at 6.66 and be coarse from 4 on. Below this word, once in
// 4096 pairs, it gets 32 more bits: the tail ends at 9.42, and steps are below float32's from
// there.
constexpr std::uint32_t kTailWords = 1U << 20;

// Appends another word to each radius word below kTailWords; cold, so a call and not a loop of its
// own.
__attribute__((noinline)) void extend_tails(const PhiloxStream& stream, std::uint64_t block,
                                            int pair, int lanes, const std::uint32_t* words,
                                            float* t) {
  PhiloxStream tail = stream;
  tail.purpose = static_cast<std::uint32_t>(Purpose::kTail);
  for (int i = 0; i < lanes; ++i) {
    if (words[i] >= kTailWords) continue;
    const auto more = philox_block(tail, block + static_cast<std::uint64_t>(i));
    const std::uint64_t all =
        (static_cast<std::uint64_t>(words[i]) << 32 | more[static_cast<std::size_t>(pair)]) | 1;
    t[i] = static_cast<float>(static_cast<double>(all) * 0x1p-64);
  }
}

namespace portable {
#define GRADUS_NOISE_LANES 4
#include <gradus/privacy/noise/internal/kernels_impl.h>
#undef GRADUS_NOISE_LANES
constexpr NoiseKernels kKernels{"portable",     philox_words, seeded_floats,
                                seeded_doubles, chacha_words, secure_doubles};
}  // namespace portable

// The same loops once more for wider vector units, though the library is built for any.
#ifdef GRADUS_NOISE_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
namespace avx2 {
#define GRADUS_NOISE_LANES 8
#include <gradus/privacy/noise/internal/kernels_impl.h>
#undef GRADUS_NOISE_LANES
constexpr NoiseKernels kKernels{"avx2",         philox_words, seeded_floats,
                                seeded_doubles, chacha_words, secure_doubles};
}  // namespace avx2
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif
namespace avx512 {
#define GRADUS_NOISE_LANES 16
#include <gradus/privacy/noise/internal/kernels_impl.h>
#undef GRADUS_NOISE_LANES
constexpr NoiseKernels kKernels{"avx512",       philox_words, seeded_floats,
                                seeded_doubles, chacha_words, secure_doubles};
}  // namespace avx512
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

}  // namespace

PhiloxStream::PhiloxStream(std::uint64_t key, std::uint32_t purpose, std::uint32_t stream)
    : purpose(purpose), stream(stream) {
  auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (std::size_t round = 0; round < 10; ++round, k0 += kPhiloxW0, k1 += kPhiloxW1) {
    round_keys[2 * round] = k0;
    round_keys[2 * round + 1] = k1;
  }
}

std::array<std::uint32_t, 4> philox_block(const PhiloxStream& stream, std::uint64_t block) {
  auto c0 = static_cast<std::uint32_t>(block), c1 = static_cast<std::uint32_t>(block >> 32);
  std::uint32_t c2 = stream.purpose, c3 = stream.stream;
  for (std::size_t round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{kPhiloxM0} * c0, p1 = std::uint64_t{kPhiloxM1} * c2;
    c0 = static_cast<std::uint32_t>((p1 >> 32) ^ c1 ^ stream.round_keys[2 * round]);
    c2 = static_cast<std::uint32_t>((p0 >> 32) ^ c3 ^ stream.round_keys[2 * round + 1]);
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
  }
  return {c0, c1, c2, c3};
}

const std::vector<const NoiseKernels*>& noise_kernels() {
  static const std::vector<const NoiseKernels*> all = [] {
    std::vector<const NoiseKernels*> found;
#ifdef GRADUS_NOISE_X86
    if (__builtin_cpu_supports("avx512f")) found.push_back(&avx512::kKernels);
    if (__builtin_cpu_supports("avx2")) found.push_back(&avx2::kKernels);
#endif
    found.push_back(&portable::kKernels);
    return found;
  }();
  return all;
}

}  // namespace gradus::privacy::internal
