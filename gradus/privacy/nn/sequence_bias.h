#pragma once

#include <cstdint>
#include <iosfwd>

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

namespace gradus::privacy::nn {

/// Appends one learnt row to every sequence of a batch: what add_bias_kv adds to keys and values.
///
/// Parameter: bias [E], drawn from N(0, 1 / E) by the default generator (the initial values of
/// torch::nn::MultiheadAttention's bias_k [1, 1, E]).
class SequenceBiasImpl : public torch::nn::Cloneable<SequenceBiasImpl> {
 public:
  /// @throws UserError unless @p embed_dim, E, is at least 1.
  explicit SequenceBiasImpl(std::int64_t embed_dim);
  void reset() override;
  void reset_parameters();

  /// [S, B, E] -> [S + 1, B, E]. @throws UserError for another shape.
  at::Tensor forward(const at::Tensor& x_SBE);

  void pretty_print(std::ostream& stream) const override;

  std::int64_t embed_dim;
  at::Tensor bias;
};
TORCH_MODULE(SequenceBias);

}  // namespace gradus::privacy::nn
