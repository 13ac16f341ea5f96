#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/options/rnn.h>
#include <torch/nn/pimpl.h>
#include <torch/nn/utils/rnn.h>

namespace gradus::privacy::nn {

// Shapes: T steps, B batch, I input, H hidden, P output of one direction (H, or an LSTM's
// proj_size), L layers, D directions (1 or 2), G gates.

/// What DPRNN, DPGRU and DPLSTM share: parameters under torch::nn's names.
///
/// Layer l has weight_ih_l{l} [G*H, I or D*P], weight_hh_l{l} [G*H, P], with bias bias_ih_l{l} and
/// bias_hh_l{l} [G*H], with a projection weight_hr_l{l} [P, H]; those of the backward direction end
/// in _reverse. Names, shapes, order and initial values are those of torch::nn::RNN, GRU and LSTM,
/// so that states and torch::save files are exchanged as they are.
template <typename Derived>
class DPRecurrentImpl : public torch::nn::Cloneable<Derived> {
 public:
  void reset() override;

  /// Draws every parameter anew from U(-1/sqrt(H), 1/sqrt(H)) by the default generator, in the
  /// order of named_parameters().
  void reset_parameters();

  /// The parameters in the order of torch::nn's all_weights().
  std::vector<at::Tensor> all_weights() const;

  /// Parameters of one layer in one direction; undefined where there is none.
  struct Weights {
    at::Tensor ih = {};
    at::Tensor hh = {};
    at::Tensor bias_ih = {};
    at::Tensor bias_hh = {};
    at::Tensor hr = {};
  };

 protected:
  explicit DPRecurrentImpl(const torch::nn::detail::RNNOptionsBase& options);

  void print(std::ostream& stream, const char* name) const;

  torch::nn::detail::RNNOptionsBase base_;
  std::vector<Weights> weights_;  // L*D, a layer's directions beside each other.
};

/// Elman's network, h' = tanh or relu(W_ih x + b_ih + W_hh h + b_hh), in steps that autograd sees.
///
/// Takes the options, inputs and states of torch::nn::RNN and gives its results (to rounding: sums
/// run in another order). The products with the input are one at::linear over all steps, those with
/// the state one at::linear a step; the dimension of the batch stays one of its own throughout, in
/// the caller's order, also for packed sequences.
///
///     DPRNN rnn(torch::nn::RNNOptions(8, 16).num_layers(2).nonlinearity(torch::kReLU));
///     auto [output, h_n] = rnn->forward(torch::randn({5, 3, 8}));   // [5, 3, 16], [2, 3, 16]
class DPRNNImpl : public DPRecurrentImpl<DPRNNImpl> {
 public:
  DPRNNImpl(std::int64_t input_size, std::int64_t hidden_size)
      : DPRNNImpl(torch::nn::RNNOptions(input_size, hidden_size)) {}
  /// @throws UserError unless sizes and num_layers are >= 1 and dropout is in [0, 1].
  explicit DPRNNImpl(const torch::nn::RNNOptions& options);

  /// input [T, B, I] (batch_first: [B, T, I]), T >= 1, hx [L*D, B, H] or undefined for zeros ->
  /// output [T, B, D*H] (batch_first: [B, T, D*H]), last state [L*D, B, H]. Dropout acts on the
  /// output of each layer but the last, in training mode only, by the default generator.
  /// @throws UserError for another shape.
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& input, at::Tensor hx = {});

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

 public:
  /// The same over a packed sequence, sorted or not; states are in the caller's order. Inside,
  /// steps behind a sequence's end are computed and thrown away: it costs what the padded input
  /// costs.
  std::tuple<torch::nn::utils::rnn::PackedSequence, at::Tensor> forward_with_packed_input(
      const torch::nn::utils::rnn::PackedSequence& packed_input, at::Tensor hx = {});

  void pretty_print(std::ostream& stream) const override;

  torch::nn::RNNOptions options;
};
TORCH_MODULE(DPRNN);

/// Gated recurrent unit as torch::nn::GRU computes it (Cho et al. 2014, the reset gate applied
/// after the product with the state), in steps that autograd sees. See DPRNN.
class DPGRUImpl : public DPRecurrentImpl<DPGRUImpl> {
 public:
  DPGRUImpl(std::int64_t input_size, std::int64_t hidden_size)
      : DPGRUImpl(torch::nn::GRUOptions(input_size, hidden_size)) {}
  /// @throws UserError as DPRNN.
  explicit DPGRUImpl(const torch::nn::GRUOptions& options);

  /// As DPRNNImpl::forward.
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& input, at::Tensor hx = {});

 protected:
  FORWARD_HAS_DEFAULT_ARGS({1, torch::nn::AnyValue(at::Tensor())})

 public:
  /// As DPRNNImpl::forward_with_packed_input.
  std::tuple<torch::nn::utils::rnn::PackedSequence, at::Tensor> forward_with_packed_input(
      const torch::nn::utils::rnn::PackedSequence& packed_input, at::Tensor hx = {});

  void pretty_print(std::ostream& stream) const override;

  torch::nn::GRUOptions options;
};
TORCH_MODULE(DPGRU);

/// Long short-term memory (Hochreiter and Schmidhuber 1997, with forget gate), with an optional
/// projection of the output (Sak et al. 2014), in steps that autograd sees. See DPRNN.
class DPLSTMImpl : public DPRecurrentImpl<DPLSTMImpl> {
 public:
  DPLSTMImpl(std::int64_t input_size, std::int64_t hidden_size)
      : DPLSTMImpl(torch::nn::LSTMOptions(input_size, hidden_size)) {}
  /// @throws UserError as DPRNN, and unless 0 <= proj_size < hidden_size.
  explicit DPLSTMImpl(const torch::nn::LSTMOptions& options);

  /// input as DPRNNImpl::forward, states (h [L*D, B, P], c [L*D, B, H]) or none for zeros -> output
  /// [T, B, D*P] (batch_first: [B, T, D*P]), last states (h, c).
  /// @throws UserError for another shape.
  std::tuple<at::Tensor, std::tuple<at::Tensor, at::Tensor>> forward(
      const at::Tensor& input, std::optional<std::tuple<at::Tensor, at::Tensor>> hx_opt = {});

 protected:
  FORWARD_HAS_DEFAULT_ARGS(
      {1, torch::nn::AnyValue(std::optional<std::tuple<at::Tensor, at::Tensor>>())})

 public:
  /// As DPRNNImpl::forward_with_packed_input.
  std::tuple<torch::nn::utils::rnn::PackedSequence, std::tuple<at::Tensor, at::Tensor>>
  forward_with_packed_input(const torch::nn::utils::rnn::PackedSequence& packed_input,
                            std::optional<std::tuple<at::Tensor, at::Tensor>> hx_opt = {});

  void pretty_print(std::ostream& stream) const override;

  torch::nn::LSTMOptions options;
};
TORCH_MODULE(DPLSTM);

}  // namespace gradus::privacy::nn
