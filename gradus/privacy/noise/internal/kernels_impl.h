// The loops of kernels.h, included once for each vector unit with GRADUS_NOISE_LANES words of 32
// bits: no #pragma once, no includes. Only additions, multiplications, square roots, conversions
// and bit operations, none of them contracted, so every unit gives the same bits.

constexpr int kLanes = GRADUS_NOISE_LANES;
constexpr int kWideLanes = kLanes / 2;

using Floats __attribute__((vector_size(4 * kLanes))) = float;
using Ints __attribute__((vector_size(4 * kLanes))) = std::int32_t;
using Words __attribute__((vector_size(4 * kLanes))) = std::uint32_t;
using Doubles __attribute__((vector_size(4 * kLanes))) = double;
using Wides __attribute__((vector_size(4 * kLanes))) = std::uint64_t;

#define GRADUS_NOISE_INLINE inline __attribute__((always_inline))

template <typename Vector, typename Value>
GRADUS_NOISE_INLINE Vector load(const Value* from) {
  Vector v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}
template <typename Vector, typename Value>
GRADUS_NOISE_INLINE void store(Value* to, Vector v) {
  std::memcpy(to, &v, sizeof(v));
}
template <typename To, typename From>
GRADUS_NOISE_INLINE To bits(From v) {
  return __builtin_bit_cast(To, v);
}
GRADUS_NOISE_INLINE Wides wide(std::uint64_t value) { return Wides{} + value; }
GRADUS_NOISE_INLINE Words word(std::uint32_t value) { return Words{} + value; }

#if GRADUS_NOISE_LANES == 16
GRADUS_NOISE_INLINE Wides product(Wides a, std::uint32_t b) {
  return bits<Wides>(_mm512_mul_epu32(bits<__m512i>(a), _mm512_set1_epi64(b)));
}
GRADUS_NOISE_INLINE Floats square_root(Floats v) { return _mm512_sqrt_ps(v); }
GRADUS_NOISE_INLINE Doubles square_root(Doubles v) { return _mm512_sqrt_pd(v); }
GRADUS_NOISE_INLINE bool any_below(Words v, std::uint32_t limit) {
  return _mm512_cmplt_epu32_mask(bits<__m512i>(v),
                                 _mm512_set1_epi32(static_cast<std::int32_t>(limit))) != 0;
}
#elif GRADUS_NOISE_LANES == 8
GRADUS_NOISE_INLINE Wides product(Wides a, std::uint32_t b) {
  return bits<Wides>(_mm256_mul_epu32(bits<__m256i>(a), _mm256_set1_epi64x(b)));
}
GRADUS_NOISE_INLINE Floats square_root(Floats v) { return _mm256_sqrt_ps(v); }
GRADUS_NOISE_INLINE Doubles square_root(Doubles v) { return _mm256_sqrt_pd(v); }
GRADUS_NOISE_INLINE bool any_below(Words v, std::uint32_t limit) {
  return _mm256_movemask_epi8(bits<__m256i>(v < word(limit))) != 0;
}
#elif defined(GRADUS_NOISE_X86)
GRADUS_NOISE_INLINE Wides product(Wides a, std::uint32_t b) {
  return bits<Wides>(_mm_mul_epu32(bits<__m128i>(a), _mm_set1_epi64x(b)));
}
GRADUS_NOISE_INLINE Floats square_root(Floats v) { return _mm_sqrt_ps(v); }
GRADUS_NOISE_INLINE Doubles square_root(Doubles v) { return _mm_sqrt_pd(v); }
GRADUS_NOISE_INLINE bool any_below(Words v, std::uint32_t limit) {
  return _mm_movemask_epi8(bits<__m128i>(v < word(limit))) != 0;
}
#else
GRADUS_NOISE_INLINE Wides product(Wides a, std::uint32_t b) {
  return (a & 0xffffffffULL) * static_cast<std::uint64_t>(b);
}
template <typename Vector>
GRADUS_NOISE_INLINE Vector square_root(Vector v) {
  for (std::size_t i = 0; i < sizeof(v) / sizeof(v[0]); ++i) v[i] = std::sqrt(v[i]);
  return v;
}
GRADUS_NOISE_INLINE bool any_below(Words v, std::uint32_t limit) {
  for (int i = 0; i < kLanes; ++i) {
    if (v[i] < limit) return true;
  }
  return false;
}
#endif

// Four words of a block in the low half of each lane; the high halves hold anything.
struct PhiloxWords {
  Wides x0, x1, x2, x3;
};

GRADUS_NOISE_INLINE PhiloxWords philox(const PhiloxStream& stream, Wides block) {
  Wides c0 = block, c1 = block >> 32, c2 = wide(stream.purpose), c3 = wide(stream.stream);
  for (std::size_t round = 0; round < 10; ++round) {
    const Wides p0 = product(c0, kPhiloxM0), p1 = product(c2, kPhiloxM1);
    c0 = (p1 >> 32) ^ c1 ^ wide(stream.round_keys[2 * round]);
    c2 = (p0 >> 32) ^ c3 ^ wide(stream.round_keys[2 * round + 1]);
    c1 = p1;
    c3 = p0;
  }
  return {c0, c1, c2, c3};
}

// Lane i of the result is the low half of even[i / 2] or odd[i / 2].
GRADUS_NOISE_INLINE Words interleave(Wides even, Wides odd) {
  return bits<Words>((even & 0xffffffffULL) | (odd << 32));
}

struct PhiloxTilePart {
  Words x[4];
};

// kLanes consecutive blocks, one a lane.
GRADUS_NOISE_INLINE PhiloxTilePart philox_lanes(const PhiloxStream& stream, std::uint64_t block) {
  const Wides even = load<Wides>(kEvenNumbers) + block;
  const PhiloxWords a = philox(stream, even), b = philox(stream, even + 1);
  return {{interleave(a.x0, b.x0), interleave(a.x1, b.x1), interleave(a.x2, b.x2),
           interleave(a.x3, b.x3)}};
}

struct FloatPair {
  Floats first, second;
};
struct DoublePair {
  Doubles first, second;
};

// -2 log u, for u = t where t >= 0 and u = 1 + t where t < 0: so that t, near zero on both sides,
// has all its digits both where u is near 0 and where it is near 1.
GRADUS_NOISE_INLINE Floats minus_twice_log(Floats t) {
  const Floats u = t < 0.0F ? t + 1.0F : t;
  const Words shifted = bits<Words>(u) + (kFloatOne - kFloatRootHalf);
  const Floats exponent = __builtin_convertvector(bits<Ints>(shifted >> 23), Floats) - 127.0F;
  const Floats mantissa = bits<Floats>((shifted & 0x007fffffU) + kFloatRootHalf);
  const Floats f = exponent == 0.0F ? t : mantissa - 1.0F;
  // Minimax polynomial (Remez) of -2 (log1p(f) - f) / f^2 on [sqrt(1/2) - 1, sqrt(2) - 1], its
  // error 3e-8 of log1p(f).
  const Floats f2 = f * f, f4 = f2 * f2;
  const Floats p01 = f * -0.666679005F + 0.999999832F, p23 = f * -0.399241434F + 0.500035106F;
  const Floats p45 = f * -0.298359533F + 0.331410123F, p67 = f * -0.174697134F + 0.286150788F;
  const Floats p = (p01 + f2 * p23) + f4 * (p45 + f2 * p67);
  return (f2 * p - (f + f)) - exponent * 1.38629436F;
}

// A normal pair by Box and Muller 1958: the first word gives the radius, the second the angle, an
// angle in [-pi/4, pi/4), then turned by a quarter or not, and by a half or not.
GRADUS_NOISE_INLINE FloatPair normal_pair(const PhiloxStream& stream, std::uint64_t block, int pair,
                                          Words radius_word, Words angle_word, float sigma) {
  Floats t = __builtin_convertvector(bits<Ints>(radius_word), Floats) * 0x1p-32F;
  if (__builtin_expect(any_below(radius_word, kTailWords), 0)) {
    float lanes[kLanes];
    std::uint32_t words[kLanes];
    store(lanes, t);
    store(words, radius_word);
    extend_tails(stream, block, pair, kLanes, words, lanes);
    t = load<Floats>(lanes);
  }
  Floats radius = square_root(minus_twice_log(t)) * sigma;
  radius = bits<Floats>(bits<Words>(radius) ^ (angle_word & 0x80000000U));
  const Floats y =
      __builtin_convertvector(bits<Ints>(angle_word << 2), Floats) * (0x1p-31F * 0.785398163F);
  const Floats y2 = y * y;
  // Minimax polynomials on [-pi/4, pi/4], 4e-9 of the sine and 1e-10.
  const Floats sine =
      y + (y * y2) * (y2 * (y2 * -0.000195172986F + 0.00833217814F) + -0.166666549F);
  const Floats cosine =
      (y2 * y2) * (y2 * (y2 * 2.44384513e-05F + -0.00138873675F) + 0.0416666469F) +
      (1.0F - 0.5F * y2);
  const auto turned = bits<Ints>(angle_word << 1) < 0;
  return {radius * (turned ? sine : cosine), radius * (turned ? cosine : sine)};
}

// Signed integers of 64 bits to the nearest float64: vector units before AVX-512 have no such
// conversion. Both halves are exact, their sum rounds once.
GRADUS_NOISE_INLINE Doubles to_doubles(Wides v) {
  // 2^84 + 2^63 + 2^32 times the signed upper half, and 2^52 plus the lower half.
  const Doubles high = bits<Doubles>((v >> 32) ^ 0x4530000080000000ULL) - 0x1.00000801p84;
  const Doubles low = bits<Doubles>((v & 0xffffffffULL) | 0x4330000000000000ULL);
  return high + low;
}

// As for float32. The coefficients are those of fdlibm's log (Sun Microsystems 1993), sine and
// cosine, each below one unit in the last place.
GRADUS_NOISE_INLINE Doubles minus_twice_log(Doubles t) {
  const Doubles u = t < 0.0 ? t + 1.0 : t;
  const Wides shifted = bits<Wides>(u) + (kDoubleOne - kDoubleRootHalf);
  const Doubles exponent =
      bits<Doubles>((shifted >> 52) | 0x4330000000000000ULL) - (0x1p52 + 1023.0);
  const Doubles mantissa = bits<Doubles>((shifted & 0x000fffffffffffffULL) + kDoubleRootHalf);
  const Doubles f = exponent == 0.0 ? t : mantissa - 1.0;
  const Doubles s = f / (f + 2.0), z = s * s, w = z * z;
  const Doubles odd = z * (w * (w * (w * 1.479819860511658591e-01 + 1.818357216161805012e-01) +
                                2.857142874366239149e-01) +
                           6.666666666666735130e-01);
  const Doubles even = w * (w * (w * 1.531383769920937332e-01 + 2.222219843214978396e-01) +
                            3.999999999940941908e-01);
  const Doubles half_square = f * f * 0.5;
  const Doubles log1p = f - (half_square - s * (half_square + (odd + even)));
  return -2.0 * (log1p + exponent * 6.931471805599453094e-01);
}

GRADUS_NOISE_INLINE DoublePair normal_pair(Wides radius_word, Wides angle_word) {
  // The last bit keeps the uniform off zero: it lies at 2^-64 at least, 9.4 standard deviations.
  const Doubles t = to_doubles(radius_word | 1) * 0x1p-64;
  Doubles radius = square_root(minus_twice_log(t));
  radius = bits<Doubles>(bits<Wides>(radius) ^ (angle_word & 0x8000000000000000ULL));
  const Doubles y = to_doubles(angle_word << 2) * (0x1p-63 * 7.853981633974483096e-01);
  const Doubles y2 = y * y;
  const Doubles sine =
      y +
      (y * y2) *
          (y2 * (y2 * (y2 * (y2 * (y2 * 1.58969099521155010221e-10 + -2.50507602534068634195e-08) +
                             2.75573137070700676789e-06) +
                       -1.98412698298579493134e-04) +
                 8.33333333332248946124e-03) +
           -1.66666666666666324348e-01);
  const Doubles cosine =
      (y2 * y2) *
          (y2 * (y2 * (y2 * (y2 * (y2 * -1.13596475577881948265e-11 + 2.08757232129817482790e-09) +
                             -2.75573143513906633035e-07) +
                       2.48015872894767294178e-05) +
                 -1.38888888888741095749e-03) +
           4.16666666666666019037e-02) +
      (1.0 - 0.5 * y2);
  const auto turned = (angle_word & 0x4000000000000000ULL) != 0;
  return {radius * (turned ? sine : cosine), radius * (turned ? cosine : sine)};
}

void philox_words(const PhiloxStream& stream, std::uint64_t first_block, std::int64_t tiles,
                  std::uint32_t* words) {
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    for (int part = 0; part < kTileBlocks; part += kLanes) {
      const auto block = first_block + static_cast<std::uint64_t>(tile * kTileBlocks + part);
      const PhiloxTilePart lanes = philox_lanes(stream, block);
      for (int x = 0; x < 4; ++x) {
        store(words + tile * kFloatsPerTile + x * kTileBlocks + part, lanes.x[x]);
      }
    }
  }
}

template <bool kAdd, typename Vector, typename Value>
GRADUS_NOISE_INLINE void put(Value* to, Vector noise) {
  store(to, kAdd ? load<Vector>(to) + noise : noise);
}

template <bool kAdd>
GRADUS_NOISE_INLINE void float_tile(const PhiloxStream& stream, std::uint64_t first_block,
                                    float sigma, float* to) {
  for (int part = 0; part < kTileBlocks; part += kLanes) {
    const std::uint64_t block = first_block + static_cast<std::uint64_t>(part);
    const PhiloxTilePart words = philox_lanes(stream, block);
    const FloatPair a = normal_pair(stream, block, 0, words.x[0], words.x[1], sigma);
    const FloatPair b = normal_pair(stream, block, 1, words.x[2], words.x[3], sigma);
    put<kAdd>(to + part, a.first);
    put<kAdd>(to + kTileBlocks + part, a.second);
    put<kAdd>(to + 2 * kTileBlocks + part, b.first);
    put<kAdd>(to + 3 * kTileBlocks + part, b.second);
  }
}

template <bool kAdd>
GRADUS_NOISE_INLINE void double_tile(const PhiloxStream& stream, std::uint64_t first_block,
                                     double sigma, double* to) {
  for (int part = 0; part < kTileBlocks; part += kWideLanes) {
    const Wides block = load<Wides>(kNumbers) + (first_block + static_cast<std::uint64_t>(part));
    const PhiloxWords x = philox(stream, block);
    const DoublePair z =
        normal_pair((x.x0 & 0xffffffffULL) | (x.x1 << 32), (x.x2 & 0xffffffffULL) | (x.x3 << 32));
    put<kAdd>(to + part, sigma * z.first);
    put<kAdd>(to + kTileBlocks + part, sigma * z.second);
  }
}

// Tile by tile; the last, partial one goes through a buffer.
template <std::int64_t kPerTile, typename Value, typename Tile>
GRADUS_NOISE_INLINE void for_tiles(std::int64_t n, std::uint64_t block, bool keep, Value* target,
                                   const Tile& tile) {
  std::int64_t i = 0;
  for (; i + kPerTile <= n; i += kPerTile, block += kTileBlocks) tile(block, target + i);
  if (i == n) return;
  Value rest[kPerTile] = {};
  const std::size_t bytes = static_cast<std::size_t>(n - i) * sizeof(Value);
  if (keep) std::memcpy(rest, target + i, bytes);
  tile(block, rest);
  std::memcpy(target + i, rest, bytes);
}

void seeded_floats(const PhiloxStream& stream, std::uint64_t first_block, std::int64_t n,
                   float sigma, bool add, float* target) {
  if (add) {
    for_tiles<kFloatsPerTile>(n, first_block, true, target, [&](std::uint64_t block, float* to) {
      float_tile<true>(stream, block, sigma, to);
    });
  } else {
    for_tiles<kFloatsPerTile>(n, first_block, false, target, [&](std::uint64_t block, float* to) {
      float_tile<false>(stream, block, sigma, to);
    });
  }
}

void seeded_doubles(const PhiloxStream& stream, std::uint64_t first_block, std::int64_t n,
                    double sigma, bool add, double* target) {
  if (add) {
    for_tiles<kDoublesPerTile>(n, first_block, true, target, [&](std::uint64_t block, double* to) {
      double_tile<true>(stream, block, sigma, to);
    });
  } else {
    for_tiles<kDoublesPerTile>(n, first_block, false, target, [&](std::uint64_t block, double* to) {
      double_tile<false>(stream, block, sigma, to);
    });
  }
}

template <int kBits>
GRADUS_NOISE_INLINE Words rotate(Words v) {
  return (v << kBits) | (v >> (32 - kBits));
}

GRADUS_NOISE_INLINE void quarter_round(Words& a, Words& b, Words& c, Words& d) {
  a += b, d = rotate<16>(d ^ a);
  c += d, b = rotate<12>(b ^ c);
  a += b, d = rotate<8>(d ^ a);
  c += d, b = rotate<7>(b ^ c);
}

// kLanes consecutive blocks, one a lane. The blocks of a tile share the upper half of the counter.
GRADUS_NOISE_INLINE void chacha_lanes(const ChaChaStream& stream, std::uint64_t block, Words* x) {
  Words start[16];
  for (int i = 0; i < 4; ++i) start[i] = word(kChaChaConstants[i]);
  for (std::size_t i = 0; i < 8; ++i) start[4 + i] = word(stream.key[i]);
  start[12] = load<Words>(kWordNumbers) + static_cast<std::uint32_t>(block);
  start[13] = word(static_cast<std::uint32_t>(block >> 32));
  start[14] = word(stream.nonce[0]);
  start[15] = word(stream.nonce[1]);
  for (int i = 0; i < 16; ++i) x[i] = start[i];
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 4; ++i) quarter_round(x[i], x[4 + i], x[8 + i], x[12 + i]);
    for (int i = 0; i < 4; ++i) {
      quarter_round(x[i], x[4 + (i + 1) % 4], x[8 + (i + 2) % 4], x[12 + (i + 3) % 4]);
    }
  }
  for (int i = 0; i < 16; ++i) x[i] += start[i];
}

void chacha_words(const ChaChaStream& stream, std::uint64_t first_block, std::int64_t tiles,
                  std::uint32_t* words) {
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    for (int part = 0; part < kTileBlocks; part += kLanes) {
      Words x[16];
      chacha_lanes(stream, first_block + static_cast<std::uint64_t>(tile * kTileBlocks + part), x);
      for (int i = 0; i < 16; ++i) {
        store(words + (tile * 16 + i) * kTileBlocks + part, x[i]);
      }
    }
  }
}

// Two values a block: halves of the sums of four first and of four second members of its pairs.
GRADUS_NOISE_INLINE void secure_tile(const ChaChaStream& stream, std::uint64_t first_block,
                                     double sigma, double* to) {
  for (int part = 0; part < kTileBlocks; part += kLanes) {
    Words x[16];
    chacha_lanes(stream, first_block + static_cast<std::uint64_t>(part), x);
    Doubles even_first{}, even_second{}, odd_first{}, odd_second{};
    for (int i = 0; i < 16; i += 4) {
      const auto x0 = bits<Wides>(x[i]), x1 = bits<Wides>(x[i + 1]);
      const auto x2 = bits<Wides>(x[i + 2]), x3 = bits<Wides>(x[i + 3]);
      const DoublePair even =
          normal_pair((x0 & 0xffffffffULL) | (x1 << 32), (x2 & 0xffffffffULL) | (x3 << 32));
      const DoublePair odd = normal_pair((x0 >> 32) | (x1 & 0xffffffff00000000ULL),
                                         (x2 >> 32) | (x3 & 0xffffffff00000000ULL));
      even_first += even.first, even_second += even.second;
      odd_first += odd.first, odd_second += odd.second;
    }
    const double half = 0.5 * sigma;
    for (int i = 0; i < kWideLanes; ++i) {
      to[part + 2 * i] = half * even_first[i];
      to[part + 2 * i + 1] = half * odd_first[i];
      to[kTileBlocks + part + 2 * i] = half * even_second[i];
      to[kTileBlocks + part + 2 * i + 1] = half * odd_second[i];
    }
  }
}

void secure_doubles(const ChaChaStream& stream, std::uint64_t first_block, std::int64_t n,
                    double sigma, double* target) {
  for_tiles<kSecurePerTile>(n, first_block, false, target, [&](std::uint64_t block, double* to) {
    secure_tile(stream, block, sigma, to);
  });
}

#undef GRADUS_NOISE_INLINE
