#include <gradus/data/parallel_text.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <filesystem>
#include <limits>
#include <numeric>
#include <set>
#include <unordered_set>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <gradus/base/error.h>
#include <gradus/data/internal/help_page.h>
#include <gradus/data/internal/help_pages.h>
#include <gradus/data/internal/shuffle.h>

namespace gradus::data {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSourceLanguage = "en-US";
constexpr const char* kTargetLanguage = "de";

bool wanted(const HelpParagraph& source, const HelpParagraph& target,
            const HelpPairOptions& options) {
  const auto fits = [&](const std::string& text) {
    return !text.empty() && std::cmp_less_equal(text.size(), options.max_bytes);
  };
  return source.id == target.id && fits(source.text) && fits(target.text) &&
         source.text != target.text;
}

void check_options(const HelpPairOptions& options) {
  GRADUS_CHECK("data", options.max_bytes >= 1, "max_bytes must be >= 1; got ", options.max_bytes);
  GRADUS_CHECK("data",
               options.validation_ratio >= 0.0 && options.test_ratio >= 0.0 &&
                   options.validation_ratio + options.test_ratio < 1.0,
               "validation_ratio and test_ratio must be >= 0 and together below 1; got ",
               options.validation_ratio, " and ", options.test_ratio);
}

std::size_t length_of(const TokenPair& pair) {
  return std::max(pair.source.size(), pair.target.size() + 1);
}

}  // namespace

std::vector<HelpParagraph> parse_help_page(std::string_view html, const std::string& origin) {
  constexpr std::string_view kTextArea = "id=\"DisplayArea\"";
  const std::size_t begin = html.find(kTextArea);
  GRADUS_CHECK("data", begin != std::string_view::npos, "a help page must have a part with ",
               kTextArea, "; '", origin, "' has none");
  const std::size_t end = html.find("</html>", begin);
  GRADUS_CHECK("data", end != std::string_view::npos, "a help page must end in </html>; '", origin,
               "' is cut. Install it afresh");
  const std::size_t tag_end = html.find('>', begin);
  return internal::HelpPageReader(html.substr(tag_end + 1, end - tag_end - 1)).paragraphs();
}

ParallelText load_help_pairs(const HelpPairOptions& options) {
  check_options(options);
  const fs::path sources = internal::help_text_directory(options.directory, kSourceLanguage);
  const fs::path targets = internal::help_text_directory(options.directory, kTargetLanguage);
  ParallelText text;
  std::set<std::pair<std::string, std::string>> seen;
  for (const fs::path& path : internal::help_page_paths(sources)) {
    if (!fs::is_regular_file(targets / path)) {
      ++text.unpaired_pages;
      continue;
    }
    std::vector<HelpParagraph> source = internal::read_help_page(sources / path);
    std::vector<HelpParagraph> target = internal::read_help_page(targets / path);
    if (source.size() != target.size()) {
      ++text.unpaired_pages;
      continue;
    }
    ++text.pages;
    for (std::size_t i = 0; i < source.size(); ++i) {
      if (!wanted(source[i], target[i], options)) continue;
      if (!seen.emplace(source[i].text, target[i].text).second) continue;
      const double place = internal::place_of(source[i].text);
      std::vector<TextPair>& part = place < options.test_ratio ? text.test
                                    : place < options.test_ratio + options.validation_ratio
                                        ? text.validation
                                        : text.train;
      part.push_back({std::move(source[i].text), std::move(target[i].text)});
    }
  }
  GRADUS_CHECK("data", !text.train.empty(), "the help must hold pairs to train on; '",
               options.directory, "' gives none from ", text.pages, " pages");
  return text;
}

PairTokens pair_tokens(const Tokenizer& tokenizer) {
  GRADUS_CHECK("data", tokenizer.name() == "sentencepiece",
               "padding is a tokenizer's <unk>, which 'sentencepiece' has; got '", tokenizer.name(),
               "'");
  const std::int64_t size = tokenizer.vocabulary_size();
  return {.padding = 0, .begin = size, .end = size + 1, .vocabulary_size = size + 2};
}

std::vector<TokenPair> encode_pairs(const Tokenizer& tokenizer, const std::vector<TextPair>& pairs,
                                    std::int64_t max_tokens) {
  std::vector<TokenPair> encoded;
  encoded.reserve(pairs.size());
  for (const TextPair& pair : pairs) {
    TokenPair tokens{tokenizer.encode(pair.source), tokenizer.encode(pair.target)};
    const auto fits = [&](const std::vector<std::int64_t>& side) {
      return !side.empty() && std::cmp_less_equal(side.size(), max_tokens);
    };
    if (fits(tokens.source) && fits(tokens.target)) encoded.push_back(std::move(tokens));
  }
  return encoded;
}

PairBatch pad_pairs(const std::vector<const TokenPair*>& pairs, const PairTokens& tokens) {
  GRADUS_CHECK("data", !pairs.empty(), "a batch needs pairs; got none");
  std::size_t source_length = 0;
  std::size_t target_length = 0;
  for (const TokenPair* pair : pairs) {
    source_length = std::max(source_length, pair->source.size());
    target_length = std::max(target_length, pair->target.size() + 1);
  }
  const auto rows = static_cast<std::int64_t>(pairs.size());
  const auto columns = static_cast<std::int64_t>(source_length);
  const auto steps = static_cast<std::int64_t>(target_length);
  PairBatch batch{.source = at::full({rows, columns}, tokens.padding, at::kLong),
                  .source_padding = at::full({rows, columns}, true, at::kBool),
                  .inputs = at::full({rows, steps}, tokens.padding, at::kLong),
                  .targets = at::full({rows, steps}, tokens.padding, at::kLong)};
  auto* source = batch.source.mutable_data_ptr<std::int64_t>();
  auto* padding = batch.source_padding.mutable_data_ptr<bool>();
  auto* inputs = batch.inputs.mutable_data_ptr<std::int64_t>();
  auto* targets = batch.targets.mutable_data_ptr<std::int64_t>();
  for (const TokenPair* pair : pairs) {
    std::copy(pair->source.begin(), pair->source.end(), source);
    std::fill_n(padding, pair->source.size(), false);
    inputs[0] = tokens.begin;
    std::copy(pair->target.begin(), pair->target.end(), inputs + 1);
    std::copy(pair->target.begin(), pair->target.end(), targets);
    targets[pair->target.size()] = tokens.end;
    batch.target_tokens += static_cast<std::int64_t>(pair->target.size()) + 1;
    source += columns;
    padding += columns;
    inputs += steps;
    targets += steps;
  }
  return batch;
}

PairBatches::PairBatches(std::vector<TokenPair> pairs, const PairTokens& tokens,
                         const PairBatchOptions& options)
    : pairs_(std::move(pairs)), tokens_(tokens), options_(options) {
  GRADUS_CHECK("data", !pairs_.empty(), "batches need pairs; got none");
  GRADUS_CHECK("data", pairs_.size() <= std::numeric_limits<std::uint32_t>::max(),
               "an epoch holds at most 2^32 - 1 pairs; got ", pairs_.size());
  GRADUS_CHECK("data", options_.batch_size >= 1, "batch_size must be >= 1; got ",
               options_.batch_size);
  GRADUS_CHECK("data", options_.pool_batches >= 1, "pool_batches must be >= 1; got ",
               options_.pool_batches);
}

std::int64_t PairBatches::batches_per_epoch() const {
  const auto count = static_cast<std::int64_t>(pairs_.size());
  return (count + options_.batch_size - 1) / options_.batch_size;
}

void PairBatches::order_epoch() {
  if (ordered_epoch_ == position_.epoch) return;
  std::vector<std::uint32_t> order(pairs_.size());
  internal::order_of_epoch(order, options_.seed, position_.epoch, options_.shuffle);
  const auto size = static_cast<std::size_t>(options_.batch_size);
  const std::size_t pool =
      options_.shuffle ? size * static_cast<std::size_t>(options_.pool_batches) : order.size();
  std::vector<std::vector<std::uint32_t>> cut;
  for (std::size_t begin = 0; begin < order.size(); begin += pool) {
    const std::size_t end = std::min(order.size(), begin + pool);
    // Stable, so that equal lengths stay in the order of the shuffle on every platform.
    std::stable_sort(order.begin() + static_cast<std::ptrdiff_t>(begin),
                     order.begin() + static_cast<std::ptrdiff_t>(end),
                     [&](std::uint32_t a, std::uint32_t b) {
                       return length_of(pairs_[a]) < length_of(pairs_[b]);
                     });
    for (std::size_t from = begin; from < end; from += size) {
      cut.emplace_back(order.begin() + static_cast<std::ptrdiff_t>(from),
                       order.begin() + static_cast<std::ptrdiff_t>(std::min(end, from + size)));
    }
  }
  batches_.assign(cut.size(), {});
  std::vector<std::uint32_t> batch_order(cut.size());
  // Another stream of numbers than the order of pairs.
  internal::order_of_epoch(batch_order, ~options_.seed, position_.epoch, options_.shuffle);
  for (std::size_t i = 0; i < cut.size(); ++i) batches_[i] = std::move(cut[batch_order[i]]);
  ordered_epoch_ = position_.epoch;
}

PairBatch PairBatches::next() {
  order_epoch();
  std::vector<const TokenPair*> rows;
  for (const std::uint32_t pair : batches_[static_cast<std::size_t>(position_.index)])
    rows.push_back(&pairs_[pair]);
  if (++position_.index == batches_per_epoch()) position_ = {position_.epoch + 1, 0};
  return pad_pairs(rows, tokens_);
}

PairBatch PairBatches::largest() const {
  std::vector<const TokenPair*> rows;
  for (const TokenPair& pair : pairs_) rows.push_back(&pair);
  const auto count = std::min(rows.size(), static_cast<std::size_t>(options_.batch_size));
  // The longest source and the longest target need not be of one pair.
  const auto longest = [&](auto side) {
    return *std::max_element(
        pairs_.begin(), pairs_.end(),
        [&](const TokenPair& a, const TokenPair& b) { return side(a).size() < side(b).size(); });
  };
  const TokenPair widest{
      longest([](const TokenPair& p) -> const auto& { return p.source; }).source,
      longest([](const TokenPair& p) -> const auto& { return p.target; }).target};
  rows.assign(count, &widest);
  return pad_pairs(rows, tokens_);
}

void PairBatches::seek(DataPosition position) {
  GRADUS_CHECK("data",
               position.epoch >= 0 && position.index >= 0 && position.index < batches_per_epoch(),
               "a position needs an epoch >= 0 and an index below the ", batches_per_epoch(),
               " batches of an epoch; got epoch ", position.epoch, ", index ", position.index);
  position_ = position;
}

}  // namespace gradus::data
