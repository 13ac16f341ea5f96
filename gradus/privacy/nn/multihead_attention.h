#pragma once

#include <cstdint>
#include <iosfwd>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/options/activation.h>
#include <torch/nn/pimpl.h>

#include <gradus/privacy/nn/sequence_bias.h>

namespace gradus::privacy::nn {

// Shapes: L queries, S keys, B batch, E width of queries and output, H heads, S' = S and one more
// each for add_bias_kv and add_zero_attn.

/// Attention of several heads (Vaswani et al. 2017, section 3.2.2) as torch::nn::MultiheadAttention
/// computes it, with a projection of its own for queries, keys and values.
///
/// Parameters: q_proj_weight [E, E], k_proj_weight [E, kdim], v_proj_weight [E, vdim], with bias
/// q_proj_bias, k_proj_bias, v_proj_bias [E], with add_bias_kv bias_k.bias, bias_v.bias [E]
/// (SequenceBias), and out_proj.weight [E, E], out_proj.bias [E]. Initial values are those of
/// torch::nn's layer for the same state of the default generator.
///
/// torch::save writes it, alone or inside another module, under torch::nn::MultiheadAttention's
/// names and shapes (in_proj_weight, ...), and torch::load reads those: files go either way. See
/// plain_state() for states that are no file.
///
///     DPMultiheadAttention attention(torch::nn::MultiheadAttentionOptions(64, 4).dropout(0.1));
///     auto [y, weights] = attention->forward(x, x, x);   // x [L, B, 64]
class DPMultiheadAttentionImpl : public torch::nn::Cloneable<DPMultiheadAttentionImpl> {
 public:
  DPMultiheadAttentionImpl(std::int64_t embed_dim, std::int64_t num_heads)
      : DPMultiheadAttentionImpl(torch::nn::MultiheadAttentionOptions(embed_dim, num_heads)) {}
  /// @throws UserError unless sizes are >= 1, num_heads divides embed_dim and dropout is in [0, 1].
  explicit DPMultiheadAttentionImpl(const torch::nn::MultiheadAttentionOptions& options);

  void reset() override;
  /// Draws all weights anew but out_proj.weight, by the default generator; sets biases to 0.
  void reset_parameters();

  /// query [L, B, E], key [S, B, kdim], value [S, B, vdim] -> output [L, B, E], weights.
  ///
  /// Unlike torch::nn's C++ layer it takes boolean and 3-D attention masks and a vdim that differs
  /// from kdim, as Python's does. A query that may see no key gets NaN, as there.
  /// @param key_padding_mask  [B, S]: bool, true where a key is left out, or floating, which is
  ///   added to the scores of all queries and heads (additive, as Python's): a key is left out by
  ///   -infinity, not by 1. None if undefined.
  /// @param need_weights  Return the attention weights (after dropout); else an undefined tensor.
  /// @param attn_mask  [L, S], or [B * H, L, S] with a head's examples H apart: bool or floating,
  /// as
  ///   key_padding_mask. None if undefined.
  /// @param average_attn_weights  Weights as the mean over heads [B, L, S'], else [B, H, L, S'].
  /// @throws UserError for another shape or a mask of another dtype.
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& query, const at::Tensor& key,
                                             const at::Tensor& value,
                                             const at::Tensor& key_padding_mask = {},
                                             bool need_weights = true,
                                             const at::Tensor& attn_mask = {},
                                             bool average_attn_weights = true);

 protected:
  FORWARD_HAS_DEFAULT_ARGS({3, torch::nn::AnyValue(at::Tensor())}, {4, torch::nn::AnyValue(true)},
                           {5, torch::nn::AnyValue(at::Tensor())}, {6, torch::nn::AnyValue(true)})

 public:
  /// Writes what torch::nn::MultiheadAttention would.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Reads what torch::nn::MultiheadAttention wrote. @throws UserError if a name is missing or a
  /// shape or dtype differs; then nothing has changed.
  void load(torch::serialize::InputArchive& archive) override;

  void pretty_print(std::ostream& stream) const override;

  torch::nn::MultiheadAttentionOptions options;
  at::Tensor q_proj_weight, k_proj_weight, v_proj_weight;
  at::Tensor q_proj_bias, k_proj_bias, v_proj_bias;  ///< Undefined without bias.
  SequenceBias bias_k{nullptr}, bias_v{nullptr};     ///< Empty without add_bias_kv.
  torch::nn::Linear out_proj{nullptr};
};
TORCH_MODULE(DPMultiheadAttention);

}  // namespace gradus::privacy::nn
