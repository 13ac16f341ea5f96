#include <gradus/data/corpus.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/data/internal/run_program.h>
#include <gradus/data/internal/utf8.h>

#include <tests/support/message_of.h>

namespace gradus::data {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::StartsWith;
using tests::message_of;

class CorpusTest : public testing::Test {
 protected:
  CorpusTest() {
    std::string pattern = (fs::temp_directory_path() / "gradus-corpus-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
  }
  ~CorpusTest() override { fs::remove_all(directory_); }

  void write(const std::string& name, const std::string& content) {
    fs::create_directories(fs::path(directory_ + "/" + name).parent_path());
    std::ofstream(directory_ + "/" + name, std::ios::binary) << content;
  }

  std::string directory_;
};

/// Puts another PATH in place for as long as it lives.
class PathGuard {
 public:
  explicit PathGuard(const std::string& path) : old_(std::getenv("PATH")) {
    ::setenv("PATH", path.c_str(), 1);
  }
  ~PathGuard() { ::setenv("PATH", old_.c_str(), 1); }

 private:
  std::string old_;
};

TEST_F(CorpusTest, BibleHasEveryVerseOnALineOfItsOwn) {
  const Corpus corpus = load_corpus("bible-kjv");
  EXPECT_EQ(std::count(corpus.text.begin(), corpus.text.end(), '\n'), 31102);
  EXPECT_GT(corpus.text.size(), 4'400'000u);
  EXPECT_THAT(corpus.text,
              StartsWith("Ge1:1 In the beginning God created the heaven and the earth.\n"));
  EXPECT_EQ(corpus.text.find(" \n"), std::string::npos);
  EXPECT_EQ(load_corpus("bible-kjv").hash, corpus.hash);
}

TEST_F(CorpusTest, MissingPackageIsNamedWithItsInstallCommand) {
  const PathGuard path(directory_);
  EXPECT_EQ(message_of([] { load_corpus("bible-kjv"); }),
            "[data] the corpus 'bible-kjv' comes from the program 'bible', which could not be "
            "started (No such file or "
            "directory). Install it: apt-get install bible-kjv");
}

TEST_F(CorpusTest, ProgramThatFailsOrPrintsTooLittleIsRefused) {
  write("bible", "#!/bin/sh\necho 'Ge1:1 In the'\necho 'no text found' >&2\nexit 3\n");
  fs::permissions(directory_ + "/bible", fs::perms::owner_all);
  const PathGuard path(directory_);
  EXPECT_THAT(
      message_of([] { load_corpus("bible-kjv"); }),
      HasSubstr(
          "must print 31102 verses; got 1 and exit status 3 (no text found\n). Install it afresh"));
}

TEST_F(CorpusTest, ProgramsAreReadThroughBothPipesToTheEnd) {
  // More than a pipe holds, on both at once: reading one after the other would never end.
  const auto result = internal::run_program(
      {"/bin/sh", "-c",
       "head -c 300000 /dev/zero >&2; head -c 300000 /dev/zero; cat; kill -TERM $$"});
  EXPECT_EQ(result.spawn_error, 0);
  EXPECT_EQ(result.output.size(), 300'000u);
  EXPECT_EQ(result.complaint.size(), 300'000u);
  EXPECT_EQ(result.exit_status, 128 + 15);
}

TEST_F(CorpusTest, DirectoryIsReadInTheOrderOfPathsAndOnlyItsTextFiles) {
  write("b.txt", "second");
  write("a.rst", "first\n");
  write("c/d.txt", "third \xc3\xa9\n");
  write("e.txt", "");
  write("ignored.md", "no");
  const Corpus corpus = load_corpus("file:" + directory_);
  EXPECT_EQ(corpus.text, "first\nsecond\nthird \xc3\xa9\n");
  EXPECT_NE(load_corpus("file:" + directory_ + "/b.txt").hash, corpus.hash);
  // A file named itself is read whatever its extension.
  EXPECT_EQ(load_corpus("file:" + directory_ + "/ignored.md").text, "no\n");
}

TEST_F(CorpusTest, RefusesWhatIsNoCorpus) {
  write("latin.txt", "caf\xe9");
  write("empty.txt", "");
  fs::create_directory(directory_ + "/none");
  EXPECT_THAT(message_of([] { load_corpus("shakespeare"); }),
              HasSubstr("a corpus is 'bible-kjv' or 'file:PATH'; got 'shakespeare'"));
  EXPECT_THAT(message_of([&] { load_corpus("file:" + directory_ + "/absent"); }),
              HasSubstr("there is no '"));
  EXPECT_THAT(message_of([&] { load_corpus("file:" + directory_ + "/latin.txt"); }),
              HasSubstr("is not at byte 3"));
  EXPECT_THAT(message_of([&] { load_corpus("file:" + directory_ + "/empty.txt"); }),
              HasSubstr("must hold text"));
  EXPECT_THAT(message_of([&] { load_corpus("file:" + directory_ + "/none"); }),
              HasSubstr("holds none"));
}

TEST(Utf8Test, AcceptsExactlyTheWellFormedSequences) {
  for (const char* good : {"a", "\xc3\xa9", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
                           "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_EQ(internal::utf8_character_bytes(good), std::string(good).size());
  }
  for (const char* bad :
       {"", "\x80", "\xc0\x80", "\xc1\xbf", "\xc3", "\xc3(", "\xe0\x9f\xbf", "\xed\xa0\x80",
        "\xe2\x82", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff"}) {
    EXPECT_EQ(internal::utf8_character_bytes(bad), 0u);
  }
  EXPECT_EQ(internal::valid_utf8_bytes("ab\xc3\xa9\xff"), 4u);
}

}  // namespace
}  // namespace gradus::data
