#pragma once

#include <vector>

namespace gradus::privacy {

class History;

/// The orders that Opacus and dp_accounting use: 1.1, 1.2, ..., 10.9, 11, ..., 63, 128, 256, 512,
/// 1024.
const std::vector<double>& default_rdp_orders();

/// How the moment of a fractional order is found.
enum class FractionalMoment {
  kExact,           ///< The integral itself.
  kAbsoluteSeries,  ///< The paper's series with each term counted as positive: an upper bound, and
                    ///< what dp_accounting (2022 and later) computes. For comparison with its
                    ///< figures.
};

/// Renyi divergence of order @p order of one step of the Poisson-subsampled Gaussian mechanism, for
/// adding or removing one example: Mironov, Talwar and Zhang 2019, Section 3.3.
///
/// Integer orders: their finite sum, less its 1, in logarithms. Fractional orders: their integral
/// by the trapezoidal rule, whose error falls exponentially, to about 1e-13; below noise 0.05,
/// where it would take too many points, the chord between the integer orders around, an upper
/// bound.
/// @param order  > 1, finite. Others as in GaussianSteps. @return >= 0, infinity for noise 0.
/// @throws UserError on other values.
double sampled_gaussian_rdp(double sample_rate, double noise_multiplier, double order,
                            FractionalMoment fractional = FractionalMoment::kExact);

/// The divergence of the whole history at each of @p orders. @throws UserError as above.
std::vector<double> history_rdp(const History& history, const std::vector<double>& orders,
                                FractionalMoment fractional = FractionalMoment::kExact);

/// An epsilon, and the order that gave it.
struct RdpEpsilon {
  double epsilon = 0.0;
  double order = 0.0;
};

/// The least epsilon over the orders: Canonne, Kamath and Steinke 2020, Proposition 12 (the bound
/// of Balle et al. 2020, Theorem 21), and 0 where the divergence alone bounds the total variation
/// by delta (Bretagnolle and Huber). Never negative. @param delta  In (0, 1).
/// @throws UserError if sizes differ or are 0, or on values outside the ranges above.
RdpEpsilon rdp_epsilon(const std::vector<double>& orders, const std::vector<double>& rdp,
                       double delta);

/// log of the least delta over the orders at @p epsilon >= 0; at most 0. Inverse of rdp_epsilon.
double rdp_log_delta(const std::vector<double>& orders, const std::vector<double>& rdp,
                     double epsilon);

}  // namespace gradus::privacy
