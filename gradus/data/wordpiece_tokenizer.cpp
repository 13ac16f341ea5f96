#include <gradus/data/wordpiece_tokenizer.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include <gradus/base/error.h>
#include <gradus/data/internal/unicode.h>
#include <gradus/data/internal/utf8.h>
#include <gradus/state/atomic_file.h>

namespace gradus::data {
namespace {

constexpr std::string_view kContinuation = "##";

/// BERT's: also the ASCII symbols that Unicode does not call punctuation, as '$' and '+'.
bool is_word_of_its_own(char32_t c) {
  if (c < 0x80)
    return c > 0x20 && c < 0x7F && !(c >= U'0' && c <= U'9') && !(c >= U'A' && c <= U'Z') &&
           !(c >= U'a' && c <= U'z');
  return internal::is_punctuation(c);
}

bool is_continuation_byte(char c) { return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U; }

std::int64_t character_count(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return !is_continuation_byte(c); });
}

}  // namespace

WordPieceTokenizer::WordPieceTokenizer(std::vector<std::string> vocabulary,
                                       const WordPieceOptions& options)
    : options_(options), pieces_(std::move(vocabulary)) {
  GRADUS_CHECK("wordpiece", options_.longest_word >= 1, "longest_word must be >= 1; got ",
               options_.longest_word);
  for (std::size_t number = 0; number < pieces_.size(); ++number) {
    const std::string& piece = pieces_[number];
    GRADUS_CHECK("wordpiece", !piece.empty(), "a piece must not be empty; number ", number, " is");
    const bool later = piece.size() > kContinuation.size() && piece.starts_with(kContinuation);
    const bool added = (later ? later_ : first_)
                           .emplace(later ? piece.substr(kContinuation.size()) : piece,
                                    static_cast<std::int64_t>(number))
                           .second;
    GRADUS_CHECK("wordpiece", added, "a vocabulary must have each piece once; number ", number,
                 " repeats '", piece, "'");
  }
  padding_ = special("[PAD]");
  unknown_ = special("[UNK]");
  begin_ = special("[CLS]");
  end_ = special("[SEP]");
}

std::int64_t WordPieceTokenizer::special(const char* piece) const {
  const auto found = first_.find(std::string_view(piece));
  GRADUS_CHECK("wordpiece", found != first_.end(), "a vocabulary must have ", piece,
               "; this one of ", pieces_.size(), " pieces has none. Is it BERT's vocab.txt?");
  return found->second;
}

WordPieceTokenizer WordPieceTokenizer::load(const std::string& path,
                                            const WordPieceOptions& options) {
  const std::string content = state::read_file(path);
  std::vector<std::string> pieces;
  for (std::size_t at = 0; at < content.size();) {
    const std::size_t line_end = std::min(content.find('\n', at), content.size());
    std::string piece = content.substr(at, line_end - at);
    if (piece.ends_with('\r')) piece.pop_back();
    GRADUS_CHECK("wordpiece", !piece.empty(), path, ":", pieces.size() + 1,
                 ": a line must hold a piece; this one is empty");
    pieces.push_back(std::move(piece));
    at = line_end + 1;
  }
  try {
    return WordPieceTokenizer(std::move(pieces), options);
  } catch (const UserError& error) {
    throw UserError(base::join("[wordpiece] '", path, "' cannot be used: ", error.what()));
  }
}

std::vector<std::string> WordPieceTokenizer::words(std::string_view text) const {
  std::vector<std::string> result;
  std::string word;
  const auto end_word = [&] {
    if (!word.empty()) result.push_back(std::exchange(word, {}));
  };
  std::u32string folded;
  for (const char32_t character : internal::decode_utf8(text)) {
    if (internal::is_space(character)) {
      end_word();
      continue;
    }
    if (character == 0xFFFD || internal::is_control(character)) continue;
    // Asked before folding, which turns compatibility forms into other characters.
    const bool alone = internal::is_cjk(character);
    if (alone) end_word();
    folded.clear();
    if (options_.lower_case) {
      internal::append_folded(character, folded);
    } else {
      folded.push_back(character);
    }
    for (const char32_t part : folded) {
      const bool mark = is_word_of_its_own(part);
      if (mark) end_word();
      internal::append_utf8(word, part);
      if (mark) end_word();
    }
    if (alone) end_word();
  }
  end_word();
  return result;
}

void WordPieceTokenizer::cut(const std::string& word, std::vector<std::int64_t>& tokens) const {
  const std::size_t before = tokens.size();
  if (character_count(word) > options_.longest_word) {
    tokens.push_back(unknown_);
    return;
  }
  std::string_view rest = word;
  while (!rest.empty()) {
    const Numbers& numbers = rest.size() == word.size() ? first_ : later_;
    std::size_t bytes = rest.size();
    auto piece = numbers.find(rest);
    while (piece == numbers.end()) {
      do {
        --bytes;
      } while (bytes > 0 && is_continuation_byte(rest[bytes]));
      if (bytes == 0) {
        tokens.resize(before);
        tokens.push_back(unknown_);
        return;
      }
      piece = numbers.find(rest.substr(0, bytes));
    }
    tokens.push_back(piece->second);
    rest.remove_prefix(bytes);
  }
}

std::vector<std::int64_t> WordPieceTokenizer::encode(std::string_view text) const {
  std::vector<std::int64_t> tokens;
  for (const std::string& word : words(text)) cut(word, tokens);
  return tokens;
}

std::vector<std::int64_t> WordPieceTokenizer::encode_sentence(std::string_view text,
                                                              std::int64_t longest) const {
  GRADUS_CHECK("wordpiece", longest >= 2, "a sentence needs room for [CLS] and [SEP]; got longest ",
               longest);
  std::vector<std::int64_t> tokens = encode(text);
  tokens.resize(std::min(tokens.size(), static_cast<std::size_t>(longest) - 2));
  tokens.insert(tokens.begin(), begin_);
  tokens.push_back(end_);
  return tokens;
}

std::string WordPieceTokenizer::decode(std::span<const std::int64_t> tokens) const {
  std::string text;
  for (const std::int64_t token : tokens) {
    GRADUS_CHECK("wordpiece", token >= 0 && token < vocabulary_size(), "a token must be in [0, ",
                 vocabulary_size(), "); got ", token);
    const std::string& piece = pieces_[static_cast<std::size_t>(token)];
    const bool later = piece.size() > kContinuation.size() && piece.starts_with(kContinuation);
    if (!later && !text.empty()) text += ' ';
    text += later ? piece.substr(kContinuation.size()) : piece;
  }
  return text;
}

}  // namespace gradus::data
