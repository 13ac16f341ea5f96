#pragma once

#include <cstdint>

namespace gradus::privacy {

class History;

/// log of an upper bound on the probability that a Poisson sample of @p dataset_size examples, each
/// taken with probability @p sample_rate, has more than @p max_batch_size: the first term of the
/// binomial tail by Stirling's bound, times the geometric series that bounds the rest. Within
/// a quarter of the true probability where that is small.
/// @param dataset_size  >= 1. @param max_batch_size  >= 0. @return <= 0; -infinity where it is
/// impossible.
/// @throws UserError on other values.
double log_overflow_probability(std::int64_t dataset_size, double sample_rate,
                                std::int64_t max_batch_size);

/// log of a bound on the probability that any batch of the history was cut to its max_batch_size:
/// the sum over steps, for the larger of two neighbouring data sets (dataset_size + 1). At most 0;
/// -infinity where no entry has a limit.
///
/// With eta this probability, cut sampling is at most eta in total variation from Poisson sampling
/// on either data set, so delta_cut(epsilon) <= delta(epsilon) + (1 + e^epsilon) eta: as in Chua
/// et al. 2024 ("Scalable DP-SGD"); docs/privacy_accountant.md has the proof. It holds whichever
/// examples are cut.
double log_truncation_probability(const History& history);

}  // namespace gradus::privacy
