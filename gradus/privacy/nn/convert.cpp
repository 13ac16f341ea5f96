#include <gradus/privacy/nn/convert.h>

#include <gradus/base/error.h>
#include <gradus/privacy/nn/internal/plain_slots.h>

namespace gradus::privacy::nn {

namespace {

template <typename Holder, typename Layer>
Holder twin_of(const Layer& layer) {
  Holder twin(layer.options);
  const auto from = internal::plain_slots(layer);
  twin->to(from[0].parts[0].device(), from[0].parts[0].scalar_type());
  const auto to = internal::plain_slots(*twin);
  GRADUS_INTERNAL_CHECK("convert", from.size() == to.size(), "the layers differ in parameters");
  for (std::size_t i = 0; i < from.size(); ++i) {
    const at::Tensor value = from[i].value();
    GRADUS_INTERNAL_CHECK("convert", from[i].name == to[i].name, from[i].name, " met ", to[i].name);
    const std::string fault = to[i].fault(value);
    GRADUS_CHECK("convert", fault.empty(), "all parameters of a layer must fit together; ", fault);
    to[i].set(value);
    to[i].set_requires_grad(from[i].requires_grad());
  }
  twin->train(layer.is_training());
  return twin;
}

}  // namespace

DPRNN convert(const torch::nn::RNNImpl& layer) { return twin_of<DPRNN>(layer); }
DPGRU convert(const torch::nn::GRUImpl& layer) { return twin_of<DPGRU>(layer); }
DPLSTM convert(const torch::nn::LSTMImpl& layer) { return twin_of<DPLSTM>(layer); }
DPMultiheadAttention convert(const torch::nn::MultiheadAttentionImpl& layer) {
  return twin_of<DPMultiheadAttention>(layer);
}
torch::nn::RNN convert(const DPRNNImpl& layer) { return twin_of<torch::nn::RNN>(layer); }
torch::nn::GRU convert(const DPGRUImpl& layer) { return twin_of<torch::nn::GRU>(layer); }
torch::nn::LSTM convert(const DPLSTMImpl& layer) { return twin_of<torch::nn::LSTM>(layer); }
torch::nn::MultiheadAttention convert(const DPMultiheadAttentionImpl& layer) {
  return twin_of<torch::nn::MultiheadAttention>(layer);
}

std::shared_ptr<torch::nn::Module> replacement_of(const torch::nn::Module& layer) {
  if (const auto* rnn = layer.as<torch::nn::RNNImpl>()) return convert(*rnn).ptr();
  if (const auto* gru = layer.as<torch::nn::GRUImpl>()) return convert(*gru).ptr();
  if (const auto* lstm = layer.as<torch::nn::LSTMImpl>()) return convert(*lstm).ptr();
  if (const auto* attention = layer.as<torch::nn::MultiheadAttentionImpl>()) {
    return convert(*attention).ptr();
  }
  return nullptr;
}

}  // namespace gradus::privacy::nn
