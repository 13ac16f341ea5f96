#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/data/batches.h>
#include <gradus/data/tokenizer.h>

namespace gradus::data {

/// A text and its translation.
struct TextPair {
  std::string source;
  std::string target;
  bool operator==(const TextPair&) const = default;
};

/// A paragraph or heading of a help page.
struct HelpParagraph {
  std::string id;    ///< "par_id3149130"; may be empty.
  std::string text;  ///< Without tags, white space in single spaces; may be empty.
  bool operator==(const HelpParagraph&) const = default;
};

/// The paragraphs (p) and headings (h1 to h6) of a LibreOffice help page, in order: those of its
/// text, not of the navigation around it. Tags are dropped and character references resolved; of
/// keys that differ between systems the one for the Mac is left out.
/// @throws UserError naming @p origin if the page has no text area or is cut (no closing html tag).
std::vector<HelpParagraph> parse_help_page(std::string_view html, const std::string& origin);

/// Where the Debian packages libreoffice-help-en-us and libreoffice-help-de put their files.
inline constexpr const char* kLibreOfficeHelpDirectory = "/usr/share/libreoffice/help";

struct HelpPairOptions {
  std::string directory = kLibreOfficeHelpDirectory;  ///< Holds en-US/text and de/text.
  std::int64_t max_bytes = 200;    ///< Longest side of a pair, UTF-8 bytes, >= 1.
  double validation_ratio = 0.02;  ///< Share of the pairs, in [0, 1).
  double test_ratio = 0.02;        ///< Share of the pairs, in [0, 1); both together below 1.
};

/// Pairs in three parts; no source text is in two of them.
struct ParallelText {
  std::vector<TextPair> train;
  std::vector<TextPair> validation;
  std::vector<TextPair> test;
  std::int64_t pages = 0;           ///< Pages that both languages have with as many paragraphs.
  std::int64_t unpaired_pages = 0;  ///< Pages of the source left out.
};

/// English paragraphs of the LibreOffice help with their German translations (MPL 2.0).
///
/// Pages are paired by their paths and paragraphs by their places, on pages with equal counts and
/// where both carry the same id. Left out are pairs with an empty or overlong side, sides that are
/// equal (names, code, what is not translated) and repeats. Which part a pair belongs to depends
/// on a hash of its source alone: the split is the same on every machine, and adding pages moves
/// no pair.
/// @throws UserError for options outside their range, a damaged page, and a missing directory; for
///   the default one it names the packages to install.
ParallelText load_help_pairs(const HelpPairOptions& options = {});

/// Numbers of tokens that no text has. The tokenizer's own <unk>, 0, is never given by encode() and
/// serves as padding; begin and end follow the tokenizer's vocabulary.
struct PairTokens {
  std::int64_t padding = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t vocabulary_size = 0;  ///< With the two that follow the tokenizer's.
};

/// The tokens around texts of @p tokenizer. @throws UserError for a tokenizer without <unk>
/// ("bytes").
PairTokens pair_tokens(const Tokenizer& tokenizer);

/// A pair as numbers, without begin and end.
struct TokenPair {
  std::vector<std::int64_t> source;
  std::vector<std::int64_t> target;
};

/// Encodes @p pairs and leaves out those with a side of no tokens or above @p max_tokens.
std::vector<TokenPair> encode_pairs(const Tokenizer& tokenizer, const std::vector<TextPair>& pairs,
                                    std::int64_t max_tokens);

/// Pairs padded to one length each side. S and T are the longest of the batch; T counts the begin
/// or end token.
struct PairBatch {
  at::Tensor source;               ///< int64 [B, S]: tokens, then padding. CPU.
  at::Tensor source_padding;       ///< bool [B, S]: true at padding.
  at::Tensor inputs;               ///< int64 [B, T]: begin, target, padding.
  at::Tensor targets;              ///< int64 [B, T]: target, end, padding.
  std::int64_t target_tokens = 0;  ///< Of targets, without padding.
  std::int64_t size() const { return source.size(0); }
};

/// Pads @p pairs into one batch. @throws UserError if there are none.
PairBatch pad_pairs(const std::vector<const TokenPair*>& pairs, const PairTokens& tokens);

struct PairBatchOptions {
  std::int64_t batch_size = 32;    ///< Pairs, >= 1.
  std::uint64_t seed = 0;          ///< Of the order.
  bool shuffle = true;             ///< A new order each epoch; else shortest first.
  std::int64_t pool_batches = 50;  ///< Batches whose pairs are sorted by length together, >= 1.
};

/// Gives pairs in batches of similar lengths, each pair once an epoch, in an order that depends on
/// seed and epoch only.
///
/// The shuffled pairs are taken in pools of pool_batches batches; a pool is sorted by length and
/// cut into batches, and all batches of the epoch are shuffled. A larger pool has less padding and
/// less variety. The shortest batch of an epoch may hold fewer pairs. One thread at a time.
class PairBatches {
 public:
  /// @throws UserError for options outside their range or no pairs.
  PairBatches(std::vector<TokenPair> pairs, const PairTokens& tokens,
              const PairBatchOptions& options);

  PairBatch next();

  /// The batch of the longest pairs: no batch of next() needs more memory.
  PairBatch largest() const;

  /// Epoch, and batches of it already given. seek() continues exactly.
  DataPosition position() const { return position_; }
  /// @throws UserError if @p position cannot exist.
  void seek(DataPosition position);

  std::int64_t batches_per_epoch() const;
  const std::vector<TokenPair>& pairs() const { return pairs_; }

 private:
  void order_epoch();

  std::vector<TokenPair> pairs_;
  PairTokens tokens_;
  PairBatchOptions options_;
  std::vector<std::vector<std::uint32_t>> batches_;  // of ordered_epoch_
  std::int64_t ordered_epoch_ = -1;
  DataPosition position_;
};

}  // namespace gradus::data
