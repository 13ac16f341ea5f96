#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <gradus/privacy/noise/internal/kernels.h>
#include <gradus/privacy/noise/noise.h>

namespace gradus::privacy::internal {

/// Some values of one tensor: n normals from the first of a tile.
struct Draw {
  std::uint64_t block = 0;  ///< The tile's first.
  std::int64_t n = 0;
  double sigma = 0.0;
  bool add = true;  ///< Add to the target, or overwrite it.
};

/// Where noise comes from, in tiles. The draws of a range read nothing but the key, so that threads
/// share a source; reserve() and the rest are for one thread.
class NoiseSource {
 public:
  NoiseSource() = default;
  NoiseSource(const NoiseSource&) = delete;
  NoiseSource& operator=(const NoiseSource&) = delete;
  virtual ~NoiseSource() = default;

  virtual bool is_secure() const = 0;
  /// Called before each use: a forked child must not repeat its parent.
  virtual void prepare() {}

  /// Values of a tile of float32 (and shorter) or float64 targets.
  virtual std::int64_t gaussians_per_tile(bool is_double) const = 0;
  virtual std::int64_t uniforms_per_tile() const = 0;
  /// Takes so many tiles of the Gaussian or uniform sequence and returns their first block.
  std::uint64_t reserve(Purpose purpose, std::int64_t tiles);

  /// Normals times sigma for n values from a tile's begin, added to the target or put into it.
  virtual void gaussian(const Draw& draw, double* target) const = 0;
  virtual void gaussian(const Draw& draw, float* target) const = 0;
  virtual void gaussian(const Draw& draw, c10::BFloat16* target) const = 0;
  virtual void gaussian(const Draw& draw, c10::Half* target) const = 0;
  /// Uniforms on [0, 1) of 53 bits.
  virtual void uniform(std::uint64_t block, std::int64_t n, double* target) const = 0;

  /// Nothing for a source whose state is secret.
  virtual std::optional<NoiseState> state() const { return std::nullopt; }
  virtual void load(const NoiseState& /*state*/) {}

 protected:
  std::uint64_t gaussian_blocks_ = 0;
  std::uint64_t uniform_blocks_ = 0;
};

/// Sources with the loops of one vector unit, and a secure one under a known key: for tests.
std::unique_ptr<NoiseSource> seeded_source(std::uint64_t seed, std::uint32_t stream,
                                           const NoiseKernels& kernels);
std::unique_ptr<NoiseSource> secure_source(const NoiseKernels& kernels);
std::unique_ptr<NoiseSource> secure_source(const std::array<std::uint32_t, 8>& key,
                                           const NoiseKernels& kernels);

}  // namespace gradus::privacy::internal
