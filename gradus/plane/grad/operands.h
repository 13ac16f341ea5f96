#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/plane/grad/grad_plane.h>

// What the nodes of LibTorch's own operators know of their forward call. Edges are positions in
// NodeView::next(). A function that returns a tensor unpacks what autograd saved: under
// rematerialisation that computes it again, so ask inside a hook of the backward pass. Undefined
// where autograd did not save it, because no gradient needed it.

namespace gradus::plane::grad {

/// added * beta + alpha * (left @ right): mm, addmm, bmm, baddbmm, mv.
struct Product {
  NodeView node{};
  std::optional<std::size_t> added = std::nullopt;  ///< Edge of the summand, if there is one.
  std::size_t left = 0;                             ///< Edge.
  std::size_t right = 1;                            ///< Edge.
  double alpha = 1;
  double beta = 1;
  bool vector = false;  ///< mv: right is a vector.

  at::Tensor left_value() const;   ///< Saved for the gradient of right.
  at::Tensor right_value() const;  ///< Saved for the gradient of left.
};
std::optional<Product> as_product(const NodeView& node);

/// conv1d, conv2d, conv3d and the transposed ones.
struct Convolution {
  static constexpr std::size_t kInput = 0, kWeight = 1, kBias = 2;  ///< Edges.
  NodeView node{};
  std::vector<std::int64_t> stride{};
  std::vector<std::int64_t> padding{};
  std::vector<std::int64_t> dilation{};
  std::vector<std::int64_t> output_padding{};
  std::int64_t groups = 1;
  bool transposed = false;

  at::Tensor input() const;
  at::Tensor weight() const;
};
std::optional<Convolution> as_convolution(const NodeView& node);

/// layer_norm, group_norm, batch_norm and rms_norm as one operator each.
struct Normalisation {
  enum class Kind : std::uint8_t { layer, group, batch, rms };
  NodeView node{};
  Kind kind = Kind::layer;
  std::size_t weight = 1;                          ///< Edge.
  std::optional<std::size_t> bias = std::nullopt;  ///< Edge; rms has none.
  std::int64_t groups = 1;                         ///< Of group.
  std::size_t normalised_dims = 0;                 ///< Of layer and rms: how many last dimensions.
  bool training = false;                           ///< Of batch: statistics come from the batch.

  /// The input, normalised but not yet scaled, in its shape.
  at::Tensor normalised_input() const;
  /// Of group: the input as it came, and the statistics that the forward call used, [N, groups];
  /// undefined otherwise.
  at::Tensor input() const;
  at::Tensor mean() const;
  at::Tensor inverse_deviation() const;
};
std::optional<Normalisation> as_normalisation(const NodeView& node);

struct Embedding {
  static constexpr std::size_t kWeight = 0;  ///< Edge.
  NodeView node{};
  std::int64_t rows = 0;
  std::int64_t padding_index = -1;  ///< -1: none.
  bool scale_by_frequency = false;

  at::Tensor indices() const;
};
std::optional<Embedding> as_embedding(const NodeView& node);

struct EmbeddingBag {
  enum class Mode : std::uint8_t { sum = 0, mean = 1, max = 2 };
  static constexpr std::size_t kWeight = 0;  ///< Edge.
  NodeView node{};
  Mode mode = Mode::sum;
  std::int64_t rows = 0;
  std::int64_t padding_index = -1;  ///< -1: none.
  bool scale_by_frequency = false;

  at::Tensor indices() const;
  at::Tensor offset_to_bag() const;  ///< The bag of each index, long; may be empty for sums.
  at::Tensor offsets() const;
  at::Tensor bag_sizes() const;
  at::Tensor max_indices() const;    ///< Of max: [bags, width].
  at::Tensor index_weights() const;  ///< per_sample_weights; undefined if none.
};
std::optional<EmbeddingBag> as_embedding_bag(const NodeView& node);

/// One layer in one direction of an RNN, GRU or LSTM as oneDNN computes it on a CPU.
struct RecurrentLayer {
  enum class Mode : std::uint8_t { rnn_relu = 0, rnn_tanh = 1, lstm = 2, gru = 3 };
  static constexpr std::size_t kInput = 0, kInputWeight = 1, kHiddenWeight = 2, kInputBias = 3,
                               kHiddenBias = 4, kHidden = 5, kCell = 6;  ///< Edges.
  NodeView node{};
  Mode mode = Mode::lstm;
  bool reverse = false;
  bool has_biases = false;
  bool batch_first = false;
  std::vector<std::int64_t> batch_sizes{};  ///< Of packed sequences; empty otherwise.

  at::Tensor input() const;          ///< [T, B, D].
  at::Tensor input_weight() const;   ///< [gates * H, D].
  at::Tensor hidden_weight() const;  ///< [gates * H, H].
  at::Tensor input_bias() const;
  at::Tensor hidden_bias() const;
  at::Tensor initial_hidden() const;  ///< [B, H].
  at::Tensor initial_cell() const;    ///< [B, H].
  at::Tensor output() const;          ///< [T, B, H], in the order of the input also if reverse.
  /// Frees what only the node's own formula needs, by far the largest of all that it saved. If
  /// @p runs, the node may still run, with undefined gradients only, which it passes on; else all
  /// that it saved is freed.
  void release(bool runs) const;
};
std::optional<RecurrentLayer> as_recurrent_layer(const NodeView& node);

/// Operators that work element by element on operands that broadcast.
struct Elementwise {
  enum class Kind : std::uint8_t { add, multiply, divide, prelu, expand };
  NodeView node{};
  Kind kind = Kind::add;
  std::vector<double> scale{};  ///< Of add: by edge, what its operand is multiplied with.

  /// Of multiply and divide: the operand at @p edge. Of prelu: 0 the input, 1 the weight.
  at::Tensor operand(std::size_t edge) const;
};
std::optional<Elementwise> as_elementwise(const NodeView& node);

/// Operators of one operand that only arrange, or convert, its elements: gradients of different
/// examples pass one by one, and their norms do not change.
struct Rearrangement {
  /// Exactly the exchange of the two dimensions of a matrix.
  bool transposes_matrix = false;
  /// Keeps the order of elements and the shape, at most changes the dtype.
  bool keeps_shape = false;
  /// Changes the shape but not the order of elements.
  bool keeps_order = false;
};
std::optional<Rearrangement> as_rearrangement(const NodeView& node);

/// How values choose which elements of an operand get a gradient, or get it from where: lookups,
/// sorting, maxima, attention, and the terms of a product, where a zero is no choice.
struct Choice {
  /// True if tensors choose that are no edges (indices, masks); false if the operand itself does.
  bool by_saved = false;
  /// Dimensions of the operand along which elements are chosen; all that the others tell stays
  /// where it is. nullopt: unknown, or all.
  std::optional<std::vector<std::int64_t>> dims = std::nullopt;

  bool operator==(const Choice&) const = default;
};
/// Of the operand at @p edge; nullopt where each element's place follows from shapes and numbers.
std::optional<Choice> as_choice(const NodeView& node, std::size_t edge);

}  // namespace gradus::plane::grad
