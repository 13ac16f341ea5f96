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

// Shapes: B batch, T positions, C width, H heads, V vocabulary.

/// What a GPT is made of.
struct GptOptions {
  std::int64_t vocabulary = 50257;  ///< V, number of token ids. >= 1.
  std::int64_t context = 1024;      ///< Longest T. >= 1.
  std::int64_t layers = 12;         ///< Number of blocks. >= 1.
  std::int64_t heads = 12;          ///< H, divides width. >= 1.
  std::int64_t width = 768;         ///< C. >= 1.
  double dropout = 0.0;             ///< Of embedding, attention, residual and MLP, in [0, 1).
  bool bias = true;                 ///< Linear layers have a bias. LayerNorm always has one.
};

/// Says what makes @p options impossible ("width must be a multiple of heads; got ..."), or "" if
/// nothing does.
std::string defect(const GptOptions& options);

/// Number of values in all parameters: V C + T C + L (12 C^2 + 4 C + 9 C if bias) + 2 C, tied
/// embedding counted once.
std::int64_t parameter_count(const GptOptions& options);

/// Causal self-attention by scaled_dot_product_attention. Parameters: qkv [3C, C], proj [C, C].
class GptAttentionImpl : public torch::nn::Cloneable<GptAttentionImpl> {
 public:
  explicit GptAttentionImpl(const GptOptions& options);
  void reset() override;

  /// [B, T, C] -> [B, T, C]. Drops attention weights in training mode.
  at::Tensor forward(const at::Tensor& x_BTC);

  std::shared_ptr<torch::nn::LinearImpl> qkv, proj;

 private:
  GptOptions options_;
};
TORCH_MODULE(GptAttention);

/// GELU (tanh form, as GPT-2) between up [4C, C] and down [C, 4C].
class GptMlpImpl : public torch::nn::Cloneable<GptMlpImpl> {
 public:
  explicit GptMlpImpl(const GptOptions& options);
  void reset() override;

  /// [B, T, C] -> [B, T, C].
  at::Tensor forward(const at::Tensor& x_BTC);

  std::shared_ptr<torch::nn::LinearImpl> up, down;

 private:
  GptOptions options_;
};
TORCH_MODULE(GptMlp);

/// x + dropout(attn(ln_1(x))), then x + dropout(mlp(ln_2(x))).
class GptBlockImpl : public torch::nn::Cloneable<GptBlockImpl> {
 public:
  explicit GptBlockImpl(const GptOptions& options);
  void reset() override;

  /// [B, T, C] -> [B, T, C]. Does not modify @p x_BTC.
  at::Tensor forward(const at::Tensor& x_BTC);

  std::shared_ptr<torch::nn::LayerNormImpl> ln_1, ln_2;
  GptAttention attn{nullptr};
  GptMlp mlp{nullptr};

 private:
  GptOptions options_;
};
TORCH_MODULE(GptBlock);

/// GPT: pre-norm blocks, learned positions, logits from the embedding's own weight (Radford et al.
/// 2019).
///
/// An ordinary torch::nn module. Its state names are wte.weight, wpe.weight, blocks.N.{ln_1,
/// ln_2}.{weight, bias}, blocks.N.attn.{qkv, proj}.{weight, bias}, blocks.N.mlp.{up, down}.{weight,
/// bias}, ln_f.{weight, bias}. A program that runs the pieces itself computes the same function as
/// forward():
///
///     at::Tensor x = gpt->embed(ids);
///     for (const auto& block : gpt->blocks()) x = block->forward(x);
///     at::Tensor logits = gpt->head(x);
class GptImpl : public torch::nn::Cloneable<GptImpl> {
 public:
  /// Builds the modules, then draws the weights from the default generator as reset_parameters()
  /// says (the modules' own initialisation draws from it before that).
  /// @throws c10::ValueError with the text of defect() if @p options are impossible.
  explicit GptImpl(GptOptions options);
  void reset() override;

  /// Draws all weights anew: LayerNorm 1 and 0, biases 0, matrices from N(0, 0.02^2), the two that
  /// write to the residual stream (attn.proj, mlp.down) from N(0, 0.02^2 / (2 layers)). One normal_
  /// call a matrix, in the order wte, wpe, then for each block attn.qkv, attn.proj, mlp.up,
  /// mlp.down: the same seed gives the same weights in any language.
  /// @param generator  Where the numbers come from; the default generator if not given.
  void reset_parameters(std::optional<at::Generator> generator = std::nullopt);

  /// Logits of the next token: ids [B, T] (int64 or int32) -> [B, T, V]. Position t sees ids 0..t
  /// only.
  /// @throws c10::ValueError unless ids have two dimensions and 1 <= T <= context.
  at::Tensor forward(const at::Tensor& ids_BT);

  /// Token plus position embedding, dropped out: [B, T] -> [B, T, C].
  at::Tensor embed(const at::Tensor& ids_BT);
  /// The residual stream after the last block: [B, T] -> [B, T, C].
  at::Tensor hidden(const at::Tensor& ids_BT);
  /// Final LayerNorm and tied projection: [..., C] -> [..., V].
  at::Tensor head(const at::Tensor& x_BTC);
  /// The blocks in order.
  std::vector<std::shared_ptr<GptBlockImpl>> blocks() const;

  const GptOptions& options() const { return options_; }

  std::shared_ptr<torch::nn::EmbeddingImpl> wte, wpe;
  std::shared_ptr<torch::nn::LayerNormImpl> ln_f;

 private:
  GptOptions options_;
  std::shared_ptr<torch::nn::ModuleListImpl> blocks_;
};
TORCH_MODULE(Gpt);

}  // namespace gradus::models
