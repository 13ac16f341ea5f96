#include <gradus/privacy/accountant/internal/fourier.h>

#include <cmath>
#include <numbers>

#include <kissfft/kissfft.hh>

namespace gradus::privacy::internal {

using Complex = std::complex<double>;

struct RealFourier::Plans {
  explicit Plans(std::size_t half) : forward(half, false) {}
  kissfft<double> forward;
};

RealFourier::RealFourier(std::size_t size)
    : size_(size), plans_(std::make_unique<Plans>(size / 2)) {}

RealFourier::~RealFourier() = default;

std::vector<Complex> RealFourier::forward(const std::vector<double>& values) const {
  const std::size_t half = size_ / 2;
  std::vector<Complex> out(half + 1);
  plans_->forward.transform_real(values.data(), out.data());
  out[half] = out[0].imag();  // KISS FFT packs the two real coefficients into one
  out[0] = out[0].real();
  return out;
}

std::vector<double> RealFourier::inverse(const std::vector<Complex>& coefficients) const {
  // Even and odd places as the real and imaginary parts of a transform of half the size.
  const std::size_t half = size_ / 2;
  std::vector<Complex> packed(half), places(half);
  const double turn = std::numbers::pi / static_cast<double>(half);
  for (std::size_t k = 0; k < half; ++k) {
    const Complex mirrored = std::conj(coefficients[half - k]);
    const Complex even = 0.5 * (coefficients[k] + mirrored);
    const Complex odd =
        0.5 * (coefficients[k] - mirrored) * std::polar(1.0, turn * static_cast<double>(k));
    // Conjugate, before and after: the inverse transform by the forward one's plan.
    packed[k] = std::conj(even + Complex(-odd.imag(), odd.real()));
  }
  plans_->forward.transform(packed.data(), places.data());
  std::vector<double> out(size_);
  const double scale = 1.0 / static_cast<double>(half);
  for (std::size_t k = 0; k < half; ++k) {
    out[2 * k] = scale * places[k].real();
    out[2 * k + 1] = -scale * places[k].imag();
  }
  return out;
}

}  // namespace gradus::privacy::internal
