#pragma once

namespace gradus::privacy {

class History;

/// log delta of the Gaussian mechanism with sensitivity over noise @p mu, exactly: Balle and Wang
/// 2018, Theorem 8. To about 1e-11 relative in delta, from 1 down to exp(-1e300): no underflow.
/// @param epsilon  >= 0. @param mu  >= 0; 0 gives -infinity, infinity gives 0.
/// @throws UserError on other values.
double gaussian_log_delta(double epsilon, double mu);

/// The least epsilon >= 0 at which delta(epsilon) <= delta: the inverse of gaussian_log_delta.
/// @param delta  In (0, 1). @throws UserError on other values.
double gaussian_epsilon(double delta, double mu);

/// mu of a history of full batches: sqrt(sum of steps / sigma^2), exact (entries with sample rate 0
/// count nothing). Infinity where noise is 0. @throws UserError on a sample rate other than 0 or 1.
double exact_mu(const History& history);

/// mu of the Gaussian differential privacy that the history tends to as steps grow: Bu, Dong, Long
/// and Su 2020, for Poisson sampling: mu^2 = sum of steps * q^2 * (exp(1 / sigma^2) - 1), and
/// steps / sigma^2 where q = 1.
///
/// A limit, not a bound: the true epsilon may be larger, without notice. Infinity where noise is 0.
double approximate_mu(const History& history);

}  // namespace gradus::privacy
