#include <gradus/privacy/noise/internal/kernels.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <vector>

#include <gtest/gtest.h>

namespace gradus::privacy::internal {
namespace {

using Block = std::array<std::uint32_t, 4>;
constexpr std::uint32_t kOnes = 0xffffffff;

PhiloxStream gaussians(std::uint64_t key) { return {key, 0, 0}; }

ChaChaStream rfc_key() {
  ChaChaStream stream;
  for (std::uint32_t i = 0; i < 8; ++i) {
    stream.key[i] = 4 * i | (4 * i + 1) << 8 | (4 * i + 2) << 16 | (4 * i + 3) << 24;
  }
  return stream;
}

// Word `word` of block `block` in a tile.
std::uint32_t at_place(const std::vector<std::uint32_t>& words, int word, int block) {
  return words[static_cast<std::size_t>(word * kTileBlocks + block)];
}

template <typename Value>
bool same_bits(const std::vector<Value>& a, const std::vector<Value>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(Value)) == 0;
}

double log_of_bits(std::uint64_t word) { return std::log(static_cast<double>(word | 1) * 0x1p-64); }

// What a pair of 64-bit words stands for, with the C library's functions.
std::pair<double, double> exact_pair(std::uint64_t radius_word, std::uint64_t angle_word) {
  const auto signed_word = static_cast<std::int64_t>(radius_word | 1);
  const double log_u = signed_word < 0 ? std::log1p(static_cast<double>(signed_word) * 0x1p-64)
                                       : log_of_bits(radius_word);
  double radius = std::sqrt(-2.0 * log_u);
  if (angle_word >> 63 != 0) radius = -radius;
  const double angle = static_cast<double>(static_cast<std::int64_t>(angle_word << 2)) * 0x1p-63 *
                       std::numbers::pi / 4.0;
  const bool turned = (angle_word >> 62 & 1) != 0;
  return {radius * (turned ? std::sin(angle) : std::cos(angle)),
          radius * (turned ? std::cos(angle) : std::sin(angle))};
}

TEST(NoiseKernelsTest, PhiloxGivesItsAuthorsKnownAnswers) {
  // Random123's kat_vectors for philox4x32, 10 rounds.
  EXPECT_EQ(philox_block({0, 0, 0}, 0), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox_block({~0ULL, kOnes, kOnes}, ~0ULL),
            (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox_block({0x299f31d0a4093822, 0x13198a2e, 0x03707344}, 0x85a308d3243f6a88),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(NoiseKernelsTest, EveryVectorUnitGivesPhiloxsWordsAcrossTheCarryOfItsCounter) {
  const PhiloxStream stream(0x299f31d0a4093822, 0x13198a2e, 0x03707344);
  for (const std::uint64_t first :
       {std::uint64_t{0x85a308d3243f6a88}, std::uint64_t{0xfffffffb}, ~std::uint64_t{0} - 4}) {
    for (const NoiseKernels* kernels : noise_kernels()) {
      SCOPED_TRACE(kernels->name);
      std::vector<std::uint32_t> words(2 * kFloatsPerTile);
      kernels->philox_words(stream, first, 2, words.data());
      for (int block = 0; block < 2 * kTileBlocks; ++block) {
        const Block expected = philox_block(stream, first + static_cast<std::uint64_t>(block));
        const int tile = block / static_cast<int>(kTileBlocks);
        for (int word = 0; word < 4; ++word) {
          EXPECT_EQ(at_place(words, 4 * tile + word, block % static_cast<int>(kTileBlocks)),
                    expected[static_cast<std::size_t>(word)]);
        }
      }
    }
  }
}

TEST(NoiseKernelsTest, EveryVectorUnitGivesTheChaChaBlockOfRfc8439) {
  // Section 2.3.2: key 00..1f, counter 1, nonce 00:00:00:09 00:00:00:4a 00:00:00:00. The first word
  // of the nonce is the upper half of our counter.
  ChaChaStream stream = rfc_key();
  stream.nonce = {0x4a000000, 0};
  const std::uint32_t expected[16] = {0xe4e7f110, 0x15593bd1, 0x1fdd0f50, 0xc47120a3,
                                      0xc7f4d1c7, 0x0368c033, 0x9aaa2204, 0x4e6cd4c3,
                                      0x466482d2, 0x09aa9f07, 0x05d7c214, 0xa2028bd9,
                                      0xd19c12b5, 0xb94e16de, 0xe883d0cb, 0x4e3c50a2};
  for (const NoiseKernels* kernels : noise_kernels()) {
    SCOPED_TRACE(kernels->name);
    std::vector<std::uint32_t> words(16 * kTileBlocks);
    kernels->chacha_words(stream, std::uint64_t{0x09000000} << 32, 1, words.data());
    for (int word = 0; word < 16; ++word) EXPECT_EQ(at_place(words, word, 1), expected[word]);
  }
}

TEST(NoiseKernelsTest, ChaChaGivesTheZeroKeysFirstBlockOfRfc8439) {
  // Appendix A.1, vectors 1 and 2.
  for (const NoiseKernels* kernels : noise_kernels()) {
    std::vector<std::uint32_t> words(16 * kTileBlocks);
    kernels->chacha_words({}, 0, 1, words.data());
    EXPECT_EQ(at_place(words, 0, 0), 0xade0b876);
    EXPECT_EQ(at_place(words, 15, 0), 0x8665eeb2);
    EXPECT_EQ(at_place(words, 0, 1), 0xbee7079f);
    EXPECT_EQ(at_place(words, 15, 1), 0x6f4d794b);
  }
}

TEST(NoiseKernelsTest, AllVectorUnitsGiveTheSameBits) {
  const NoiseKernels& widest = *noise_kernels().front();
  for (const std::int64_t n : {1, 17, 64, 1000, 1 << 20}) {
    const auto size = static_cast<std::size_t>(n);
    std::vector<float> floats(size, 0.25F);
    std::vector<double> doubles(size, 0.25), secure(size);
    widest.seeded_floats(gaussians(7), 48, n, 1.5F, true, floats.data());
    widest.seeded_doubles(gaussians(7), 48, n, 1.5, true, doubles.data());
    widest.secure_doubles(rfc_key(), 48, n, 1.5, secure.data());
    for (const NoiseKernels* kernels : noise_kernels()) {
      SCOPED_TRACE(kernels->name);
      std::vector<float> f(size, 0.25F);
      std::vector<double> d(size, 0.25), s(size);
      kernels->seeded_floats(gaussians(7), 48, n, 1.5F, true, f.data());
      kernels->seeded_doubles(gaussians(7), 48, n, 1.5, true, d.data());
      kernels->secure_doubles(rfc_key(), 48, n, 1.5, s.data());
      EXPECT_TRUE(same_bits(f, floats)) << n;
      EXPECT_TRUE(same_bits(d, doubles)) << n;
      EXPECT_TRUE(same_bits(s, secure)) << n;
    }
  }
}

TEST(NoiseKernelsTest, Float64NormalsAreBoxMullersOfTheirWords) {
  const PhiloxStream stream = gaussians(11);
  constexpr std::int64_t kTiles = 2000;
  std::vector<double> values(kTiles * kDoublesPerTile);
  noise_kernels().front()->seeded_doubles(stream, 0, kTiles * kDoublesPerTile, 1.0, false,
                                          values.data());
  double worst = 0.0;
  for (std::int64_t block = 0; block < kTiles * kTileBlocks; ++block) {
    const Block x = philox_block(stream, static_cast<std::uint64_t>(block));
    const auto [a, b] =
        exact_pair(std::uint64_t{x[1]} << 32 | x[0], std::uint64_t{x[3]} << 32 | x[2]);
    const auto place =
        static_cast<std::size_t>(block / kTileBlocks * kDoublesPerTile + block % kTileBlocks);
    worst = std::max(worst, std::abs(values[place] - a) / std::max(1e-3, std::abs(a)));
    worst =
        std::max(worst, std::abs(values[place + kTileBlocks] - b) / std::max(1e-3, std::abs(b)));
  }
  EXPECT_LT(worst, 2e-15);
}

TEST(NoiseKernelsTest, Float32NormalsAreBoxMullersOfTheirWordsUpToTheTail) {
  const PhiloxStream stream = gaussians(12);
  PhiloxStream tail = stream;
  tail.purpose = static_cast<std::uint32_t>(Purpose::kTail);
  constexpr std::int64_t kTiles = 4000;
  std::vector<float> values(kTiles * kFloatsPerTile);
  noise_kernels().front()->seeded_floats(stream, 0, kTiles * kFloatsPerTile, 1.0F, false,
                                         values.data());
  double worst = 0.0;
  int extended = 0;
  for (std::int64_t block = 0; block < kTiles * kTileBlocks; ++block) {
    const Block x = philox_block(stream, static_cast<std::uint64_t>(block));
    const Block more = philox_block(tail, static_cast<std::uint64_t>(block));
    for (std::size_t pair = 0; pair < 2; ++pair) {
      const bool short_word = x[2 * pair] < 1U << 20;
      extended += short_word ? 1 : 0;
      // Words that get no more bits stand for their own multiple of 2^-32.
      const auto word = static_cast<std::int32_t>(x[2 * pair]);
      std::uint64_t radius_word = std::uint64_t{x[2 * pair]} << 32;
      if (short_word) radius_word |= more[pair];
      auto [a, b] = exact_pair(radius_word, std::uint64_t{x[2 * pair + 1]} << 32);
      if (word < 0) {
        const double right = std::sqrt(-2.0 * std::log1p(static_cast<double>(word) * 0x1p-32));
        const double scale = right / std::hypot(a, b);
        a *= scale;
        b *= scale;
      }
      const auto place = static_cast<std::size_t>(
          block / kTileBlocks * kFloatsPerTile + static_cast<std::int64_t>(2 * pair) * kTileBlocks +
          block % kTileBlocks);
      worst = std::max(worst, std::abs(values[place] - a) / std::max(1e-2, std::abs(a)));
      worst =
          std::max(worst, std::abs(values[place + kTileBlocks] - b) / std::max(1e-2, std::abs(b)));
    }
  }
  EXPECT_LT(worst, 6e-7);
  EXPECT_GT(extended, 10);  // 31 expected
}

struct Counter {
  std::uint64_t block = 0;
  std::uint32_t purpose = 0, stream = 0;
};

// Of an odd number modulo 2^32, by Newton's iteration.
constexpr std::uint32_t inverse(std::uint32_t a) {
  std::uint32_t x = a;
  for (int i = 0; i < 5; ++i) x *= 2 - a * x;
  return x;
}

// Philox run backwards: the counter that gives these words under key 0.
Counter counter_of(Block c) {
  const PhiloxStream keys(0, 0, 0);
  for (std::size_t round = 10; round-- > 0;) {
    const std::uint32_t c2 = c[1] * inverse(0xCD9E8D57);
    const std::uint32_t c0 = c[3] * inverse(0xD2511F53);
    const auto high = [](std::uint32_t a, std::uint32_t b) {
      return static_cast<std::uint32_t>(std::uint64_t{a} * b >> 32);
    };
    const auto k0 = static_cast<std::uint32_t>(keys.round_keys[2 * round]);
    const auto k1 = static_cast<std::uint32_t>(keys.round_keys[2 * round + 1]);
    const std::uint32_t c1 = c[0] ^ high(0xCD9E8D57, c2) ^ k0;
    const std::uint32_t c3 = c[2] ^ high(0xD2511F53, c0) ^ k1;
    c = {c0, c1, c2, c3};
  }
  return {.block = std::uint64_t{c[1]} << 32 | c[0], .purpose = c[2], .stream = c[3]};
}

TEST(NoiseKernelsTest, Float32TailReachesBeyondEightAndAHalfDeviations) {
  // A block whose first radius word is 0 and whose angle is 0, and among such blocks one whose
  // further word is below 2^11.
  Counter found;
  std::uint32_t more = ~0U;
  for (std::uint32_t x2 = 0; more >= 1U << 11 && x2 < 1U << 24; ++x2) {
    found = counter_of({0, 0, x2, 0x80000000});
    more =
        philox_block({0, static_cast<std::uint32_t>(Purpose::kTail), found.stream}, found.block)[0];
  }
  ASSERT_LT(more, 1U << 11);
  const PhiloxStream stream(0, found.purpose, found.stream);
  ASSERT_EQ(philox_block(stream, found.block)[0], 0U);
  const double expected = exact_pair(more, 0).first;
  EXPECT_GT(expected, 8.5);
  for (const NoiseKernels* kernels : noise_kernels()) {
    SCOPED_TRACE(kernels->name);
    // Whatever its lane.
    for (const std::uint64_t lane : {0, 1, 5, 15}) {
      std::vector<float> values(kFloatsPerTile);
      kernels->seeded_floats(stream, found.block - lane, kFloatsPerTile, 1.0F, false,
                             values.data());
      EXPECT_NEAR(values[lane], expected, 2e-6);
    }
  }
}

TEST(NoiseKernelsTest, SecureNormalsAreHalvedSumsOfFourIndependentOnes) {
  const ChaChaStream stream = rfc_key();
  constexpr std::int64_t kTiles = 200;
  std::vector<std::uint32_t> words(kTiles * 16 * kTileBlocks);
  std::vector<double> values(kTiles * kSecurePerTile);
  const NoiseKernels& kernels = *noise_kernels().front();
  kernels.chacha_words(stream, 0, kTiles, words.data());
  kernels.secure_doubles(stream, 0, kTiles * kSecurePerTile, 3.0, values.data());
  double worst = 0.0;
  for (int tile = 0; tile < kTiles; ++tile) {
    for (int block = 0; block < kTileBlocks; ++block) {
      double first = 0.0, second = 0.0;
      for (int word = 0; word < 16; word += 4) {
        const auto of = [&](int i) { return at_place(words, 16 * tile + word + i, block); };
        const auto [a, b] =
            exact_pair(std::uint64_t{of(1)} << 32 | of(0), std::uint64_t{of(3)} << 32 | of(2));
        first += a;
        second += b;
      }
      const auto place = static_cast<std::size_t>(tile * kSecurePerTile + block);
      worst = std::max(worst, std::abs(values[place] - 1.5 * first));
      worst = std::max(worst, std::abs(values[place + kTileBlocks] - 1.5 * second));
    }
  }
  EXPECT_LT(worst, 2e-14);
}

}  // namespace
}  // namespace gradus::privacy::internal
