#include <gradus/privacy/accountant/truncated_sampling.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include <gradus/base/error.h>
#include <gradus/privacy/accountant/history.h>
#include <gradus/privacy/accountant/internal/log_space.h>

namespace gradus::privacy {

using internal::kInfinity;

double log_overflow_probability(std::int64_t dataset_size, double sample_rate,
                                std::int64_t max_batch_size) {
  GRADUS_CHECK("privacy_accountant", dataset_size >= 1, "dataset_size must be >= 1; got ",
               dataset_size);
  GRADUS_CHECK("privacy_accountant", sample_rate >= 0.0 && sample_rate <= 1.0,
               "sample_rate must be in [0, 1]; got ", sample_rate);
  GRADUS_CHECK("privacy_accountant", max_batch_size >= 0, "max_batch_size must be >= 0; got ",
               max_batch_size);
  if (sample_rate == 0.0 || max_batch_size >= dataset_size) return -kInfinity;
  if (sample_rate == 1.0) return 0.0;
  const auto n = static_cast<double>(dataset_size);
  const double m = static_cast<double>(max_batch_size) + 1.0;  // the least batch that is cut
  const double q = sample_rate;
  if (m == n) return n * std::log(q);
  const double ratio = (n - m) / (m + 1.0) * (q / (1.0 - q));  // of the next term to the first
  if (!(ratio < 1.0) || m <= n * q) return 0.0;
  // Binomial(n, m) <= sqrt(n / (2 pi m (n - m))) exp(n entropy(m / n)), so that the first term is
  // at most that root times exp(-n divergence(m / n || q)).
  const double divergence =
      m * std::log(m / (n * q)) + (n - m) * std::log1p((n * q - m) / (n * (1.0 - q)));
  const double first = 0.5 * std::log(n / (2.0 * std::numbers::pi * m * (n - m))) -
                       std::max(divergence, 0.0) * (1.0 - 1e-12);
  return std::min(0.0, first - std::log1p(-ratio));
}

double log_truncation_probability(const History& history) {
  internal::LogSum sum;
  for (const GaussianSteps& entry : history.entries()) {
    if (entry.max_batch_size == 0) continue;
    sum.add(
        std::log(static_cast<double>(entry.steps)) +
        log_overflow_probability(entry.dataset_size + 1, entry.sample_rate, entry.max_batch_size));
  }
  return std::min(0.0, sum.log());
}

}  // namespace gradus::privacy
