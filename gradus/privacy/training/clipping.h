#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::privacy {

/// How an example's gradient is brought to a bounded norm.
enum class Clipping : std::uint8_t {
  flat,       ///< min(1, C / n), n over all parameters (Abadi et al. 2016).
  per_layer,  ///< min(1, C_l / n_l) in each group of parameters (McMahan et al. 2018).
  adaptive,   ///< flat, C following a quantile of the norms (Andrew et al. 2021).
  automatic,  ///< C / (n + gamma): AUTO-S (Bu et al. 2022); C only scales the learning rate.
};

/// "flat", "per-layer", "adaptive" or "automatic".
const char* name(Clipping clipping);

/// Parameters that are clipped together.
struct ClippedLayer {
  /// Names of parameters, or of modules whose parameters are meant ("encoder" for
  /// "encoder.weight").
  std::vector<std::string> names{};
  double max_norm = 1.0;  ///< C_l, finite, > 0.
};

struct ClippingOptions {
  Clipping policy = Clipping::flat;
  double max_norm = 1.0;  ///< C, finite, > 0; of adaptive: where it starts.
  /// per_layer: the groups, each parameter in one. Empty: each parameter alone, with C /
  /// sqrt(L), L the number of those that are not frozen.
  std::vector<ClippedLayer> layers{};
  double target_quantile = 0.5;  ///< adaptive: share of examples to leave unclipped, in [0, 1].
  double adaptation_rate = 0.2;  ///< adaptive: eta_C, > 0.
  /// adaptive: standard deviation of the noise on the count of unclipped examples, > half the noise
  /// multiplier. Unset: a twentieth of the expected batch size, at least the noise multiplier.
  std::optional<double> count_noise = std::nullopt;
  double least_norm = 1e-6;  ///< adaptive: C stays between these.
  double greatest_norm = 1e6;
  double stability = 0.01;  ///< automatic: gamma, > 0.
};

/// What the norms of some examples lead to.
struct ClipWeights {
  std::vector<at::Tensor> groups{};  ///< For each group float64 [B]: the factor of each example.
  at::Tensor finite{};               ///< bool [B]: false where a norm is NaN or infinite; factor 0.
  at::Tensor clipped{};              ///< bool [B]: finite, and the factor of a group below 1.
};

/// Turns norms into factors, and keeps the thresholds.
///
/// An example whose norm is NaN or infinite has factor 0 in all groups. That is as private as
/// clipping: its contribution depends on it alone and has norm 0 <= C.
class Clipper {
 public:
  /// @param parameters  Names, for per_layer. @throws UserError on an option out of its range, a
  /// name that no parameter has, a parameter in no group or in two.
  explicit Clipper(ClippingOptions options, const std::vector<std::string>& parameters = {});

  /// per_layer: which parameters want a gradient, by number. Groups without one count neither in L
  /// nor in the sensitivity. Until it is called, all do. @throws UserError on another number of
  /// flags.
  void set_live(const std::vector<bool>& live);

  const ClippingOptions& options() const { return options_; }
  std::size_t groups() const { return thresholds_.size(); }
  /// The group of parameter number @p index.
  std::size_t group_of(std::size_t index) const;
  /// C of each group now, schedule and adaptation included.
  std::vector<double> thresholds() const;
  /// Bound of the L2 norm of an example's clipped gradient: C, or the root of the sum of C_l^2 over
  /// groups that are not frozen.
  double sensitivity() const;

  /// @param norms  For each group float64 [B], >= 0.
  ClipWeights weights(const std::vector<at::Tensor>& norms) const;

  /// Multiplies all thresholds until the next call: a schedule. @throws UserError unless finite, >
  /// 0.
  void set_scale(double scale);

  /// How a noise multiplier is shared between gradients and count: with the gradients' share
  /// (z^-2 - (2 s)^-2)^(-1/2) and s on the count, both together cost what z on gradients alone does
  /// (Andrew et al. 2021, theorem 1). z itself if not adaptive, or z = 0.
  struct NoiseShares {
    double gradients = 0.0;  ///< Noise multiplier of the gradients.
    double count = 0.0;      ///< Standard deviation on the count.
  };
  NoiseShares shares(double noise_multiplier, double expected_batch_size) const;

  /// adaptive: what an example adds to the count: 1/2 if it is not clipped, else -1/2, so that its
  /// sensitivity is 1/2. Float64 scalar.
  at::Tensor count(const ClipWeights& weights) const;
  /// adaptive: moves C by exp(-eta (b - target)), b = 1/2 + @p noised_count / expected_batch_size.
  void adapt(double noised_count, double expected_batch_size);

  /// The adapted threshold, for a training state; and back. @throws UserError unless finite, > 0.
  double adapted_norm() const { return options_.max_norm; }
  void set_adapted_norm(double norm);

 private:
  ClippingOptions options_;
  std::vector<double> thresholds_;  // at scale 1; of adaptive, options_.max_norm is the live one
  std::vector<std::size_t> group_of_;
  std::vector<bool> live_;  // of groups; empty: all
  double scale_ = 1.0;
};

}  // namespace gradus::privacy
