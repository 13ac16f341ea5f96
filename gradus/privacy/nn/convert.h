#pragma once

#include <memory>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/rnn.h>

#include <gradus/privacy/nn/multihead_attention.h>
#include <gradus/privacy/nn/recurrent.h>

namespace gradus::privacy::nn {

/// A new layer of the other kind with the same options, weights (copied), dtype, device, mode
/// (training or evaluation) and frozen parameters. Of three frozen and live projections the one
/// in_proj_weight made is live. Making a layer draws from the default generator, as always.
DPRNN convert(const torch::nn::RNNImpl& layer);
DPGRU convert(const torch::nn::GRUImpl& layer);
DPLSTM convert(const torch::nn::LSTMImpl& layer);
DPMultiheadAttention convert(const torch::nn::MultiheadAttentionImpl& layer);
torch::nn::RNN convert(const DPRNNImpl& layer);
torch::nn::GRU convert(const DPGRUImpl& layer);
torch::nn::LSTM convert(const DPLSTMImpl& layer);
torch::nn::MultiheadAttention convert(const DPMultiheadAttentionImpl& layer);

/// convert() of a torch::nn layer whose type is known at run time only; null if gradus has no layer
/// for it. The caller puts it in place: a module's members of type torch::nn::LSTM cannot hold it,
/// and Module::replace_module() would leave them as they were, so no tree is rewritten here.
std::shared_ptr<torch::nn::Module> replacement_of(const torch::nn::Module& layer);

}  // namespace gradus::privacy::nn
