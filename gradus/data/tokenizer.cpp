#include <gradus/data/tokenizer.h>

#include <charconv>
#include <sstream>

#include <gradus/base/error.h>
#include <gradus/state/atomic_file.h>
#include <gradus/state/content_hash.h>

namespace gradus::data {
namespace {

constexpr std::string_view kMagic = "gradus-tokenizer";
constexpr int kVersion = 1;

}  // namespace

std::string Tokenizer::serialise() const {
  const std::string content = payload();
  // One line of text, then the bytes; the checksum covers the kind as well.
  return base::join(kMagic, " ", kVersion, " ", name(), " ", content.size(), " ",
                    state::hash_text(state::content_hash(name() + content)), "\n", content);
}

void Tokenizer::save(const std::string& path) const {
  state::write_file_atomically(path, serialise());
}

std::uint64_t Tokenizer::hash() const { return state::content_hash(serialise()); }

std::vector<std::int64_t> ByteTokenizer::encode(std::string_view text) const {
  std::vector<std::int64_t> tokens;
  tokens.reserve(text.size());
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

std::string ByteTokenizer::decode(std::span<const std::int64_t> tokens) const {
  std::string text;
  text.reserve(tokens.size());
  for (const std::int64_t token : tokens) {
    GRADUS_CHECK("tokenizer", token >= 0 && token < 256, "a token must be in [0, 256); got ",
                 token);
    text.push_back(static_cast<char>(token));
  }
  return text;
}

std::shared_ptr<const Tokenizer> make_tokenizer(const TokenizerOptions& options,
                                                std::string_view text) {
  if (options.kind == "bytes") return std::make_shared<ByteTokenizer>();
  GRADUS_CHECK("tokenizer", options.kind == "sentencepiece",
               "a tokenizer is 'sentencepiece' or 'bytes'; got '", options.kind, "'");
  return SentencePieceTokenizer::train(text, options.vocabulary_size);
}

std::shared_ptr<const Tokenizer> parse_tokenizer(std::string_view bytes,
                                                 const std::string& origin) {
  const std::size_t line_end = bytes.substr(0, 200).find('\n');
  std::istringstream line(
      std::string(bytes.substr(0, line_end == std::string_view::npos ? 0 : line_end)));
  std::string magic, kind, hash;
  int version = 0;
  std::size_t size = 0;
  line >> magic >> version >> kind >> size >> hash;
  GRADUS_CHECK("tokenizer", line && magic == kMagic, "'", origin,
               "' is no tokenizer file of gradus");
  GRADUS_CHECK("tokenizer", version == kVersion, "'", origin, "' has version ", version,
               "; this build reads ", kVersion);
  const std::string_view payload = bytes.substr(line_end + 1);
  GRADUS_CHECK("tokenizer",
               payload.size() == size &&
                   state::hash_text(state::content_hash(kind + std::string(payload))) == hash,
               "'", origin, "' is truncated or damaged: restore it from a copy or build it again");
  if (kind == "bytes") return std::make_shared<ByteTokenizer>();
  GRADUS_CHECK("tokenizer", kind == "sentencepiece", "'", origin,
               "' holds a tokenizer of unknown kind '", kind, "'");
  return std::make_shared<SentencePieceTokenizer>(std::string(payload));
}

std::shared_ptr<const Tokenizer> load_tokenizer(const std::string& path) {
  return parse_tokenizer(state::read_file(path), path);
}

}  // namespace gradus::data
