// The loops of kernels.h, included once for each instruction set: no #pragma once, no includes.
// They are plain C++ in the form that compilers vectorise: lanes in small arrays, selects for
// branches. No contraction of multiply and add: every instruction set gives the same bits.

template <typename To, typename From>
inline To bits_of(From value) {
  To out;
  std::memcpy(&out, &value, sizeof(out));
  return out;
}

// Sets bit i of each word where test(x[i]).
template <typename Word, typename Test>
inline void bitmap(const Word* x, std::int64_t n, std::uint64_t* bits, Test test) {
  for (std::int64_t first = 0; first < n; first += 64) {
    std::uint8_t flags[64];
    const std::int64_t count = std::min<std::int64_t>(64, n - first);
    if (count == 64) {
      for (int i = 0; i < 64; ++i) flags[i] = test(x[first + i]) ? 1 : 0;
    } else {
      for (int i = 0; i < 64; ++i) flags[i] = i < count && test(x[first + i]) ? 1 : 0;
    }
    std::uint64_t word = 0;
    for (int byte = 0; byte < 8; ++byte) {
      std::uint64_t eight;
      std::memcpy(&eight, flags + 8 * byte, 8);
      // Gathers the low bits of eight bytes into the top byte.
      word |= ((eight * 0x0102040810204080ULL) >> 56) << (8 * byte);
    }
    bits[first / 64] = word;
  }
}

template <typename Word>
void positive(const Word* x, std::int64_t n, Word infinity, bool nan, std::uint64_t* bits) {
  using Signed = std::make_signed_t<Word>;
  constexpr Word kMagnitude = static_cast<Word>(static_cast<Word>(~Word{0}) >> 1);
  if (nan) {
    bitmap(x, n, bits, [infinity](Word v) {
      return (static_cast<Signed>(v) > 0) | (static_cast<Word>(v & kMagnitude) > infinity);
    });
  } else {
    bitmap(x, n, bits,
           [infinity](Word v) { return (static_cast<Signed>(v) > 0) & (v <= infinity); });
  }
}

template <typename Word>
std::int64_t nonzero(const Word* x, std::int64_t n, std::uint64_t* bits) {
  bitmap(x, n, bits, [](Word v) { return v != 0; });
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < bitmap_words(n); ++i) count += std::popcount(bits[i]);
  return count;
}

template <typename Word>
bool either(const Word* x, std::int64_t n, Word zero, Word one, std::uint64_t* bits) {
  constexpr std::int64_t kChunk = 1 << 14;  // stops early, yet checks outside the inner loop
  for (std::int64_t first = 0; first < n; first += kChunk) {
    const std::int64_t count = std::min(kChunk, n - first);
    Word wrong = 0;
    for (std::int64_t i = first; i < first + count; ++i) {
      wrong |= static_cast<Word>((x[i] != zero) & (x[i] != one));
    }
    if (wrong != 0) return false;
    bitmap(x + first, count, bits + first / 64, [one](Word v) { return v == one; });
  }
  return true;
}

template <typename Word>
void select(const std::uint64_t* bits, std::int64_t n, Word zero, Word one, Word* out) {
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(bits);
  const Word differ = zero ^ one;
  std::int64_t first = 0;
  for (; first + 8 <= n; first += 8) {
    const Word byte = bytes[first / 8];
    for (int i = 0; i < 8; ++i) {
      const Word chosen = static_cast<Word>(Word{0} - ((byte >> i) & 1));
      out[first + i] = static_cast<Word>(zero ^ (differ & chosen));
    }
  }
  for (; first < n; ++first) out[first] = (bytes[first / 8] >> (first % 8)) & 1 ? one : zero;
}

template <typename Word>
void compact(const Word* x, std::int64_t n, const std::uint64_t* bits, Word* values) {
  for (std::int64_t first = 0; first < n; first += 64) {
    const std::uint64_t word = bits[first / 64];
    const int count = std::popcount(word);
    if (count == 64) {
      std::memcpy(values, x + first, 64 * sizeof(Word));
    } else if (count > 0) {
      // Always write, advance by the bit: no branch to mispredict. The spare place takes the last.
      Word kept[65];
      int place = 0;
      const int end = static_cast<int>(std::min<std::int64_t>(64, n - first));
      for (int i = 0; i < end; ++i) {
        kept[place] = x[first + i];
        place += static_cast<int>((word >> i) & 1);
      }
      std::memcpy(values, kept, static_cast<std::size_t>(count) * sizeof(Word));
    }
    values += count;
  }
}

template <typename Word>
void expand(const std::uint64_t* bits, std::int64_t n, const Word* values, Word* out) {
  for (std::int64_t first = 0; first < n; first += 64) {
    const std::uint64_t word = bits[first / 64];
    const int count = std::popcount(word);
    const int end = static_cast<int>(std::min<std::int64_t>(64, n - first));
    if (count == 0) {
      std::memset(out + first, 0, static_cast<std::size_t>(end) * sizeof(Word));
    } else if (count == 64) {
      std::memcpy(out + first, values, 64 * sizeof(Word));
    } else {
      Word kept[65];  // one may be read past the last value
      std::memcpy(kept, values, static_cast<std::size_t>(count) * sizeof(Word));
      kept[count] = 0;
      int place = 0;
      for (int i = 0; i < end; ++i) {
        const auto bit = static_cast<int>((word >> i) & 1);
        out[first + i] =
            static_cast<Word>(kept[place] & static_cast<Word>(Word{0} - static_cast<Word>(bit)));
        place += bit;
      }
    }
    values += count;
  }
}

template <typename Word>
constexpr WordKernels<Word> kWordKernels{positive<Word>, nonzero<Word>, either<Word>,
                                         select<Word>,   compact<Word>, expand<Word>};

// Values at a time through buffers on the stack; a multiple of three for the 10-bit format.
constexpr std::int64_t kPiece = 768;

template <typename Value>
std::uint32_t largest(const Value* x, std::int64_t n) {
  std::uint32_t top = 0;
  for (std::int64_t first = 0; first < n; first += kPiece) {
    const std::int64_t count = std::min(kPiece, n - first);
    float values[kPiece];
    for (std::int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(x[first + i]);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint32_t magnitude = bits_of<std::uint32_t>(values[i]) & 0x7fffffffU;
      top = magnitude > top ? magnitude : top;
    }
  }
  return top;
}

inline void store_codes(const std::uint16_t* in, std::int64_t n, int bits, std::uint8_t* out) {
  if (bits == 16) {
    std::memcpy(out, in, static_cast<std::size_t>(2 * n));
  } else if (bits == 8) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<std::uint8_t>(in[i]);
  } else {
    for (std::int64_t i = 0; i < n; i += 3) {
      const std::uint32_t second = i + 1 < n ? in[i + 1] : 0U;
      const std::uint32_t third = i + 2 < n ? in[i + 2] : 0U;
      const std::uint32_t word = in[i] | second << 10 | third << 20;
      std::memcpy(out + i / 3 * 4, &word, 4);
    }
  }
}

inline void load_codes(const std::uint8_t* in, std::int64_t n, int bits, std::uint16_t* out) {
  if (bits == 16) {
    std::memcpy(out, in, static_cast<std::size_t>(2 * n));
  } else if (bits == 8) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = in[i];
  } else {
    for (std::int64_t i = 0; i < n; i += 3) {
      std::uint32_t word;
      std::memcpy(&word, in + i / 3 * 4, 4);
      for (std::int64_t j = i; j < std::min(i + 3, n); ++j, word >>= 10) {
        out[j] = static_cast<std::uint16_t>(word & 0x3ffU);
      }
    }
  }
}

template <typename Value>
void encode(const Value* x, std::int64_t n, const Minifloat& format, std::uint8_t* codes) {
  const int mantissa = format.mantissa_bits;
  const int shift = 23 - mantissa;
  const std::uint32_t half = (1U << (shift - 1)) - 1;
  const std::uint32_t offset = static_cast<std::uint32_t>(format.base) << mantissa;
  const std::uint32_t normal = static_cast<std::uint32_t>(format.base + 1) << 23;
  // Subnormals are multiples of the step 2^(base + 1 - 127 - mantissa).
  const float steps =
      bits_of<float>(static_cast<std::uint32_t>(253 + mantissa - format.base) << 23);
  const auto limit = static_cast<float>(2 << mantissa);
  const int sign_shift = 32 - format.bits();
  const std::uint32_t sign_bit = 1U << (format.bits() - 1);
  for (std::int64_t first = 0; first < n; first += kPiece) {
    const std::int64_t count = std::min(kPiece, n - first);
    float values[kPiece];
    std::uint16_t out[kPiece];
    for (std::int64_t i = 0; i < count; ++i) values[i] = static_cast<float>(x[first + i]);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto word = bits_of<std::uint32_t>(values[i]);
      const std::uint32_t magnitude = word & 0x7fffffffU;
      const std::uint32_t large =
          ((magnitude + half + ((magnitude >> shift) & 1U)) >> shift) - offset;
      const float scaled = bits_of<float>(magnitude) * steps;
      const auto small = static_cast<std::uint32_t>(
          static_cast<std::int32_t>((scaled < limit ? scaled : limit) + 0.5F));
      const std::uint32_t code = magnitude >= normal ? large : small;
      out[i] = static_cast<std::uint16_t>(code | ((word >> sign_shift) & sign_bit));
    }
    store_codes(out, count, format.bits(), codes + code_bytes(first, format.bits()));
  }
}

template <typename Value>
void decode(const std::uint8_t* codes, std::int64_t n, const Minifloat& format, Value* out) {
  const int mantissa = format.mantissa_bits;
  const int shift = 23 - mantissa;
  const std::uint32_t offset = static_cast<std::uint32_t>(format.base) << mantissa;
  const float step = bits_of<float>(static_cast<std::uint32_t>(format.base + 1 - mantissa) << 23);
  const int sign_shift = 32 - format.bits();
  const std::uint32_t sign_bit = 1U << (format.bits() - 1);
  const std::uint32_t normal = 1U << mantissa;
  for (std::int64_t first = 0; first < n; first += kPiece) {
    const std::int64_t count = std::min(kPiece, n - first);
    std::uint16_t in[kPiece];
    load_codes(codes + code_bytes(first, format.bits()), count, format.bits(), in);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint32_t code = in[i] & (sign_bit - 1);
      const std::uint32_t sign = (in[i] & sign_bit) << sign_shift;
      const std::uint32_t large = (code + offset) << shift;
      const auto small =
          bits_of<std::uint32_t>(static_cast<float>(static_cast<std::int32_t>(code)) * step);
      out[first + i] = static_cast<Value>(bits_of<float>((code >= normal ? large : small) | sign));
    }
  }
}

// splitmix64 (Steele, Lea and Flood 2014): the keys of blocks.
inline std::uint64_t mix64(std::uint64_t v) {
  v += 0x9e3779b97f4a7c15ULL;
  v = (v ^ (v >> 30)) * 0xbf58476d1ce4e5b9ULL;
  v = (v ^ (v >> 27)) * 0x94d049bb133111ebULL;
  return v ^ (v >> 31);
}

// 24 random bits for each place of a block, from a keyed integer hash: no state, so lanes are
// independent.
inline void draw(std::uint64_t key, std::int32_t* out) {
  const auto low = static_cast<std::uint32_t>(key);
  const auto high = static_cast<std::uint32_t>(key >> 32);
  for (std::uint32_t i = 0; i < kBlock; ++i) {
    std::uint32_t v = i * 0x9e3779b9U + low;
    v = (v ^ (v >> 16)) * 0x7feb352dU;
    v = ((v ^ (v >> 15)) + high) * 0x846ca68bU;
    v = (v ^ (v >> 16)) * 0x9e3779b1U;
    out[i] = static_cast<std::int32_t>((v ^ (v >> 15)) >> 8);
  }
}

// Extremes of a block; false if they span no finite range or a value is not finite.
template <typename Scale>
inline bool extremes(const Scale* x, Scale* low, Scale* high) {
  constexpr int kLanes = 16;
  Scale lows[kLanes];
  Scale highs[kLanes];
  Scale poison[kLanes];
  for (int j = 0; j < kLanes; ++j) {
    lows[j] = highs[j] = x[j];
    poison[j] = 0;
  }
  for (int i = 0; i < kBlock; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const Scale v = x[i + j];
      lows[j] = v < lows[j] ? v : lows[j];
      highs[j] = v > highs[j] ? v : highs[j];
      poison[j] += v - v;  // 0, or NaN for an infinity or NaN
    }
  }
  *low = lows[0];
  *high = highs[0];
  Scale sum = poison[0];
  for (int j = 1; j < kLanes; ++j) {
    *low = std::min(*low, lows[j]);
    *high = std::max(*high, highs[j]);
    sum += poison[j];
  }
  return sum == 0 && *high - *low <= std::numeric_limits<Scale>::max();
}

// Code i goes to byte i % stride, at bit (i / stride) * bits: whole vectors shift by one amount.
inline void store_block(const std::uint8_t* in, std::int64_t stride, int bits, std::uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, in, static_cast<std::size_t>(stride));
  } else if (bits == 4) {
    for (std::int64_t i = 0; i < stride; ++i) {
      out[i] = static_cast<std::uint8_t>(in[i] | in[i + stride] << 4);
    }
  } else {
    for (std::int64_t i = 0; i < stride; ++i) {
      out[i] = static_cast<std::uint8_t>(in[i] | in[i + stride] << 2 | in[i + 2 * stride] << 4 |
                                         in[i + 3 * stride] << 6);
    }
  }
}

inline void load_block(const std::uint8_t* in, std::int64_t stride, int bits, std::uint8_t* out) {
  const auto mask = static_cast<std::uint8_t>((1 << bits) - 1);
  for (int part = 0; part < 8 / bits; ++part) {
    for (std::int64_t i = 0; i < stride; ++i) {
      out[part * stride + i] = static_cast<std::uint8_t>((in[i] >> (part * bits)) & mask);
    }
  }
}

template <typename Value, typename Scale = typename BlockFloat<Value>::type>
bool quantise(const Value* x, std::int64_t n, int bits, RandomKey key, std::uint8_t* codes,
              Scale* scales) {
  const int levels = (1 << bits) - 1;
  const int per_byte = 8 / bits;
  const std::uint64_t call_key = mix64(mix64(key.seed) ^ key.call);
  for (std::int64_t first = 0, block = 0; first < n; first += kBlock, ++block) {
    const std::int64_t count = std::min(kBlock, n - first);
    Scale values[kBlock];
    for (std::int64_t i = 0; i < count; ++i) values[i] = static_cast<Scale>(x[first + i]);
    for (std::int64_t i = count; i < kBlock; ++i) values[i] = values[0];
    Scale low;
    Scale high;
    if (!extremes(values, &low, &high)) return false;
    const Scale range = high - low;
    // 1 / scale of a smaller range would overflow: it counts as constant.
    const Scale inverse = range < std::numeric_limits<Scale>::min() * 1024
                              ? Scale{0}
                              : static_cast<Scale>(levels) / range;
    scales[2 * block] = low;
    scales[2 * block + 1] = inverse == 0 ? Scale{0} : range / static_cast<Scale>(levels);
    std::int32_t random[kBlock];
    draw(mix64(call_key + static_cast<std::uint64_t>(block)), random);
    std::uint8_t out[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      // floor(v + r) with r uniform in [0, 1) is v on average.
      const Scale v = (values[i] - low) * inverse + static_cast<Scale>(random[i]) * Scale(0x1p-24);
      const auto code = static_cast<std::int32_t>(v);
      out[i] = static_cast<std::uint8_t>(code < levels ? code : levels);
    }
    const std::int64_t stride = (count + per_byte - 1) / per_byte;
    store_block(out, stride, bits, codes);
    codes += stride;
  }
  return true;
}

template <typename Value, typename Scale = typename BlockFloat<Value>::type>
void dequantise(const std::uint8_t* codes, const Scale* scales, std::int64_t n, int bits,
                Value* out) {
  const int per_byte = 8 / bits;
  for (std::int64_t first = 0, block = 0; first < n; first += kBlock, ++block) {
    const std::int64_t count = std::min(kBlock, n - first);
    const std::int64_t stride = (count + per_byte - 1) / per_byte;
    std::uint8_t in[kBlock];
    load_block(codes, stride, bits, in);
    const Scale low = scales[2 * block];
    const Scale scale = scales[2 * block + 1];
    for (std::int64_t i = 0; i < count; ++i) {
      out[first + i] =
          static_cast<Value>(low + static_cast<Scale>(static_cast<std::int32_t>(in[i])) * scale);
    }
    codes += stride;
  }
}

template <typename Value>
constexpr RealKernels<Value> kRealKernels{largest<Value>, encode<Value>, decode<Value>,
                                          quantise<Value>, dequantise<Value>};
