#pragma once

namespace gradus::privacy {

class History;

struct PldOptions {
  /// Distance of the grid's losses, > 0, at most. Taken smaller where the losses of one step are
  /// small, larger where the grid would grow beyond 2^20 points and where that moves epsilon by
  /// less than about 1e-7 of it (squared in max_interval / 1e-4).
  double max_interval = 1e-4;
};

/// Epsilon by the privacy loss distribution: an upper bound, commonly within 1e-4 of the true
/// value.
///
/// The loss of each step is rounded pessimistically ("connect the dots": Doroshenko et al. 2022),
/// the sum is taken by Fourier transform (Koskela et al. 2020) on exponentially tilted masses, and
/// what falls outside the grid and the rounding errors count as losses of infinity. The larger of
/// adding and removing one example. Where epsilon exceeds 1e5, noise is below 1e-3 or steps exceed
/// 1e10, and wherever that is smaller: RDP.
/// @param delta  In (0, 1). @return >= 0; infinity where noise is 0. @throws UserError.
double pld_epsilon(const History& history, double delta, const PldOptions& options = {});

/// log delta at @p epsilon >= 0, by the same bound; at most 0.
double pld_log_delta(const History& history, double epsilon, const PldOptions& options = {});

/// What is known of an epsilon: lower <= the true one <= upper.
struct EpsilonBounds {
  double lower = 0.0;
  double estimate = 0.0;
  double upper = 0.0;
  double epsilon_error =
      0.0;  ///< Reached; larger than asked for where the grid would be too large.
  double delta_error = 0.0;
};

struct PrvOptions {
  double epsilon_error = 0.01;      ///< Of either bound from rounding losses, > 0.
  double delta_error_ratio = 1e-3;  ///< delta_error over delta, in (0, 1).
};

/// Epsilon by privacy random variables: Gopi, Lee and Wutschitz 2021.
///
/// Losses are rounded to the nearest point of a grid with their mean kept. Where k steps are
/// rounded by at most h each, Hoeffding's inequality puts the sum within epsilon_error = h sqrt(k /
/// 2 log(4 / delta_error)) of the true one but for a probability of delta_error / 2; tails and
/// arithmetic take the rest of delta_error. So upper = epsilon(delta - delta_error) +
/// epsilon_error, lower = epsilon(delta + delta_error) - epsilon_error. Where pld_epsilon falls
/// back to RDP, so does this: lower is 0 then.
/// @param delta  In (0, 1). @throws UserError.
EpsilonBounds prv_epsilon(const History& history, double delta, const PrvOptions& options = {});

}  // namespace gradus::privacy
