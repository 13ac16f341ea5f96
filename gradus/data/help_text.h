#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/data/parallel_text.h>

namespace gradus::data {

class Tokenizer;
class WordPieceTokenizer;

/// A text and what it is about.
struct LabelledText {
  std::string text;
  std::int64_t label = 0;  ///< Place in class_names.
  bool operator==(const LabelledText&) const = default;
};

struct HelpTextOptions {
  std::string directory = kLibreOfficeHelpDirectory;  ///< Holds LANGUAGE/text.
  std::string language = "en-US";                     ///< Or "de".
  /// Folders of the help to tell apart, at least two, as {"scalc", "swriter"}; empty: every one but
  /// "shared", which is about no application, with at least min_paragraphs.
  std::vector<std::string> classes = {};
  std::int64_t min_paragraphs = 400;  ///< Of a class that is not named, >= 1.
  std::int64_t min_bytes = 40;        ///< Shortest paragraph, UTF-8 bytes, >= 1.
  double test_ratio = 0.2;            ///< Share of the pages, in [0, 1).
};

/// Paragraphs in two parts. No page has paragraphs in both, and no text is there twice.
struct HelpText {
  std::vector<std::string> class_names;  ///< Sorted: "scalc", "schart", ...
  std::vector<LabelledText> train;
  std::vector<LabelledText> test;
  std::int64_t pages = 0;      ///< Pages read, of all classes.
  std::int64_t ambiguous = 0;  ///< Texts left out because several classes have them.
  std::int64_t repeated = 0;   ///< Further paragraphs with a text that is there already.

  std::vector<std::int64_t> train_counts() const;  ///< Paragraphs of each class.
  std::vector<std::int64_t> test_counts() const;   ///< Paragraphs of each class.
};

/// Paragraphs of the LibreOffice help, labelled with the application they are about (MPL 2.0).
///
/// A page's class is the first folder of its path. Which part a page belongs to depends on a hash
/// of its path alone: the split is the same on every machine. A text that several pages of a class
/// have stays with the first of them, in the order of their paths; one that several classes have is
/// left out, since nobody could tell.
/// @throws UserError for options outside their range, an unknown class, fewer than two classes, a
///   class without paragraphs to train on, a damaged page, and a missing directory; for the default
///   one it names the package to install.
HelpText load_help_text(const HelpTextOptions& options = {});

/// Texts as numbers, padded to one length. CPU tensors; N texts, L tokens.
struct TextExamples {
  at::Tensor ids;      ///< int64 [N, L]: tokens, then padding.
  at::Tensor lengths;  ///< int64 [N]: tokens of each text, in [1, L].
  at::Tensor labels;   ///< int64 [N].
  std::int64_t size() const { return ids.size(0); }
};

/// Encodes @p texts and cuts them after @p length tokens; the padding is 0.
/// @throws UserError if @p length is below 1 or a text gives no token.
TextExamples encode_texts(const Tokenizer& tokenizer, const std::vector<LabelledText>& texts,
                          std::int64_t length);

/// Encodes @p texts as sentences, [CLS] ... [SEP], of at most @p length tokens, padded by [PAD].
/// @throws UserError if @p length is below 2.
TextExamples encode_texts(const WordPieceTokenizer& tokenizer,
                          const std::vector<LabelledText>& texts, std::int64_t length);

/// Where a padded text has no token: bool [N, @p length], true from lengths [N] on.
at::Tensor padding_after(const at::Tensor& lengths, std::int64_t length);

}  // namespace gradus::data
