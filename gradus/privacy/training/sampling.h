#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/privacy/accountant/history.h>
#include <gradus/privacy/noise/noise.h>
#include <gradus/privacy/training/state_entries.h>

namespace gradus::privacy {

/// How a logical batch is drawn.
enum class Sampling : std::uint8_t {
  poisson,  ///< Each example on its own with probability q: what accountants assume.
  uniform,  ///< A fixed number of examples without replacement; costs twice the noise.
};

struct SamplerOptions {
  std::int64_t examples = 0;  ///< N, of all ranks together. >= 1.
  double sample_rate = 0.0;   ///< q in (0, 1]: the expected batch size over N, not 1 / batches.
  std::int64_t steps = 1;     ///< Logical batches to draw. >= 1.
  /// Larger Poisson batches are cut to this many examples, drawn at random; 0 cuts none. The
  /// accountant adds what that costs (truncated_sampling.h).
  std::int64_t max_batch_size = 0;
  /// Seed of a repeatable draw; unset: a secure one. Whoever can guess which examples are in a
  /// batch takes the amplification by sampling away, so that a seed is for tests and must stay
  /// secret.
  std::optional<std::uint64_t> seed = std::nullopt;
  std::int64_t rank = 0;   ///< This process, of `ranks`.
  std::int64_t ranks = 1;  ///< Processes that share each batch. >= 1.
  /// Overwrites a tensor, in place, by that of rank 0. Needed by more than one rank of a secure
  /// draw; seeded ones agree without.
  std::function<void(const at::Tensor&)> broadcast = nullptr;
};

/// Draws the logical batches of private training. Not safe from two threads at once.
///
///     auto sampler = make_sampler(Sampling::poisson, {.examples = 60000, .sample_rate = 256.0 /
///     60000,
///                                                     .steps = 3000});
///     while (const auto batch = sampler->next()) { ... }   // batch may be empty: step all the
///     same
class Sampler {
 public:
  virtual ~Sampler() = default;
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  /// Indices of this rank's share of the next batch, ascending; nothing after the last. All ranks
  /// see the same draw, and rank r of R has its r-th, r+R-th, ... example. An empty batch is a
  /// batch: its noise must be added and counted.
  std::optional<std::vector<std::int64_t>> next();

  std::int64_t step() const { return step_; }  ///< Batches drawn so far.
  const SamplerOptions& options() const { return options_; }
  /// q N, of all ranks: what a clipped sum is divided by.
  double expected_batch_size() const;
  virtual Sampling kind() const = 0;

  /// What one step that adds noise of this multiplier releases, for the accountant.
  virtual GaussianSteps accounted(double noise_multiplier) const = 0;

  /// Position and, if seeded, generator. @see load_state
  StateEntries state() const;
  /// Goes on where state() was taken: exactly, if seeded; a secure draw goes on with fresh numbers.
  /// @throws UserError, with nothing changed, on the state of another N, q, kind, maximum or number
  /// of steps, or of a seeded draw for a secure one and vice versa.
  void load_state(const StateEntries& entries);

 protected:
  explicit Sampler(SamplerOptions options);

  /// bool [N]: which examples are in.
  virtual at::Tensor draw(NoiseGenerator& generator) const = 0;

 private:
  SamplerOptions options_;
  NoiseGenerator generator_;
  std::int64_t step_ = 0;
};

/// Poisson sampling, incl. empty batches, cut at max_batch_size.
class PoissonSampler final : public Sampler {
 public:
  /// @throws UserError on an option out of its range.
  explicit PoissonSampler(SamplerOptions options);
  Sampling kind() const override { return Sampling::poisson; }
  GaussianSteps accounted(double noise_multiplier) const override;

 protected:
  at::Tensor draw(NoiseGenerator& generator) const override;
};

/// q N examples, without replacement in a batch, each batch on its own.
///
/// Accounted as Poisson sampling at rate q with half the noise: when one example comes or goes, the
/// batch swaps one with probability at most q, which moves the clipped sum by up to 2 C, so that
/// each direction is dominated by the Poisson-subsampled Gaussian pair of sensitivity 2 C (docs has
/// the proof). Its use is a fixed shape of batches; it costs twice the noise.
class UniformSampler final : public Sampler {
 public:
  /// q becomes b / N for the whole number b of examples that are drawn, where it differs by
  /// rounding (a relative 1e-9). @throws UserError on an option out of its range; q N no whole
  /// number; max_batch_size set.
  explicit UniformSampler(SamplerOptions options);
  Sampling kind() const override { return Sampling::uniform; }
  GaussianSteps accounted(double noise_multiplier) const override;

 protected:
  at::Tensor draw(NoiseGenerator& generator) const override;
};

std::unique_ptr<Sampler> make_sampler(Sampling kind, SamplerOptions options);

/// Cuts a logical batch into pieces of @p size, the last one shorter; none of an empty batch.
/// @throws UserError unless size >= 1.
std::vector<std::vector<std::int64_t>> micro_batches(const std::vector<std::int64_t>& batch,
                                                     std::int64_t size);

}  // namespace gradus::privacy
