#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gradus::metrics {

/// Longest n-gram that BLEU counts.
inline constexpr std::size_t kBleuOrder = 4;

/// What stands in for a precision of 0 (Chen and Cherry 2014).
enum class BleuSmoothing : std::uint8_t {
  none,         ///< Nothing: the score is 0.
  exponential,  ///< "exp", mteval's: 1/2, 1/4, ... of a match for each order without one.
  floor,        ///< A count of 0 becomes floor_count.
  add_k,        ///< add_count is added to counts and totals of 2-grams and longer.
};

struct BleuOptions {
  BleuSmoothing smoothing = BleuSmoothing::exponential;
  double floor_count = 0.1;  ///< For BleuSmoothing::floor, >= 0.
  double add_count = 1.0;    ///< For BleuSmoothing::add_k, >= 0.
  /// Leave out orders that are longer than every hypothesis: for single sentences.
  bool effective_order = false;
};

/// A score and what it is made of.
struct Bleu {
  double score = 0.0;                           ///< 0 to 100.
  std::array<double, kBleuOrder> counts{};      ///< N-grams of hypotheses that a reference has.
  std::array<double, kBleuOrder> totals{};      ///< N-grams of hypotheses.
  std::array<double, kBleuOrder> precisions{};  ///< In per cent, smoothed.
  double brevity_penalty = 1.0;                 ///< exp(1 - r / h) where h < r, else 1.
  std::int64_t hypothesis_length = 0;           ///< h, tokens.
  std::int64_t reference_length = 0;            ///< r, tokens: of the reference nearest in length.
};

/// BLEU of a corpus (Papineni et al. 2002) as sacrebleu computes it (Post 2018; signature
/// nrefs:N|case:mixed|eff:no|tok:13a|smooth:exp): clipped counts of 1- to 4-grams of 13a tokens
/// summed over all sentences, geometric mean, brevity penalty.
/// @param references  For each hypothesis at least one.
/// @throws UserError if there is no hypothesis, their numbers differ, a sentence has no reference,
///   or an option is out of its range.
Bleu corpus_bleu(const std::vector<std::string>& hypotheses,
                 const std::vector<std::vector<std::string>>& references,
                 const BleuOptions& options = {});

/// The same with one reference a sentence.
Bleu corpus_bleu(const std::vector<std::string>& hypotheses,
                 const std::vector<std::string>& references, const BleuOptions& options = {});

/// Splits @p line as mteval-v13a, WMT's tokeniser, does: tokens with single spaces between. Bytes
/// that are no UTF-8 are parts of words.
std::string tokenize_13a(std::string_view line);

}  // namespace gradus::metrics
