#pragma once

#include <complex>
#include <cstddef>
#include <memory>
#include <vector>

namespace gradus::privacy::internal {

/// Discrete Fourier transforms of real vectors of one even size, by KISS FFT.
class RealFourier {
 public:
  /// @param size  Even, > 0; fast for powers of two.
  explicit RealFourier(std::size_t size);
  ~RealFourier();
  RealFourier(const RealFourier&) = delete;
  RealFourier& operator=(const RealFourier&) = delete;

  /// The size / 2 + 1 coefficients, sum over j of values[j] exp(-2 pi i j k / size).
  std::vector<std::complex<double>> forward(const std::vector<double>& values) const;
  /// The inverse of forward.
  std::vector<double> inverse(const std::vector<std::complex<double>>& coefficients) const;

 private:
  struct Plans;
  std::size_t size_;
  std::unique_ptr<Plans> plans_;
};

}  // namespace gradus::privacy::internal
