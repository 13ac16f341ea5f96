#include <gradus/privacy/accountant/internal/loss_composition.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <utility>

#include <gradus/privacy/accountant/internal/fourier.h>
#include <gradus/privacy/accountant/internal/log_space.h>

namespace gradus::privacy::internal {
namespace {

// Tilted mass outside the window, on each side.
constexpr double kOutside = 1e-15;
// A tilt weaker than Chernoff's best by this exponent costs three digits and needs a smaller
// window: the best one makes rare, large losses of single steps common.
constexpr double kSpared = 7.0;
// Evaluations of a moment in each search; any value is valid, the best one is only tighter.
constexpr int kEvaluations = 26;

double deviation_squared(const LossGrid& grid) {
  double total = 0.0, mean = 0.0, square = 0.0;
  for (std::size_t i = 0; i < grid.mass.size(); ++i) {
    total += grid.mass[i];
    mean += grid.mass[i] * static_cast<double>(i);
  }
  mean /= total;
  for (std::size_t i = 0; i < grid.mass.size(); ++i) {
    const double distance = static_cast<double>(i) - mean;
    square += grid.mass[i] * distance * distance;
  }
  return square / total * grid.step * grid.step;
}

// z^count in polar form; its error, about count * 1e-16 relative, is covered by the slack, and what
// is dropped is below the rounding of the largest coefficient, 1, by six digits.
std::complex<double> power(std::complex<double> z, double count) {
  const double size = std::abs(z);
  if (size == 0.0) return 0.0;
  const double log_size = count * std::log(size);
  return log_size < -50.0 ? 0.0 : std::polar(std::exp(log_size), count * std::arg(z));
}

}  // namespace

LossComposition::LossComposition(std::vector<LossPart> parts) : parts_(std::move(parts)) {
  step_ = parts_.front().grid.step;
  double square = 0.0;
  for (const LossPart& part : parts_) {
    const auto count = static_cast<double>(part.count);
    offset_ += count * part.grid.offset;
    square += count * deviation_squared(part.grid);
  }
  deviation_ = std::max(std::sqrt(square), 1e-3 * step_);
}

double LossComposition::log_moment(double lambda) const {
  double sum = 0.0;
  for (const LossPart& part : parts_)
    sum += static_cast<double>(part.count) * part.grid.log_moment(lambda);
  return sum;
}

double LossComposition::milder_tilt(double best, double level, double loss) const {
  // K(lambda) - lambda * loss is convex, and level at best.
  double high = best;
  double low = best * 1e-3;
  for (int i = 0; i < 10; ++i) {
    const double middle = std::sqrt(low * high);
    (log_moment(middle) - middle * loss > level + kSpared ? low : high) = middle;
  }
  return high;
}

double LossComposition::tilt_for_delta(double log_delta) const {
  // Chernoff: the loss whose tail is delta is at most the minimum of (K(lambda) - log delta) /
  // lambda.
  const auto loss_at = [&](double u) {
    const double lambda = std::exp(u) / deviation_;
    return (log_moment(lambda) - log_delta) / lambda;
  };
  const double best = least_argument(std::log(1e-3), std::log(1e3), kEvaluations, loss_at);
  return milder_tilt(std::exp(best) / deviation_, log_delta, loss_at(best));
}

LossWindow LossComposition::window(double lambda) const {
  const double at_tilt = log_moment(lambda);
  const auto bound = [&](double sign) {
    const auto reach = [&](double u) {
      const double s = std::exp(u) / deviation_;
      return (log_moment(lambda + sign * s) - at_tilt - std::log(kOutside)) / s;
    };
    return sign * reach(least_argument(std::log(1e-2), std::log(1e3), kEvaluations, reach));
  };
  double least = 0.0, most = 0.0;
  for (const LossPart& part : parts_) {
    const auto count = static_cast<double>(part.count);
    const auto first = static_cast<double>(part.grid.first);
    least += count * first * step_;
    most += count * (first + static_cast<double>(part.grid.mass.size()) - 1.0) * step_;
  }
  const double high = bound(1.0);
  return {.lambda = lambda,
          .low = std::max(bound(-1.0), least),
          .high = std::min(high, most),
          .complete_above = high >= most};
}

ComposedLoss LossComposition::compose(const LossWindow& range) const {
  const double lambda = range.lambda;
  ComposedLoss composed;
  composed.lambda_ = lambda;
  composed.log_moment_ = log_moment(lambda);
  composed.step_ = step_;
  composed.offset_ = offset_;
  composed.complete_above_ = range.complete_above;
  composed.first_ = static_cast<std::int64_t>(std::floor(range.low / step_));
  const auto last = static_cast<std::int64_t>(std::ceil(range.high / step_));
  const std::size_t size = std::bit_ceil(
      static_cast<std::size_t>(std::max<std::int64_t>(last - composed.first_ + 1, 2)));
  const auto mask = static_cast<std::uint64_t>(size - 1);  // residues modulo a power of two

  const RealFourier fourier(size);
  std::vector<std::complex<double>> product(size / 2 + 1, 1.0);
  std::uint64_t center = 0;
  double finite = 0.0, steps = 0.0;
  for (const LossPart& part : parts_) {
    const auto count = static_cast<double>(part.count);
    const double log_part = part.grid.log_moment(lambda);
    std::vector<double> values(size, 0.0);
    std::vector<double> tilted(part.grid.mass.size());
    double mean = 0.0;
    for (std::size_t i = 0; i < tilted.size(); ++i) {
      const double index = static_cast<double>(part.grid.first) + static_cast<double>(i);
      tilted[i] = part.grid.mass[i] * std::exp(lambda * index * step_ - log_part);
      mean += tilted[i] * static_cast<double>(i);
    }
    // Centred, so that phases stay small under the power.
    const std::int64_t middle = std::llround(mean);
    for (std::size_t i = 0; i < tilted.size(); ++i)
      values[static_cast<std::uint64_t>(static_cast<std::int64_t>(i) - middle) & mask] += tilted[i];
    center += static_cast<std::uint64_t>(part.count) *
              static_cast<std::uint64_t>(part.grid.first + middle);
    const auto spectrum = fourier.forward(values);
    for (std::size_t k = 0; k < product.size(); ++k) product[k] *= power(spectrum[k], count);
    finite += count * std::log1p(-part.grid.infinite_mass);
    steps += count;
  }
  const std::vector<double> sum = fourier.inverse(product);
  composed.tilted_.resize(size);
  for (std::size_t i = 0; i < size; ++i) {
    const std::uint64_t place = static_cast<std::uint64_t>(composed.first_) + i - center;
    composed.tilted_[i] = std::max(sum[place & mask], 0.0);
  }
  composed.infinite_mass_ = -std::expm1(finite);
  // Quadrature and powers lose up to 1e-13 a step, transforms far less than 1e-10.
  composed.slack_ = 1e-10 + 2e-13 * steps;
  return composed;
}

// Both queries walk down from the largest loss with D = sum over losses l above of mass * (1 -
// e^(here - l)), which is delta, and S = sum of mass * e^(here - l): D only ever grows by positive
// terms. Between points delta(here + t) = D - (e^t - 1) S.
double ComposedLoss::epsilon(double log_delta) const {
  // Masses in units of delta, at loss reference times 1.
  const double reference = (log_moment_ - log_delta) / lambda_;
  const auto unit = [&](double loss) { return std::exp(-lambda_ * (loss - reference)); };
  const double top =
      static_cast<double>(first_ + static_cast<std::int64_t>(tilted_.size()) - 1) * step_;
  // Mass below the window comes back above it, in delta's units at most 1e-15 * exp(kSpared) and a
  // few orders more for the distance between Chernoff's loss and the true one: well within the
  // slack.
  const double beyond = complete_above_ ? 0.0 : kOutside * unit(top);
  const double target = (1.0 - infinite_mass_ * std::exp(-log_delta) - beyond) / (1.0 + slack_);
  if (!(target > 0.0)) return kInfinity;
  const double keep = std::exp(-step_), gain = -std::expm1(-step_);
  double above = 0.0, discounted = 0.0, here = top;  // D and S
  for (std::size_t i = tilted_.size(); i-- > 0;) {
    const double carried = tilted_[i] * unit(here) + discounted;
    const double next = above + gain * carried;
    discounted = keep * carried;
    above = next;
    here = static_cast<double>(first_ + static_cast<std::int64_t>(i) - 1) * step_;
    if (above > target || here + offset_ < 0.0) break;
  }
  const double ratio = discounted > 0.0 ? (above - target) / discounted : -1.0;
  if (ratio <= -1.0) return 0.0;
  return std::max(0.0, here + offset_ + std::log1p(ratio));
}

double ComposedLoss::log_estimate(double epsilon) const {
  const double reference = epsilon - offset_;
  const auto unit = [&](double loss) { return std::exp(-lambda_ * (loss - reference)); };
  const double top =
      static_cast<double>(first_ + static_cast<std::int64_t>(tilted_.size()) - 1) * step_;
  const double keep = std::exp(-step_), gain = -std::expm1(-step_);
  double above = 0.0, discounted = 0.0, here = top;
  for (std::size_t i = tilted_.size(); here > reference && i-- > 0;) {
    const double carried = tilted_[i] * unit(here) + discounted;
    above += gain * carried;
    discounted = keep * carried;
    here = static_cast<double>(first_ + static_cast<std::int64_t>(i) - 1) * step_;
  }
  double delta = reference < top ? above - std::expm1(reference - here) * discounted : 0.0;
  delta = std::max(delta, 0.0) * (1.0 + slack_);
  return delta > 0.0 ? log_moment_ - lambda_ * reference + std::log(delta) : -kInfinity;
}

double ComposedLoss::log_delta(double epsilon) const {
  const double reference = epsilon - offset_;
  const double top =
      static_cast<double>(first_ + static_cast<std::int64_t>(tilted_.size()) - 1) * step_;
  LogSum sum;
  sum.add(log_estimate(epsilon));
  // What the window lost above is above the loss asked about, too.
  if (!complete_above_)
    sum.add(log_moment_ - lambda_ * std::max(top, reference) + std::log(kOutside));
  if (infinite_mass_ > 0.0) sum.add(std::log(infinite_mass_));
  return std::min(0.0, sum.log());
}

}  // namespace gradus::privacy::internal
