#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::privacy {

namespace internal {
class NoiseSource;
}

/// Where a seeded generator stands. Restored, it goes on with exactly the values that would have
/// come next.
struct NoiseState {
  std::uint64_t seed = 0;
  std::uint32_t stream = 0;
  std::uint64_t gaussian_blocks = 0;  ///< Blocks of the Gaussian sequence that are used up.
  std::uint64_t uniform_blocks = 0;   ///< The same of the uniform sequence.

  bool operator==(const NoiseState&) const = default;
};

/// The standard deviations that a type of element can hold noise of.
struct NoiseRange {
  double least = 0.0;  ///< The least normal number.
  double most = 0.0;   ///< A sixteenth of the largest.
};
/// @param type  float32, float64, bfloat16 or float16. @throws UserError on another.
NoiseRange noise_range(at::ScalarType type);

/// Normal and uniform noise for differentially private training.
///
///     auto noise = NoiseGenerator::secure();                 // or NoiseGenerator::seeded(7)
///     noise.add_gaussian_(summed_gradients, sigma * max_norm);
///     const at::Tensor drawn = noise.bernoulli(examples, sample_rate);
///
/// Values depend on the generator's state and on an element's place (its tensor's place in the list
/// of calls, its index in row-major order), never on the number of threads, the vector unit or the
/// tensor's strides. A list gives what its tensors would get one after the other.
///
/// The tail of all normals reaches 9.4 standard deviations. Not for use by several threads at once;
/// it uses LibTorch's threads itself. Movable only: a copy would repeat the noise.
class NoiseGenerator {
 public:
  /// The repeatable generator: Philox 4x32-10 (Salmon et al. 2011) and Box-Muller, computed in
  /// float32 for float32, bfloat16 and float16, in float64 for float64. Not cryptographic.
  /// @param stream  Generators of one seed and different streams are independent.
  static NoiseGenerator seeded(std::uint64_t seed, std::uint32_t stream = 0);

  /// The private generator: ChaCha20 (RFC 8439) under a key that the kernel's random source gave
  /// (getrandom). Each normal is the halved sum of four, in float64, and is rounded once, after it
  /// is added: Holohan and Braghin 2021 ("Secure Random Sampling in Differential Privacy", section
  /// 4) against Mironov's attack on floating-point noise (2012). A forked child draws a key of its
  /// own. @throws UserError where the system has no random source.
  static NoiseGenerator secure();

  explicit NoiseGenerator(std::unique_ptr<internal::NoiseSource> source);
  NoiseGenerator(NoiseGenerator&& other) noexcept;
  NoiseGenerator& operator=(NoiseGenerator&& other) noexcept;
  ~NoiseGenerator();

  bool is_secure() const;

  /// Adds independent normals of mean 0 to every element.
  ///
  /// @param target  float32, float64, bfloat16 or float16, strided, any shape and device (noise is
  ///   made on the CPU), not overlapping itself. Its version is bumped; autograd does not see it.
  /// @param standard_deviation  In the noise_range() of the target's type; or 0, which leaves the
  ///   target as it is, bit for bit, and draws as much.
  /// @throws UserError on anything else; then no target has changed and nothing is drawn.
  void add_gaussian_(const at::Tensor& target, double standard_deviation);
  void add_gaussian_(const std::vector<at::Tensor>& targets, double standard_deviation);
  /// One standard deviation for each target.
  void add_gaussian_(const std::vector<at::Tensor>& targets,
                     const std::vector<double>& standard_deviations);

  /// Overwrites every element with such noise. Arguments and errors as of add_gaussian_.
  void fill_gaussian_(const at::Tensor& target, double standard_deviation);
  void fill_gaussian_(const std::vector<at::Tensor>& targets, double standard_deviation);

  /// Uniform float64 [n] on [0, 1), multiples of 2^-53, from a sequence of its own: how many
  /// normals were drawn changes nothing. @throws UserError if n < 0.
  at::Tensor uniform(std::int64_t n);

  /// bool [n], each true with @p probability on its own (rounded up to a multiple of 2^-53):
  /// Poisson sampling. From the sequence of uniform(). @throws UserError unless probability is in
  /// [0, 1] and n >= 0.
  at::Tensor bernoulli(std::int64_t n, double probability);

  /// @throws UserError for a secure generator: who knew its state could take the noise off again.
  NoiseState state() const;
  /// Continues from @p state. @throws UserError for a secure generator: a seeded one must never
  /// take its place unnoticed.
  void load(const NoiseState& state);

 private:
  void gaussian_(const std::vector<at::Tensor>& targets, const std::vector<double>& deviations,
                 bool add);

  std::unique_ptr<internal::NoiseSource> source_;
};

}  // namespace gradus::privacy
