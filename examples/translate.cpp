// Trains an English-German translator on the LibreOffice help, inside a memory limit.
//
//   translate --model transformer --memory 300MiB --depth 8 --steps 300 --out runs/translate
//   translate --model recurrent ...    an LSTM with attention
//   translate --compare ...            the deepest plain model that fits beside it
//
// The text comes from the Debian packages libreoffice-help-en-us and libreoffice-help-de, or from
// --data.

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <examples/support.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/data/parallel_text.h>
#include <gradus/data/tokenizer.h>
#include <gradus/metrics/bleu.h>
#include <gradus/models/recurrent_translator.h>
#include <gradus/models/transformer.h>

namespace {

using namespace gradus;

struct Options {
  std::string model = "transformer";  ///< Or "recurrent".
  std::int64_t width = 128;           ///< Of the model.
  std::int64_t vocabulary = 4000;     ///< Pieces that both languages share.
  std::int64_t max_tokens = 40;       ///< Longest side of a pair.
  std::int64_t eval_pairs = 400;      ///< Of the test pairs, for the final BLEU.
  double dropout = 0.1;
};

/// A model that learns and translates, whatever it is made of.
class Translator {
 public:
  virtual ~Translator() = default;
  virtual std::shared_ptr<torch::nn::Module> module() = 0;
  virtual at::Tensor forward(const data::PairBatch& batch) = 0;
  /// Greedy translation: the likeliest token at each position, [B, <= longest].
  virtual at::Tensor translate(const data::PairBatch& batch, const data::PairTokens& tokens,
                               std::int64_t longest) = 0;
};

/// True once each row has its end.
bool all_ended(at::Tensor& ended_B, const at::Tensor& ids_B, std::int64_t end) {
  ended_B = ended_B.logical_or(ids_B.eq(end));
  return ended_B.all().item<bool>();
}

class TransformerTranslator final : public Translator {
 public:
  explicit TransformerTranslator(const models::TransformerOptions& options) : model_(options) {}
  std::shared_ptr<torch::nn::Module> module() override { return model_.ptr(); }
  at::Tensor forward(const data::PairBatch& batch) override {
    return model_->forward(batch.source, batch.inputs, batch.source_padding);
  }
  at::Tensor translate(const data::PairBatch& batch, const data::PairTokens& tokens,
                       std::int64_t longest) override {
    const at::Tensor memory = model_->encode(batch.source, batch.source_padding);
    at::Tensor ids = torch::full({batch.size(), 1}, tokens.begin, torch::kLong);
    at::Tensor ended = torch::zeros({batch.size()}, torch::kBool);
    while (ids.size(1) <= longest) {
      const at::Tensor next =
          model_->decode(ids, memory, batch.source_padding).select(1, -1).argmax(-1);
      ids = torch::cat({ids, next.unsqueeze(1)}, 1);
      if (all_ended(ended, next, tokens.end)) break;
    }
    return ids.slice(1, 1);
  }

 private:
  models::Transformer model_;
};

class RecurrentTranslation final : public Translator {
 public:
  explicit RecurrentTranslation(const models::RecurrentTranslatorOptions& options)
      : model_(options) {}
  std::shared_ptr<torch::nn::Module> module() override { return model_.ptr(); }
  at::Tensor forward(const data::PairBatch& batch) override {
    return model_->forward(batch.source, batch.inputs, batch.source_padding);
  }
  at::Tensor translate(const data::PairBatch& batch, const data::PairTokens& tokens,
                       std::int64_t longest) override {
    const auto memory = model_->encode(batch.source, batch.source_padding);
    auto state = memory.start;
    at::Tensor next = torch::full({batch.size()}, tokens.begin, torch::kLong);
    at::Tensor ended = torch::zeros({batch.size()}, torch::kBool);
    std::vector<at::Tensor> ids;
    for (std::int64_t t = 0; t < longest; ++t) {
      next = model_->step(next, memory, state).argmax(-1);
      ids.push_back(next);
      if (all_ended(ended, next, tokens.end)) break;
    }
    return torch::stack(ids, 1);
  }

 private:
  models::RecurrentTranslator model_;
};

class Translation final : public examples::Subject {
 public:
  Translation(const Options& options, const examples::RunOptions& run)
      : options_(options), run_(run) {}

  /// Reads the pages and trains the tokenizer. @throws UserError.
  void load() {
    text_ = data::load_help_pairs({.directory = run_.data});
    GRADUS_CHECK("translate", !text_.test.empty(), "the help must have pairs for the test; '",
                 run_.data, "' has too few pages");
    std::string corpus;
    for (const data::TextPair& pair : text_.train)
      corpus += pair.source + "\n" + pair.target + "\n";
    tokenizer_ = data::make_tokenizer({.vocabulary_size = options_.vocabulary}, corpus);
    tokens_ = data::pair_tokens(*tokenizer_);
    train_ = data::encode_pairs(*tokenizer_, text_.train, options_.max_tokens);
    GRADUS_CHECK("translate", !train_.empty(), "--max-tokens ", options_.max_tokens,
                 " must leave pairs to train on; it leaves none");
  }

  std::string task() const override { return "English to German, LibreOffice help"; }
  std::string model_name(std::int64_t depth) const override {
    return base::join(options_.model, ", ", depth, " + ", depth, " layers, width ", options_.width);
  }
  std::string quality_name() const override { return "BLEU"; }
  std::string loss_label() const override { return "Cross-entropy, nats per token"; }
  std::string item() const override { return "token"; }
  std::int64_t smallest_depth() const override { return 1; }
  std::int64_t depth_step() const override { return 1; }
  std::vector<std::pair<std::string, std::string>> settings() const override {
    return {{"model", options_.model},
            {"width", std::to_string(options_.width)},
            {"vocabulary", std::to_string(options_.vocabulary)},
            {"max-tokens", std::to_string(options_.max_tokens)},
            {"dropout", base::join(options_.dropout)},
            {"eval-pairs", std::to_string(options_.eval_pairs)},
            {"bleu", "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp"}};
  }

  std::shared_ptr<torch::nn::Module> begin(std::int64_t depth) override {
    if (options_.model == "recurrent") {
      translator_ = std::make_unique<RecurrentTranslation>(
          models::RecurrentTranslatorOptions{.source_vocabulary = tokens_.vocabulary_size,
                                             .target_vocabulary = tokens_.vocabulary_size,
                                             .width = options_.width,
                                             .layers = depth,
                                             .dropout = options_.dropout});
    } else {
      translator_ = std::make_unique<TransformerTranslator>(
          models::TransformerOptions{.source_vocabulary = tokens_.vocabulary_size,
                                     .target_vocabulary = tokens_.vocabulary_size,
                                     .context = longest() + 1,
                                     .encoder_layers = depth,
                                     .decoder_layers = depth,
                                     .heads = 4,
                                     .width = options_.width,
                                     .hidden = 4 * options_.width,
                                     .dropout = options_.dropout});
    }
    batches_.emplace(train_, tokens_,
                     data::PairBatchOptions{.batch_size = run_.batch,
                                            .seed = static_cast<std::uint64_t>(run_.seed)});
    return translator_->module();
  }

  void end() override {
    translator_.reset();
    batches_.reset();
    batch_ = {};
  }

  std::int64_t draw(bool largest) override {
    batch_ = {};
    batch_ = largest ? batches_->largest() : batches_->next();
    return batch_.target_tokens;
  }

  at::Tensor loss() override {
    const at::Tensor logits = translator_->forward(batch_);
    return torch::cross_entropy_loss(logits.flatten(0, 1), batch_.targets.flatten(), {},
                                     at::Reduction::Mean, tokens_.padding);
  }

  examples::Quality evaluate(bool final) override {
    constexpr std::int64_t kQuickPairs = 64;
    batch_ = {};
    const std::shared_ptr<torch::nn::Module> module = translator_->module();
    const bool training = module->is_training();
    module->eval();
    const std::vector<data::TextPair> pairs =
        final ? chosen(text_.test, options_.eval_pairs)
              : chosen(text_.validation.empty() ? text_.test : text_.validation,
                       std::min(kQuickPairs, options_.eval_pairs));
    std::vector<std::string> hypotheses;
    std::vector<std::string> references;
    for (std::size_t begin = 0; begin < pairs.size();
         begin += static_cast<std::size_t>(run_.batch)) {
      const std::size_t end = std::min(pairs.size(), begin + static_cast<std::size_t>(run_.batch));
      translate({pairs.begin() + static_cast<std::ptrdiff_t>(begin),
                 pairs.begin() + static_cast<std::ptrdiff_t>(end)},
                hypotheses);
    }
    for (const data::TextPair& pair : pairs) references.push_back(pair.target);
    module->train(training);
    const metrics::Bleu bleu = metrics::corpus_bleu(hypotheses, references);
    char text[64];
    std::snprintf(text, sizeof text, "%.2f on %zu pairs", bleu.score, pairs.size());
    return {.value = bleu.score, .text = text, .sample = sample(pairs, hypotheses)};
  }

 private:
  /// Tokens that a translation may have.
  std::int64_t longest() const { return options_.max_tokens + options_.max_tokens / 2; }

  /// The first @p count pairs whose source is no longer than the model has seen.
  std::vector<data::TextPair> chosen(const std::vector<data::TextPair>& pairs,
                                     std::int64_t count) const {
    std::vector<data::TextPair> result;
    for (const data::TextPair& pair : pairs) {
      if (std::cmp_greater_equal(result.size(), count)) break;
      if (std::cmp_less_equal(tokenizer_->encode(pair.source).size(), options_.max_tokens))
        result.push_back(pair);
    }
    GRADUS_CHECK("translate", !result.empty(), "--max-tokens ", options_.max_tokens,
                 " must leave pairs to evaluate on; it leaves none");
    return result;
  }

  void translate(const std::vector<data::TextPair>& pairs, std::vector<std::string>& out) {
    std::vector<data::TokenPair> encoded;
    for (const data::TextPair& pair : pairs)
      encoded.push_back({tokenizer_->encode(pair.source), {}});
    std::vector<const data::TokenPair*> rows;
    for (const data::TokenPair& pair : encoded) rows.push_back(&pair);
    const at::Tensor ids =
        translator_->translate(data::pad_pairs(rows, tokens_), tokens_, longest()).contiguous();
    for (std::int64_t row = 0; row < ids.size(0); ++row) {
      std::vector<std::int64_t> words;
      for (std::int64_t t = 0; t < ids.size(1); ++t) {
        const auto id = ids[row][t].item<std::int64_t>();
        if (id == tokens_.end) break;
        if (id != tokens_.begin && id != tokens_.padding) words.push_back(id);
      }
      out.push_back(tokenizer_->decode(words));
    }
  }

  static std::string sample(const std::vector<data::TextPair>& pairs,
                            const std::vector<std::string>& hypotheses) {
    constexpr std::size_t kShown = 6;
    std::string text;
    for (std::size_t i = 0; i < std::min(kShown, pairs.size()); ++i) {
      text += base::join("source     ", pairs[i].source, "\nmodel      ", hypotheses[i],
                         "\nreference  ", pairs[i].target, "\n\n");
    }
    return text;
  }

  Options options_;
  const examples::RunOptions& run_;
  data::ParallelText text_;
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  data::PairTokens tokens_;
  std::vector<data::TokenPair> train_;
  std::unique_ptr<Translator> translator_;
  std::optional<data::PairBatches> batches_;
  data::PairBatch batch_;
};

void check(const Options& options) {
  GRADUS_CHECK("flags", options.model == "transformer" || options.model == "recurrent",
               "--model must be transformer or recurrent; got '", options.model, "'");
  GRADUS_CHECK("flags", options.width >= 4 && options.width % 4 == 0,
               "--width must be a multiple of 4; got ", options.width);
  GRADUS_CHECK("flags", options.vocabulary > 257, "--vocabulary must be > 257; got ",
               options.vocabulary);
  GRADUS_CHECK("flags", options.max_tokens >= 1, "--max-tokens must be >= 1; got ",
               options.max_tokens);
  GRADUS_CHECK("flags", options.eval_pairs >= 1, "--eval-pairs must be >= 1; got ",
               options.eval_pairs);
  GRADUS_CHECK("flags", options.dropout >= 0.0 && options.dropout < 1.0,
               "--dropout must be in [0, 1); got ", options.dropout);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains an English-German translator inside a memory limit", "translate");
  examples::RunOptions run{.memory = "200MiB",
                           .depth = 8,
                           .steps = 300,
                           .batch = 64,
                           .data = data::kLibreOfficeHelpDirectory,
                           .out = "runs/translate"};
  Options options;
  examples::add_run_options(app, run);
  app.add_option("--model", options.model, "transformer, or recurrent (LSTM with attention)")
      ->capture_default_str();
  app.add_option("--width", options.width, "Width of the model")->capture_default_str();
  app.add_option("--vocabulary", options.vocabulary, "Pieces that both languages share")
      ->capture_default_str();
  app.add_option("--max-tokens", options.max_tokens, "Longest side of a pair")
      ->capture_default_str();
  app.add_option("--eval-pairs", options.eval_pairs, "Test pairs for the final BLEU")
      ->capture_default_str();
  app.add_option("--dropout", options.dropout, "Dropout of the model")->capture_default_str();
  std::unique_ptr<Translation> subject;
  const auto prepare = [&] {
    check(options);
    subject = std::make_unique<Translation>(options, run);
    examples::validate(run, subject.get());
  };
  return examples::run_program(app, argc, argv, prepare, [&] {
    subject->load();
    examples::run_example(*subject, run, std::cout);
  });
}
