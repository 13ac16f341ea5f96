#include <gradus/train/generate.h>

#include <algorithm>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/topk.h>

#include <gradus/base/error.h>

namespace gradus::train {
namespace {

std::int64_t choose(at::Tensor logits_V, const GenerateOptions& options, at::Generator& generator) {
  if (options.temperature == 0.0) return logits_V.argmax().item<std::int64_t>();
  const std::int64_t count = options.top_k == 0
                                 ? logits_V.size(0)
                                 : std::min<std::int64_t>(options.top_k, logits_V.size(0));
  const auto [values, indices] = at::topk(logits_V, count);
  const at::Tensor probabilities = at::softmax(values / options.temperature, 0);
  return indices[at::multinomial(probabilities, 1, false, generator).item<std::int64_t>()]
      .item<std::int64_t>();
}

}  // namespace

std::string generate(models::GptImpl& gpt, const data::Tokenizer& tokenizer,
                     const GenerateOptions& options) {
  GRADUS_CHECK("generate", !options.prompt.empty(),
               "a prompt of at least one character is required; got none");
  GRADUS_CHECK("generate", options.tokens >= 0 && options.temperature >= 0.0 && options.top_k >= 0,
               "tokens, temperature and top_k must be >= 0; got ", options.tokens, ", ",
               options.temperature, ", ", options.top_k);
  std::vector<std::int64_t> tokens = tokenizer.encode(options.prompt);
  const at::NoGradGuard no_grad;
  const bool was_training = gpt.is_training();
  gpt.eval();
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  const at::Device device = gpt.parameters().front().device();
  try {
    for (std::int64_t i = 0; i < options.tokens; ++i) {
      const std::int64_t length =
          std::min(static_cast<std::int64_t>(tokens.size()), gpt.options().context);
      const std::vector<std::int64_t> window(tokens.end() - length, tokens.end());
      const at::Tensor hidden = gpt.hidden(at::tensor(window, at::kLong).unsqueeze(0).to(device));
      const at::Tensor logits_V =
          gpt.head(hidden.select(1, length - 1)).squeeze(0).to(at::kCPU, at::kFloat);
      tokens.push_back(choose(logits_V, options, generator));
    }
  } catch (...) {
    gpt.train(was_training);
    throw;
  }
  gpt.train(was_training);
  return tokenizer.decode(tokens);
}

}  // namespace gradus::train
