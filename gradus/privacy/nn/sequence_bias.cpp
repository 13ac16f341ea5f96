#include <gradus/privacy/nn/sequence_bias.h>

#include <cmath>
#include <ostream>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/types.h>

#include <gradus/base/error.h>

namespace gradus::privacy::nn {

SequenceBiasImpl::SequenceBiasImpl(std::int64_t embed_dim) : embed_dim(embed_dim) {
  GRADUS_CHECK("sequence_bias", embed_dim >= 1, "embed_dim must be at least 1; got ", embed_dim);
  SequenceBiasImpl::reset();
}

void SequenceBiasImpl::reset() {
  bias = register_parameter("bias", torch::empty({embed_dim}));
  reset_parameters();
}

void SequenceBiasImpl::reset_parameters() {
  const at::NoGradGuard no_grad;
  // Glorot and Bengio 2010 as LibTorch reads [1, 1, E]: fan-in and fan-out are both E.
  bias.normal_(0.0, std::sqrt(1.0 / static_cast<double>(embed_dim)));
}

at::Tensor SequenceBiasImpl::forward(const at::Tensor& x_SBE) {
  GRADUS_CHECK("sequence_bias", x_SBE.dim() == 3 && x_SBE.size(2) == embed_dim,
               "input must have shape [positions, batch, ", embed_dim, "]; got ", x_SBE.sizes());
  return at::cat({x_SBE, bias.expand({1, x_SBE.size(1), embed_dim})});
}

void SequenceBiasImpl::pretty_print(std::ostream& stream) const {
  stream << "gradus::privacy::nn::SequenceBias(embed_dim=" << embed_dim << ")";
}

}  // namespace gradus::privacy::nn
