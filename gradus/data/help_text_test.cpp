#include <gradus/data/help_text.h>

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <gradus/data/internal/temporary_folder.h>
#include <gradus/data/tokenizer.h>
#include <gradus/data/wordpiece_tokenizer.h>

#include <tests/support/message_of.h>

namespace gradus::data {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAre;
using tests::message_of;

std::string page(const std::vector<std::string>& paragraphs) {
  std::string html = "<html><body><div id=\"DisplayArea\">";
  for (const std::string& paragraph : paragraphs) html += "<p>" + paragraph + "</p>";
  return html + "</div></body></html>";
}

class HelpTextTest : public testing::Test {
 protected:
  void write(const std::string& name, const std::vector<std::string>& paragraphs) const {
    folder_.write("en-US/text/" + name, page(paragraphs));
  }
  HelpTextOptions options() const {
    return {.directory = folder_.path(), .min_paragraphs = 1, .min_bytes = 4, .test_ratio = 0.0};
  }

  internal::TemporaryFolder folder_;
};

TEST_F(HelpTextTest, LabelsParagraphsByTheFirstFolderOfTheirPage) {
  write("swriter/01/a.html", {"A text document", "it"});
  write("scalc/b.html", {"A spreadsheet", "A &lt;cell&gt;"});
  write("shared/c.html", {"Of no application"});
  write("d.html", {"In no folder"});
  const HelpText text = load_help_text(options());
  EXPECT_THAT(text.class_names, ElementsAre("scalc", "swriter"));
  EXPECT_THAT(text.train, ElementsAre(LabelledText{"A spreadsheet", 0}, LabelledText{"A <cell>", 0},
                                      LabelledText{"A text document", 1}));
  EXPECT_THAT(text.test, IsEmpty());
  EXPECT_EQ(text.pages, 2);
  EXPECT_THAT(text.train_counts(), ElementsAre(2, 1));
  EXPECT_THAT(text.test_counts(), ElementsAre(0, 0));
}

TEST_F(HelpTextTest, KeepsATextOnceAndNoneThatSeveralClassesHave) {
  write("scalc/a.html", {"Only Calc", "Both have it", "Only Calc"});
  write("scalc/b.html", {"Only Calc", "More Calc"});
  write("swriter/a.html", {"Both have it", "Only Writer", "Both have it"});
  const HelpText text = load_help_text(options());
  EXPECT_THAT(text.train, ElementsAre(LabelledText{"Only Calc", 0}, LabelledText{"More Calc", 0},
                                      LabelledText{"Only Writer", 1}));
  EXPECT_EQ(text.ambiguous, 1);
  EXPECT_EQ(text.repeated, 2);
}

TEST_F(HelpTextTest, ChoosesClassesByCountOrByName) {
  write("scalc/a.html", {"One of Calc", "Two of Calc"});
  write("smath/a.html", {"One of Math"});
  write("swriter/a.html", {"One of Writer", "Two of Writer"});
  HelpTextOptions chosen = options();
  chosen.min_paragraphs = 2;
  EXPECT_THAT(load_help_text(chosen).class_names, ElementsAre("scalc", "swriter"));
  chosen.classes = {"swriter", "smath"};
  const HelpText named = load_help_text(chosen);
  EXPECT_THAT(named.class_names, ElementsAre("smath", "swriter"));
  EXPECT_EQ(named.pages, 2);
}

TEST_F(HelpTextTest, PutsWholePagesIntoOnePartTheSameWithMorePages) {
  std::map<std::string, std::string> page_of;
  for (int i = 0; i < 200; ++i) {
    const std::string name =
        std::string(i % 2 == 0 ? "scalc" : "swriter") + "/" + std::to_string(i) + ".html";
    std::vector<std::string> paragraphs;
    for (int j = 0; j < 3; ++j) {
      paragraphs.push_back("Text " + std::to_string(i) + " " + std::to_string(j));
      page_of[paragraphs.back()] = name;
    }
    write(name, paragraphs);
  }
  HelpTextOptions split = options();
  split.test_ratio = 0.3;
  const HelpText text = load_help_text(split);
  EXPECT_EQ(text.train.size() + text.test.size(), 600U);
  const auto pages = [&](const std::vector<LabelledText>& part) {
    std::set<std::string> names;
    for (const LabelledText& labelled : part) names.insert(page_of.at(labelled.text));
    return names;
  };
  EXPECT_EQ(pages(text.train).size() + pages(text.test).size(), 200U);  // none in both
  EXPECT_NEAR(static_cast<double>(pages(text.test).size()), 60.0, 25.0);

  write("scalc/more.html", {"Another text"});
  EXPECT_EQ(pages(load_help_text(split).test), pages(text.test));
}

TEST_F(HelpTextTest, RefusesWhatItCannotUseByName) {
  EXPECT_THAT(message_of([&] { load_help_text(options()); }),
              HasSubstr("help pages must be in '" + folder_.path() + "/en-US/text'"));
  write("scalc/a.html", {"A text"});
  EXPECT_THAT(message_of([&] { load_help_text(options()); }),
              HasSubstr("at least two classes; '" + folder_.path() + "' gives 1 with at least 1"));
  write("swriter/a.html", {"x"});
  HelpTextOptions wrong = options();
  wrong.classes = {"scalc", "swriter"};
  EXPECT_THAT(message_of([&] { load_help_text(wrong); }),
              HasSubstr("'swriter' has none of at least 4 bytes"));
  wrong.classes = {"scalc", "base"};
  EXPECT_THAT(message_of([&] { load_help_text(wrong); }), HasSubstr("there is no 'base'"));
  wrong.classes = {"scalc", "scalc"};
  EXPECT_THAT(message_of([&] { load_help_text(wrong); }), HasSubstr("must differ"));
  wrong = options();
  wrong.min_bytes = 0;
  EXPECT_THAT(message_of([&] { load_help_text(wrong); }), HasSubstr("min_bytes must be >= 1"));
  wrong = options();
  wrong.min_paragraphs = 0;
  EXPECT_THAT(message_of([&] { load_help_text(wrong); }), HasSubstr("min_paragraphs must be >= 1"));
  wrong = options();
  wrong.test_ratio = 1.0;
  EXPECT_THAT(message_of([&] { load_help_text(wrong); }),
              HasSubstr("test_ratio must be in [0, 1)"));
  folder_.write("en-US/text/swriter/a.html", "<html>");
  EXPECT_THAT(message_of([&] { load_help_text(options()); }), HasSubstr("swriter/a.html"));
}

TEST_F(HelpTextTest, ReadsTheInstalledHelpOrNamesItsPackage) {
  if (!fs::exists(fs::path(kLibreOfficeHelpDirectory) / "en-US" / "text")) {
    EXPECT_THAT(message_of([] { load_help_text(); }),
                HasSubstr("apt-get install libreoffice-help-en-us"));
    GTEST_SKIP() << "no libreoffice-help-en-us: run scripts/setup.sh --data";
  }
  const HelpText text = load_help_text();
  EXPECT_THAT(text.class_names, testing::IsSupersetOf({"sbasic", "scalc", "simpress", "swriter"}));
  EXPECT_GT(text.train.size(), 10000U);
  EXPECT_GT(text.test.size(), 2000U);
  std::set<std::string> seen;
  for (const auto* part : {&text.train, &text.test})
    for (const LabelledText& labelled : *part) EXPECT_TRUE(seen.insert(labelled.text).second);
  for (const std::int64_t count : text.test_counts()) EXPECT_GT(count, 20);
}

TEST(TextExamplesTest, CutsAndPadsToOneLength) {
  const std::vector<LabelledText> texts{{"abcd", 1}, {"ab", 0}, {"abcdef", 2}};
  const TextExamples examples = encode_texts(ByteTokenizer(), texts, 4);
  EXPECT_TRUE(examples.ids.equal(
      torch::tensor({{97, 98, 99, 100}, {97, 98, 0, 0}, {97, 98, 99, 100}}).to(torch::kLong)));
  EXPECT_TRUE(examples.lengths.equal(torch::tensor({4, 2, 4}).to(torch::kLong)));
  EXPECT_TRUE(examples.labels.equal(torch::tensor({1, 0, 2}).to(torch::kLong)));
  EXPECT_TRUE(
      padding_after(examples.lengths, 4)
          .equal(torch::tensor({{0, 0, 0, 0}, {0, 0, 1, 1}, {0, 0, 0, 0}}).to(torch::kBool)));
  EXPECT_EQ(encode_texts(ByteTokenizer(), {}, 4).size(), 0);
  EXPECT_THAT(message_of([] { encode_texts(ByteTokenizer(), {{"", 0}}, 4); }),
              HasSubstr("at least one token"));
  EXPECT_THAT(message_of([&] { encode_texts(ByteTokenizer(), texts, 0); }),
              HasSubstr("length must be >= 1; got 0"));
}

TEST(TextExamplesTest, WordPiecesAreSentencesWithTheirMarks) {
  const WordPieceTokenizer tokenizer({"[UNK]", "[PAD]", "[CLS]", "[SEP]", "a", "cell"});
  const TextExamples examples =
      encode_texts(tokenizer, {{"A cell", 0}, {"a a a a", 1}, {"", 1}}, 5);
  EXPECT_TRUE(examples.ids.equal(
      torch::tensor({{2, 4, 5, 3, 1}, {2, 4, 4, 4, 3}, {2, 3, 1, 1, 1}}).to(torch::kLong)));
  EXPECT_TRUE(examples.lengths.equal(torch::tensor({4, 5, 2}).to(torch::kLong)));
  EXPECT_THAT(message_of([&] { encode_texts(tokenizer, {}, 1); }),
              HasSubstr("length must be >= 2"));
}

}  // namespace
}  // namespace gradus::data
