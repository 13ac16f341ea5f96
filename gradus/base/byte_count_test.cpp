#include <gradus/base/byte_count.h>

#include <gtest/gtest.h>

#include <gradus/base/error.h>

namespace gradus::base {
namespace {

TEST(ByteCountTest, ParsesBinaryAndDecimalUnits) {
  using namespace gradus::literals;
  EXPECT_EQ(parse_bytes("0"), 0);
  EXPECT_EQ(parse_bytes("1024"), 1024);
  EXPECT_EQ(parse_bytes("600MiB"), 600_MiB);
  EXPECT_EQ(parse_bytes("1.5 GiB"), 1536_MiB);
  EXPECT_EQ(parse_bytes("4GB"), 4000000000);
  EXPECT_EQ(parse_bytes("12 B"), 12);
}

TEST(ByteCountTest, RefusesWhatIsNoByteCount) {
  for (const char* text :
       {"", "MiB", "-1MiB", "12 apples", "nan", "inf", "1e30TiB", "600mib", "1 2"}) {
    SCOPED_TRACE(text);
    EXPECT_THROW(parse_bytes(text), UserError);
  }
}

TEST(ByteCountTest, FormatsWithOneDecimalFromKibibytesOn) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1024), "1.0 KiB");
  EXPECT_EQ(format_bytes(629145600), "600.0 MiB");
  EXPECT_EQ(format_bytes(1610612736), "1.5 GiB");
}

}  // namespace
}  // namespace gradus::base
