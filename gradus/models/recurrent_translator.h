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
class LinearImpl;
class ModuleListImpl;
}  // namespace torch::nn

namespace gradus::models {

// Shapes: B batch, S source positions, T target positions, C width, V target vocabulary.

/// What a recurrent translator is made of.
struct RecurrentTranslatorOptions {
  std::int64_t source_vocabulary = 8000;  ///< Number of source ids. >= 1.
  std::int64_t target_vocabulary = 8000;  ///< V, number of target ids. >= 1.
  std::int64_t width = 256;  ///< C, of embeddings and states; half of it in each direction. Even.
  std::int64_t layers = 2;   ///< Of the encoder, and of the decoder. >= 1.
  double dropout = 0.0;      ///< Of embeddings, between layers and of the output, in [0, 1).
};

/// Says what makes @p options impossible ("width must be even; got 3"), or "" if nothing does.
std::string defect(const RecurrentTranslatorOptions& options);

/// Number of values in all parameters: (source + target vocabulary) C + L (6 C^2 + 8 C) for the
/// encoder's layers + L (8 C^2 + 8 C) + 4 C^2 for the decoder's + 3 C^2 for the attention + V (C +
/// 1).
std::int64_t parameter_count(const RecurrentTranslatorOptions& options);

/// What the decoder carries from one target position to the next.
struct RecurrentTranslatorState {
  std::vector<at::Tensor> hidden;  ///< Of each layer, [B, C].
  std::vector<at::Tensor> cell;    ///< Of each layer, [B, C].
  at::Tensor fed_BC;  ///< The attentional vector of the position before (input feeding).
};

/// What the encoder makes of a source.
struct RecurrentTranslatorMemory {
  at::Tensor values_BSC;  ///< Outputs of the last encoder layer.
  at::Tensor keys_BSC;    ///< W_a values, what the decoder's state is compared with.
  at::Tensor padding_BS;  ///< As given; undefined if nothing is padding.
  /// The decoder's state before the first position: a layer's hidden state is where both directions
  /// of the encoder's layer ended; cells and the fed vector are zero.
  RecurrentTranslatorState start;
};

/// Recurrent translator with attention: a bidirectional LSTM encoder, a decoder of LSTM cells with
/// global attention in its "general" form and input feeding (Luong et al. 2015, equations 4, 5, 6
/// and 8, section 3.3). Each target position waits for the one before, in a loop in C++.
///
/// An ordinary torch::nn module. Its state names are source_embedding.weight,
/// target_embedding.weight, encoder_forward.N.{weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0}
/// and encoder_backward.N likewise, cells.N.{weight_ih, weight_hh, bias_ih, bias_hh},
/// attention.weight (W_a), combine.weight (W_c), output.{weight, bias}.
///
/// Greedy translation encodes once, then takes a step a position:
///
///     torch::NoGradGuard no_grad;
///     auto memory = model->encode(source, padding);
///     auto state = memory.start;
///     at::Tensor ids_B = torch::full({B}, begin, torch::kLong);
///     for (int t = 0; t < longest; ++t) ids_B = model->step(ids_B, memory, state).argmax(-1);
class RecurrentTranslatorImpl : public torch::nn::Cloneable<RecurrentTranslatorImpl> {
 public:
  /// Builds the modules, then draws the weights from the default generator as reset_parameters()
  /// says (the modules' own initialisation draws from it before that).
  /// @throws c10::ValueError with the text of defect() if @p options are impossible.
  explicit RecurrentTranslatorImpl(RecurrentTranslatorOptions options);
  void reset() override;

  /// Draws all weights anew, in the order of named_parameters(): embeddings from N(0, 1 / C), all
  /// other weights and the biases of LSTMs from U(-1/sqrt(n), 1/sqrt(n)), n the width of a state (C
  /// / 2 in the encoder, else C); the output's bias is 0.
  /// @param generator  Where the numbers come from; the default generator if not given.
  void reset_parameters(const std::optional<at::Generator>& generator = std::nullopt);

  /// Logits of the next target token: source ids [B, S], target ids [B, T] (the target behind its
  /// begin token) -> [B, T, V]. Position t sees the source and target ids 0..t.
  /// @param source_padding_BS  Bool, true where the source has no token, at the end of a row only;
  ///   nothing is padding if undefined. Each row has at least one token.
  /// @throws c10::ValueError unless ids have two dimensions, the same batch and at least one
  /// position, and the padding is bool and has the source's shape.
  at::Tensor forward(const at::Tensor& source_BS, const at::Tensor& target_BT,
                     const at::Tensor& source_padding_BS = {});

  /// The encoder alone: source ids [B, S] -> memory and first state.
  RecurrentTranslatorMemory encode(const at::Tensor& source_BS,
                                   const at::Tensor& source_padding_BS = {});
  /// One target position: ids [B] -> logits [B, V]. Replaces @p state by the next one.
  at::Tensor step(const at::Tensor& ids_B, const RecurrentTranslatorMemory& memory,
                  RecurrentTranslatorState& state);

  const RecurrentTranslatorOptions& options() const { return options_; }

  std::shared_ptr<torch::nn::EmbeddingImpl> source_embedding, target_embedding;
  std::shared_ptr<torch::nn::LinearImpl> attention, combine, output;

 private:
  at::Tensor advance(const at::Tensor& embedded_BC, const RecurrentTranslatorMemory& memory,
                     RecurrentTranslatorState& state);

  RecurrentTranslatorOptions options_;
  // The layers are reached through their lists: clone() replaces what a list holds.
  std::shared_ptr<torch::nn::ModuleListImpl> forward_, backward_, cells_;
};
TORCH_MODULE(RecurrentTranslator);

}  // namespace gradus::models
