#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include <gradus/plane/saved/saved_plane.h>

namespace gradus::compress {

/// Where a Quantiser stands in its stream of random numbers: two numbers that a training state
/// keeps.
struct RoundingState {
  std::uint64_t seed = 0;   ///< Any value; equal seeds draw equal numbers.
  std::uint64_t calls = 0;  ///< Tensors quantised so far.
  bool operator==(const RoundingState&) const = default;
};

/// Block quantisation with stochastic rounding after Chen et al. 2021 ("ActNN") and Liu et al. 2022
/// ("GACT"): each 256 values in the order of memory keep their minimum and a scale, each value a
/// code of 8, 4 or 2 bits that is rounded up or down at random so that the restored value is right
/// on average. Lossy:
///
///   |x - restored| <= (max - min) / (2^bits - 1) within its block,
///
/// up to the rounding of the arithmetic, see error_bound(). A block of equal values is exact.
///
/// Draws from a counter-based generator of its own; LibTorch's generators are left alone.
/// Thread-safe; the order in which threads call decides which numbers each gets.
class Quantiser {
 public:
  /// @param bits  8, 4 or 2.
  /// @throws UserError for other numbers of bits.
  explicit Quantiser(int bits, RoundingState state = {});

  /// Floating CPU tensors, of any strides; those with gaps come back without. nullopt for others,
  /// for empty ones, for those with an infinity or NaN (kept as they are, whole) and for repeated
  /// values (expand), which take less memory as they are. Integers and bools are left alone.
  std::optional<plane::saved::Packed> pack(const at::Tensor& tensor);

  int bits() const { return bits_; }
  RoundingState state() const;

  /// Bits that pack() keeps a value in a large float tensor: the code and a share of minimum and
  /// scale.
  double bits_a_value() const { return bits_ + 0.25; }

  /// (high - low) / (2^bits - 1) + 2 epsilon max(|low|, |high|) + 2^-116 for a block with values in
  /// [low, high] of @p dtype, whose machine epsilon this is (half: 2^-24 in place of 2^-116).
  static double error_bound(int bits, double low, double high, at::ScalarType dtype);

 private:
  int bits_;
  std::uint64_t seed_;
  std::atomic<std::uint64_t> calls_;
};

}  // namespace gradus::compress
