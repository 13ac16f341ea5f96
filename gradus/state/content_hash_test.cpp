#include <gradus/state/content_hash.h>

#include <string>

#include <gtest/gtest.h>

namespace gradus::state {
namespace {

TEST(ContentHashTest, AgreesWithThePublishedVectorsOfXxh64) {
  EXPECT_EQ(content_hash(""), 0xEF46DB3751D8E999ULL);
  EXPECT_EQ(content_hash("a"), 0xD24EC4F1A98C6E5BULL);
  EXPECT_EQ(content_hash("abc"), 0x44BC2CF5AD770999ULL);
  // Longer than one stripe of 32 bytes.
  EXPECT_EQ(content_hash("Nobody inspects the spammish repetition"), 0xFBCEA83C8A378BF1ULL);
}

TEST(ContentHashTest, EveryLengthEveryByteAndTheSeedCount) {
  std::string text(100, 'x');
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string other = text;
    other[i] = static_cast<char>(other[i] ^ 1);
    EXPECT_NE(content_hash(text), content_hash(other)) << i;
    EXPECT_NE(content_hash(text), content_hash(text.substr(0, i))) << i;
  }
  EXPECT_NE(content_hash(text, 0), content_hash(text, 1));
}

TEST(ContentHashTest, WritesSixteenDigits) {
  EXPECT_EQ(hash_text(0), "0000000000000000");
  EXPECT_EQ(hash_text(0xEF46DB3751D8E999ULL), "ef46db3751d8e999");
}

}  // namespace
}  // namespace gradus::state
