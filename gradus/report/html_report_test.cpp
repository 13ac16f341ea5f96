#include <gradus/report/html_report.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <gradus/base/error.h>
#include <gradus/report/internal/example_report.h>
#include <gradus/report/internal/scratch_folder.h>

namespace gradus::report {
namespace {

using internal::example_report;
using internal::ScratchFolder;

std::size_t occurrences(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++count;
  return count;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// @p part if @p text lacks it, else "": a failure shows the part, not the whole document.
std::string missing(const std::string& text, const std::string& part) {
  return contains(text, part) ? "" : part;
}

/// The hover data of the figure @p id.
nlohmann::json chart_data(const std::string& html, const std::string& id) {
  const std::string open = "<script type=\"application/json\">";
  const std::size_t figure = html.find("id=\"" + id + "\"");
  const std::size_t begin = html.find(open, figure) + open.size();
  return nlohmann::json::parse(html.substr(begin, html.find("</script>", begin) - begin));
}

std::string figure(const std::string& html, const std::string& id) {
  const std::size_t begin = html.find("id=\"" + id + "\"");
  return html.substr(begin, html.find("</figure>", begin) - begin);
}

/// The first element that is not closed by its own name, in order; "" if each is.
std::string nesting_fault(const std::string& html) {
  std::vector<std::string> open;
  std::size_t at = 0;
  while ((at = html.find('<', at)) != std::string::npos) {
    // The end of the tag, past quoted attributes.
    std::size_t end = at;
    for (bool quoted = false; end < html.size() && (quoted || html[end] != '>'); ++end)
      quoted ^= html[end] == '"';
    const std::string tag = html.substr(at + 1, end - at - 1);
    at = end;
    const bool closes = tag.starts_with("/");
    const std::size_t start = closes ? 1 : 0;
    const std::string name = tag.substr(start, tag.find_first_of(" \n/", start) - start);
    if (tag.starts_with("!") || name == "meta" || tag.ends_with("/")) continue;
    if (!closes) {
      open.push_back(name);
      // What follows is no markup until the element ends.
      if (name == "script" || name == "style") at = html.find("</" + name, at);
    } else if (open.empty() || open.back() != name) {
      return "</" + name + "> closes <" + (open.empty() ? "" : open.back()) + ">";
    } else {
      open.pop_back();
    }
  }
  return open.empty() ? "" : "<" + open.back() + "> is never closed";
}

TEST(HtmlReportTest, ShowsEverythingThatTheRunTells) {
  const std::string html = html_report(example_report());
  for (const char* part : {"GPT on the King James Bible",
                           ">finished<",
                           "12,281,856",
                           "micro-batch 8, recompute 4 of 6 segments",
                           "the fastest of 14 plans",
                           "8 examples, 4 per step",
                           "Effective batch</th><td>32 examples",
                           "Precision</th><td>bf16",
                           "Optimizer</th><td>adamw",
                           ">4 of 6<",
                           "600.0 MiB",
                           "572.7 MiB (95.5% of the limit)",
                           "1.7 GiB (predicted from one measured step)",
                           "3.0 times this run&#39;s peak",
                           "6 min 12 s",
                           "tokens/s (median of the steps)",
                           "validation",
                           "Memory during one step (step 3)",
                           "Time, ms",
                           "Live memory, MiB",
                           "limit 600.0 MiB<",
                           "plain training needs 1.7 GiB &#8593;",
                           "Peak memory of each step",
                           "Learning rate",
                           "Gradient norm",
                           "Throughput",
                           "data.corpus",
                           "train.output",
                           "LibTorch",
                           "2.13.0+cpu",
                           "And God said unto ",
                           "The loss was not finite in 1 step;",
                           "optimizer state"}) {
    EXPECT_EQ(missing(html, part), "");
  }
  EXPECT_EQ(nesting_fault(html), "");
}

TEST(HtmlReportTest, LoadsNothingFromOutside) {
  const std::string html = html_report(example_report());
  for (const char* part :
       {"http://", "https://", "src=", "url(", "@import", "<link", "<img", "<iframe", "fetch("}) {
    EXPECT_FALSE(contains(html, part)) << part;
  }
  EXPECT_EQ(missing(html, "default-src 'none'"), "");
}

TEST(HtmlReportTest, HostileTextIsInertWhereverItStands) {
  const std::string hostile =
      "</script></style><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\xFF\x01";
  ReportData data = example_report();
  const std::size_t scripts = occurrences(html_report(data), "<script");
  for (std::string* text : {&data.title,
                            &data.status,
                            &data.created,
                            &data.model,
                            &data.plan,
                            &data.plan_reason,
                            &data.precision,
                            &data.optimizer,
                            &data.plain_source,
                            &data.timeline_label,
                            &data.loss_label,
                            &data.item,
                            &data.sample_prompt,
                            &data.sample_text,
                            &data.phases[0].name,
                            &data.phases[1].name,
                            &data.configuration[0].first,
                            &data.configuration[0].second,
                            &data.environment[0].first,
                            &data.environment[0].second}) {
    *text = hostile;
  }
  const std::string html = html_report(data);
  EXPECT_EQ(occurrences(html, "<script"), scripts);
  EXPECT_EQ(occurrences(html, "</script>"), scripts);
  EXPECT_EQ(occurrences(html, "<style"), 1u);
  EXPECT_FALSE(contains(html, "<img")) << "<img";
  EXPECT_FALSE(contains(html, "\xFF")) << "\xFF";
  EXPECT_GE(occurrences(html, "&lt;script&gt;alert(1)"), 17u);
  EXPECT_EQ(nesting_fault(html), "");
}

TEST(HtmlReportTest, AMillionStepsStaySmallAndKeepTheirExtremes) {
  ReportData data = example_report(6);
  data.steps.clear();
  for (std::int64_t step = 1; step <= 200000; ++step) {
    StepMetrics metrics{.step = step, .loss = 3.0 + 1e-3 * std::sin(static_cast<double>(step))};
    metrics.grad_norm = 1.0;
    metrics.peak_bytes = step == 77777 ? 599 << 20 : 500 << 20;
    if (step == 123456) metrics.loss = 9.5;
    data.steps.push_back(metrics);
  }
  const std::string html = html_report(data);
  EXPECT_LT(html.size(), 600u << 10);
  const auto loss = chart_data(html, "loss")["series"][0];
  EXPECT_LE(loss["x"].size(), 1000u);
  const auto ys = loss["y"].get<std::vector<double>>();
  const auto highest = std::max_element(ys.begin(), ys.end());
  EXPECT_EQ(*highest, 9.5);
  EXPECT_EQ(loss["x"][static_cast<std::size_t>(highest - ys.begin())], 123456);
  const auto peaks = chart_data(html, "peaks")["series"][0]["y"].get<std::vector<double>>();
  EXPECT_EQ(*std::max_element(peaks.begin(), peaks.end()), static_cast<double>(599 << 20));
}

TEST(HtmlReportTest, ANonFiniteLossIsAGapInCurveAndData) {
  ReportData data;
  for (std::int64_t step = 1; step <= 5; ++step) data.steps.push_back({.step = step, .loss = 2.0});
  data.steps[2].loss = std::nan("");
  data.steps[4].loss = std::numeric_limits<double>::infinity();
  const std::string html = html_report(data);
  const auto series = chart_data(html, "loss")["series"];
  EXPECT_TRUE(series[0]["y"][2].is_null());
  EXPECT_TRUE(series[1]["y"][2].is_null());
  EXPECT_TRUE(series[0]["y"][4].is_null());
  // Steps 1-2, and step 4 alone as a dot: two strokes begin.
  const std::string chart = figure(html, "loss");
  const std::size_t begin = chart.find(" d=\"", chart.find("<path class=\"faint\"")) + 4;
  EXPECT_EQ(occurrences(chart.substr(begin, chart.find('"', begin) - begin), "M"), 2u);
  EXPECT_FALSE(contains(html, "nan")) << "nan";
  EXPECT_EQ(missing(html, "not finite in 2 steps;"), "");
}

TEST(HtmlReportTest, TheLossScaleIsDrawnWithItsSkippedSteps) {
  ReportData data;
  for (std::int64_t step = 1; step <= 6; ++step) data.steps.push_back({.step = step, .loss = 2.0});
  EXPECT_FALSE(contains(html_report(data), "Loss scale"));
  for (auto& step : data.steps) step.loss_scale = step.step < 4 ? 65536.0 : 32768.0;
  data.steps[2].skipped = true;
  const std::string html = html_report(data);
  const auto series = chart_data(html, "lossscale")["series"];
  EXPECT_EQ(series[0]["y"][3], 32768.0);
  EXPECT_EQ(series[1]["x"], nlohmann::json({3}));
  EXPECT_EQ(series[1]["y"], nlohmann::json({65536.0}));
  EXPECT_EQ(missing(html, "1 of 6 (16.7%): a gradient was not finite"), "");
  EXPECT_EQ(nesting_fault(html), "");
}

TEST(HtmlReportTest, ThroughputIsInTheItemsThatTheRunCounts) {
  ReportData data = example_report();
  data.item = "image";
  const std::string html = html_report(data);
  for (const char* part : {"images/s (median of the steps)", "images/s, median step",
                           "Throughput, images per second", " images<"}) {
    EXPECT_EQ(missing(html, part), "");
  }
  EXPECT_FALSE(contains(html, "tokens/s"));
}

TEST(HtmlReportTest, AnEmptyRunIsAReportWithoutData) {
  const std::string html = html_report({});
  EXPECT_EQ(occurrences(html, "No data"), 6u);
  EXPECT_EQ(nesting_fault(html), "");
  ReportData data;
  data.steps.push_back(
      {.step = 1, .loss = std::nan(""), .tokens_per_s = std::nan(""), .grad_norm = std::nan("")});
  data.step_timeline.push_back({.time_s = 3.0, .live = {}});
  const std::string one = html_report(data);
  EXPECT_EQ(nesting_fault(one), "");
  EXPECT_FALSE(contains(one, "inf")) << "inf";
}

TEST(HtmlReportTest, StackedAreasHoldTheTimelineByCategory) {
  ReportData data;
  data.limit_bytes = 100 << 20;
  base::MemoryPoint point{.time_s = 5.0, .live = {}};
  point.live[base::MemoryCategory::parameters] = 10 << 20;
  data.step_timeline.push_back(point);
  point.time_s = 5.5;
  point.live[base::MemoryCategory::activations] = 50 << 20;
  data.step_timeline.push_back(point);
  point.time_s = 6.0;
  point.live[base::MemoryCategory::activations] = 0;
  data.step_timeline.push_back(point);
  const std::string html = html_report(data);
  const auto chart = chart_data(html, "timeline");
  EXPECT_EQ(chart["x1"], 1000);
  EXPECT_EQ(chart["y1"], 125 << 20) << "the limit is inside the chart";
  EXPECT_EQ(chart["series"][0]["name"], "parameters");
  EXPECT_EQ(chart["series"][3]["y"], nlohmann::json({0, 50 << 20, 0}));
  // Of 125 MiB: parameters 10 throughout, with the activations 60 from half the time to the end.
  EXPECT_EQ(missing(html, "var(--blue)\" d=\"M0 1000H0V920H500V920H1000V920V1000Z\""), "");
  EXPECT_EQ(missing(html, "var(--violet)\" d=\"M0 1000H0V920H500V520H1000V920V1000Z\""), "");
  // The breakdown falls back to the highest point of the timeline.
  EXPECT_EQ(missing(html, "<td class=\"number\">50.0 MiB</td><td class=\"number\">83.3%</td>"), "");
}

TEST(HtmlReportTest, APlainRequirementFarAboveTheLimitIsNamedAtTheEdge) {
  ReportData data = example_report();
  data.plain_peak_bytes = std::int64_t{80} << 30;
  const std::string html = html_report(data);
  EXPECT_EQ(missing(figure(html, "timeline"), "plain training needs 80.0 GiB &#8593;"), "");
  EXPECT_LT(chart_data(html, "timeline")["y1"].get<double>(), 2e9);
}

TEST(HtmlReportTest, WritingReplacesAnOldReportWholeOrNotAtAll) {
  const ScratchFolder folder;
  internal::write_file(folder / "report.html", "old");
  write_html_report(folder / "report.html", example_report());
  EXPECT_EQ(internal::read_file(folder / "report.html"), html_report(example_report()));
  // A folder in its place cannot be replaced, and nothing is left beside it.
  std::filesystem::create_directories(folder.path() / "busy" / "x");
  EXPECT_THROW(write_html_report(folder / "busy", example_report()), UserError);
  EXPECT_THROW(write_html_report(folder.path() / "none" / "r.html", example_report()), UserError);
  std::size_t entries = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder.path()))
    ++entries;
  EXPECT_EQ(entries, 2u);
}

}  // namespace
}  // namespace gradus::report
