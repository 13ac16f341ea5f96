#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace gradus::data {

/// Text to token numbers and back. Immutable, so one object serves several threads.
///
/// Faithful: decode(encode(text)) == text for every sequence of bytes. Additive at newlines: if a
/// ends in '\n', encode(a + b) is encode(a) followed by encode(b), so that a large text can be
/// encoded in parts.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual std::vector<std::int64_t> encode(std::string_view text) const = 0;

  /// @throws UserError for a token outside [0, vocabulary_size()).
  virtual std::string decode(std::span<const std::int64_t> tokens) const = 0;

  virtual std::int64_t vocabulary_size() const = 0;

  /// "bytes" or "sentencepiece".
  virtual std::string name() const = 0;

  /// The whole tokenizer as bytes with a checksum, for parse_tokenizer.
  std::string serialise() const;

  /// Writes serialise() to @p path, atomically. @throws UserError if writing fails.
  void save(const std::string& path) const;

  /// state::content_hash of serialise(): equal exactly for equal tokenizers.
  std::uint64_t hash() const;

 protected:
  virtual std::string payload() const = 0;
};

/// Every byte is its own token: 256 of them, no training.
class ByteTokenizer : public Tokenizer {
 public:
  std::vector<std::int64_t> encode(std::string_view text) const override;
  std::string decode(std::span<const std::int64_t> tokens) const override;
  std::int64_t vocabulary_size() const override { return 256; }
  std::string name() const override { return "bytes"; }

 protected:
  std::string payload() const override { return {}; }
};

/// Byte-pair encoding by SentencePiece (Kudo and Richardson 2018), trained in this process.
///
/// No normalisation, no dummy space in front, spaces kept, and bytes for every character outside
/// the vocabulary, which makes it faithful; '\n' is always the token of its byte. Token 0 is <unk>,
/// which encode() never gives.
class SentencePieceTokenizer : public Tokenizer {
 public:
  /// Trains on @p text; the same text and size give the same tokenizer on every run.
  ///
  /// @param vocabulary_size  > 257: one <unk>, 256 bytes and the characters of the text must fit. A
  /// text with too few
  ///   different pieces gives a smaller vocabulary: ask vocabulary_size().
  /// @throws UserError if the text is empty or the size is too small for its characters.
  static std::shared_ptr<SentencePieceTokenizer> train(std::string_view text,
                                                       std::int64_t vocabulary_size);

  /// Reads a model as model() gave it. @throws UserError if it is no BPE model with byte fallback.
  explicit SentencePieceTokenizer(std::string model);
  ~SentencePieceTokenizer() override;

  std::vector<std::int64_t> encode(std::string_view text) const override;
  std::string decode(std::span<const std::int64_t> tokens) const override;
  std::int64_t vocabulary_size() const override;
  std::string name() const override { return "sentencepiece"; }

  /// SentencePiece's own file content, which Python's `sentencepiece` reads.
  const std::string& model() const { return model_; }

 protected:
  std::string payload() const override { return model_; }

 private:
  struct Implementation;
  void encode_plain(std::string_view text, std::vector<std::int64_t>& tokens) const;

  std::string model_;
  std::unique_ptr<Implementation> implementation_;
};

/// Which tokenizer to make.
struct TokenizerOptions {
  std::string kind = "sentencepiece";  ///< "sentencepiece" or "bytes".
  std::int64_t vocabulary_size =
      4000;  ///< For "sentencepiece": wanted tokens, > 257. "bytes" always has 256.
};

/// Makes the tokenizer of @p options, training it on @p text where it needs that.
/// @throws UserError for an unknown kind, and as SentencePieceTokenizer::train does.
std::shared_ptr<const Tokenizer> make_tokenizer(const TokenizerOptions& options,
                                                std::string_view text);

/// Reads what Tokenizer::serialise wrote. @p origin names the source in messages.
/// @throws UserError if it is cut, changed, or of another version.
std::shared_ptr<const Tokenizer> parse_tokenizer(std::string_view bytes, const std::string& origin);

/// Reads what Tokenizer::save wrote. @throws UserError as parse_tokenizer, and if the file cannot
/// be read.
std::shared_ptr<const Tokenizer> load_tokenizer(const std::string& path);

}  // namespace gradus::data
