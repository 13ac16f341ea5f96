#include <gradus/metrics/bleu.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <unordered_map>
#include <utility>

#include <gradus/base/error.h>

namespace gradus::metrics {
namespace {

// Logarithm of a precision of 0, as sacrebleu has it: exp of its quarter is 0.
constexpr double kLogOfZero = -9999999999.0;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Bytes of the white space at the start of @p text as Python's str.split() sees it, 0 if none.
std::size_t space_bytes(std::string_view text) {
  const auto c = static_cast<unsigned char>(text[0]);
  if (c == ' ' || (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x1F)) return 1;
  static constexpr std::array<std::string_view, 19> kWide{
      "\xc2\x85",     "\xc2\xa0",     "\xe1\x9a\x80", "\xe2\x80\x80", "\xe2\x80\x81",
      "\xe2\x80\x82", "\xe2\x80\x83", "\xe2\x80\x84", "\xe2\x80\x85", "\xe2\x80\x86",
      "\xe2\x80\x87", "\xe2\x80\x88", "\xe2\x80\x89", "\xe2\x80\x8a", "\xe2\x80\xa8",
      "\xe2\x80\xa9", "\xe2\x80\xaf", "\xe2\x81\x9f", "\xe3\x80\x80"};
  if (c < 0x80) return 0;
  for (const std::string_view wide : kWide)
    if (text.starts_with(wide)) return wide.size();
  return 0;
}

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> words;
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t space = space_bytes(text.substr(at));
    if (space == 0) {
      ++at;
      continue;
    }
    if (at > begin) words.push_back(text.substr(begin, at - begin));
    at += space;
    begin = at;
  }
  if (begin < text.size()) words.push_back(text.substr(begin));
  return words;
}

std::string_view without_trailing_space(std::string_view text) {
  const std::vector<std::string_view> words = split(text);
  if (words.empty()) return {};
  return text.substr(
      0, static_cast<std::size_t>(words.back().data() - text.data()) + words.back().size());
}

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
}

/// The punctuation that always stands alone: [\{-\~\[-\` -\&\(-\+\:-\@\/], all of ASCII's but ' , -
/// and the full stop.
bool stands_alone(char c) {
  return (c >= '{' && c <= '~') || (c >= '[' && c <= '`') || (c >= ' ' && c <= '&') ||
         (c >= '(' && c <= '+') || (c >= ':' && c <= '@') || c == '/';
}

bool is_point(char c) { return c == '.' || c == ','; }

/// Replaces every pair of characters that @p matches by what @p replace appends, from left to right
/// without overlaps, as a regular expression of two characters does. Bytes will do for characters:
/// where one of a pair is ASCII, all bytes of a longer character fare alike.
template <typename Matches, typename Replace>
std::string rewrite_pairs(const std::string& text, Matches matches, Replace replace) {
  std::string result;
  result.reserve(text.size() + text.size() / 4);
  std::size_t at = 0;
  while (at < text.size()) {
    if (at + 1 < text.size() && matches(text[at], text[at + 1])) {
      replace(result, text[at], text[at + 1]);
      at += 2;
    } else {
      result += text[at++];
    }
  }
  return result;
}

using NgramCounts = std::unordered_map<std::string, std::int64_t>;

/// N-grams of @p tokens by order; a token has no space, so that joined ones stay apart.
std::array<NgramCounts, kBleuOrder> count_ngrams(const std::vector<std::string_view>& tokens) {
  std::array<NgramCounts, kBleuOrder> counts;
  for (std::size_t begin = 0; begin < tokens.size(); ++begin) {
    std::string ngram;
    for (std::size_t n = 0; n < kBleuOrder && begin + n < tokens.size(); ++n) {
      if (n > 0) ngram += ' ';
      ngram += tokens[begin + n];
      ++counts[n][ngram];
    }
  }
  return counts;
}

/// What one sentence adds to the corpus.
void add_sentence(Bleu& bleu, const std::string& hypothesis,
                  const std::vector<std::string>& references) {
  const std::string text = tokenize_13a(without_trailing_space(hypothesis));
  const std::vector<std::string_view> tokens = split(text);
  const auto length = static_cast<std::int64_t>(tokens.size());
  std::array<NgramCounts, kBleuOrder> wanted;
  std::int64_t nearest = -1;
  for (const std::string& reference : references) {
    const std::string reference_text = tokenize_13a(without_trailing_space(reference));
    const std::vector<std::string_view> reference_tokens = split(reference_text);
    const auto candidate = static_cast<std::int64_t>(reference_tokens.size());
    const std::int64_t distance = std::abs(candidate - length);
    const std::int64_t best = std::abs(nearest - length);
    if (nearest < 0 || distance < best || (distance == best && candidate < nearest))
      nearest = candidate;
    std::array<NgramCounts, kBleuOrder> counts = count_ngrams(reference_tokens);
    for (std::size_t n = 0; n < kBleuOrder; ++n) {
      for (const auto& [ngram, count] : counts[n])
        wanted[n][ngram] = std::max(wanted[n][ngram], count);
    }
  }
  bleu.hypothesis_length += length;
  bleu.reference_length += nearest;
  const std::array<NgramCounts, kBleuOrder> found = count_ngrams(tokens);
  for (std::size_t n = 0; n < kBleuOrder; ++n) {
    for (const auto& [ngram, count] : found[n]) {
      bleu.totals[n] += static_cast<double>(count);
      const auto match = wanted[n].find(ngram);
      if (match != wanted[n].end())
        bleu.counts[n] += static_cast<double>(std::min(count, match->second));
    }
  }
}

void finish(Bleu& bleu, const BleuOptions& options) {
  const auto h = static_cast<double>(bleu.hypothesis_length);
  const auto r = static_cast<double>(bleu.reference_length);
  if (h < r) bleu.brevity_penalty = h > 0.0 ? std::exp(1.0 - r / h) : 0.0;
  if (std::all_of(bleu.counts.begin(), bleu.counts.end(), [](double c) { return c == 0.0; }))
    return;
  double halves = 1.0;
  std::size_t order = kBleuOrder;
  for (std::size_t n = 0; n < kBleuOrder; ++n) {
    double& count = bleu.counts[n];
    double& total = bleu.totals[n];
    if (options.smoothing == BleuSmoothing::add_k && n > 0) {
      count += options.add_count;
      total += options.add_count;
    }
    if (total == 0.0) break;
    if (options.effective_order) order = n + 1;
    if (count > 0.0) {
      bleu.precisions[n] = 100.0 * count / total;
    } else if (options.smoothing == BleuSmoothing::exponential) {
      halves *= 2.0;
      bleu.precisions[n] = 100.0 / (halves * total);
    } else if (options.smoothing == BleuSmoothing::floor) {
      bleu.precisions[n] = 100.0 * options.floor_count / total;
    }
  }
  double logarithms = 0.0;
  for (std::size_t n = 0; n < order; ++n)
    logarithms += bleu.precisions[n] > 0.0 ? std::log(bleu.precisions[n]) : kLogOfZero;
  bleu.score = bleu.brevity_penalty * std::exp(logarithms / static_cast<double>(order));
}

}  // namespace

std::string tokenize_13a(std::string_view line) {
  std::string text(line);
  replace_all(text, "<skipped>", "");
  replace_all(text, "-\n", "");
  replace_all(text, "\n", " ");
  replace_all(text, "&quot;", "\"");
  replace_all(text, "&amp;", "&");
  replace_all(text, "&lt;", "<");
  replace_all(text, "&gt;", ">");

  std::string apart = " ";
  for (const char c : text) {
    if (stands_alone(c)) {
      apart += ' ';
      apart += c;
      apart += ' ';
    } else {
      apart += c;
    }
  }
  apart += ' ';
  const auto put = [](std::string& out, std::string_view before, char a, std::string_view between,
                      char b, std::string_view after) {
    out += before;
    out += a;
    out += between;
    out += b;
    out += after;
  };
  // A point or comma unless behind a digit, then unless before one, then a dash behind a digit.
  apart = rewrite_pairs(
      apart, [](char a, char b) { return !is_digit(a) && is_point(b); },
      [&](std::string& out, char a, char b) { put(out, "", a, " ", b, " "); });
  apart = rewrite_pairs(
      apart, [](char a, char b) { return is_point(a) && !is_digit(b); },
      [&](std::string& out, char a, char b) { put(out, " ", a, " ", b, ""); });
  apart = rewrite_pairs(
      apart, [](char a, char b) { return is_digit(a) && b == '-'; },
      [&](std::string& out, char a, char b) { put(out, "", a, " ", b, " "); });

  std::string tokens;
  for (const std::string_view word : split(apart)) {
    if (!tokens.empty()) tokens += ' ';
    tokens += word;
  }
  return tokens;
}

Bleu corpus_bleu(const std::vector<std::string>& hypotheses,
                 const std::vector<std::vector<std::string>>& references,
                 const BleuOptions& options) {
  GRADUS_CHECK("bleu", !hypotheses.empty() && hypotheses.size() == references.size(),
               "a corpus needs hypotheses and as many lists of references; got ", hypotheses.size(),
               " and ", references.size());
  GRADUS_CHECK("bleu", options.floor_count >= 0.0 && options.add_count >= 0.0,
               "floor_count and add_count must be >= 0; got ", options.floor_count, " and ",
               options.add_count);
  Bleu bleu;
  for (std::size_t i = 0; i < hypotheses.size(); ++i) {
    GRADUS_CHECK("bleu", !references[i].empty(), "every hypothesis needs a reference; number ", i,
                 " has none");
    add_sentence(bleu, hypotheses[i], references[i]);
  }
  finish(bleu, options);
  return bleu;
}

Bleu corpus_bleu(const std::vector<std::string>& hypotheses,
                 const std::vector<std::string>& references, const BleuOptions& options) {
  std::vector<std::vector<std::string>> lists;
  lists.reserve(references.size());
  for (const std::string& reference : references) lists.push_back({reference});
  return corpus_bleu(hypotheses, lists, options);
}

}  // namespace gradus::metrics
