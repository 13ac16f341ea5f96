#pragma once

#include <cstdint>

namespace gradus::data::internal {

/// SplitMix64 (Steele, Lea and Flood 2014, figure 16): draw i of a key is a function of both, with
/// no state to save. Written out because std::shuffle and the std distributions differ between
/// standard libraries.
class CounterRandom {
 public:
  CounterRandom(std::uint64_t seed, std::uint64_t stream)
      : state_(mix(seed + kStep) ^ mix(stream * kStep + 1)) {}

  std::uint64_t next() { return mix(state_ += kStep); }

  /// Uniform in [0, bound), bound >= 1, without bias: draws below 2^64 mod bound are refused.
  std::uint64_t below(std::uint64_t bound) {
    const std::uint64_t refused = (0 - bound) % bound;
    std::uint64_t draw = next();
    while (draw < refused) draw = next();
    return draw % bound;
  }

 private:
  static constexpr std::uint64_t kStep = 0x9E3779B97F4A7C15ULL;
  static constexpr std::uint64_t mix(std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }

  std::uint64_t state_;
};

}  // namespace gradus::data::internal
