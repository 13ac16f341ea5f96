#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace gradus::privacy::internal {

/// Both generators are counters turned into words, in tiles of 16 blocks. A Philox block has 4
/// words, a ChaCha20 block 16. What a place of a tile holds depends on its block alone, so neither
/// the vector unit nor the split over threads changes a value.
constexpr std::int64_t kTileBlocks = 16;
/// float32 normals of a Philox tile: one a word.
constexpr std::int64_t kFloatsPerTile = 64;
/// float64 normals, or uniforms of 53 bits, of a Philox tile: one from two words.
constexpr std::int64_t kDoublesPerTile = 32;
/// Secure normals of a ChaCha20 tile: one from eight words.
constexpr std::int64_t kSecurePerTile = 32;
/// Uniforms of 53 bits of a ChaCha20 tile.
constexpr std::int64_t kSecureUniformsPerTile = 128;

/// What a sequence of blocks is for. Sequences of one key never meet: the purpose is part of the
/// counter.
enum class Purpose : std::uint32_t { kGaussian = 0, kTail = 1, kUniform = 2 };

/// Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") under one
/// key, and the upper half of its counter.
struct PhiloxStream {
  PhiloxStream(std::uint64_t key, std::uint32_t purpose, std::uint32_t stream);

  std::array<std::uint64_t, 20> round_keys{};  ///< Two a round, each in the low half.
  std::uint32_t purpose = 0;                   ///< Word 2 of the counter.
  std::uint32_t stream = 0;                    ///< Word 3.
};

/// ChaCha20's block function (RFC 8439, section 2.3), its counter widened to 64 bits by the first
/// word of the nonce.
struct ChaChaStream {
  std::array<std::uint32_t, 8> key{};
  std::array<std::uint32_t, 2> nonce{};  ///< Words 14 and 15 of the state.
};

/// The loops for one vector unit. All give the same bits. n counts values, and the last tile may be
/// partial.
struct NoiseKernels {
  const char* name = nullptr;
  /// Words of whole tiles: words[tile][word of the block][block].
  void (*philox_words)(const PhiloxStream& stream, std::uint64_t first_block, std::int64_t tiles,
                       std::uint32_t* words) = nullptr;
  /// target = or += sigma * normal.
  void (*seeded_floats)(const PhiloxStream& stream, std::uint64_t first_block, std::int64_t n,
                        float sigma, bool add, float* target) = nullptr;
  void (*seeded_doubles)(const PhiloxStream& stream, std::uint64_t first_block, std::int64_t n,
                         double sigma, bool add, double* target) = nullptr;
  /// first_block is a multiple of kTileBlocks.
  void (*chacha_words)(const ChaChaStream& stream, std::uint64_t first_block, std::int64_t tiles,
                       std::uint32_t* words) = nullptr;
  /// Each value is (z1 + z2 + z3 + z4) / 2 of four independent normals.
  void (*secure_doubles)(const ChaChaStream& stream, std::uint64_t first_block, std::int64_t n,
                         double sigma, double* target) = nullptr;
};

/// What this processor can run, the widest first; the portable one is last.
const std::vector<const NoiseKernels*>& noise_kernels();

/// One Philox block, word by word.
std::array<std::uint32_t, 4> philox_block(const PhiloxStream& stream, std::uint64_t block);

}  // namespace gradus::privacy::internal
