#include <gradus/data/parallel_text.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <gradus/base/error.h>
#include <gradus/data/internal/help_page.h>

namespace gradus::data {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::string page(const std::string& body) {
  return "<!DOCTYPE html>\n<html lang=\"en-US\"><head><title>T</title></head><body>\n"
         "<p dir=\"auto\">navigation</p><div id=\"DisplayArea\" itemprop=\"softwareHelp\">\n" +
         body + "\n</div></body></html>\n";
}

std::string paragraph(const std::string& id, const std::string& text) {
  return "<p id=\"" + id + "\" class=\"paragraph\" dir=\"auto\">" + text + "</p>\n";
}

TEST(HelpPageTest, ReadsParagraphsAndHeadingsOfTheTextArea) {
  const auto paragraphs =
      parse_help_page(page("<h1 id=\"hd_1\" dir=\"auto\">Insert Menu</h1>\n"
                           "<p id=\"par_2\" class=\"paragraph\"><a name=\"x\"></a>Choose <span "
                           "class=\"menuitem\">Insert -\n"
                           "  More</span><br>now\xc2\xa0please\n</p>"
                           "<div><p class=\"tip\"><img src=\"a.svg\" alt=\"Icon\"></p></div>"
                           "<script>var p = \"<p>no</p>\";</script><!-- <p>no</p> --><pre>no</pre>"
                           "<h3>last &amp; least</h3>"),
                      "page");
  EXPECT_THAT(paragraphs, ElementsAre(HelpParagraph{"hd_1", "Insert Menu"},
                                      HelpParagraph{"par_2", "Choose Insert - More now please"},
                                      HelpParagraph{"", ""}, HelpParagraph{"", "last & least"}));
}

TEST(HelpPageTest, LeavesOutTheKeyOfTheMac) {
  const auto paragraphs = parse_help_page(
      page("<p><span class=\"switchinline\"><span hidden=\"true\" id=\"M\" class=\"MAC\">"
           "<span class=\"emph\">Command</span>\n</span><span hidden=\"true\" "
           "id=\"d\">Ctrl</span></span>+F2</p>"
           "<p>after</p>"),
      "page");
  EXPECT_THAT(paragraphs, ElementsAre(HelpParagraph{"", "Ctrl+F2"}, HelpParagraph{"", "after"}));
}

TEST(HelpPageTest, ResolvesReferencesAndLeavesUnknownOnes) {
  EXPECT_EQ(internal::resolve_references("&lt;b&gt; &amp;amp; &quot;x&apos; "
                                         "&#228;&#x20AC;&#x1F600; &bogus; A&B; &#0; &#xD800; & &"),
            "<b> &amp; \"x' \xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80 &bogus; A&B; &#0; &#xD800; & &");
}

TEST(HelpPageTest, RefusesOtherFilesByName) {
  EXPECT_THAT(([] { parse_help_page("<html><p>x</p></html>", "dir/a.html"); }),
              ThrowsMessage<UserError>(AllOf(HasSubstr("dir/a.html"), HasSubstr("DisplayArea"))));
  const std::string whole = page("<p>text</p>");
  EXPECT_THAT(([&] { parse_help_page(whole.substr(0, whole.size() - 20), "dir/b.html"); }),
              ThrowsMessage<UserError>(AllOf(HasSubstr("dir/b.html"), HasSubstr("is cut"))));
}

class HelpPairsTest : public testing::Test {
 protected:
  HelpPairsTest() {
    std::string pattern = (fs::temp_directory_path() / "gradus-help-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    folder_ = pattern;
  }
  ~HelpPairsTest() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

  void write(const std::string& language, const std::string& name, const std::string& content) {
    const fs::path path = folder_ / language / "text" / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << content;
  }
  HelpPairOptions options() const {
    return {.directory = folder_.string(), .validation_ratio = 0.0, .test_ratio = 0.0};
  }

  fs::path folder_;
};

TEST_F(HelpPairsTest, PairsParagraphsOfPagesWithEqualCounts) {
  write("en-US", "swriter/01/a.html",
        page(paragraph("1", "One") + paragraph("2", "Same") + paragraph("3", "Two") +
             paragraph("4", "") + paragraph("5", "One") + paragraph("6", "Shifted")));
  write("de", "swriter/01/a.html",
        page(paragraph("1", "Eins") + paragraph("2", "Same") + paragraph("3", "Zwei") +
             paragraph("4", "leer") + paragraph("5", "Eins") + paragraph("7", "Verschoben")));
  write("en-US", "b.html", page(paragraph("1", "Three") + paragraph("2", "Four")));
  write("de", "b.html", page(paragraph("1", "Drei")));
  write("en-US", "c.html", page(paragraph("1", "Only English")));
  write("en-US", "d.html", page(paragraph("1", "One") + paragraph("2", std::string(201, 'x'))));
  write("de", "d.html", page(paragraph("1", "Einer") + paragraph("2", "lang")));
  write("de", "readme.txt", "not a page");
  const ParallelText text = load_help_pairs(options());
  EXPECT_THAT(text.train, ElementsAre(TextPair{"One", "Einer"}, TextPair{"One", "Eins"},
                                      TextPair{"Two", "Zwei"}));
  EXPECT_EQ(text.pages, 2);
  EXPECT_EQ(text.unpaired_pages, 2);
}

TEST_F(HelpPairsTest, SplitsBySourceTheSameWithMorePages) {
  std::string english, german;
  for (int i = 0; i < 1000; ++i) {
    english += paragraph(std::to_string(i), "Text " + std::to_string(i % 500));
    german += paragraph(std::to_string(i), "Wort " + std::to_string(i));
  }
  write("en-US", "a.html", page(english));
  write("de", "a.html", page(german));
  HelpPairOptions split = options();
  split.validation_ratio = 0.2;
  split.test_ratio = 0.1;
  const ParallelText text = load_help_pairs(split);
  const auto sources = [](const std::vector<TextPair>& pairs) {
    std::set<std::string> result;
    for (const TextPair& pair : pairs) result.insert(pair.source);
    return result;
  };
  EXPECT_EQ(text.train.size() + text.validation.size() + text.test.size(), 1000U);
  EXPECT_EQ(
      sources(text.train).size() + sources(text.validation).size() + sources(text.test).size(),
      500U);  // no source is in two parts
  EXPECT_NEAR(static_cast<double>(text.validation.size()), 200.0, 60.0);
  EXPECT_NEAR(static_cast<double>(text.test.size()), 100.0, 45.0);

  write("en-US", "0.html", page(paragraph("1", "New")));
  write("de", "0.html", page(paragraph("1", "Neu")));
  EXPECT_EQ(sources(load_help_pairs(split).validation), sources(text.validation));
}

TEST_F(HelpPairsTest, RefusesWhatItCannotUseByName) {
  EXPECT_THAT(([&] { load_help_pairs(options()); }),
              ThrowsMessage<UserError>(AllOf(HasSubstr((folder_ / "en-US" / "text").string()),
                                             testing::Not(HasSubstr("apt-get")))));
  write("en-US", "a.html", page(paragraph("1", "Same")));
  write("de", "a.html", page(paragraph("1", "Same")));
  EXPECT_THAT(([&] { load_help_pairs(options()); }),
              ThrowsMessage<UserError>(HasSubstr("gives none from 1 pages")));
  write("de", "a.html", "<html>");
  EXPECT_THAT(([&] { load_help_pairs(options()); }),
              ThrowsMessage<UserError>(HasSubstr((folder_ / "de" / "text" / "a.html").string())));
  write("de", "a.html", page(paragraph("1", "\xff")));
  EXPECT_THAT(([&] { load_help_pairs(options()); }),
              ThrowsMessage<UserError>(HasSubstr("must be UTF-8")));
  HelpPairOptions wrong = options();
  wrong.test_ratio = 1.0;
  EXPECT_THAT(([&] { load_help_pairs(wrong); }),
              ThrowsMessage<UserError>(HasSubstr("together below 1; got 0 and 1")));
  wrong = options();
  wrong.max_bytes = 0;
  EXPECT_THAT(([&] { load_help_pairs(wrong); }), ThrowsMessage<UserError>(HasSubstr("max_bytes")));
}

TEST_F(HelpPairsTest, NamesThePackagesOfTheDefaultDirectory) {
  if (fs::exists(fs::path(kLibreOfficeHelpDirectory) / "en-US") &&
      fs::exists(fs::path(kLibreOfficeHelpDirectory) / "de")) {
    const ParallelText text = load_help_pairs();
    EXPECT_GT(text.pages, 2000);
    EXPECT_GT(text.train.size(), 20000U);
    EXPECT_GT(text.validation.size(), 300U);
    EXPECT_GT(text.test.size(), 300U);
  } else {
    EXPECT_THAT(([] { load_help_pairs(); }),
                ThrowsMessage<UserError>(HasSubstr("apt-get install libreoffice-help-en-us")));
  }
}

constexpr PairTokens kTokens{.padding = 0, .begin = 100, .end = 101, .vocabulary_size = 102};

TEST(PairBatchesTest, PadsBothSidesAndMarksPadding) {
  const TokenPair a{{5, 6, 7}, {8}};
  const TokenPair b{{9}, {10, 11}};
  const PairBatch batch = pad_pairs({&a, &b}, kTokens);
  EXPECT_TRUE(torch::equal(batch.source, torch::tensor({{5, 6, 7}, {9, 0, 0}})));
  EXPECT_TRUE(
      torch::equal(batch.source_padding, torch::tensor({{0, 0, 0}, {0, 1, 1}}).to(torch::kBool)));
  EXPECT_TRUE(torch::equal(batch.inputs, torch::tensor({{100, 8, 0}, {100, 10, 11}})));
  EXPECT_TRUE(torch::equal(batch.targets, torch::tensor({{8, 101, 0}, {10, 11, 101}})));
  EXPECT_EQ(batch.target_tokens, 5);
  EXPECT_THAT(([] { pad_pairs({}, kTokens); }), ThrowsMessage<UserError>(HasSubstr("got none")));
}

// Pairs whose first source token numbers them, of lengths 1 to 30.
std::vector<TokenPair> numbered_pairs(std::int64_t count) {
  std::vector<TokenPair> pairs;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto length = static_cast<std::size_t>(1 + (i * 7919) % 30);
    TokenPair pair{std::vector<std::int64_t>(length, 1), std::vector<std::int64_t>(length, 2)};
    pair.source[0] = 200 + i;
    pairs.push_back(pair);
  }
  return pairs;
}

std::vector<std::int64_t> numbers(const PairBatch& batch) {
  const at::Tensor first = batch.source.select(1, 0).contiguous();
  return {first.data_ptr<std::int64_t>(), first.data_ptr<std::int64_t>() + first.numel()};
}

TEST(PairBatchesTest, GivesEveryPairOnceAnEpochInBatchesOfSimilarLengths) {
  PairBatches batches(numbered_pairs(1003), kTokens,
                      {.batch_size = 8, .seed = 5, .pool_batches = 16});
  ASSERT_EQ(batches.batches_per_epoch(), 126);
  std::set<std::int64_t> seen;
  std::int64_t cells = 0;
  std::int64_t tokens = 0;
  for (std::int64_t i = 0; i < 126; ++i) {
    const PairBatch batch = batches.next();
    for (const std::int64_t number : numbers(batch)) EXPECT_TRUE(seen.insert(number).second);
    cells += batch.targets.numel();
    tokens += batch.target_tokens;
  }
  EXPECT_EQ(seen.size(), 1003U);
  EXPECT_LT(static_cast<double>(cells), 1.15 * static_cast<double>(tokens));
  EXPECT_EQ(batches.position(), (DataPosition{1, 0}));
}

TEST(PairBatchesTest, OrderDependsOnSeedAndEpochAndContinuesFromAPosition) {
  const auto order = [](std::uint64_t seed, DataPosition from, std::int64_t count) {
    PairBatches batches(numbered_pairs(100), kTokens, {.batch_size = 7, .seed = seed});
    batches.seek(from);
    std::vector<std::vector<std::int64_t>> result;
    for (std::int64_t i = 0; i < count; ++i) result.push_back(numbers(batches.next()));
    return result;
  };
  const auto all = order(1, {}, 30);  // an epoch has 15
  EXPECT_EQ(all, order(1, {}, 30));
  EXPECT_NE(all, order(2, {}, 30));
  EXPECT_NE(std::vector(all.begin(), all.begin() + 15), std::vector(all.begin() + 15, all.end()));
  EXPECT_EQ(std::vector(all.begin() + 19, all.end()), order(1, {1, 4}, 11));
}

TEST(PairBatchesTest, GivesShortestFirstWithoutShuffling) {
  PairBatches batches(numbered_pairs(60), kTokens, {.batch_size = 6, .shuffle = false});
  std::int64_t before = 0;
  for (int i = 0; i < 10; ++i) {
    const std::int64_t length = batches.next().source.size(1);
    EXPECT_GE(length, before);
    before = length;
  }
  EXPECT_EQ(before, 30);
}

TEST(PairBatchesTest, LargestBoundsEveryBatch) {
  std::vector<TokenPair> pairs = numbered_pairs(50);
  pairs[3].source.resize(40, 1);
  PairBatches batches(std::move(pairs), kTokens, {.batch_size = 8});
  const PairBatch largest = batches.largest();
  EXPECT_EQ(largest.source.sizes(), (std::vector<std::int64_t>{8, 40}));
  EXPECT_EQ(largest.targets.sizes(), (std::vector<std::int64_t>{8, 31}));
}

TEST(PairBatchesTest, RefusesOptionsOutOfTheirRange) {
  const auto refused = [](std::vector<TokenPair> pairs, const PairBatchOptions& options,
                          const char* text) {
    EXPECT_THAT(([&] { PairBatches batches(std::move(pairs), kTokens, options); }),
                ThrowsMessage<UserError>(HasSubstr(text)));
  };
  refused({}, {}, "got none");
  refused(numbered_pairs(3), {.batch_size = 0}, "batch_size must be >= 1; got 0");
  refused(numbered_pairs(3), {.pool_batches = 0}, "pool_batches must be >= 1; got 0");
  PairBatches batches(numbered_pairs(3), kTokens, {});
  EXPECT_THAT(([&] { batches.seek({0, 1}); }), ThrowsMessage<UserError>(HasSubstr("index 1")));
}

TEST(PairTokensTest, FollowTheTokenizersVocabulary) {
  std::string text;
  for (int i = 0; i < 200; ++i) text += "the quick brown fox jumps over the lazy dog\n";
  const auto tokenizer = SentencePieceTokenizer::train(text, 300);
  const PairTokens tokens = pair_tokens(*tokenizer);
  EXPECT_EQ(tokens.begin, tokenizer->vocabulary_size());
  EXPECT_EQ(tokens.vocabulary_size, tokenizer->vocabulary_size() + 2);
  const auto encoded = encode_pairs(
      *tokenizer, {{"the fox", "the dog"}, {"", "dog"}, {"fox", std::string(500, 'z')}}, 50);
  ASSERT_EQ(encoded.size(), 1U);
  EXPECT_EQ(tokenizer->decode(encoded[0].source), "the fox");
  EXPECT_EQ(std::count(encoded[0].source.begin(), encoded[0].source.end(), tokens.padding), 0);
  EXPECT_THAT(([] { pair_tokens(ByteTokenizer()); }),
              ThrowsMessage<UserError>(HasSubstr("'bytes'")));
}

}  // namespace
}  // namespace gradus::data
