// Uses an installed gradus as a user's program would: accumulates two micro-batches, then steps.

#include <cmath>
#include <iostream>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <gradus/accumulate/window.h>
#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/optim/sgd.h>

int main() {
  at::Tensor parameter = at::full({4}, 2.0).requires_grad_();
  gradus::accumulate::GradientWindow window({parameter}, {.micro_batches = 2});
  gradus::optim::SGD optimizer({parameter}, {.lr = 0.5});
  // Gradients 1 of one token and 5 of three tokens: (1 * 1 + 3 * 5) / 4 = 4, and the step goes to 2
  // - 0.5 * 4 = 0.
  window.backward(parameter.mul(1.0).sum(), 1.0);
  window.backward(parameter.mul(5.0).sum(), 3.0);
  window.finish();
  optimizer.step();
  const double left = parameter.detach().abs().sum().item<double>();
  if (std::isnan(left) || left > 1e-6) {
    std::cerr << "consumer: the step ended " << left << " away from 0\n";
    return 1;
  }
  // An exception thrown inside the library is caught by its type out here.
  try {
    gradus::base::parse_bytes("12 apples");
  } catch (const gradus::UserError&) {
    std::cout << "consumer: an installed gradus works\n";
    return 0;
  }
  std::cerr << "consumer: parse_bytes took '12 apples'\n";
  return 1;
}
