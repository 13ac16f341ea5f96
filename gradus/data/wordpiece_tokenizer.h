#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace gradus::data {

struct WordPieceOptions {
  bool lower_case = true;  ///< And without accents: the "uncased" models. Off for "cased" ones.
  std::int64_t longest_word = 100;  ///< Characters; a longer word is [UNK]. >= 1.
};

/// BERT's tokenizer (Devlin et al. 2018; WordPiece: Wu et al. 2016): text to the numbers of a
/// vocab.txt.
///
/// Control characters go, white space separates words, each punctuation mark and each Chinese
/// character is a word of its own; for an uncased model letters are decomposed (NFD), stripped of
/// their marks and put into lower case. A word is cut into the longest pieces of the vocabulary
/// from its start on, all but the first with "##" in front; a word that cannot be cut is [UNK].
/// Bytes that are no UTF-8 are left out. Names such as "[CLS]" within a text are ordinary text.
///
/// No Tokenizer: case and spaces are lost, and so decode() does not give the text back. Immutable,
/// so one object serves several threads.
class WordPieceTokenizer {
 public:
  /// @param vocabulary  Pieces in the order of their numbers.
  /// @throws UserError if it repeats a piece, has an empty one or lacks [PAD], [UNK], [CLS] or
  ///   [SEP], and for options outside their range.
  explicit WordPieceTokenizer(std::vector<std::string> vocabulary,
                              const WordPieceOptions& options = {});

  /// Reads a vocab.txt: one piece a line. @throws UserError that names the file (and line), also if
  ///   it cannot be read.
  static WordPieceTokenizer load(const std::string& path, const WordPieceOptions& options = {});

  /// Pieces of @p text, without [CLS] and [SEP].
  std::vector<std::int64_t> encode(std::string_view text) const;

  /// [CLS], pieces, [SEP], cut before [SEP] so that there are at most @p longest of them (>= 2).
  /// @throws UserError if @p longest is below 2.
  std::vector<std::int64_t> encode_sentence(std::string_view text, std::int64_t longest) const;

  /// Pieces joined into words and separated by spaces, for reading.
  /// @throws UserError for a token outside [0, vocabulary_size()).
  std::string decode(std::span<const std::int64_t> tokens) const;

  /// The words that encode() cuts into pieces.
  std::vector<std::string> words(std::string_view text) const;

  std::int64_t vocabulary_size() const { return static_cast<std::int64_t>(pieces_.size()); }
  std::int64_t padding() const { return padding_; }  ///< Number of [PAD].
  std::int64_t unknown() const { return unknown_; }  ///< Number of [UNK].
  std::int64_t begin() const { return begin_; }      ///< Number of [CLS].
  std::int64_t end() const { return end_; }          ///< Number of [SEP].

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const {
      return std::hash<std::string_view>()(text);
    }
  };
  using Numbers = std::unordered_map<std::string, std::int64_t, Hash, std::equal_to<>>;

  std::int64_t special(const char* piece) const;
  void cut(const std::string& word, std::vector<std::int64_t>& tokens) const;

  WordPieceOptions options_;
  std::vector<std::string> pieces_;
  Numbers first_;  // pieces that begin a word
  Numbers later_;  // the others, without "##"
  std::int64_t padding_ = 0;
  std::int64_t unknown_ = 0;
  std::int64_t begin_ = 0;
  std::int64_t end_ = 0;
};

}  // namespace gradus::data
