#include <examples/compare_page.h>

#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gradus::examples {
namespace {

using testing::HasSubstr;
using testing::Not;

std::vector<RunResult> two_runs() {
  RunResult plain{.name = "plain",
                  .model = "ResNet-10 <small>",
                  .depth = 10,
                  .parameters = 1234567,
                  .limit_bytes = 64 << 20,
                  .peak_bytes = 60 << 20,
                  .step_ms = 123.4,
                  .last_loss = 0.5,
                  .quality = "80.0 %",
                  .sample = "a & b",
                  .report_path = "plain/report.html"};
  RunResult budget{.name = "budget", .model = "ResNet-50", .depth = 50, .replayed = 9876};
  for (int i = 1; i <= 4; ++i) {
    plain.steps.push_back({.step = i, .loss = 2.0 / i});
    budget.steps.push_back({.step = i, .loss = i == 2 ? NAN : 1.0});
  }
  return {plain, budget};
}

TEST(ComparePageTest, ShowsEveryFigureOfBothRunsEscaped) {
  const std::string page = comparison_page(
      {.title = "A & B", .quality_name = "accuracy", .loss_label = "Loss, nats"}, two_runs());
  for (const char* text :
       {"<title>A &amp; B</title>", "ResNet-10 &lt;small&gt;", "1,234,567", "64.0 MiB", "60.0 MiB",
        "123 ms", "9,876", "0.5000", "80.0 %", "a &amp; b", "href=\"plain/report.html\"",
        "Loss, nats by step", "<td>none</td>"}) {
    EXPECT_THAT(page, HasSubstr(text));
  }
  EXPECT_THAT(page, Not(HasSubstr("nan")));
  EXPECT_THAT(page, Not(HasSubstr("http")));
}

TEST(ComparePageTest, DrawsEachCurveFromItsFirstStepToItsLast) {
  const std::string page = comparison_page({}, two_runs());
  // 4 steps over 832 units from 48; losses up to 2, so 0 to 2.5, over 280 units up from 292.
  EXPECT_THAT(page, HasSubstr("d=\"M256.0 68.0 L464.0 180.0 L672.0 217.3 L880.0 236.0 \""));
  EXPECT_THAT(page, HasSubstr("d=\"M256.0 180.0 L672.0 180.0 L880.0 180.0 \""));
}

TEST(ComparePageTest, StandsWithoutAnyStep) {
  EXPECT_THAT(comparison_page({}, {RunResult{.name = "plain"}}), HasSubstr("</html>"));
}

TEST(ComparePageTest, PrintsTheTableAsText) {
  const std::string table = comparison_table({.quality_name = "accuracy"}, two_runs());
  EXPECT_THAT(table, testing::ContainsRegex("depth +10 +50\n"));
  EXPECT_THAT(table, testing::ContainsRegex("accuracy +80.0 %\n"));
}

}  // namespace
}  // namespace gradus::examples
