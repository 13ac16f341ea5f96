#include <gradus/models/recurrent_translator.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>

#include <gradus/models/internal/layers.h>

namespace gradus::models {

using internal::call;

namespace {

constexpr const char* kComponent = "recurrent_translator";

// Where each token of [S, B] rows (one row a position and sentence) lies when every sentence is
// turned round within its own length: the direction from the end then reads no padding first, and
// what an LSTM makes of padding comes after all that is used.
struct Reversal {
  at::Tensor rows;    // [S B], its own inverse.
  at::Tensor last_B;  // Row of each sentence's last token.
};

Reversal reversal(std::int64_t S, std::int64_t B, const at::Tensor& padding_BS,
                  const at::TensorOptions& options) {
  const at::Tensor positions = at::arange(S, options).unsqueeze(1);
  const at::Tensor b_B = at::arange(B, options);
  const at::Tensor last_B =
      padding_BS.defined() ? (S - 1) - padding_BS.sum(1) : at::full({B}, S - 1, options);
  const at::Tensor t_SB = at::where(positions <= last_B, last_B - positions, positions);
  return {(t_SB * B + b_B).flatten(), last_B * B + b_B};
}

at::Tensor take_rows(const at::Tensor& x_SBC, const at::Tensor& rows) {
  return x_SBC.flatten(0, 1).index_select(0, rows).view_as(x_SBC);
}

}  // namespace

std::string defect(const RecurrentTranslatorOptions& options) {
  std::string problem = internal::count_defect({
      {"source_vocabulary", options.source_vocabulary},
      {"target_vocabulary", options.target_vocabulary},
      {"width", options.width},
      {"layers", options.layers},
  });
  if (!problem.empty()) return problem;
  if (options.width % 2 != 0) return "width must be even; got " + std::to_string(options.width);
  return internal::dropout_defect(options.dropout);
}

std::int64_t parameter_count(const RecurrentTranslatorOptions& options) {
  const std::int64_t C = options.width, L = options.layers, V = options.target_vocabulary;
  const std::int64_t encoder = L * (6 * C * C + 8 * C);
  const std::int64_t decoder = L * (8 * C * C + 8 * C) + 4 * C * C;
  return (options.source_vocabulary + V) * C + encoder + decoder + 3 * C * C + V * (C + 1);
}

RecurrentTranslatorImpl::RecurrentTranslatorImpl(RecurrentTranslatorOptions options)
    : options_(options) {
  internal::check(kComponent, options_);
  RecurrentTranslatorImpl::reset();
}

void RecurrentTranslatorImpl::reset() {
  const std::int64_t C = options_.width;
  source_embedding =
      register_module("source_embedding", internal::make_embedding(options_.source_vocabulary, C));
  target_embedding =
      register_module("target_embedding", internal::make_embedding(options_.target_vocabulary, C));
  forward_ = register_module("encoder_forward", std::make_shared<torch::nn::ModuleListImpl>());
  backward_ = register_module("encoder_backward", std::make_shared<torch::nn::ModuleListImpl>());
  cells_ = register_module("cells", std::make_shared<torch::nn::ModuleListImpl>());
  for (std::int64_t i = 0; i < options_.layers; ++i) {
    forward_->push_back(torch::nn::LSTMImpl(torch::nn::LSTMOptions(C, C / 2)));
    backward_->push_back(torch::nn::LSTMImpl(torch::nn::LSTMOptions(C, C / 2)));
    // The first cell reads the token and the attentional vector of the position before.
    cells_->push_back(torch::nn::LSTMCellImpl(torch::nn::LSTMCellOptions(i == 0 ? 2 * C : C, C)));
  }
  attention = register_module("attention", internal::make_linear(C, C, /*bias=*/false));
  combine = register_module("combine", internal::make_linear(2 * C, C, /*bias=*/false));
  output = register_module("output", internal::make_linear(C, options_.target_vocabulary));
  reset_parameters();
}

void RecurrentTranslatorImpl::reset_parameters(const std::optional<at::Generator>& generator) {
  const at::NoGradGuard no_grad;
  const std::int64_t C = options_.width;
  const double bound = internal::root_of_inverse(C), half_bound = internal::root_of_inverse(C / 2);
  source_embedding->weight.normal_(0.0, bound, generator);
  target_embedding->weight.normal_(0.0, bound, generator);
  for (auto& parameter : forward_->parameters()) {
    parameter.uniform_(-half_bound, half_bound, generator);
  }
  for (auto& parameter : backward_->parameters()) {
    parameter.uniform_(-half_bound, half_bound, generator);
  }
  for (auto& parameter : cells_->parameters()) parameter.uniform_(-bound, bound, generator);
  attention->weight.uniform_(-bound, bound, generator);
  combine->weight.uniform_(-bound, bound, generator);
  output->weight.uniform_(-bound, bound, generator);
  output->bias.zero_();
}

at::Tensor RecurrentTranslatorImpl::forward(const at::Tensor& source_BS,
                                            const at::Tensor& target_BT,
                                            const at::Tensor& source_padding_BS) {
  internal::check_ids(kComponent, "source ids", source_BS);
  internal::check_ids(kComponent, "target ids", target_BT);
  internal::check_batches(kComponent, source_BS, target_BT);
  const RecurrentTranslatorMemory memory = encode(source_BS, source_padding_BS);
  RecurrentTranslatorState state = memory.start;
  const at::Tensor embedded_TBC =
      at::embedding(target_embedding->weight, target_BT.t().contiguous());
  std::vector<at::Tensor> attentional;
  attentional.reserve(static_cast<std::size_t>(target_BT.size(1)));
  // One unbind, since the gradient of a select is as large as what it selects from.
  for (const at::Tensor& embedded_BC : embedded_TBC.unbind(0)) {
    attentional.push_back(advance(embedded_BC, memory, state));
  }
  return call(*output, at::dropout(at::stack(attentional, 1), options_.dropout, is_training()));
}

RecurrentTranslatorMemory RecurrentTranslatorImpl::encode(const at::Tensor& source_BS,
                                                          const at::Tensor& source_padding_BS) {
  internal::check_ids(kComponent, "source ids", source_BS);
  internal::check_padding(kComponent, source_padding_BS, source_BS.sizes());
  const std::int64_t B = source_BS.size(0), S = source_BS.size(1);
  const Reversal turned =
      reversal(S, B, source_padding_BS, at::device(source_BS.device()).dtype(at::kLong));
  RecurrentTranslatorMemory memory;
  memory.padding_BS = source_padding_BS;
  at::Tensor x_SBC = at::embedding(source_embedding->weight, source_BS.t().contiguous());
  for (std::size_t i = 0; i < forward_->size(); ++i) {
    x_SBC = at::dropout(x_SBC, options_.dropout, is_training());
    const at::Tensor ahead = std::get<0>(forward_->at<torch::nn::LSTMImpl>(i).forward(x_SBC));
    const at::Tensor turned_back =
        std::get<0>(backward_->at<torch::nn::LSTMImpl>(i).forward(take_rows(x_SBC, turned.rows)));
    memory.start.hidden.push_back(
        at::cat({ahead.flatten(0, 1).index_select(0, turned.last_B),
                 turned_back.flatten(0, 1).index_select(0, turned.last_B)},
                1));
    x_SBC = at::cat({ahead, take_rows(turned_back, turned.rows)}, 2);
  }
  memory.values_BSC = x_SBC.transpose(0, 1).contiguous();
  memory.keys_BSC = call(*attention, memory.values_BSC);
  const at::Tensor zero_BC = at::zeros({B, options_.width}, x_SBC.options());
  memory.start.cell.assign(cells_->size(), zero_BC);
  memory.start.fed_BC = zero_BC;
  return memory;
}

at::Tensor RecurrentTranslatorImpl::step(const at::Tensor& ids_B,
                                         const RecurrentTranslatorMemory& memory,
                                         RecurrentTranslatorState& state) {
  TORCH_CHECK_VALUE(ids_B.dim() == 1 && ids_B.size(0) == memory.values_BSC.size(0), "[", kComponent,
                    "] ids must have shape [batch], the memory's batch of ",
                    memory.values_BSC.size(0), "; got ", ids_B.sizes());
  const at::Tensor attentional_BC =
      advance(at::embedding(target_embedding->weight, ids_B), memory, state);
  return call(*output, at::dropout(attentional_BC, options_.dropout, is_training()));
}

at::Tensor RecurrentTranslatorImpl::advance(const at::Tensor& embedded_BC,
                                            const RecurrentTranslatorMemory& memory,
                                            RecurrentTranslatorState& state) {
  at::Tensor x = at::cat({embedded_BC, state.fed_BC}, 1);
  for (std::size_t i = 0; i < cells_->size(); ++i) {
    x = at::dropout(x, options_.dropout, is_training());
    std::tie(state.hidden[i], state.cell[i]) = cells_->at<torch::nn::LSTMCellImpl>(i).forward(
        x, std::make_tuple(state.hidden[i], state.cell[i]));
    x = state.hidden[i];
  }
  at::Tensor scores = at::bmm(memory.keys_BSC, x.unsqueeze(2));
  if (memory.padding_BS.defined()) {
    scores = scores.masked_fill(memory.padding_BS.unsqueeze(2), -INFINITY);
  }
  const at::Tensor context_BC =
      at::bmm(at::softmax(scores, 1).transpose(1, 2), memory.values_BSC).squeeze(1);
  state.fed_BC = at::tanh(call(*combine, at::cat({context_BC, x}, 1)));
  return state.fed_BC;
}

}  // namespace gradus::models
