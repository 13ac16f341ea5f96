#include <gradus/report/internal/privacy_section.h>

#include <cmath>
#include <limits>
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gradus::report::internal {
namespace {

using testing::HasSubstr;
using testing::Not;

std::size_t total(const Histogram& histogram) {
  return std::accumulate(histogram.counts.begin(), histogram.counts.end(), std::size_t{0});
}

TEST(PrivacySectionTest, AHistogramCountsEachFiniteValueOnceInBinsOfEqualRatio) {
  const Histogram histogram = logarithmic_histogram({1.0, 2.0, 4.0, 8.0, 16.0, 0.0, NAN}, 4);
  ASSERT_EQ(histogram.edges.size(), 5u);
  for (std::size_t i = 0; i < 5; ++i) EXPECT_NEAR(histogram.edges[i], std::pow(2.0, i), 1e-9);
  EXPECT_EQ(histogram.counts.size(), 4u);
  EXPECT_EQ(total(histogram), 6u);
  EXPECT_GE(histogram.counts[0], 2u);  // 0 and 1
  EXPECT_GE(histogram.counts[3], 1u);  // the greatest is inside, not past the end
}

TEST(PrivacySectionTest, AHistogramOfEqualTinyOrNoValuesHasAWidth) {
  const Histogram equal = logarithmic_histogram({3.0, 3.0, 3.0}, 8);
  EXPECT_EQ(total(equal), 3u);
  EXPECT_LT(equal.edges.front(), equal.edges.back());
  const Histogram spread = logarithmic_histogram({1e-300, 1.0}, 8);
  EXPECT_EQ(total(spread), 2u);
  EXPECT_GE(spread.edges.front(), 0.9e-6);
  EXPECT_TRUE(logarithmic_histogram({}, 8).counts.empty());
  EXPECT_TRUE(logarithmic_histogram({0.0, INFINITY}, 8).counts.empty());
}

ReportData private_run() {
  ReportData data;
  for (int step = 1; step <= 20; ++step) {
    StepMetrics metrics{.step = step, .loss = 1.0};
    metrics.extra = {{"clip_fraction", 0.5},
                     {"norm_p10", 0.1},
                     {"norm_median", 0.5},
                     {"norm_p90", 2.0},
                     {"max_norm", 1.0}};
    if (step % 5 == 0) metrics.extra["epsilon"] = 0.1 * step;
    if (step == 20) metrics.extra["accuracy"] = 0.875;
    data.steps.push_back(metrics);
  }
  data.privacy = {{"Clipping", "flat <b>"}};
  data.example_norms = {0.5, 0.7, 3.0};
  data.norm_threshold = 1.0;
  return data;
}

TEST(PrivacySectionTest, AReportOfAPrivateRunShowsBudgetClippingNormsAndAccuracy) {
  const std::string html = html_report(private_run());
  for (const char* text : {"Epsilon spent", "Clipped examples", "Norms of one batch",
                           "Gradient norms of single examples", "Test accuracy", "87.50%",
                           "after step 20", "clipped to 1", "flat &lt;b&gt;", "have no noise"}) {
    EXPECT_THAT(html, HasSubstr(text));
  }
  EXPECT_THAT(html, Not(HasSubstr("nan")));
}

TEST(PrivacySectionTest, AReportOfAPlainRunHasNoPartAboutPrivacy) {
  ReportData data;
  data.steps.push_back({.step = 1, .loss = 1.0});
  EXPECT_EQ(privacy_section(data), "");
  EXPECT_EQ(accuracy_chart(data), "");
  EXPECT_THAT(html_report(data), Not(HasSubstr("psilon")));
}

TEST(PrivacySectionTest, WithoutNormsTheHistogramIsLeftOut) {
  ReportData data = private_run();
  data.example_norms.clear();
  EXPECT_THAT(privacy_section(data), Not(HasSubstr("Norms of one batch")));
}

}  // namespace
}  // namespace gradus::report::internal
