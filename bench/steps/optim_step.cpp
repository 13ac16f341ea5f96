// Optimizer steps on a gradient that stays: 25 million parameters in the shapes of a GPT with an
// untied head, and a small convolutional net beside it. bench/steps/optim_peer.py has the same.
// And a training of a small GPT on bytes, for what an optimizer does to the loss.

#include <cmath>
#include <cstdint>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "protocol.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/stack.h>

#include <gradus/models/gpt.h>
#include <gradus/optim/adafactor.h>
#include <gradus/optim/adam.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/eight_bit.h>
#include <gradus/optim/sgd.h>

namespace gradus::bench {

namespace {

using Shape = std::vector<std::int64_t>;

std::vector<Shape> shapes() {
  constexpr std::int64_t kWidth = 512, kVocabulary = 8192, kContext = 1024, kLayers = 5;
  std::vector<Shape> result{{kVocabulary, kWidth}, {kContext, kWidth}};
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    for (const Shape& shape : std::vector<Shape>{{kWidth},
                                                 {kWidth},
                                                 {3 * kWidth, kWidth},
                                                 {3 * kWidth},
                                                 {kWidth, kWidth},
                                                 {kWidth},
                                                 {kWidth},
                                                 {kWidth},
                                                 {4 * kWidth, kWidth},
                                                 {4 * kWidth},
                                                 {kWidth, 4 * kWidth},
                                                 {kWidth}}) {
      result.push_back(shape);
    }
  }
  result.push_back({kVocabulary, kWidth});
  for (const std::int64_t channels : {64, 128}) {
    result.push_back({channels, channels, 3, 3});
    result.push_back({channels});
  }
  return result;
}

std::unique_ptr<optim::Optimizer> make_optimizer(const std::string& name,
                                                 std::vector<at::Tensor> parameters, double lr) {
  if (name == "adamw")
    return std::make_unique<optim::AdamW>(std::move(parameters), optim::AdamWOptions{.lr = lr});
  if (name == "adam")
    return std::make_unique<optim::Adam>(std::move(parameters), optim::AdamOptions{.lr = lr});
  if (name == "adam8bit")
    return std::make_unique<optim::Adam8bit>(std::move(parameters),
                                             optim::Adam8bitOptions{.lr = lr});
  if (name == "sgd")
    return std::make_unique<optim::SGD>(std::move(parameters),
                                        optim::SGDOptions{.lr = lr, .momentum = 0.9});
  if (name == "sgd8bit")
    return std::make_unique<optim::SGD8bit>(std::move(parameters), optim::SGD8bitOptions{.lr = lr});
  if (name == "adafactor")
    return std::make_unique<optim::Adafactor>(std::move(parameters),
                                              optim::AdafactorOptions{.lr = lr});
  throw std::invalid_argument(
      "--mode must be adamw, adam, adam8bit, sgd, sgd8bit or adafactor; got '" + name + "'");
}

std::string state_answer(const optim::Optimizer& optimizer) {
  std::int64_t bytes = 0;
  for (const auto& tensor : optimizer.state_tensors()) {
    bytes += static_cast<std::int64_t>(tensor.storage().nbytes());
  }
  std::ostringstream answer;
  answer << "{\"state_bytes\": " << bytes << "}";
  return answer.str();
}

struct Steps {
  std::vector<at::Tensor> parameters;
  std::unique_ptr<optim::Optimizer> optimizer;

  explicit Steps(const StepOptions& options) {
    at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
    for (const auto& shape : shapes()) {
      parameters.push_back(at::randn(shape, generator).mul_(0.02).requires_grad_());
      parameters.back().mutable_grad() = at::randn(shape, generator).mul_(1e-3);
    }
    optimizer = make_optimizer(options.mode, parameters, 1e-3);
  }

  // Answers a number that depends on the step, in place of a loss: the first parameters' values.
  double run() {
    optimizer->step();
    double sum = 0.0;
    for (const auto& parameter : parameters) {
      sum += std::abs(double{*parameter.const_data_ptr<float>()});
    }
    return sum;
  }
};

// Text with structure at several lengths, made on the spot: words of a fixed lexicon that follow
// one another by a rule with some noise.
struct Training {
  models::Gpt model{
      models::GptOptions{.vocabulary = 64, .context = 64, .layers = 2, .heads = 4, .width = 128}};
  std::unique_ptr<optim::Optimizer> optimizer;
  at::Tensor text;
  at::Generator generator;

  explicit Training(const StepOptions& options)
      : generator(at::make_generator<at::CPUGeneratorImpl>(options.seed)) {
    model->reset_parameters(generator);
    constexpr std::int64_t kWords = 200, kLetters = 5, kLength = 20000;
    const auto lexicon = at::randint(0, 64, {kWords, kLetters}, generator, at::kLong);
    const auto noise = at::randint(0, 8, {kLength}, generator, at::kLong);
    std::vector<at::Tensor> words;
    std::int64_t word = 1;
    for (std::int64_t i = 0; i < kLength; ++i) {
      word = (word * 7 + noise[i].item<std::int64_t>() / 6 + 3) % kWords;
      words.push_back(lexicon[word]);
    }
    text = at::cat(words);
    optimizer = make_optimizer(options.mode, model->parameters(),
                               options.mode.starts_with("sgd") ? 0.1 : 2e-3);
  }

  double run() {
    const auto starts = at::randint(0, text.numel() - 65, {16}, generator, at::kLong);
    std::vector<at::Tensor> rows;
    for (std::int64_t i = 0; i < starts.numel(); ++i) {
      const auto start = starts[i].item<std::int64_t>();
      rows.push_back(text.slice(0, start, start + 65));
    }
    const auto batch = at::stack(rows);
    optimizer->zero_grad();
    const auto logits = model->forward(batch.slice(1, 0, 64));
    const auto loss =
        at::cross_entropy_loss(logits.reshape({-1, 64}), batch.slice(1, 1, 65).reshape({-1}));
    loss.backward();
    optimizer->step();
    return loss.item<double>();
  }
};

template <typename Kind>
Program make(const StepOptions& options) {
  const auto kind = std::make_shared<Kind>(options);
  return {.step = [kind] { return kind->run(); },
          .requests = {{"state", [kind] { return state_answer(*kind->optimizer); }}}};
}

}  // namespace

Program make_optim_step(const StepOptions& options) { return make<Steps>(options); }
Program make_optim_training(const StepOptions& options) { return make<Training>(options); }

}  // namespace gradus::bench
