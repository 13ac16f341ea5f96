#include <gradus/models/text_classifier.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/dropout.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>

#include <gradus/models/internal/layers.h>

namespace gradus::models {

std::string defect(const TextClassifierOptions& options) {
  const std::string problem = internal::count_defect({{"vocabulary", options.vocabulary},
                                                      {"classes", options.classes},
                                                      {"embedding", options.embedding},
                                                      {"width", options.width},
                                                      {"layers", options.layers}});
  return problem.empty() ? internal::dropout_defect(options.dropout) : problem;
}

std::int64_t parameter_count(const TextClassifierOptions& options) {
  const std::int64_t E = options.embedding, C = options.width;
  const std::int64_t lstm = 4 * C * (E + C + 2) + (options.layers - 1) * 4 * C * (2 * C + 2);
  return options.vocabulary * E + lstm + options.classes * (C + 1);
}

TextClassifierImpl::TextClassifierImpl(const TextClassifierOptions& options) : options_(options) {
  internal::check("text_classifier", options_);
  TextClassifierImpl::reset();
}

void TextClassifierImpl::reset() {
  embedding = register_module("embedding",
                              internal::make_embedding(options_.vocabulary, options_.embedding));
  // LSTM warns about a dropout that has no layers to act between.
  lstm = register_module("lstm", std::make_shared<torch::nn::LSTMImpl>(
                                     torch::nn::LSTMOptions(options_.embedding, options_.width)
                                         .num_layers(options_.layers)
                                         .batch_first(true)
                                         .dropout(options_.layers > 1 ? options_.dropout : 0.0)));
  head = register_module("head", internal::make_linear(options_.width, options_.classes));
  reset_parameters();
}

void TextClassifierImpl::reset_parameters(const std::optional<at::Generator>& generator) {
  const at::NoGradGuard no_grad;
  embedding->weight.normal_(0.0, 1.0, generator);
  const double bound = internal::root_of_inverse(options_.width);
  for (auto& parameter : lstm->parameters()) parameter.uniform_(-bound, bound, generator);
  for (auto& parameter : head->parameters()) parameter.uniform_(-bound, bound, generator);
}

at::Tensor TextClassifierImpl::forward(const at::Tensor& ids_BT, const at::Tensor& lengths_B) {
  internal::check_ids("text_classifier", "ids", ids_BT);
  const std::int64_t B = ids_BT.size(0), T = ids_BT.size(1), C = options_.width;
  TORCH_CHECK_VALUE(!lengths_B.defined() || (lengths_B.scalar_type() == at::kLong &&
                                             lengths_B.dim() == 1 && lengths_B.size(0) == B),
                    "[text_classifier] lengths must be int64 [", B, "]; got ",
                    lengths_B.scalar_type(), " ", lengths_B.sizes());
  const at::Tensor x_BTE = at::dropout(embedding->forward(ids_BT), options_.dropout, is_training());
  const at::Tensor y_BTC = std::get<0>(lstm->forward(x_BTE));
  const at::Tensor last_BC =
      lengths_B.defined()
          ? y_BTC.gather(1, (lengths_B.clamp_min(1) - 1).view({B, 1, 1}).expand({B, 1, C}))
                .squeeze(1)
          : y_BTC.select(1, T - 1);
  return head->forward(at::dropout(last_BC, options_.dropout, is_training()));
}

}  // namespace gradus::models
