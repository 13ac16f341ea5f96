#include <gradus/privacy/accountant/internal/loss_grid.h>

#include <algorithm>
#include <array>
#include <cmath>

#include <gradus/privacy/accountant/internal/log_space.h>

namespace gradus::privacy::internal {
namespace {

struct Node {
  double place = 0.0;  // in [-1, 1]
  double weight = 0.0;
};

// Gauss-Legendre with 5 and 3 points.
constexpr std::array<Node, 5> kFive = {{{0.0, 0.56888888888888888889},
                                        {-0.53846931010568309104, 0.47862867049936646804},
                                        {0.53846931010568309104, 0.47862867049936646804},
                                        {-0.90617984593866399280, 0.23692688505618908751},
                                        {0.90617984593866399280, 0.23692688505618908751}}};
constexpr std::array<Node, 3> kThree = {{{0.0, 0.88888888888888888889},
                                         {-0.77459666924148337704, 0.55555555555555555556},
                                         {0.77459666924148337704, 0.55555555555555555556}}};

// Gauss-Legendre with 2 points.
constexpr std::array<Node, 2> kTwo = {
    {{-0.57735026918962576451, 1.0}, {0.57735026918962576451, 1.0}}};

// -(exp(u) - 1), where |u| is at most a step: mostly small.
double minus_expm1(double u) {
  if (std::abs(u) > 1e-3) return -std::expm1(u);
  return -u * (1.0 + u / 2.0 * (1.0 + u / 3.0 * (1.0 + u / 4.0 * (1.0 + u / 5.0))));
}

// Calls visit(mass, loss) for the points of a quadrature of P over [low, high].
template <typename Visit>
void integrate(const LossCurve& curve, double low, double high, const Visit& visit) {
  const double width = curve.smooth_width();
  const auto pieces = std::max<std::int64_t>(1, std::llround(std::ceil((high - low) / width)));
  const double half = 0.5 * (high - low) / static_cast<double>(pieces);
  const auto over = [&](const auto& nodes) {
    for (std::int64_t i = 0; i < pieces; ++i) {
      const double middle = low + half * static_cast<double>(2 * i + 1);
      for (const Node& node : nodes) {
        const double x = middle + half * node.place;
        const double loss = curve.loss(x);
        visit(half * node.weight * std::exp(curve.log_density(x, loss)), loss);
      }
    }
  };
  if (2.0 * half < 0.004 * width)
    over(kTwo);
  else if (2.0 * half < 0.08 * width)
    over(kThree);
  else
    over(kFive);
}

// Cuts [low, high] where the loss is (i + shift) * step and calls visit(i, from, to) for each cell.
template <typename Visit>
void for_each_cell(const LossCurve& curve, double low, double high, double step, double shift,
                   std::int64_t first, std::int64_t last, const Visit& visit) {
  double from = low;
  for (std::int64_t i = first; i <= last; ++i) {
    const double end =
        i == last ? high : curve.inverse((static_cast<double>(i) + 1.0 + shift) * step);
    const double to = std::clamp(end, from, high);
    if (to > from) visit(i, from, to);
    from = to;
  }
}

}  // namespace

LossCurve::LossCurve(double sample_rate, double noise_multiplier, Adjacency adjacency)
    : q_(sample_rate),
      sigma_(noise_multiplier),
      log_q_(std::log(sample_rate)),
      log_not_q_(std::log1p(-sample_rate)),
      log_peak_(-std::log(noise_multiplier) - kLogSqrtTwoPi),
      sign_(adjacency == Adjacency::kRemove ? 1.0 : -1.0) {}

double LossCurve::loss(double x) const {
  const double t = (sign_ * x - 0.5) / (sigma_ * sigma_);
  if (q_ == 1.0) return sign_ * t;
  // log((1 - q) + q e^t), to all its digits also where it is near 0.
  return sign_ * (t > 600.0 ? log1p_exp(log_q_ + t) : std::log1p(q_ * std::expm1(t)));
}

double LossCurve::log_density(double x, double loss) const {
  const double z = x / sigma_;
  return -0.5 * z * z + log_peak_ + (sign_ > 0.0 ? loss : 0.0);
}

double LossCurve::inverse(double loss) const {
  const double y = sign_ * loss;
  double t = y;
  if (q_ < 1.0) {
    if (y <= log_not_q_) return -sign_ * kInfinity;
    t = y > 600.0 ? y - log_q_ : std::log1p(std::expm1(y) / q_);
  }
  return sign_ * (t * sigma_ * sigma_ + 0.5);
}

// The upper tail of a normal at z is at most exp(-z^2 / 2) / 2.
double LossCurve::low(double log_tail) const { return -sigma_ * std::sqrt(-2.0 * log_tail); }

double LossCurve::high(double log_tail) const {
  return sigma_ * std::sqrt(-2.0 * log_tail) + (sign_ > 0.0 ? 1.0 : 0.0);
}

// A normal wants sigma / 8; the loss has a pole at pi sigma^2 from the real line.
double LossCurve::smooth_width() const {
  return q_ == 1.0 ? sigma_ / 8.0 : std::min(sigma_ / 8.0, 0.5 * sigma_ * sigma_);
}

double LossCurve::deviation() const {
  double mean = 0.0, square = 0.0;
  integrate(*this, low(-40.0), high(-40.0), [&](double mass, double loss) {
    mean += mass * loss;
    square += mass * loss * loss;
  });
  return std::sqrt(std::max(square - mean * mean, 0.0));
}

double LossGrid::log_moment(double lambda) const {
  // Horner's rule in blocks whose powers cannot overflow: one multiplication a point.
  const double exponent = lambda * step;
  const auto block =
      static_cast<std::size_t>(std::clamp(300.0 / std::max(std::abs(exponent), 1e-3), 1.0, 1024.0));
  const double ratio = std::exp(exponent), ratio_4 = std::exp(4.0 * exponent);
  LogSum sum;
  for (std::size_t from = 0; from < mass.size(); from += block) {
    const std::size_t to = std::min(from + block, mass.size());
    // Four interleaved chains: one alone waits for each multiplication.
    std::array<double, 4> chains = {};
    const std::size_t even = from + (to - from) / 4 * 4;
    for (std::size_t i = even; i > from; i -= 4)
      for (std::size_t j = 0; j < 4; ++j) chains[j] = chains[j] * ratio_4 + mass[i - 4 + j];
    double value = 0.0;
    if (even > from)
      value = ((chains[3] * ratio + chains[2]) * ratio + chains[1]) * ratio + chains[0];
    for (std::size_t i = even; i < to; ++i)
      value += mass[i] * std::exp(exponent * static_cast<double>(i - from));
    if (value > 0.0)
      sum.add(std::log(value) +
              exponent * static_cast<double>(first + static_cast<std::int64_t>(from)));
  }
  return sum.log();
}

LossGrid connect_dots(const LossCurve& curve, double step, double log_tail) {
  const double low = curve.low(log_tail), high = curve.high(log_tail);
  LossGrid grid{.step = step, .infinite_mass = std::exp(log_tail)};
  grid.first = static_cast<std::int64_t>(std::floor(curve.loss(low) / step));
  const auto last = static_cast<std::int64_t>(std::floor(curve.loss(high) / step));
  grid.mass.assign(static_cast<std::size_t>(last - grid.first + 2), 0.0);
  const double full = -std::expm1(-step);
  for_each_cell(curve, low, high, step, 0.0, grid.first, last,
                [&](std::int64_t i, double from, double to) {
                  const double point = static_cast<double>(i) * step;
                  double below = 0.0, above = 0.0;
                  integrate(curve, from, to, [&](double mass, double loss) {
                    // a + b = 1 and a e^-point + b e^-(point + step) = e^-loss.
                    const double share = std::clamp(minus_expm1(point - loss) / full, 0.0, 1.0);
                    above += mass * share;
                    below += mass * (1.0 - share);
                  });
                  const auto index = static_cast<std::size_t>(i - grid.first);
                  grid.mass[index] += below;
                  grid.mass[index + 1] += above;
                });
  grid.mass[1] += std::exp(log_tail);  // the first point above loss(low)
  return grid;
}

LossGrid round_to_nearest(const LossCurve& curve, double step, double log_tail) {
  const double low = curve.low(log_tail), high = curve.high(log_tail);
  LossGrid grid{.step = step};
  grid.first = static_cast<std::int64_t>(std::floor(curve.loss(low) / step + 0.5));
  const auto last = static_cast<std::int64_t>(std::floor(curve.loss(high) / step + 0.5));
  grid.mass.assign(static_cast<std::size_t>(last - grid.first + 1), 0.0);
  double total = 0.0, error = 0.0;
  for_each_cell(curve, low, high, step, -0.5, grid.first, last,
                [&](std::int64_t i, double from, double to) {
                  double in_cell = 0.0;
                  integrate(curve, from, to, [&](double mass, double loss) {
                    in_cell += mass;
                    error += mass * (loss - static_cast<double>(i) * step);
                  });
                  grid.mass[static_cast<std::size_t>(i - grid.first)] += in_cell;
                  total += in_cell;
                });
  grid.offset = error / total;
  return grid;
}

}  // namespace gradus::privacy::internal
