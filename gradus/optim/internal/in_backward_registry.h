#pragma once

#include <ATen/core/Tensor.h>

namespace gradus::optim::internal {

/// Which parameters of the process an OptimizerInBackward steps, so that what needs gradients after
/// backward can refuse instead of finding none. Thread-safe.
bool steps_in_backward(const at::Tensor& parameter);
/// Returns false, with nothing changed, if @p parameter is there already.
bool register_in_backward(const at::Tensor& parameter);
void unregister_in_backward(const at::Tensor& parameter);

}  // namespace gradus::optim::internal
