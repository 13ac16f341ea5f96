// The 8-bit loops of loops.h, included once for each instruction set: no #pragma once, no includes.
// Each block goes through small arrays of kBlock values, one simple loop after the other. Only the
// look-ups in tables of eight differ by instruction set (GRADUS_OPTIM_PERMUTE), not in their
// result.

template <typename To, typename From>
inline To bits_of(From value) {
  To out;
  std::memcpy(&out, &value, sizeof(out));
  return out;
}

// The place of each magnitude y, see CodeMap. NaN counts as zero.
inline void find_places(const float* y, const CodeMap& map, std::int32_t* places) {
#ifdef GRADUS_OPTIM_PERMUTE
  const __m256 unit = _mm256_loadu_ps(map.places), zero = _mm256_loadu_ps(map.zero_places);
  const __m256 least = _mm256_loadu_ps(map.least), one = _mm256_set1_ps(1.0F);
  __m256 thresholds[8];
  for (int t = 0; t < 8; ++t) thresholds[t] = _mm256_set1_ps(map.thresholds[t]);
  for (int i = 0; i < kBlock; i += 8) {
    const __m256 magnitude = _mm256_loadu_ps(y + i);
    const auto reached = [&](int t) {
      return _mm256_castps_si256(_mm256_cmp_ps(magnitude, thresholds[t], _CMP_GE_OQ));
    };
    __m256i decade = _mm256_setzero_si256();
    for (int t = 0; t < 7; ++t) decade = _mm256_sub_epi32(decade, reached(t));
    const __m256 first = _mm256_permutevar8x32_ps(least, decade);
    const __m256 last = _mm256_max_ps(_mm256_sub_ps(_mm256_add_ps(first, first), one), first);
    __m256 place = _mm256_add_ps(_mm256_mul_ps(_mm256_permutevar8x32_ps(unit, decade), magnitude),
                                 _mm256_permutevar8x32_ps(zero, decade));
    place = _mm256_min_ps(_mm256_max_ps(place, first), last);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(places + i),
                        _mm256_sub_epi32(_mm256_cvttps_epi32(place), reached(7)));
  }
#else
  std::int32_t decade[kBlock];
  for (int i = 0; i < kBlock; ++i) decade[i] = 0;
  for (int t = 0; t < 7; ++t) {
    for (int i = 0; i < kBlock; ++i) decade[i] += y[i] >= map.thresholds[t] ? 1 : 0;
  }
  for (int i = 0; i < kBlock; ++i) {
    const std::int32_t d = decade[i];
    const float first = map.least[d];
    const float double_less_one = first + first - 1.0F;
    const float last = double_less_one > first ? double_less_one : first;
    float place = map.places[d] * y[i] + map.zero_places[d];
    place = place > first ? place : first;
    place = place < last ? place : last;
    places[i] = static_cast<std::int32_t>(place) + (y[i] >= map.thresholds[7] ? 1 : 0);
  }
#endif
}

// A whole block of values; @p codes has kBlock, too.
inline void quantise_block(const float* x, const CodeMap& map, std::uint8_t* codes, float* absmax) {
  // Compared as integers, magnitudes order as they should, and NaN is the largest: it takes the
  // whole block with it instead of being lost.
  std::int32_t top = 0;
  for (int i = 0; i < kBlock; ++i) {
    const auto magnitude = bits_of<std::int32_t>(x[i]) & 0x7fffffff;
    top = magnitude > top ? magnitude : top;
  }
  *absmax = bits_of<float>(top);
  const float divisor = top > 0 ? *absmax : 1.0F;
  float shares[kBlock];
  for (int i = 0; i < kBlock; ++i) shares[i] = std::abs(x[i]) / divisor;
  std::int32_t places[kBlock];
  find_places(shares, map, places);
  if (map.is_signed) {
    for (int i = 0; i < kBlock; ++i) {
      // 127 is zero; above it 128 positive values, below it 127 negative ones.
      const std::int32_t negative = 127 - (places[i] < 127 ? places[i] : 127);
      codes[i] =
          static_cast<std::uint8_t>(bits_of<std::int32_t>(x[i]) < 0 ? negative : 127 + places[i]);
    }
  } else {
    for (int i = 0; i < kBlock; ++i) {
      // What is positive stays so: a second moment that became zero would leave eps alone in the
      // denominator, and the parameter would jump (Li et al. 2023, "Memory Efficient Optimizers
      // with 4-bit States", section 3.2).
      const std::int32_t least = x[i] > 0.0F ? 2 : 1;
      codes[i] = static_cast<std::uint8_t>((places[i] > least ? places[i] : least) - 1);
    }
  }
}

inline void dequantise_block(const std::uint8_t* codes, float absmax, const CodeMap& map,
                             float* x) {
#ifdef GRADUS_OPTIM_PERMUTE
  // The exponent of a place is its decade, the fraction how far it lies in it.
  const __m256 widths = _mm256_loadu_ps(map.widths), firsts = _mm256_loadu_ps(map.firsts);
  const __m256 scale = _mm256_set1_ps(absmax), one = _mm256_set1_ps(1.0F);
  const __m256i zero_code = _mm256_set1_epi32(map.is_signed ? 127 : 0);
  const __m256i unsigned_shift = _mm256_set1_epi32(map.is_signed ? 0 : 1);
  for (int i = 0; i < kBlock; i += 8) {
    const __m256i code =
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    const __m256i difference = _mm256_sub_epi32(code, zero_code);
    const __m256i magnitude = _mm256_abs_epi32(difference);
    const __m256i place =
        _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_add_epi32(magnitude, unsigned_shift)));
    const __m256i exponent = _mm256_sub_epi32(_mm256_srli_epi32(place, 23), _mm256_set1_epi32(127));
    const __m256 fraction = _mm256_sub_ps(
        _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(place, _mm256_set1_epi32(0x007fffff)),
                                            _mm256_castps_si256(one))),
        one);
    __m256 value =
        _mm256_add_ps(_mm256_mul_ps(_mm256_permutevar8x32_ps(widths, exponent), fraction),
                      _mm256_permutevar8x32_ps(firsts, exponent));
    // The two that are in no decade: place 256 of an unsigned map is 1, and zero is zero.
    value = _mm256_blendv_ps(
        value, one, _mm256_castsi256_ps(_mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(255))));
    value = _mm256_andnot_ps(
        _mm256_castsi256_ps(_mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256())), value);
    const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(difference), _mm256_set1_ps(-0.0F));
    _mm256_storeu_ps(x + i, _mm256_mul_ps(_mm256_or_ps(value, sign), scale));
  }
#else
  for (int i = 0; i < kBlock; ++i) x[i] = map.values[codes[i]] * absmax;
#endif
}

inline float adam_value(float p, float g, float& mean, float& square, const AdamScalars& s) {
  const float gradient = s.sign * g + s.l2 * p;
  mean = s.beta1 * mean + s.rest1 * gradient;
  // In this order, as torch's fused Adam: it overflows later.
  square = s.beta2 * square + s.rest2 * gradient * gradient;
  const float root = std::sqrt(square) / s.root_correction + s.eps;
  return p * s.keep - s.step_size * (mean / root);
}

inline float sgd_value(float p, float g, float& buffer, const SgdScalars& s) {
  const float gradient = s.sign * g + s.l2 * p;
  buffer = s.kept * buffer + s.added * gradient;
  return p - s.lr * (s.of_gradient * gradient + s.of_buffer * buffer);
}

inline void adam_block(float* p, const float* g, std::uint8_t* mean_codes, float* mean_absmax,
                       std::uint8_t* square_codes, float* square_absmax, const CodeMap& signed_map,
                       const CodeMap& unsigned_map, const AdamScalars& scalars) {
  const AdamScalars s = scalars;  // a copy of its own: no store below can change it
  float mean[kBlock], square[kBlock];
  dequantise_block(mean_codes, *mean_absmax, signed_map, mean);
  dequantise_block(square_codes, *square_absmax, unsigned_map, square);
  for (int i = 0; i < kBlock; ++i) p[i] = adam_value(p[i], g[i], mean[i], square[i], s);
  // An infinite scale would make the whole block NaN. NaN stays: the comparison is false.
  constexpr float kLargest = std::numeric_limits<float>::max();
  for (int i = 0; i < kBlock; ++i) square[i] = square[i] > kLargest ? kLargest : square[i];
  quantise_block(mean, signed_map, mean_codes, mean_absmax);
  quantise_block(square, unsigned_map, square_codes, square_absmax);
}

inline void sgd_block(float* p, const float* g, std::uint8_t* codes, float* absmax,
                      const CodeMap& map, const SgdScalars& scalars) {
  const SgdScalars s = scalars;
  float buffer[kBlock];
  dequantise_block(codes, *absmax, map, buffer);
  for (int i = 0; i < kBlock; ++i) p[i] = sgd_value(p[i], g[i], buffer[i], s);
  quantise_block(buffer, map, codes, absmax);
}

// Calls block(first value, count) for each block.
template <typename Block>
inline void each_block(std::int64_t n, Block block) {
  for (std::int64_t first = 0; first < n; first += kBlock) {
    block(first, static_cast<int>(std::min(kBlock, n - first)));
  }
}

template <typename Value>
inline void load(const Value* from, int count, float* to) {
  if (count == kBlock) {
    for (int i = 0; i < kBlock; ++i) to[i] = static_cast<float>(from[i]);
  } else {
    for (int i = 0; i < kBlock; ++i) to[i] = i < count ? static_cast<float>(from[i]) : 0.0F;
  }
}

template <typename Value>
inline void store(const float* from, int count, Value* to) {
  if (count == kBlock) {
    for (int i = 0; i < kBlock; ++i) to[i] = static_cast<Value>(from[i]);
  } else {
    for (int i = 0; i < count; ++i) to[i] = static_cast<Value>(from[i]);
  }
}

// A short last block works on copies of its codes, padded with the code of zero (which is not 0 in
// a signed map): the padding must not become the block's largest magnitude.
template <typename Work>
inline void with_whole_codes(std::uint8_t* codes, int count, const CodeMap& map, Work work) {
  if (count == kBlock) return work(codes);
  std::uint8_t whole[kBlock];
  std::memset(whole, map.is_signed ? 127 : 0, sizeof(whole));
  std::memcpy(whole, codes, static_cast<std::size_t>(count));
  work(whole);
  std::memcpy(codes, whole, static_cast<std::size_t>(count));
}

template <typename Value>
void adam(Value* p, const Value* g, BlockState mean, BlockState square, std::int64_t n,
          const CodeMap& signed_map, const CodeMap& unsigned_map, const AdamScalars& scalars) {
  each_block(n, [&](std::int64_t first, int count) {
    float parameter[kBlock], gradient[kBlock];
    load(p + first, count, parameter);
    load(g + first, count, gradient);
    with_whole_codes(mean.codes + first, count, signed_map, [&](std::uint8_t* mean_codes) {
      with_whole_codes(square.codes + first, count, unsigned_map, [&](std::uint8_t* square_codes) {
        adam_block(parameter, gradient, mean_codes, mean.absmax + first / kBlock, square_codes,
                   square.absmax + first / kBlock, signed_map, unsigned_map, scalars);
      });
    });
    store(parameter, count, p + first);
  });
}

template <typename Value>
void sgd(Value* p, const Value* g, BlockState buffer, std::int64_t n, const CodeMap& signed_map,
         const SgdScalars& scalars) {
  each_block(n, [&](std::int64_t first, int count) {
    float parameter[kBlock], gradient[kBlock];
    load(p + first, count, parameter);
    load(g + first, count, gradient);
    with_whole_codes(buffer.codes + first, count, signed_map, [&](std::uint8_t* codes) {
      sgd_block(parameter, gradient, codes, buffer.absmax + first / kBlock, signed_map, scalars);
    });
    store(parameter, count, p + first);
  });
}

template <typename Value>
void plain_adam(Value* p, const Value* g, float* mean, float* square, std::int64_t n,
                const AdamScalars& scalars) {
  const AdamScalars s = scalars;
  for (std::int64_t i = 0; i < n; ++i) {
    p[i] = static_cast<Value>(
        adam_value(static_cast<float>(p[i]), static_cast<float>(g[i]), mean[i], square[i], s));
  }
}

template <typename Value>
void plain_sgd(Value* p, const Value* g, float* buffer, std::int64_t n, const SgdScalars& scalars) {
  const SgdScalars s = scalars;
  for (std::int64_t i = 0; i < n; ++i) {
    p[i] = static_cast<Value>(
        sgd_value(static_cast<float>(p[i]), static_cast<float>(g[i]), buffer[i], s));
  }
}

inline void quantise(const float* x, std::int64_t n, const CodeMap& map, BlockState state) {
  each_block(n, [&](std::int64_t first, int count) {
    float values[kBlock];
    load(x + first, count, values);
    with_whole_codes(state.codes + first, count, map, [&](std::uint8_t* codes) {
      quantise_block(values, map, codes, state.absmax + first / kBlock);
    });
  });
}

inline void dequantise(const BlockState& state, std::int64_t n, const CodeMap& map, float* x) {
  each_block(n, [&](std::int64_t first, int count) {
    float values[kBlock];
    with_whole_codes(state.codes + first, count, map, [&](std::uint8_t* codes) {
      dequantise_block(codes, state.absmax[first / kBlock], map, values);
    });
    store(values, count, x + first);
  });
}

template <typename Value>
constexpr BlockLoops<Value> kBlockLoops{adam<Value>, sgd<Value>, plain_adam<Value>,
                                        plain_sgd<Value>};
constexpr CodeLoops kCodeLoops{quantise, dequantise};
