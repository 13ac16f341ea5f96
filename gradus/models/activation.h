#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace gradus::models {

enum class Activation : std::uint8_t {
  relu,
  tanh,
  tempered_sigmoid,  ///< scale / (1 + exp(-inverse_temperature x)) - offset
};

/// What stands between layers. Bounded activations keep gradients of single examples small, which
/// private training clips: tempered sigmoids (Papernot et al. 2021, "Tempered Sigmoid Activations
/// for Deep Learning with Differential Privacy"). The defaults of scale,
/// inverse_temperature and offset make one tanh.
struct ActivationOptions {
  Activation kind = Activation::tanh;
  double scale = 2.0;                ///< s of the paper. Finite, > 0.
  double inverse_temperature = 2.0;  ///< T of the paper. Finite, > 0.
  double offset = 1.0;               ///< o of the paper. Finite.
};

/// Says what makes @p options impossible ("scale must be finite and > 0; got ..."), or "" if
/// nothing does. Asks scale, inverse_temperature and offset for tempered_sigmoid only.
std::string defect(const ActivationOptions& options);

/// Elementwise, a new tensor.
at::Tensor activate(const at::Tensor& x, const ActivationOptions& options);

}  // namespace gradus::models
