#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

namespace torch::nn {
class EmbeddingImpl;
class LSTMImpl;
class LinearImpl;
}  // namespace torch::nn

namespace gradus::models {

// Shapes: B batch, T positions, E embedding width, C width, K classes, V vocabulary.

/// What a recurrent text classifier is made of.
struct TextClassifierOptions {
  std::int64_t vocabulary = 4000;  ///< V, number of token ids. >= 1.
  std::int64_t classes = 2;        ///< K. >= 1.
  std::int64_t embedding = 64;     ///< E, width of the embedding. >= 1.
  std::int64_t width = 128;        ///< C, of each layer's state. >= 1.
  std::int64_t layers = 1;         ///< LSTM layers. >= 1.
  double dropout = 0.0;            ///< Of embedding, layers and last output, in [0, 1).
};

/// Says what makes @p options impossible ("layers must be at least 1; got 0"), or "" if nothing
/// does.
std::string defect(const TextClassifierOptions& options);

/// Number of values in all parameters: V E + sum over layers of 4 C (in + C + 2), in = E for the
/// first and C for the others, + K (C + 1).
std::int64_t parameter_count(const TextClassifierOptions& options);

/// Embedding, LSTM layers, linear head on the output at each text's last token.
///
/// An ordinary torch::nn module. Its state names are embedding.weight, lstm.{weight_ih_lN,
/// weight_hh_lN, bias_ih_lN, bias_hh_lN}, head.{weight, bias}.
class TextClassifierImpl : public torch::nn::Cloneable<TextClassifierImpl> {
 public:
  /// Builds the modules, then draws the weights from the default generator as reset_parameters()
  /// says (the modules' own initialisation draws from it before that).
  /// @throws c10::ValueError with the text of defect() if @p options are impossible.
  explicit TextClassifierImpl(const TextClassifierOptions& options);
  void reset() override;

  /// Draws all weights anew, in the order of named_parameters(): the embedding from N(0, 1), all
  /// others from U(-1/sqrt(C), 1/sqrt(C)).
  /// @param generator  Where the numbers come from; the default generator if not given.
  void reset_parameters(const std::optional<at::Generator>& generator = std::nullopt);

  /// Logits: ids [B, T] (int64 or int32) -> [B, K].
  ///
  /// @param lengths_B  Tokens of each text, int64 [B] in [1, T]; what stands behind them does not
  ///   matter, but must be ids. Left out, all T. A length of 0 counts as 1. Values are not checked
  ///   here, so that nothing waits for a device: one above T is LibTorch's index error.
  /// @throws c10::ValueError unless ids have two dimensions, T >= 1 and lengths fit them.
  at::Tensor forward(const at::Tensor& ids_BT, const at::Tensor& lengths_B = {});

  const TextClassifierOptions& options() const { return options_; }

  std::shared_ptr<torch::nn::EmbeddingImpl> embedding;
  std::shared_ptr<torch::nn::LSTMImpl> lstm;
  std::shared_ptr<torch::nn::LinearImpl> head;

 private:
  TextClassifierOptions options_;
};
TORCH_MODULE(TextClassifier);

}  // namespace gradus::models
