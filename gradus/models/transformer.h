#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

namespace torch::nn {
class EmbeddingImpl;
class LayerNormImpl;
class LinearImpl;
class ModuleListImpl;
}  // namespace torch::nn

namespace gradus::models {

// Shapes: B batch, S source positions, T target positions, C width, F hidden, H heads, V target
// vocabulary.

/// What an encoder-decoder transformer is made of. The defaults are the base model of Vaswani et
/// al. 2017 but for vocabulary and dropout.
struct TransformerOptions {
  std::int64_t source_vocabulary = 8000;  ///< Number of source ids. >= 1.
  std::int64_t target_vocabulary = 8000;  ///< V, number of target ids. >= 1.
  std::int64_t context = 512;             ///< Longest S and longest T. >= 1.
  std::int64_t encoder_layers = 6;        ///< >= 1.
  std::int64_t decoder_layers = 6;        ///< >= 1.
  std::int64_t heads = 8;                 ///< H, divides width. >= 1.
  std::int64_t width = 512;               ///< C, even. >= 2.
  std::int64_t hidden = 2048;             ///< F, inner width of the feed-forward layers. >= 1.
  double dropout = 0.0;  ///< Of embeddings, residuals and attention weights, in [0, 1).
  bool tied_output =
      true;  ///< The output uses the target embedding's weight; else its own. No bias.
};

/// Says what makes @p options impossible ("width must be a multiple of heads; got ..."), or "" if
/// nothing does.
std::string defect(const TransformerOptions& options);

/// Number of values in all parameters, a tied weight counted once.
std::int64_t parameter_count(const TransformerOptions& options);

/// Attention of queries to keys and values by scaled_dot_product_attention. Parameters, each with a
/// bias: query [C, C], key_value [2C, C] (all of k, then v, each head by head), output [C, C].
class TransformerAttentionImpl : public torch::nn::Cloneable<TransformerAttentionImpl> {
 public:
  explicit TransformerAttentionImpl(const TransformerOptions& options);
  void reset() override;

  /// x [B, T, C] asks, memory [B, S, C] answers -> [B, T, C]. Drops attention weights in training
  /// mode.
  /// @param visible  Which keys a query may see, bool, [B, 1, 1, S] or broadcast to [B, H, T, S];
  ///   all if undefined. A query that may see none gets values that mean nothing.
  /// @param causal  Query t sees keys 0..t only; not together with @p visible.
  at::Tensor forward(const at::Tensor& x_BTC, const at::Tensor& memory_BSC,
                     const at::Tensor& visible, bool causal);

  std::shared_ptr<torch::nn::LinearImpl> query, key_value, output;

 private:
  TransformerOptions options_;
};
TORCH_MODULE(TransformerAttention);

/// x + attention(norm_1(x)), then x + down(relu(up(norm_2(x)))), both terms dropped out.
class TransformerEncoderLayerImpl : public torch::nn::Cloneable<TransformerEncoderLayerImpl> {
 public:
  explicit TransformerEncoderLayerImpl(const TransformerOptions& options);
  void reset() override;

  /// [B, S, C] -> [B, S, C]. @p visible as TransformerAttention takes it.
  at::Tensor forward(const at::Tensor& x_BSC, const at::Tensor& visible);

  std::shared_ptr<torch::nn::LayerNormImpl> norm_1, norm_2;
  TransformerAttention attention{nullptr};
  std::shared_ptr<torch::nn::LinearImpl> up, down;

 private:
  TransformerOptions options_;
};
TORCH_MODULE(TransformerEncoderLayer);

/// x + causal attention(norm_1(x)), then x + cross(norm_2(x), memory), then x +
/// down(relu(up(norm_3(x)))), all terms dropped out.
class TransformerDecoderLayerImpl : public torch::nn::Cloneable<TransformerDecoderLayerImpl> {
 public:
  explicit TransformerDecoderLayerImpl(const TransformerOptions& options);
  void reset() override;

  /// x [B, T, C], memory [B, S, C] -> [B, T, C]. @p visible as TransformerAttention takes it, of
  /// the memory's positions.
  at::Tensor forward(const at::Tensor& x_BTC, const at::Tensor& memory_BSC,
                     const at::Tensor& visible);

  std::shared_ptr<torch::nn::LayerNormImpl> norm_1, norm_2, norm_3;
  TransformerAttention attention{nullptr}, cross{nullptr};
  std::shared_ptr<torch::nn::LinearImpl> up, down;

 private:
  TransformerOptions options_;
};
TORCH_MODULE(TransformerDecoderLayer);

/// Encoder-decoder transformer (Vaswani et al. 2017) with pre-norm layers (Xiong et al. 2020) and
/// sinusoidal positions.
///
/// An ordinary torch::nn module. Its state names are source_embedding.weight,
/// target_embedding.weight, encoder.N.{norm_1, norm_2, attention.{query, key_value, output}, up,
/// down}.{weight, bias}, encoder_norm.{weight, bias}, decoder.N.{norm_1, norm_2, norm_3,
/// attention..., cross..., up, down}.{weight, bias}, decoder_norm.{weight, bias}, and unless tied
/// output.weight. The position table is no part of the state.
///
/// Greedy translation encodes once and decodes the growing prefix:
///
///     torch::NoGradGuard no_grad;
///     at::Tensor memory = model->encode(source, padding);
///     at::Tensor ids = torch::full({B, 1}, begin, torch::kLong);
///     while (ids.size(1) < longest) {
///       at::Tensor next = model->decode(ids, memory, padding).select(1, -1).argmax(-1, true);
///       ids = torch::cat({ids, next}, 1);
///     }
class TransformerImpl : public torch::nn::Cloneable<TransformerImpl> {
 public:
  /// Builds the modules, then draws the weights from the default generator as reset_parameters()
  /// says (the modules' own initialisation draws from it before that).
  /// @throws c10::ValueError with the text of defect() if @p options are impossible.
  explicit TransformerImpl(TransformerOptions options);
  void reset() override;

  /// Draws all weights anew, in the order of named_parameters(): embeddings and an untied output
  /// from N(0, 1 / C), matrices from U(-a, a), a = sqrt(6 / (in + out)) (Glorot & Bengio 2010; k
  /// and v each with an out of C). Norms are 1 and 0, biases 0.
  /// @param generator  Where the numbers come from; the default generator if not given.
  void reset_parameters(const std::optional<at::Generator>& generator = std::nullopt);

  /// Logits of the next target token: source ids [B, S], target ids [B, T] (the target behind its
  /// begin token) -> [B, T, V]. Position t sees the source and target ids 0..t.
  /// @param source_padding_BS  Bool, true where the source has no token; nothing is padding if
  ///   undefined. Each row has at least one token. Padding behind a target needs no mask: no
  ///   earlier position sees it.
  /// @throws c10::ValueError unless ids have two dimensions, the same batch, and between 1 and
  /// context positions, and the padding is bool and has the source's shape.
  at::Tensor forward(const at::Tensor& source_BS, const at::Tensor& target_BT,
                     const at::Tensor& source_padding_BS = {});

  /// The encoder alone: source ids [B, S] -> memory [B, S, C].
  at::Tensor encode(const at::Tensor& source_BS, const at::Tensor& source_padding_BS = {});
  /// The decoder alone: target ids [B, T], memory [B, S, C] -> logits [B, T, V].
  at::Tensor decode(const at::Tensor& target_BT, const at::Tensor& memory_BSC,
                    const at::Tensor& source_padding_BS = {});

  /// The layers of the encoder in order.
  std::vector<std::shared_ptr<TransformerEncoderLayerImpl>> encoder() const;
  /// The layers of the decoder in order.
  std::vector<std::shared_ptr<TransformerDecoderLayerImpl>> decoder() const;

  const TransformerOptions& options() const { return options_; }

  std::shared_ptr<torch::nn::EmbeddingImpl> source_embedding, target_embedding;
  std::shared_ptr<torch::nn::LayerNormImpl> encoder_norm, decoder_norm;
  std::shared_ptr<torch::nn::LinearImpl> output;  ///< Null if tied.

 private:
  at::Tensor embed(const torch::nn::EmbeddingImpl& table, const at::Tensor& ids_BT,
                   const char* name) const;

  TransformerOptions options_;
  std::shared_ptr<torch::nn::ModuleListImpl> encoder_, decoder_;
  at::Tensor positions_;  // [context, C], double.
};
TORCH_MODULE(Transformer);

}  // namespace gradus::models
