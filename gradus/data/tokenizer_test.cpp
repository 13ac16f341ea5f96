#include <gradus/data/tokenizer.h>

#include <filesystem>
#include <random>

#include <unistd.h>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/data/corpus.h>
#include <gradus/state/atomic_file.h>

#include <tests/support/message_of.h>

namespace gradus::data {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using tests::message_of;

const std::string& bible() {
  static const std::string text = load_corpus("bible-kjv").text;
  return text;
}

/// 2,000 verses: trained in a moment.
const std::string& slice() {
  static const std::string text = bible().substr(0, bible().find('\n', 270'000) + 1);
  return text;
}

const SentencePieceTokenizer& trained() {
  static const auto tokenizer = SentencePieceTokenizer::train(slice(), 1000);
  return *tokenizer;
}

const std::vector<std::string>& difficult_texts() {
  static const std::vector<std::string> texts{
      "",
      " ",
      "\n",
      "\n\n  leading, double  and trailing spaces  \n",
      "tabs\tand\r\nreturns\v\f",
      std::string("nul\0inside", 10),
      "caf\xc3\xa9 \xe4\xb8\xad\xe6\x96\x87 \xf0\x9f\x98\x80 e\xcc\x81 \xef\xac\x81 "
      "\xef\xbc\xa1",  // no normalisation
      "the mark \xe2\x96\x81 itself \xe2\x96\x81\xe2\x96\x81"
      "and",
      "<unk> <s> </s> <0x0A> \xe2\x96\x85 \xe2\x81\x87 \xef\xbf\xbd \xef\xbb\xbf",
      "no UTF-8: \xff\xfe \xc3 \xed\xa0\x80 end\xe2\x96"};
  return texts;
}

void expect_round_trip(const Tokenizer& tokenizer, const std::string& text) {
  const std::vector<std::int64_t> tokens = tokenizer.encode(text);
  EXPECT_EQ(tokenizer.decode(tokens), text);
  for (const std::int64_t token : tokens)
    ASSERT_TRUE(token >= 0 && token < tokenizer.vocabulary_size());
}

TEST(TokenizerTest, DifficultTextsAndRandomBytesComeBackExactly) {
  std::mt19937 random(5);
  for (const Tokenizer* tokenizer : {static_cast<const Tokenizer*>(&trained()),
                                     static_cast<const Tokenizer*>(new ByteTokenizer)}) {
    SCOPED_TRACE(tokenizer->name());
    for (const std::string& text : difficult_texts()) expect_round_trip(*tokenizer, text);
    for (int trial = 0; trial < 200; ++trial) {
      std::string text;
      for (int i = 0; i < 50; ++i) text.push_back(static_cast<char>(random()));
      expect_round_trip(*tokenizer, text);
    }
  }
}

TEST(TokenizerTest, WholeBibleComesBackFromATokenizerOfASlice) {
  const std::vector<std::int64_t> tokens = trained().encode(bible());
  EXPECT_EQ(trained().decode(tokens), bible());
  // It compresses: 1,000 pieces of English carry well above two bytes a token.
  EXPECT_LT(tokens.size(), bible().size() / 2);
}

TEST(TokenizerTest, EncodingIsAdditiveAtNewlinesAndBeforeSpaces) {
  const std::string line(slice().substr(0, slice().find('\n', 500) + 1));
  std::vector<std::int64_t> parts = trained().encode(line);
  const std::vector<std::int64_t> rest = trained().encode("And God said,\n");
  parts.insert(parts.end(), rest.begin(), rest.end());
  EXPECT_EQ(trained().encode(line + "And God said,\n"), parts);

  // Lines above 64 KiB are given to SentencePiece in parts; a word at a time must give the same
  // tokens.
  std::string long_line;
  std::vector<std::int64_t> word_tokens;
  std::mt19937 random(1);
  while (long_line.size() < 150'000) {
    const std::string word =
        base::join(" ", bible().substr(bible().find(' ', random() % 4'000'000) + 1, 5));
    if (word.find('\n') != std::string::npos) continue;
    long_line += word;
  }
  for (std::size_t at = 0; at < long_line.size();) {
    const std::size_t end = std::min(long_line.find(' ', at + 1), long_line.size());
    const auto word = trained().encode(long_line.substr(at, end - at));
    word_tokens.insert(word_tokens.end(), word.begin(), word.end());
    at = end;
  }
  EXPECT_EQ(trained().encode(long_line), word_tokens);
}

TEST(TokenizerTest, TrainingIsDeterministicAndOfTheSizeAskedFor) {
  const auto again = SentencePieceTokenizer::train(slice(), 1000);
  EXPECT_EQ(again->model(), trained().model());
  EXPECT_EQ(again->hash(), trained().hash());
  EXPECT_EQ(trained().vocabulary_size(), 1000);
  EXPECT_NE(SentencePieceTokenizer::train(slice(), 900)->hash(), trained().hash());
}

TEST(TokenizerTest, LongLinesAndTabsTakePartInTraining) {
  // One line of 60 kB with a tab: the trainer alone would skip it whole.
  std::string line = "\t";
  for (int i = 0; i < 5000; ++i) line += " abracadabra";
  const auto tokenizer = SentencePieceTokenizer::train(line, 300);
  EXPECT_EQ(tokenizer->encode(" abracadabra").size(), 1u);
  // A text with few different pieces gives the vocabulary that there is.
  EXPECT_LT(tokenizer->vocabulary_size(), 300);
}

TEST(TokenizerTest, WorksBesideLibTorchInEitherOrder) {
  // LibTorch exports protobuf symbols of its own release; SentencePiece must not pick them up.
  const at::Tensor before = at::ones({8, 8}).mm(at::ones({8, 8}));
  const auto tokenizer = SentencePieceTokenizer::train(slice().substr(0, 50'000), 500);
  const at::Tensor after = at::ones({8, 8}).mm(at::ones({8, 8}));
  EXPECT_TRUE(at::equal(before, after));
  expect_round_trip(*tokenizer, slice());
}

TEST(TokenizerTest, RefusesWhatCannotBeTrainedOrDecoded) {
  EXPECT_THAT(message_of([] { SentencePieceTokenizer::train("text", 257); }),
              HasSubstr("must be in (257, 2^24]"));
  EXPECT_THAT(message_of([] { SentencePieceTokenizer::train("", 300); }),
              HasSubstr("is trained on text; got none"));
  EXPECT_THAT(message_of([] { SentencePieceTokenizer::train("\n\n\t\n", 300); }),
              HasSubstr("got none"));
  EXPECT_THAT(message_of([] { SentencePieceTokenizer::train(slice(), 260); }),
              HasSubstr("Increase vocab_size"));
  EXPECT_THAT(message_of([] { SentencePieceTokenizer("nonsense"); }),
              HasSubstr("needs a SentencePiece model"));
  const std::vector<std::int64_t> high{1000}, negative{-1}, byte{256};
  EXPECT_THAT(message_of([&] { trained().decode(high); }),
              HasSubstr("must be in [0, 1000); got 1000"));
  EXPECT_THAT(message_of([&] { trained().decode(negative); }), HasSubstr("got -1"));
  EXPECT_THAT(message_of([&] { ByteTokenizer().decode(byte); }),
              HasSubstr("must be in [0, 256); got 256"));
  EXPECT_THAT(message_of([] { make_tokenizer({.kind = "words"}, "x"); }), HasSubstr("got 'words'"));
}

TEST(TokenizerTest, SavedAndLoadedItIsTheSame) {
  std::string pattern = (fs::temp_directory_path() / "gradus-tokenizer-XXXXXX").string();
  const std::string directory = ::mkdtemp(pattern.data());
  for (const auto& tokenizer : {make_tokenizer({.kind = "bytes"}, ""),
                                make_tokenizer({.kind = "sentencepiece", .vocabulary_size = 500},
                                               slice().substr(0, 50'000))}) {
    SCOPED_TRACE(tokenizer->name());
    const std::string path = directory + "/tokenizer";
    tokenizer->save(path);
    const auto loaded = load_tokenizer(path);
    EXPECT_EQ(loaded->name(), tokenizer->name());
    EXPECT_EQ(loaded->hash(), tokenizer->hash());
    EXPECT_EQ(loaded->vocabulary_size(), tokenizer->vocabulary_size());
    EXPECT_EQ(loaded->encode(slice()), tokenizer->encode(slice()));
  }
  fs::remove_all(directory);
}

TEST(TokenizerTest, DamagedFilesAreRefused) {
  const std::string whole = trained().serialise();
  const auto refusal = [](const std::string& bytes) {
    return message_of([&] { parse_tokenizer(bytes, "run/tokenizer"); });
  };
  EXPECT_EQ(refusal(whole), "no UserError");
  EXPECT_THAT(refusal(whole.substr(0, whole.size() - 1)),
              HasSubstr("'run/tokenizer' is truncated or damaged"));
  EXPECT_THAT(refusal(""), HasSubstr("is no tokenizer file"));
  EXPECT_THAT(refusal(trained().model()), HasSubstr("is no tokenizer file"));
  EXPECT_THAT(refusal("gradus-tokenizer 2 bytes 0 0\n"), HasSubstr("has version 2"));
  std::string changed = whole;
  changed[whole.size() / 2] = static_cast<char>(changed[whole.size() / 2] ^ 4);
  EXPECT_THAT(refusal(changed), HasSubstr("truncated or damaged"));
  std::string kind = ByteTokenizer().serialise();
  kind.replace(kind.find("bytes"), 5, "bites");
  EXPECT_THAT(refusal(kind), HasSubstr("truncated or damaged"));
}

}  // namespace
}  // namespace gradus::data
