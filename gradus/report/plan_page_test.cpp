#include <gradus/report/plan_page.h>

#include <fstream>
#include <iterator>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/report/internal/scratch_folder.h>

namespace gradus::report {
namespace {

using testing::HasSubstr;
using testing::Not;

PlanPageData example() {
  PlanPageData data{.title = "Memory plan: <GPT>",
                    .model = "GPT, 6 layers",
                    .plan = "micro-batch 8 (4 a step)",
                    .reason = "the fastest & proved",
                    .limit_bytes = 1000 << 10,
                    .plain_peak_bytes = 3000 << 10,
                    .predicted_peak_bytes = 990 << 10,
                    .measured_peak_bytes = 980 << 10,
                    .plain_seconds = 0.5,
                    .predicted_seconds = 0.6,
                    .measured_seconds = 0.625,
                    .timeline_label = "a micro-batch of 8",
                    .planned_bytes = {100, 200, 300, 200},
                    .measured_bytes = {90, 210, 290, 200},
                    .backward_begin = 2};
  data.tables.push_back(
      {.title = "Plans",
       .note = "a note",
       .columns = {"micro-batch", "peak"},
       .rows = {{.cells = {"8", "<b>"}, .marked = true}, {.cells = {"16", "2.0"}, .pale = true}}});
  data.configuration = {{"model.layers", "6"}};
  return data;
}

TEST(PlanPageTest, ShowsPlanNumbersTimelinesAndTables) {
  const std::string html = plan_page(example());
  for (const char* part :
       {"micro-batch 8 (4 a step)", "limit 1000.0 KiB", "980.0 KiB", "+1.0%", "625.0 ms",
        "1.20 \xC3\x97", "planned", "measured", "Backward begins with call 2.", "a note",
        "a micro-batch of 8", "<tr class=\"chosen\">", "<tr class=\"pale\">", "model.layers"}) {
    EXPECT_THAT(html, HasSubstr(part));
  }
}

TEST(PlanPageTest, EscapesEveryTextAndLoadsNothing) {
  const std::string html = plan_page(example());
  EXPECT_THAT(html, HasSubstr("&lt;GPT&gt;"));
  EXPECT_THAT(html, HasSubstr("fastest &amp; proved"));
  EXPECT_THAT(html, Not(HasSubstr("<b>\xE2")));
  EXPECT_THAT(html, HasSubstr("&lt;b&gt;"));
  EXPECT_THAT(html, HasSubstr("default-src 'none'"));
  EXPECT_THAT(html, Not(HasSubstr("https://")));
}

TEST(PlanPageTest, WhatIsUnknownIsLeftOut) {
  const std::string html = plan_page({.title = "t"});
  EXPECT_THAT(html, Not(HasSubstr("id=\"timeline\"")));
  EXPECT_THAT(html, Not(HasSubstr("Measured peak")));
  EXPECT_THAT(html, Not(HasSubstr("nan")));
  EXPECT_THAT(html, Not(HasSubstr("inf")));
}

TEST(PlanPageTest, IsWrittenWholeOrNotAtAll) {
  const internal::ScratchFolder folder;
  const auto path = folder.path() / "plan.html";
  write_plan_page(path, example());
  std::ifstream in(path);
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  EXPECT_EQ(text, plan_page(example()));
  EXPECT_THROW(write_plan_page(folder.path() / "none" / "plan.html", example()), UserError);
}

}  // namespace
}  // namespace gradus::report
