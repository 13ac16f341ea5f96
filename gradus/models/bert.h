#pragma once

#include <cstdint>
#include <map>
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

// Shapes: B batch, T positions, C width, H heads, K classes.

/// What a BERT encoder is made of. The defaults are MiniLM-L6-H384-uncased.
struct BertOptions {
  std::int64_t vocabulary = 30522;   ///< Number of token ids. >= 1.
  std::int64_t context = 512;        ///< Longest T. >= 1.
  std::int64_t token_types = 2;      ///< First and second text of a pair. >= 1.
  std::int64_t layers = 6;           ///< >= 1.
  std::int64_t heads = 12;           ///< H, divides width. >= 1.
  std::int64_t width = 384;          ///< C. >= 1.
  std::int64_t intermediate = 1536;  ///< Width inside a layer's two linear layers. >= 1.
  double dropout = 0.1;         ///< Of embedding, attention and both halves of a layer, [0, 1).
  double norm_epsilon = 1e-12;  ///< Of every LayerNorm. > 0.
  bool pooler = true;           ///< Has the layer that BertImpl::pool() needs.
};

/// Says what makes @p options impossible ("width must be a multiple of heads; got ..."), or "" if
/// nothing does.
std::string defect(const BertOptions& options);

/// Number of values in all parameters.
std::int64_t parameter_count(const BertOptions& options);

/// The sum of what a token is, where it stands and which text it belongs to, normalised.
class BertEmbeddingsImpl : public torch::nn::Cloneable<BertEmbeddingsImpl> {
 public:
  explicit BertEmbeddingsImpl(const BertOptions& options);
  void reset() override;

  /// Ids and types [B, T] -> [B, T, C]; undefined types are all 0.
  at::Tensor forward(const at::Tensor& ids_BT, const at::Tensor& types_BT);

  std::shared_ptr<torch::nn::EmbeddingImpl> word_embeddings, position_embeddings,
      token_type_embeddings;
  std::shared_ptr<torch::nn::LayerNormImpl> norm;

 private:
  BertOptions options_;
};
TORCH_MODULE(BertEmbeddings);

/// Attention of every position to all that are no padding, by scaled_dot_product_attention.
class BertSelfAttentionImpl : public torch::nn::Cloneable<BertSelfAttentionImpl> {
 public:
  explicit BertSelfAttentionImpl(const BertOptions& options);
  void reset() override;

  /// [B, T, C] -> [B, T, C]. @p attend is bool and broadcasts to [B, H, T, T], true where a
  /// position may be looked at; undefined: everywhere. Drops attention weights in training mode.
  at::Tensor forward(const at::Tensor& x_BTC, const at::Tensor& attend);

  std::shared_ptr<torch::nn::LinearImpl> query, key, value;

 private:
  BertOptions options_;
};
TORCH_MODULE(BertSelfAttention);

/// LayerNorm(residual + dropout(dense(x))): how both halves of a layer end.
class BertResidualImpl : public torch::nn::Cloneable<BertResidualImpl> {
 public:
  /// @param in  Width of x.
  BertResidualImpl(const BertOptions& options, std::int64_t in);
  void reset() override;

  /// [B, T, in] and [B, T, C] -> [B, T, C].
  at::Tensor forward(const at::Tensor& x, const at::Tensor& residual_BTC);

  std::shared_ptr<torch::nn::LinearImpl> dense;
  std::shared_ptr<torch::nn::LayerNormImpl> norm;

 private:
  BertOptions options_;
  std::int64_t in_;
};
TORCH_MODULE(BertResidual);

/// Self-attention and its residual end.
class BertAttentionImpl : public torch::nn::Cloneable<BertAttentionImpl> {
 public:
  explicit BertAttentionImpl(const BertOptions& options);
  void reset() override;

  /// [B, T, C] -> [B, T, C]; @p attend as of BertSelfAttentionImpl.
  at::Tensor forward(const at::Tensor& x_BTC, const at::Tensor& attend);

  BertSelfAttention self{nullptr};
  BertResidual output{nullptr};

 private:
  BertOptions options_;
};
TORCH_MODULE(BertAttention);

/// A linear layer behind a name of its own, as BERT's files have it.
class BertDenseImpl : public torch::nn::Cloneable<BertDenseImpl> {
 public:
  BertDenseImpl(std::int64_t in, std::int64_t out);
  void reset() override;

  /// [..., in] -> [..., out].
  at::Tensor forward(const at::Tensor& x);

  std::shared_ptr<torch::nn::LinearImpl> dense;

 private:
  std::int64_t in_;
  std::int64_t out_;
};
TORCH_MODULE(BertDense);

/// Attention, then exact GELU between two linear layers; each half ends in a LayerNorm.
class BertLayerImpl : public torch::nn::Cloneable<BertLayerImpl> {
 public:
  explicit BertLayerImpl(const BertOptions& options);
  void reset() override;

  /// [B, T, C] -> [B, T, C]; @p attend as of BertSelfAttentionImpl.
  at::Tensor forward(const at::Tensor& x_BTC, const at::Tensor& attend);

  BertAttention attention{nullptr};
  BertDense intermediate{nullptr};
  BertResidual output{nullptr};

 private:
  BertOptions options_;
};
TORCH_MODULE(BertLayer);

/// The layers, in a list named `layer`.
class BertEncoderImpl : public torch::nn::Cloneable<BertEncoderImpl> {
 public:
  explicit BertEncoderImpl(const BertOptions& options);
  void reset() override;

  /// [B, T, C] -> [B, T, C]; @p attend as of BertSelfAttentionImpl.
  at::Tensor forward(const at::Tensor& x_BTC, const at::Tensor& attend);

  std::vector<std::shared_ptr<BertLayerImpl>> layers() const;

 private:
  BertOptions options_;
  std::shared_ptr<torch::nn::ModuleListImpl> layer_;
};
TORCH_MODULE(BertEncoder);

/// BERT's encoder: post-norm layers over learned positions (Devlin et al. 2018).
///
/// An ordinary torch::nn module with the state names of Hugging Face's BertModel:
/// embeddings.{word_embeddings, position_embeddings, token_type_embeddings}.weight,
/// embeddings.LayerNorm, encoder.layer.N.attention.self.{query, key, value},
/// encoder.layer.N.attention.output.{dense, LayerNorm}, encoder.layer.N.intermediate.dense,
/// encoder.layer.N.output.{dense, LayerNorm}, pooler.dense. huggingface_names() finds them in a
/// file.
class BertImpl : public torch::nn::Cloneable<BertImpl> {
 public:
  /// Builds the modules, then draws the weights from the default generator as reset_parameters()
  /// says (the modules' own initialisation draws from it before that).
  /// @throws c10::ValueError with the text of defect() if @p options are impossible.
  explicit BertImpl(const BertOptions& options);
  void reset() override;

  /// Draws all weights anew, in the order of named_parameters(): matrices from N(0, 0.02^2), biases
  /// 0, LayerNorm 1 and 0.
  /// @param generator  Where the numbers come from; the default generator if not given.
  void reset_parameters(const std::optional<at::Generator>& generator = std::nullopt);

  /// The last layer's output: ids [B, T] (int64 or int32) -> [B, T, C].
  ///
  /// @param padding_BT  bool, true where a text has no token; left out, there is none. No position
  ///   attends to padding; what stands there has no meaning. A row needs at least one token.
  /// @param types_BT  Ids of the text a token belongs to, int64 or int32; left out, all 0.
  /// @throws c10::ValueError unless ids have two dimensions, 1 <= T <= context and the others their
  ///   shape.
  at::Tensor forward(const at::Tensor& ids_BT, const at::Tensor& padding_BT = {},
                     const at::Tensor& types_BT = {});

  /// tanh(dense(first position)): [B, T, C] -> [B, C]. @throws c10::ValueError without a pooler.
  at::Tensor pool(const at::Tensor& hidden_BTC);

  /// The layers in order.
  std::vector<std::shared_ptr<BertLayerImpl>> layers() const { return encoder->layers(); }
  const BertOptions& options() const { return options_; }

  BertEmbeddings embeddings{nullptr};
  BertEncoder encoder{nullptr};
  BertDense pooler{nullptr};  ///< Null if options().pooler is false.

 private:
  BertOptions options_;
};
TORCH_MODULE(Bert);

/// The mean over the positions that are no padding: [B, T, C] and bool [B, T] -> [B, C]. Undefined
/// padding: over all. A row of nothing but padding gives 0.
at::Tensor mean_pool(const at::Tensor& hidden_BTC, const at::Tensor& padding_BT = {});

enum class BertPooling : std::uint8_t {
  mean,   ///< mean_pool(), as sentence embeddings have it.
  first,  ///< BertImpl::pool(), as BERT was trained.
};

/// What a classifier over BERT is made of.
struct BertClassifierOptions {
  BertOptions bert = {};     ///< pooler is set by `pooling`.
  std::int64_t classes = 2;  ///< K. >= 1.
  BertPooling pooling = BertPooling::mean;
  double dropout = 0.1;  ///< Before the head, in [0, 1).
};

/// Says what makes @p options impossible, or "" if nothing does.
std::string defect(const BertClassifierOptions& options);

/// BERT, pooled, and a linear head. State names are those of Hugging Face's
/// BertForSequenceClassification: bert.*, classifier.{weight, bias}.
class BertClassifierImpl : public torch::nn::Cloneable<BertClassifierImpl> {
 public:
  /// @throws c10::ValueError with the text of defect() if @p options are impossible.
  explicit BertClassifierImpl(const BertClassifierOptions& options);
  void reset() override;

  /// Draws the head only: weight from N(0, 0.02^2), bias 0.
  /// @param generator  Where the numbers come from; the default generator if not given.
  void reset_head(const std::optional<at::Generator>& generator = std::nullopt);

  /// Logits: as BertImpl::forward() -> [B, K].
  at::Tensor forward(const at::Tensor& ids_BT, const at::Tensor& padding_BT = {},
                     const at::Tensor& types_BT = {});

  const BertClassifierOptions& options() const { return options_; }

  Bert bert{nullptr};
  std::shared_ptr<torch::nn::LinearImpl> classifier;

 private:
  BertClassifierOptions options_;
};
TORCH_MODULE(BertClassifier);

/// Where each parameter of @p bert is in a file of Hugging Face's transformers.
///
/// @param available  Names of the file. They may begin with "bert." (a file of a model with a head)
///   and call LayerNorm's weight and bias gamma and beta (files made from TensorFlow's). Others
///   than those needed are left alone.
/// @return The file's name for each name of named_parameters().
/// @throws c10::ValueError that lists the parameters the file lacks.
std::map<std::string, std::string> huggingface_names(const BertImpl& bert,
                                                     const std::vector<std::string>& available);

/// Takes the embeddings and the lowest @p count layers out of training: requires_grad off, on for
/// the layers above and the pooler. They keep no graph and cost no gradients; their dropout stays.
/// @return Number of values that are frozen.
/// @throws c10::ValueError unless 0 <= count <= layers.
std::int64_t freeze_lower_layers(BertImpl& bert, std::int64_t count);

}  // namespace gradus::models
