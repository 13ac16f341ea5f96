#pragma once

#include <cstdint>

namespace gradus::compress::internal {

/// Values of a block that share a minimum and a scale.
inline constexpr std::int64_t kBlock = 256;

/// Bitmaps are arrays of 64-bit words; value i is bit i % 64 of word i / 64, and bits past the end
/// are zero.
constexpr std::int64_t bitmap_words(std::int64_t values) { return (values + 63) / 64; }

/// Loops over values of one width, whatever their type: @p n values, n > 0.
template <typename Word>
struct WordKernels {
  /// Bit: x > 0 in the float type whose infinity has the bits @p infinity; NaN gives @p nan.
  void (*positive)(const Word* x, std::int64_t n, Word infinity, bool nan, std::uint64_t* bits);
  /// Bit: x has a bit set. Returns how many have.
  std::int64_t (*nonzero)(const Word* x, std::int64_t n, std::uint64_t* bits);
  /// Bit: x is @p one. False as soon as a value is neither @p zero nor @p one.
  bool (*either)(const Word* x, std::int64_t n, Word zero, Word one, std::uint64_t* bits);
  /// out = bit ? one : zero.
  void (*select)(const std::uint64_t* bits, std::int64_t n, Word zero, Word one, Word* out);
  /// The values whose bit is set, one after the other.
  void (*compact)(const Word* x, std::int64_t n, const std::uint64_t* bits, Word* values);
  /// The inverse of compact, zeros elsewhere.
  void (*expand)(const std::uint64_t* bits, std::int64_t n, const Word* values, Word* out);
};
/// @param widest  For this processor; else for any. Both give the same bits.
template <typename Word>
const WordKernels<Word>& word_kernels(bool widest = true);

/// A float format of 1 sign bit, `exponent_bits` and `mantissa_bits`, with subnormals and without
/// infinities; exponent field e of a float is e - base here.
struct Minifloat {
  int exponent_bits = 5;
  int mantissa_bits = 10;
  std::int32_t base = 0;
  int bits() const { return 1 + exponent_bits + mantissa_bits; }
};

/// Bytes of @p values codes of 8, 10 or 16 bits.
constexpr std::int64_t code_bytes(std::int64_t values, int bits) {
  return bits == 10 ? (values + 2) / 3 * 4 : values * (bits / 8);
}

/// What one call of quantise() draws its random numbers from.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t call = 0;
};

/// Float in which blocks of Value are quantised.
template <typename Value>
struct BlockFloat {
  using type = float;
};
template <>
struct BlockFloat<double> {
  using type = double;
};

/// Loops over values of one floating type.
template <typename Value>
struct RealKernels {
  using Scale = typename BlockFloat<Value>::type;
  /// The bits of the largest |float(x)|; at least those of infinity if a value is not finite.
  std::uint32_t (*largest)(const Value* x, std::int64_t n);
  /// Rounds to nearest, into 2, 4/3 (three to a 32-bit word) or 1 bytes a value by format.bits().
  void (*encode)(const Value* x, std::int64_t n, const Minifloat& format, std::uint8_t* codes);
  void (*decode)(const std::uint8_t* codes, std::int64_t n, const Minifloat& format, Value* out);
  /// Blocks of kBlock values: minimum and scale to @p scales, codes of @p bits (2, 4, 8) each.
  /// False as soon as a block holds an infinity or NaN, or spans more than the type's range.
  bool (*quantise)(const Value* x, std::int64_t n, int bits, RandomKey key, std::uint8_t* codes,
                   Scale* scales);
  void (*dequantise)(const std::uint8_t* codes, const Scale* scales, std::int64_t n, int bits,
                     Value* out);
};
template <typename Value>
const RealKernels<Value>& real_kernels(bool widest = true);

}  // namespace gradus::compress::internal
