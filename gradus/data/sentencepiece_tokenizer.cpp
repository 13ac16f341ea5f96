#include <algorithm>
#include <array>
#include <unordered_map>

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <gradus/base/error.h>
#include <gradus/data/internal/utf8.h>
#include <gradus/data/tokenizer.h>

namespace gradus::data {
namespace {

// SentencePiece writes a space as this character inside a piece; the character itself must go by
// bytes.
constexpr std::string_view kSpaceMark = "\xe2\x96\x81";
// The trainer skips sentences above 4,192 bytes, and an encoder's queue grows with its input.
constexpr std::size_t kTrainingPieceBytes = 4096;
constexpr std::size_t kEncodingPieceBytes = 1 << 16;

/// Where to end a part of at most @p limit bytes: before a space, since no piece has one but at its
/// start (split_by_whitespace); else before any character.
std::size_t part_bytes(std::string_view text, std::size_t limit, bool anywhere) {
  if (text.size() <= limit) return text.size();
  const std::size_t space = text.rfind(' ', limit);
  if (space != std::string_view::npos && space > 0) return space;
  if (!anywhere) {
    const std::size_t next = text.find(' ', limit);
    return next == std::string_view::npos ? text.size() : next;
  }
  std::size_t end = limit;
  while (end > 1 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return end;
}

/// Feeds the trainer a text line by line, without what it would refuse (tabs, which it reserves) or
/// skip (long lines).
class Sentences : public sentencepiece::SentenceIterator {
 public:
  explicit Sentences(std::string_view rest) : rest_(rest) { Next(); }
  bool done() const override { return done_; }
  void Next() override {
    while (!rest_.empty()) {
      const std::string_view line = rest_.substr(0, rest_.find_first_of("\n\t"));
      const std::size_t taken = part_bytes(line, kTrainingPieceBytes, true);
      current_.assign(line.substr(0, taken));
      rest_.remove_prefix(std::min(rest_.size(), taken + (taken == line.size() ? 1 : 0)));
      if (!current_.empty()) return;
    }
    done_ = true;
  }
  const std::string& value() const override { return current_; }
  sentencepiece::util::Status status() const override { return {}; }

 private:
  std::string_view rest_;
  std::string current_;
  bool done_ = false;
};

}  // namespace

struct SentencePieceTokenizer::Implementation {
  sentencepiece::SentencePieceProcessor processor;
  std::array<std::int64_t, 256> byte_tokens{};
  std::vector<std::string> texts;  // what each token stands for
};

std::shared_ptr<SentencePieceTokenizer> SentencePieceTokenizer::train(
    std::string_view text, std::int64_t vocabulary_size) {
  GRADUS_CHECK("tokenizer", vocabulary_size > 257 && vocabulary_size <= (1 << 24),
               "vocabulary_size must be in (257, 2^24]: one <unk>, 256 bytes and some pieces; got ",
               vocabulary_size);
  Sentences sentences(text);
  GRADUS_CHECK("tokenizer", !sentences.done(), "a tokenizer is trained on text; got none");
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(
      std::unordered_map<std::string, std::string>{{"model_type", "bpe"},
                                                   {"vocab_size", std::to_string(vocabulary_size)},
                                                   {"hard_vocab_limit", "false"},
                                                   {"byte_fallback", "true"},
                                                   {"normalization_rule_name", "identity"},
                                                   {"remove_extra_whitespaces", "false"},
                                                   {"add_dummy_prefix", "false"},
                                                   {"unk_id", "0"},
                                                   {"bos_id", "-1"},
                                                   {"eos_id", "-1"},
                                                   {"num_threads", "1"},
                                                   {"minloglevel", "2"}},
      &sentences, &model);
  GRADUS_CHECK("tokenizer", status.ok(), "SentencePiece must find a vocabulary of ",
               vocabulary_size, " in the text; it says: ", status.message());
  return std::make_shared<SentencePieceTokenizer>(std::move(model));
}

SentencePieceTokenizer::SentencePieceTokenizer(std::string model)
    : model_(std::move(model)), implementation_(std::make_unique<Implementation>()) {
  auto& [processor, byte_tokens, texts] = *implementation_;
  const auto status = processor.LoadFromSerializedProto(model_);
  GRADUS_CHECK("tokenizer", status.ok(),
               "a tokenizer needs a SentencePiece model; reading it gave: ", status.message());
  std::size_t bytes = 0;
  for (int id = 0; id < processor.GetPieceSize(); ++id) {
    std::string text = processor.IdToPiece(id);
    if (processor.IsByte(id)) {
      const auto byte =
          static_cast<std::size_t>(std::stoi(text.substr(3, 2), nullptr, 16));  // "<0x0A>"
      byte_tokens[byte] = id;
      ++bytes;
      text.assign(1, static_cast<char>(byte));
    } else if (processor.IsUnknown(id)) {
      text = "\xef\xbf\xbd";  // U+FFFD, the sign for what has no sign
    } else if (processor.IsControl(id)) {
      text.clear();
    } else {
      for (std::size_t at = 0; (at = text.find(kSpaceMark, at)) != std::string::npos; ++at) {
        text.replace(at, kSpaceMark.size(), " ");
      }
    }
    texts.push_back(std::move(text));
  }
  GRADUS_CHECK(
      "tokenizer", bytes == byte_tokens.size(),
      "a SentencePiece model must have a piece for each of 256 bytes (--byte_fallback); got ",
      bytes);
}

SentencePieceTokenizer::~SentencePieceTokenizer() = default;

std::int64_t SentencePieceTokenizer::vocabulary_size() const {
  return static_cast<std::int64_t>(implementation_->texts.size());
}

void SentencePieceTokenizer::encode_plain(std::string_view text,
                                          std::vector<std::int64_t>& tokens) const {
  std::vector<int> ids;
  while (!text.empty()) {
    const std::size_t taken = part_bytes(text, kEncodingPieceBytes, false);
    const auto status = implementation_->processor.Encode(text.substr(0, taken), &ids);
    GRADUS_INTERNAL_CHECK("tokenizer", status.ok(),
                          "SentencePiece cannot encode: ", status.message());
    tokens.insert(tokens.end(), ids.begin(), ids.end());
    text.remove_prefix(taken);
  }
}

std::vector<std::int64_t> SentencePieceTokenizer::encode(std::string_view text) const {
  std::vector<std::int64_t> tokens;
  tokens.reserve(text.size() / 3);
  std::size_t plain_begin = 0;
  std::size_t at = 0;
  // SentencePiece gets runs of plain text; what it reserves, drops or replaces (its space mark,
  // controls, bytes that are no UTF-8) goes out byte by byte.
  while (at < text.size()) {
    const std::string_view rest = text.substr(at);
    const std::size_t bytes = internal::utf8_character_bytes(rest);
    const bool plain =
        bytes > 0 && static_cast<unsigned char>(rest[0]) >= 0x20 && !rest.starts_with(kSpaceMark);
    if (plain) {
      at += bytes;
      continue;
    }
    encode_plain(text.substr(plain_begin, at - plain_begin), tokens);
    const std::size_t end = at + std::max<std::size_t>(bytes, 1);
    for (; at < end; ++at)
      tokens.push_back(implementation_->byte_tokens[static_cast<unsigned char>(text[at])]);
    plain_begin = at;
  }
  encode_plain(text.substr(plain_begin), tokens);
  return tokens;
}

std::string SentencePieceTokenizer::decode(std::span<const std::int64_t> tokens) const {
  std::string text;
  for (const std::int64_t token : tokens) {
    GRADUS_CHECK("tokenizer", token >= 0 && token < vocabulary_size(), "a token must be in [0, ",
                 vocabulary_size(), "); got ", token);
    text += implementation_->texts[static_cast<std::size_t>(token)];
  }
  return text;
}

}  // namespace gradus::data
