#pragma once

#include <cstdint>
#include <vector>

#include <gradus/privacy/accountant/internal/loss_grid.h>

namespace gradus::privacy::internal {

/// A number of steps with one distribution of losses.
struct LossPart {
  LossGrid grid;
  std::int64_t count = 0;
};

/// The sum of independent losses around the region that one query asks about.
///
/// Masses are held tilted: times exp(lambda * loss), over their sum. With lambda from Chernoff's
/// bound the losses asked about are the bulk of the tilted distribution, and so the rounding errors
/// of the Fourier transform are relative to delta, however small, and not to 1.
class ComposedLoss {
 public:
  /// The least epsilon >= 0 with delta(epsilon) <= exp(log_delta), rounded up.
  double epsilon(double log_delta) const;
  /// log delta(epsilon), rounded up, at most 0.
  double log_delta(double epsilon) const;
  /// The same without what stands for losses outside the window and the grids: no bound.
  double log_estimate(double epsilon) const;

 private:
  friend class LossComposition;
  double lambda_ = 0.0;
  double log_moment_ = 0.0;  // of all steps, at lambda_
  double step_ = 0.0;
  double offset_ = 0.0;
  std::int64_t first_ = 0;
  std::vector<double> tilted_;
  double infinite_mass_ = 0.0;
  bool complete_above_ = false;
  double slack_ = 0.0;  // relative, for rounding errors
};

/// The losses, without offset, that hold the tilted distribution of a sum.
struct LossWindow {
  double lambda = 0.0;
  double low = 0.0;
  double high = 0.0;
  bool complete_above = false;  ///< No sum is larger than high.
};

/// Independent losses, on grids of one step, to be added up.
class LossComposition {
 public:
  explicit LossComposition(std::vector<LossPart> parts);

  /// The tilt for queries about losses with delta near exp(log_delta).
  double tilt_for_delta(double log_delta) const;
  /// What compose() has to hold at this tilt: Chernoff's bound leaves next to nothing outside.
  LossWindow window(double lambda) const;
  /// Adds up, by one Fourier transform a part and one back.
  ComposedLoss compose(const LossWindow& window) const;

 private:
  double log_moment(double lambda) const;
  double milder_tilt(double best, double level, double loss) const;

  std::vector<LossPart> parts_;
  double step_ = 0.0;
  double offset_ = 0.0;
  double deviation_ = 0.0;  // of the sum
};

}  // namespace gradus::privacy::internal
