#include <gradus/data/token_file.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <thread>

#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/state/atomic_file.h>

#include <tests/support/message_of.h>

namespace gradus::data {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using tests::message_of;

class TokenFileTest : public testing::Test {
 protected:
  TokenFileTest() {
    std::string pattern = (fs::temp_directory_path() / "gradus-tokens-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
    path_ = directory_ + "/tokens";
  }
  ~TokenFileTest() override { fs::remove_all(directory_); }

  void write(const std::string& path, const std::string& content) {
    std::ofstream(path, std::ios::binary) << content;
  }
  std::string text_of(const PreparedTokens& prepared) {
    std::vector<std::int64_t> tokens(static_cast<std::size_t>(prepared.tokens->size()));
    prepared.tokens->copy(0, tokens);
    return prepared.tokenizer->decode(tokens);
  }

  std::string directory_;
  std::string path_;
};

TEST_F(TokenFileTest, TokensOfBothWidthsComeBack) {
  for (const std::int64_t vocabulary :
       {std::int64_t{256}, std::int64_t{65536}, std::int64_t{65537}, std::int64_t{1} << 32}) {
    SCOPED_TRACE(vocabulary);
    const std::vector<std::int64_t> tokens{0, 5, vocabulary - 1, 7};
    TokenFile::write(path_, tokens,
                     {.vocabulary_size = vocabulary, .tokenizer_hash = 11, .corpus_hash = 12});
    const auto file = TokenFile::open(path_);
    EXPECT_EQ(file->info(), (TokenFileInfo{4, vocabulary, 11, 12}));
    EXPECT_EQ(fs::file_size(path_), 64u + 4 * (vocabulary <= 65536 ? 2 : 4));
    for (std::size_t i = 0; i < tokens.size(); ++i)
      EXPECT_EQ((*file)[static_cast<std::int64_t>(i)], tokens[i]);
    std::vector<std::int64_t> middle(2);
    file->copy(1, middle);
    EXPECT_EQ(middle, (std::vector<std::int64_t>{5, vocabulary - 1}));
  }
}

TEST_F(TokenFileTest, EmptyFileIsAFile) {
  TokenFile::write(path_, {}, {.vocabulary_size = 2});
  EXPECT_EQ(TokenFile::open(path_)->size(), 0);
}

TEST_F(TokenFileTest, RefusesTokensAndRangesOutside) {
  const std::vector<std::int64_t> high{2}, negative{-1}, good{0, 1};
  EXPECT_THAT(message_of([&] { TokenFile::write(path_, high, {.vocabulary_size = 2}); }),
              HasSubstr("must be in [0, 2); got 2"));
  EXPECT_THAT(message_of([&] { TokenFile::write(path_, negative, {.vocabulary_size = 2}); }),
              HasSubstr("got -1"));
  EXPECT_THAT(message_of([&] { TokenFile::write(path_, good, {}); }), HasSubstr("1 to 2^32"));
  EXPECT_FALSE(fs::exists(path_));
  TokenFile::write(path_, good, {.vocabulary_size = 2});
  const auto file = TokenFile::open(path_);
  std::vector<std::int64_t> out(2);
  EXPECT_THAT(message_of([&] { file->copy(1, out); }),
              HasSubstr("tokens 1 to 3 must lie in a file of 2"));
  EXPECT_THAT(message_of([&] { file->copy(-1, out); }), HasSubstr("must lie in"));
  EXPECT_THAT(message_of([&] { (*file)[2]; }), HasSubstr("must lie in"));
}

TEST_F(TokenFileTest, EveryTruncationAndEveryChangedByteIsRefused) {
  std::vector<std::int64_t> tokens(20);
  std::iota(tokens.begin(), tokens.end(), 100);
  TokenFile::write(path_, tokens, {.vocabulary_size = 256, .tokenizer_hash = 1, .corpus_hash = 2});
  const std::string whole = state::read_file(path_);
  const auto refusal = [&](const std::string& content) {
    write(path_, content);
    return message_of([&] { TokenFile::open(path_); });
  };
  EXPECT_EQ(refusal(whole), "no UserError");
  for (std::size_t i = 0; i < whole.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_THAT(refusal(whole.substr(0, i)), HasSubstr("cannot be used"));
    std::string changed = whole;
    changed[i] = static_cast<char>(changed[i] ^ 0x10);
    EXPECT_THAT(refusal(changed), HasSubstr("cannot be used"));
  }
  EXPECT_THAT(refusal(whole + "xx"),
              HasSubstr("should hold 20 tokens of 2 bytes and has 42 bytes"));
  EXPECT_THAT(message_of([&] { TokenFile::open(directory_ + "/absent"); }),
              HasSubstr("No such file or directory"));
  EXPECT_THAT(message_of([&] { TokenFile::open(directory_); }), HasSubstr("cannot be used"));
}

class PrepareTokensTest : public TokenFileTest {
 protected:
  PrepareTokensTest()
      : corpus_("file:" + directory_ + "/text.txt"), cache_(directory_ + "/cache/deep") {
    write(directory_ + "/text.txt", text_);
  }

  PreparedTokens prepare(const TokenizerOptions& options = {.vocabulary_size = 300}) {
    return prepare_tokens(corpus_, options, cache_);
  }

  std::string text_ = "In the beginning God created\nthe heaven and the earth.\n";
  std::string corpus_;
  std::string cache_;
};

TEST_F(PrepareTokensTest, BuildsOnceAndThenReuses) {
  const PreparedTokens first = prepare();
  EXPECT_EQ(first.built_because, "not cached");
  EXPECT_EQ(text_of(first), text_);
  const auto written = fs::last_write_time(first.directory + "/tokens");
  const PreparedTokens second = prepare();
  EXPECT_EQ(second.built_because, "");
  EXPECT_EQ(second.directory, first.directory);
  EXPECT_EQ(second.tokenizer->hash(), first.tokenizer->hash());
  EXPECT_EQ(second.tokens->info(), first.tokens->info());
  EXPECT_EQ(fs::last_write_time(first.directory + "/tokens"), written);
}

TEST_F(PrepareTokensTest, OtherOptionsAndOtherCorporaHaveEntriesOfTheirOwn) {
  const PreparedTokens pieces = prepare();
  const PreparedTokens bytes = prepare({.kind = "bytes"});
  EXPECT_EQ(bytes.built_because, "not cached");
  EXPECT_EQ(bytes.tokens->size(), static_cast<std::int64_t>(text_.size()));
  EXPECT_NE(bytes.directory, pieces.directory);
  EXPECT_EQ(prepare().built_because, "");
  EXPECT_EQ(prepare({.kind = "bytes"}).built_because, "");
}

TEST_F(PrepareTokensTest, ChangedCorpusIsTokenisedAgain) {
  const PreparedTokens old = prepare();
  write(directory_ + "/text.txt", text_ + "And the earth was without form.\n");
  const PreparedTokens changed = prepare();
  EXPECT_EQ(changed.built_because, "the corpus changed");
  EXPECT_EQ(text_of(changed), text_ + "And the earth was without form.\n");
  // Whoever mapped the old file still reads the old tokens.
  EXPECT_EQ(text_of(old), text_);
}

TEST_F(PrepareTokensTest, DamagedOrMixedEntriesAreBuiltAgain) {
  const PreparedTokens first = prepare();
  const std::string tokens = first.directory + "/tokens",
                    tokenizer = first.directory + "/tokenizer";
  std::string damaged = state::read_file(tokens);
  damaged.back() = static_cast<char>(damaged.back() ^ 1);
  // In a new file: the mapped one must stay as it is.
  state::write_file_atomically(tokens, damaged);
  EXPECT_THAT(prepare().built_because, HasSubstr("its tokens are damaged (checksum)"));
  fs::remove(tokenizer);
  EXPECT_THAT(prepare().built_because, HasSubstr("No such file or directory"));
  ByteTokenizer().save(tokenizer);
  EXPECT_EQ(prepare().built_because, "the cached tokens are of another tokenizer");
  const PreparedTokens last = prepare();
  EXPECT_EQ(last.built_because, "");
  EXPECT_EQ(text_of(last), text_);
}

TEST_F(PrepareTokensTest, SeveralAtOnceEachSeeAWholeEntry) {
  std::vector<std::thread> threads;
  std::vector<std::string> texts(4);
  for (std::size_t i = 0; i < texts.size(); ++i) {
    threads.emplace_back([&, i] { texts[i] = text_of(prepare({.kind = "bytes"})); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& text : texts) EXPECT_EQ(text, text_);
}

TEST_F(PrepareTokensTest, CacheThatCannotBeMadeIsNamed) {
  EXPECT_THAT(message_of([&] {
                prepare_tokens(corpus_, {.kind = "bytes"}, directory_ + "/text.txt/cache");
              }),
              HasSubstr("cannot create the cache directory"));
}

}  // namespace
}  // namespace gradus::data
