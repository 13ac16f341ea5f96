#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include <gradus/base/rng.h>

namespace gradus::persample::internal {

/// Seeds the default generators of the CPU and of every accelerator device.
void seed_generators(std::uint64_t seed);

/// A seed from the CPU's default generator, which moves on by a draw.
std::uint64_t drawn_seed();

/// A stream of random numbers for each example, seeded at its first use.
///
/// Where the streams stand is kept in the seed of the CPU's default generator: a program that puts
/// that generator back (a checkpointed region, run again) has all streams back, and one that seeds
/// it has every example draw from that seed.
class RandomStreams {
 public:
  explicit RandomStreams(std::vector<std::uint64_t> seeds);

  /// Begins an operator that draws for every example.
  void begin();
  /// Has the default generators continue the stream of example number @p row.
  void enter(std::size_t row);
  /// Keeps where the stream of @p row ended.
  void leave(std::size_t row);
  /// Ends the operator.
  void end();

 private:
  using Position = std::vector<std::optional<base::RngState>>;  // of each example; unset: its seed

  std::vector<std::uint64_t> seeds_;
  std::unordered_map<std::uint64_t, Position> positions_;
  Position now_;
  std::uint64_t token_;
};

}  // namespace gradus::persample::internal
