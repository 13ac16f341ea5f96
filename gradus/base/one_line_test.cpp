#include <gradus/base/one_line.h>

#include <gtest/gtest.h>

namespace gradus::base {
namespace {

TEST(OneLineTest, JoinsTheLinesOfAList) {
  EXPECT_EQ(one_line("unknown flags:\n  --a\n\n  --b\n"), "unknown flags: --a; --b");
  EXPECT_EQ(one_line("as it is"), "as it is");
  EXPECT_EQ(one_line("\n   \n"), "");
}

}  // namespace
}  // namespace gradus::base
