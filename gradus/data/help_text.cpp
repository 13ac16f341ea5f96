#include <gradus/data/help_text.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <unordered_map>
#include <utility>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <gradus/base/error.h>
#include <gradus/data/internal/help_pages.h>
#include <gradus/data/tokenizer.h>
#include <gradus/data/wordpiece_tokenizer.h>

namespace gradus::data {
namespace {

namespace fs = std::filesystem;

constexpr const char* kNoApplication = "shared";

struct Paragraph {
  std::string text;
  bool test = false;
};
using Paragraphs = std::map<std::string, std::vector<Paragraph>>;  // by class

void check_options(const HelpTextOptions& options) {
  GRADUS_CHECK("data", options.min_bytes >= 1, "min_bytes must be >= 1; got ", options.min_bytes);
  GRADUS_CHECK("data", options.min_paragraphs >= 1, "min_paragraphs must be >= 1; got ",
               options.min_paragraphs);
  GRADUS_CHECK("data", options.test_ratio >= 0.0 && options.test_ratio < 1.0,
               "test_ratio must be in [0, 1); got ", options.test_ratio);
}

bool may_be_class(const std::string& folder, const HelpTextOptions& options) {
  if (options.classes.empty()) return folder != kNoApplication;
  return std::find(options.classes.begin(), options.classes.end(), folder) != options.classes.end();
}

/// Every paragraph that is long enough, page by page.
Paragraphs read_paragraphs(const fs::path& directory, const HelpTextOptions& options,
                           HelpText& result) {
  Paragraphs paragraphs;
  for (const fs::path& path : internal::help_page_paths(directory)) {
    if (!path.has_parent_path()) continue;
    const std::string folder = path.begin()->string();
    if (!may_be_class(folder, options)) continue;
    ++result.pages;
    const bool test = internal::place_of(path.generic_string()) < options.test_ratio;
    for (HelpParagraph& paragraph : internal::read_help_page(directory / path)) {
      if (std::cmp_greater_equal(paragraph.text.size(), options.min_bytes))
        paragraphs[folder].push_back({std::move(paragraph.text), test});
    }
  }
  return paragraphs;
}

/// Leaves each text once, and out where several classes have it.
void drop_repeats(Paragraphs& paragraphs, HelpText& result) {
  constexpr const char* kSeveral = "";
  std::unordered_map<std::string, std::string> class_of;
  for (const auto& [name, texts] : paragraphs) {
    for (const Paragraph& paragraph : texts) {
      const auto [known, added] = class_of.emplace(paragraph.text, name);
      if (!added && known->second != name) known->second = kSeveral;
    }
  }
  for (const auto& [text, name] : class_of) result.ambiguous += name == kSeveral ? 1 : 0;
  for (auto& [name, texts] : paragraphs) {
    std::vector<Paragraph> kept;
    for (Paragraph& paragraph : texts) {
      const auto known = class_of.find(paragraph.text);
      // Erased once used, so that what is not found is a repeat.
      if (known == class_of.end()) {
        ++result.repeated;
      } else if (known->second != kSeveral) {
        class_of.erase(known);
        kept.push_back(std::move(paragraph));
      }
    }
    texts = std::move(kept);
  }
}

std::vector<std::string> choose_classes(const Paragraphs& paragraphs,
                                        const HelpTextOptions& options) {
  std::vector<std::string> names = options.classes;
  if (names.empty()) {
    for (const auto& [name, texts] : paragraphs) {
      if (std::cmp_greater_equal(texts.size(), options.min_paragraphs)) names.push_back(name);
    }
  }
  std::sort(names.begin(), names.end());
  GRADUS_CHECK("data", std::adjacent_find(names.begin(), names.end()) == names.end(),
               "classes must differ; got one of them twice");
  GRADUS_CHECK("data", names.size() >= 2, "there must be at least two classes; '",
               options.directory, "' gives ", names.size(), " with at least ",
               options.min_paragraphs, " paragraphs");
  return names;
}

std::vector<std::int64_t> counts_of(const std::vector<LabelledText>& texts, std::size_t classes) {
  std::vector<std::int64_t> counts(classes, 0);
  for (const LabelledText& text : texts) ++counts[static_cast<std::size_t>(text.label)];
  return counts;
}

using Encoder = std::function<std::vector<std::int64_t>(const std::string&)>;

TextExamples encode(const std::vector<LabelledText>& texts, std::int64_t length,
                    std::int64_t padding, const Encoder& encoder) {
  const auto count = static_cast<std::int64_t>(texts.size());
  TextExamples examples{.ids = at::full({count, length}, padding, at::kLong),
                        .lengths = at::empty({count}, at::kLong),
                        .labels = at::empty({count}, at::kLong)};
  auto* ids = examples.ids.mutable_data_ptr<std::int64_t>();
  auto* lengths = examples.lengths.mutable_data_ptr<std::int64_t>();
  auto* labels = examples.labels.mutable_data_ptr<std::int64_t>();
  for (const LabelledText& text : texts) {
    const std::vector<std::int64_t> tokens = encoder(text.text);
    GRADUS_CHECK("data", !tokens.empty(), "a text must give at least one token; got '", text.text,
                 "'");
    const std::int64_t kept = std::min(length, static_cast<std::int64_t>(tokens.size()));
    std::copy_n(tokens.begin(), kept, ids);
    ids += length;
    *lengths++ = kept;
    *labels++ = text.label;
  }
  return examples;
}

}  // namespace

std::vector<std::int64_t> HelpText::train_counts() const {
  return counts_of(train, class_names.size());
}

std::vector<std::int64_t> HelpText::test_counts() const {
  return counts_of(test, class_names.size());
}

HelpText load_help_text(const HelpTextOptions& options) {
  check_options(options);
  const fs::path directory = internal::help_text_directory(options.directory, options.language);
  for (const std::string& name : options.classes) {
    GRADUS_CHECK("data", !name.empty() && fs::is_directory(directory / name),
                 "a class must be a folder of '", directory.string(), "'; there is no '", name,
                 "'");
  }
  HelpText result;
  Paragraphs paragraphs = read_paragraphs(directory, options, result);
  drop_repeats(paragraphs, result);
  result.class_names = choose_classes(paragraphs, options);
  for (std::size_t label = 0; label < result.class_names.size(); ++label) {
    const std::size_t before = result.train.size();
    for (Paragraph& paragraph : paragraphs[result.class_names[label]]) {
      (paragraph.test ? result.test : result.train)
          .push_back({std::move(paragraph.text), static_cast<std::int64_t>(label)});
    }
    GRADUS_CHECK("data", result.train.size() > before,
                 "a class must hold paragraphs to train on; '", result.class_names[label],
                 "' has none of at least ", options.min_bytes, " bytes");
  }
  return result;
}

TextExamples encode_texts(const Tokenizer& tokenizer, const std::vector<LabelledText>& texts,
                          std::int64_t length) {
  GRADUS_CHECK("data", length >= 1, "length must be >= 1; got ", length);
  return encode(texts, length, /*padding=*/0,
                [&](const std::string& text) { return tokenizer.encode(text); });
}

TextExamples encode_texts(const WordPieceTokenizer& tokenizer,
                          const std::vector<LabelledText>& texts, std::int64_t length) {
  GRADUS_CHECK("data", length >= 2, "length must be >= 2, for [CLS] and [SEP]; got ", length);
  return encode(texts, length, tokenizer.padding(),
                [&](const std::string& text) { return tokenizer.encode_sentence(text, length); });
}

at::Tensor padding_after(const at::Tensor& lengths, std::int64_t length) {
  return at::arange(length, lengths.options()).unsqueeze(0).ge(lengths.unsqueeze(1));
}

}  // namespace gradus::data
