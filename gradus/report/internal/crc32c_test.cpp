#include <gradus/report/internal/crc32c.h>

#include <string>

#include <gtest/gtest.h>

namespace gradus::report::internal {
namespace {

TEST(Crc32cTest, MatchesThePublishedVectors) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(""), 0u);
  // RFC 3720, appendix B.4.
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43u);
  std::string ascending, descending;
  for (int i = 0; i < 32; ++i) {
    ascending.push_back(static_cast<char>(i));
    descending.push_back(static_cast<char>(31 - i));
  }
  EXPECT_EQ(crc32c(ascending), 0x46DD794Eu);
  EXPECT_EQ(crc32c(descending), 0x113FDB5Cu);
}

TEST(Crc32cTest, MaskUndoesToTheChecksum) {
  const std::uint32_t rotated = masked_crc32c("foo") - 0xA282EAD8u;
  EXPECT_EQ((rotated >> 17) | (rotated << 15), crc32c("foo"));
}

}  // namespace
}  // namespace gradus::report::internal
