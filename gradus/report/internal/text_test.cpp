#include <gradus/report/internal/text.h>

#include <limits>

#include <gtest/gtest.h>

namespace gradus::report::internal {
namespace {

TEST(TextTest, ReplacesOnlyTheBytesThatAreNoUtf8) {
  EXPECT_EQ(valid_utf8("caf\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80"),
            "caf\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80");
  EXPECT_EQ(valid_utf8("a\xC3"), "a\xEF\xBF\xBD");                        // cut short
  EXPECT_EQ(valid_utf8("\x80z"), "\xEF\xBF\xBDz");                        // a continuation alone
  EXPECT_EQ(valid_utf8("\xC0\xAF"), "\xEF\xBF\xBD\xEF\xBF\xBD");          // overlong '/'
  EXPECT_EQ(valid_utf8("\xED\xA0\x80").find('\xED'), std::string::npos);  // a surrogate
  EXPECT_EQ(valid_utf8("\xF4\x90\x80\x80").find('\xF4'), std::string::npos);
}

TEST(TextTest, EscapesWhatHtmlAndScriptsCouldRun) {
  EXPECT_EQ(escape_html("<a href=\"x\" o='y'>&\x01\n"),
            "&lt;a href=&quot;x&quot; o=&#39;y&#39;&gt;&amp;\xEF\xBF\xBD\n");
  EXPECT_EQ(json_string("</script>\"\\\n&"), "\"\\u003c/script\\u003e\\\"\\\\\\u000a\\u0026\"");
}

TEST(TextTest, MeasuresAndClipsByCodePoint) {
  EXPECT_EQ(display_width("a\xE2\x96\x88z"), 3u);
  EXPECT_EQ(clip_to_width("a\xE2\x96\x88z", 2), "a\xE2\x96\x88");
  EXPECT_EQ(clip_to_width("abc", 9), "abc");
  EXPECT_EQ(without_control_characters("a\x1b[2Jb\rc\nd\te"), "a?[2Jb?c\nd\te");
}

TEST(TextTest, WritesNumbersAsPeopleReadThem) {
  EXPECT_EQ(group_digits(0), "0");
  EXPECT_EQ(group_digits(-1234567), "-1,234,567");
  EXPECT_EQ(group_digits(999), "999");
  EXPECT_EQ(group_digits(1000), "1,000");
  EXPECT_EQ(short_count(999.4), "999");
  EXPECT_EQ(short_count(999.6), "1.00k");
  EXPECT_EQ(short_count(1234), "1.23k");
  EXPECT_EQ(short_count(9999), "10.0k");
  EXPECT_EQ(short_count(123456), "123k");
  EXPECT_EQ(short_count(45.6e6), "45.6M");
  EXPECT_EQ(clock_time(42), "0:42");
  EXPECT_EQ(clock_time(725), "12:05");
  EXPECT_EQ(clock_time(3 * 3600 + 131), "3:02:11");
  EXPECT_EQ(clock_time(std::numeric_limits<double>::infinity()), "-:--");
  EXPECT_EQ(clock_time(-1), "-:--");
  EXPECT_EQ(spoken_time(0.421), "0.42 s");
  EXPECT_EQ(spoken_time(59.6), "1 min 0 s");
  EXPECT_EQ(spoken_time(200), "3 min 20 s");
  EXPECT_EQ(spoken_time(7500), "2 h 5 min");
  EXPECT_EQ(exact_decimal(-0.0), "-0.0");
  EXPECT_EQ(exact_decimal(3.0), "3.0");
  EXPECT_EQ(exact_decimal(0.1), "0.1");
  EXPECT_EQ(exact_decimal(1e300), "1e+300");
}

}  // namespace
}  // namespace gradus::report::internal
