#pragma once

#include <cstdint>
#include <vector>

namespace gradus::privacy::internal {

/// Which of two neighbouring data sets has the example: the loss is log P / Q under P.
enum class Adjacency {
  kRemove,  ///< P is the mixture (1 - q) N(0, sigma^2) + q N(1, sigma^2), Q is N(0, sigma^2).
  kAdd,     ///< P is N(0, sigma^2), Q the mixture.
};

/// The privacy loss of one step of the Poisson-subsampled Gaussian mechanism, 0 < q <= 1, sigma >
/// 0, as a function, increasing, of a point x of the real line (for kAdd the line is mirrored).
class LossCurve {
 public:
  LossCurve(double sample_rate, double noise_multiplier, Adjacency adjacency);

  double loss(double x) const;
  /// log of the density of P at x, where loss(x) is @p loss.
  double log_density(double x, double loss) const;
  /// Where loss(x) is @p loss; -infinity or infinity where it never is.
  double inverse(double loss) const;
  /// P is outside [low, high] with at most exp(log_tail) on either side.
  double low(double log_tail) const;
  double high(double log_tail) const;
  /// Quadrature with few points is exact to doubles on intervals of this width.
  double smooth_width() const;
  /// Standard deviation of the loss under P.
  double deviation() const;

 private:
  double q_;
  double sigma_;
  double log_q_;
  double log_not_q_;  // -infinity where q is 1
  double log_peak_;   // of N(0, sigma^2)
  double sign_;       // 1 for kRemove
};

/// A distribution of losses on the points (first + i) * step + offset.
struct LossGrid {
  double step = 0.0;
  std::int64_t first = 0;
  double offset = 0.0;
  std::vector<double> mass = {};
  double infinite_mass = 0.0;  ///< At loss infinity.

  /// log of E[exp(lambda * loss); loss < infinity], without the offset.
  double log_moment(double lambda) const;
};

/// "Connect the dots" (Doroshenko, Ghazi, Kamath, Kumar and Manurangsi 2022): each bit of mass goes
/// to the two grid points around its loss, so that the masses under P and under Q both stay. The
/// hockey-stick curve is that of the exact loss at all grid points, and above it between:
/// pessimistic, also after composition. The upper tail, exp(log_tail), goes to infinity; the lower
/// one up.
LossGrid connect_dots(const LossCurve& curve, double step, double log_tail);

/// Nearest points, shifted by an offset so that the mean is exact: Gopi, Lee and Wutschitz 2021,
/// Algorithm 2. Off by at most @p step in all, with mean 0; both tails, at most exp(log_tail) each,
/// are left out.
LossGrid round_to_nearest(const LossCurve& curve, double step, double log_tail);

}  // namespace gradus::privacy::internal
