#include <gradus/models/lstm_language_model.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>

#include <gradus/models/internal/layers.h>

namespace gradus::models {

std::string defect(const LstmLanguageModelOptions& options) {
  std::string problem = internal::count_defect({{"vocabulary", options.vocabulary},
                                                {"embedding", options.embedding},
                                                {"width", options.width},
                                                {"layers", options.layers}});
  if (!problem.empty()) return problem;
  if (options.tied && options.embedding != options.width) {
    return "embedding and width must be equal for a tied head; got " +
           std::to_string(options.embedding) + " and " + std::to_string(options.width);
  }
  return internal::dropout_defect(options.dropout);
}

std::int64_t parameter_count(const LstmLanguageModelOptions& options) {
  const std::int64_t V = options.vocabulary, E = options.embedding, C = options.width;
  const std::int64_t lstm = 4 * C * (E + C + 2) + (options.layers - 1) * 4 * C * (2 * C + 2);
  return V * E + lstm + (options.tied ? 0 : V * (C + 1));
}

LstmLanguageModelImpl::LstmLanguageModelImpl(LstmLanguageModelOptions options) : options_(options) {
  internal::check("lstm_language_model", options_);
  LstmLanguageModelImpl::reset();
}

void LstmLanguageModelImpl::reset() {
  embedding = register_module("embedding",
                              internal::make_embedding(options_.vocabulary, options_.embedding));
  // LSTM warns about a dropout that has no layers to act between.
  lstm = register_module("lstm", std::make_shared<torch::nn::LSTMImpl>(
                                     torch::nn::LSTMOptions(options_.embedding, options_.width)
                                         .num_layers(options_.layers)
                                         .dropout(options_.layers > 1 ? options_.dropout : 0.0)));
  if (!options_.tied) {
    head = register_module("head", internal::make_linear(options_.width, options_.vocabulary));
  }
  reset_parameters();
}

void LstmLanguageModelImpl::reset_parameters(const std::optional<at::Generator>& generator) {
  const at::NoGradGuard no_grad;
  embedding->weight.normal_(0.0, internal::root_of_inverse(options_.embedding), generator);
  const double bound = internal::root_of_inverse(options_.width);
  for (auto& parameter : lstm->parameters()) parameter.uniform_(-bound, bound, generator);
  if (!head) return;
  head->weight.uniform_(-bound, bound, generator);
  head->bias.zero_();
}

at::Tensor LstmLanguageModelImpl::forward(const at::Tensor& ids_BT) {
  return project(hidden(ids_BT));
}

at::Tensor LstmLanguageModelImpl::hidden(const at::Tensor& ids_BT) {
  internal::check_ids("lstm_language_model", "ids", ids_BT);
  // The layers run over a leading time; only their output is laid out by batch again, so that the
  // projection is one matrix product and the larger logits need no copy.
  const at::Tensor x_TBE = at::dropout(at::embedding(embedding->weight, ids_BT.t().contiguous()),
                                       options_.dropout, is_training());
  const at::Tensor y_BTC = std::get<0>(lstm->forward(x_TBE)).transpose(0, 1).contiguous();
  return at::dropout(y_BTC, options_.dropout, is_training());
}

at::Tensor LstmLanguageModelImpl::project(const at::Tensor& x_BTC) {
  return head ? internal::call(*head, x_BTC) : at::linear(x_BTC, embedding->weight);
}

}  // namespace gradus::models
