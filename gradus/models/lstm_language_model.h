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

// Shapes: B batch, T positions, E embedding width, C width, V vocabulary.

/// What an LSTM language model is made of.
struct LstmLanguageModelOptions {
  std::int64_t vocabulary = 10000;  ///< V, number of token ids. >= 1.
  std::int64_t embedding = 256;     ///< E, width of the embedding. >= 1.
  std::int64_t width = 256;         ///< C, of each layer's state. >= 1.
  std::int64_t layers = 2;          ///< LSTM layers. >= 1.
  double dropout = 0.0;             ///< Of embedding, layers and last output, in [0, 1).
  bool tied =
      false;  ///< The head uses the embedding's weight and no bias; width must be embedding.
};

/// Says what makes @p options impossible ("layers must be at least 1; got 0"), or "" if nothing
/// does.
std::string defect(const LstmLanguageModelOptions& options);

/// Number of values in all parameters, a tied weight counted once: V E + sum over layers of 4 C (in
/// + C + 2), in = E for the first and C for the others, + V (C + 1) if not tied.
std::int64_t parameter_count(const LstmLanguageModelOptions& options);

/// Embedding, LSTM layers with dropout between them (Zaremba et al. 2014), linear head, tied or not
/// (Press & Wolf 2017).
///
/// An ordinary torch::nn module. Its state names are embedding.weight, lstm.{weight_ih_lN,
/// weight_hh_lN, bias_ih_lN, bias_hh_lN}, and unless tied head.{weight, bias}.
class LstmLanguageModelImpl : public torch::nn::Cloneable<LstmLanguageModelImpl> {
 public:
  /// Builds the modules, then draws the weights from the default generator as reset_parameters()
  /// says (the modules' own initialisation draws from it before that).
  /// @throws c10::ValueError with the text of defect() if @p options are impossible.
  explicit LstmLanguageModelImpl(LstmLanguageModelOptions options);
  void reset() override;

  /// Draws all weights anew, in the order of named_parameters(): the embedding from N(0, 1 / E),
  /// the LSTM's weights and biases and the head's weight from U(-1/sqrt(C), 1/sqrt(C)); the head's
  /// bias is 0.
  /// @param generator  Where the numbers come from; the default generator if not given.
  void reset_parameters(const std::optional<at::Generator>& generator = std::nullopt);

  /// Logits of the next token: ids [B, T] (int64 or int32) -> [B, T, V]. Position t sees ids 0..t
  /// only; the state before the first is zero.
  /// @throws c10::ValueError unless ids have two dimensions and T >= 1.
  at::Tensor forward(const at::Tensor& ids_BT);

  /// Output of the last layer, dropped out: [B, T] -> [B, T, C].
  at::Tensor hidden(const at::Tensor& ids_BT);
  /// Projection to the vocabulary: [..., C] -> [..., V].
  at::Tensor project(const at::Tensor& x_BTC);

  const LstmLanguageModelOptions& options() const { return options_; }

  std::shared_ptr<torch::nn::EmbeddingImpl> embedding;
  std::shared_ptr<torch::nn::LSTMImpl> lstm;
  std::shared_ptr<torch::nn::LinearImpl> head;  ///< Null if tied.

 private:
  LstmLanguageModelOptions options_;
};
TORCH_MODULE(LstmLanguageModel);

}  // namespace gradus::models
