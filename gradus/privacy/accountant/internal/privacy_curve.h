#pragma once

#include <memory>

#include <gradus/privacy/accountant/accountant.h>

namespace gradus::privacy::internal {

/// epsilon and delta of one history by one accountant. Keeps what queries have in common, so that
/// several cost little more than one. Both ways round are of one piece: log_delta(epsilon(delta))
/// is at most log(delta), but for rounding in the last bits.
class PrivacyCurve {
 public:
  PrivacyCurve() = default;
  PrivacyCurve(const PrivacyCurve&) = delete;
  PrivacyCurve& operator=(const PrivacyCurve&) = delete;
  virtual ~PrivacyCurve() = default;

  /// @param delta  In (0, 1). @return In [0, infinity].
  virtual double epsilon(double delta) = 0;
  /// @param epsilon  >= 0. @return At most 0.
  virtual double log_delta(double epsilon) = 0;
  /// The same from what epsilon(@p near) needs: at most log(near) just where epsilon(near) is at
  /// most @p epsilon; a rough value where it is far from there.
  virtual double log_delta_near(double epsilon, double near) = 0;
};

/// By privacy loss distributions. @param coarseness  >= 1: factor of the grid's interval. Above 1,
/// RDP is asked at a few orders only, and the curve is somewhat higher: to look around.
std::unique_ptr<PrivacyCurve> pld_curve(const History& history, const PldOptions& options,
                                        double coarseness = 1.0);

/// By privacy random variables; log_delta is the smaller of its bound and pld_curve's.
std::unique_ptr<PrivacyCurve> prv_curve(const History& history, const PrvOptions& options,
                                        const PldOptions& pld);

/// By any accountant, with what limits of the batch cost. The history may have steps without noise.
std::unique_ptr<PrivacyCurve> curve_of(const History& history, const AccountantOptions& options);

/// A quick curve that is close to curve_of() and seldom below it.
std::unique_ptr<PrivacyCurve> rough_curve_of(const History& history,
                                             const AccountantOptions& options);

/// log of the probability that an example is in any batch at all, which bounds delta at any
/// epsilon.
double log_touched(const History& history);

}  // namespace gradus::privacy::internal
