#include <gradus/report/progress.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/report/internal/text.h>

namespace gradus::report {
namespace {

using literals::operator""_MiB;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

/// What a terminal of unlimited height shows after @p stream: \r returns, \x1b[K clears to the end
/// of the line.
std::vector<std::string> screen(const std::string& stream) {
  std::vector<std::string> lines(1);
  std::size_t column = 0;
  for (std::size_t i = 0; i < stream.size(); ++i) {
    if (stream.compare(i, 3, "\x1b[K") == 0) {
      lines.back().resize(std::min(column, lines.back().size()));
      i += 2;
    } else if (stream[i] == '\r') {
      column = 0;
    } else if (stream[i] == '\n') {
      lines.emplace_back();
      column = 0;
    } else {
      if (lines.back().size() <= column) lines.back().resize(column + 1, ' ');
      lines.back()[column++] = stream[i];
    }
  }
  return lines;
}

struct FakeRun {
  double now_s = 100.0;
  std::ostringstream out;
  Progress progress;
  explicit FakeRun(ProgressOptions options)
      : progress(out, [this] { return now_s; }, std::move(options)) {}
};

ProgressOptions terminal(int columns) {
  return {.total_steps = 3000, .is_terminal = true, .columns = columns, .limit_bytes = 600_MiB};
}

TEST(ProgressTest, TerminalShowsBarStepLossRateMemoryAgainstTheLimitAndTimeLeft) {
  FakeRun run(terminal(100));
  for (int step = 1; step <= 1200; ++step) {
    run.now_s += 0.25;
    run.progress.update({.step = step, .loss = 3.25, .tokens = 512, .peak_bytes = 571_MiB});
  }
  // 1800 steps of 0.25 s are left.
  EXPECT_EQ(screen(run.out.str()).back(),
            "|###########-----------------| 40%  1200/3000  loss 3.2500  2.05k tok/s  571/600 MiB "
            "95%  7:30 left");
  EXPECT_EQ(screen(run.out.str()).back().size(), 99u) << "all but the last column";
}

TEST(ProgressTest, RedrawsAtMostTenTimesASecond) {
  FakeRun run(terminal(80));
  for (int step = 1; step <= 2000; ++step) {
    run.now_s += 0.001;
    run.progress.update({.step = step, .loss = 3.0, .tokens = 1, .peak_bytes = 1});
  }
  const std::string stream = run.out.str();
  const auto redraws = std::count(stream.begin(), stream.end(), '\r');
  EXPECT_GE(redraws, 18);
  EXPECT_LE(redraws, 21);
  EXPECT_EQ(std::count(stream.begin(), stream.end(), '\n'), 0);
}

TEST(ProgressTest, LineFitsEveryWidthInBothAlphabets) {
  for (const bool unicode : {false, true}) {
    for (int columns = 1; columns <= 200; ++columns) {
      SCOPED_TRACE(columns);
      auto options = terminal(columns);
      options.unicode = unicode;
      FakeRun run(options);
      run.now_s += 0.5;
      run.progress.update({.step = 1234, .loss = 3.25, .tokens = 512, .peak_bytes = 571_MiB});
      const std::string line = screen(run.out.str()).back();
      EXPECT_LE(internal::display_width(line), static_cast<std::size_t>(std::max(columns, 2) - 1));
      if (columns >= 40)
        EXPECT_THAT(line, AllOf(HasSubstr("1234/3000"), HasSubstr("loss 3.25"), HasSubstr("95%")));
      if (columns >= 80)
        EXPECT_THAT(line, AllOf(HasSubstr("571/600 MiB 95%"), HasSubstr(" left"), HasSubstr("|")));
      if (!unicode)
        EXPECT_EQ(line.size(), internal::display_width(line)) << "only ASCII unless asked";
    }
  }
}

TEST(ProgressTest, UnicodeBarGrowsByEighthsOfACell) {
  auto options = terminal(100);
  options.total_steps = 80;
  options.unicode = true;
  std::string previous;
  FakeRun run(options);
  for (int step = 1; step <= 80; ++step) {
    run.now_s += 1.0;
    run.progress.update({.step = step, .loss = 3.0, .tokens = 1, .peak_bytes = 1});
    const std::string line = screen(run.out.str()).back();
    const std::string bar = line.substr(0, line.find('|', 1) + 1);
    EXPECT_NE(bar, previous) << "at step " << step;
    previous = bar;
  }
  EXPECT_EQ(previous.find(' '), std::string::npos) << "the last bar is full: " << previous;
}

TEST(ProgressTest, FollowsAResizedWindow) {
  int columns = 100;
  auto options = terminal(100);
  options.measure_columns = [&] { return columns; };
  FakeRun run(options);
  run.progress.update({.step = 1, .loss = 3.0, .tokens = 1, .peak_bytes = 1});
  columns = 30;
  run.now_s += 1.0;
  run.progress.update({.step = 2, .loss = 3.0, .tokens = 1, .peak_bytes = 1});
  EXPECT_LE(screen(run.out.str()).back().size(), 29u);
}

TEST(ProgressTest, NotesStandAboveTheBarAndLeaveItWhole) {
  FakeRun run(terminal(80));
  run.progress.note("loading");
  run.progress.update({.step = 1, .loss = 3.0, .tokens = 8, .peak_bytes = 1});
  const std::string bar = screen(run.out.str()).back();
  run.progress.note("saved\x1b[2J to\r x\nand more");
  const auto lines = screen(run.out.str());
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_EQ(lines[0], "loading");
  EXPECT_EQ(lines[1], "saved?[2J to? x");
  EXPECT_EQ(lines[2], "and more");
  EXPECT_EQ(lines[3], bar);
}

TEST(ProgressTest, FinishShowsTheLastStepAndTheWholeTimeAndEndsTheLine) {
  FakeRun run(terminal(90));
  run.progress.update({.step = 1, .loss = 3.0, .tokens = 8, .peak_bytes = 1});
  run.now_s += 0.05;
  run.progress.update(
      {.step = 2, .loss = 3.0, .tokens = 8, .peak_bytes = 1});  // too soon to be drawn
  run.now_s += 125.0;
  run.progress.finish();
  run.progress.finish();
  run.progress.update({.step = 3});
  const auto lines = screen(run.out.str());
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_THAT(lines[0], AllOf(HasSubstr(" 2/3000"), HasSubstr("in 2:05")));
  EXPECT_EQ(lines[1], "");
}

TEST(ProgressTest, AnAbandonedBarLeavesTheTerminalOnAFreshLine) {
  std::ostringstream out;
  {
    Progress progress(out, [] { return 0.0; }, terminal(80));
    progress.update({.step = 1, .loss = 3.0, .tokens = 8, .peak_bytes = 1});
  }
  EXPECT_EQ(out.str().back(), '\n');
}

TEST(ProgressTest, PipeGetsPlainLinesAtGrowingIntervalsWithoutControlCharacters) {
  FakeRun run({.total_steps = 1000, .limit_bytes = 600_MiB, .line_interval_s = 10.0});
  for (int step = 1; step <= 1000; ++step) {
    run.now_s += 0.125;
    run.progress.update({.step = step, .loss = 2.5, .tokens = 100, .peak_bytes = 300_MiB});
    if (step == 500) run.progress.note("note");
  }
  run.progress.finish();
  const std::string stream = run.out.str();
  for (const char c : stream) EXPECT_TRUE(c == '\n' || static_cast<unsigned char>(c) >= 0x20);
  const auto lines = screen(stream);
  // After 0.125 s; then 1, 2, 4, 8 s later, then every 10 s to 125 s (10 times); the last step; the
  // note; the end.
  EXPECT_EQ(lines.size(), 18u);
  EXPECT_EQ(lines[0],
            "step 1/1000  loss 2.5000  800 tokens/s  peak 300.0 MiB of 600.0 MiB (50%)  2:05 left");
  EXPECT_THAT(lines[1], HasSubstr("step 9/1000"));
  EXPECT_THAT(lines[lines.size() - 2], HasSubstr("step 1000/1000"));
  EXPECT_THAT(lines, testing::Contains("note"));
}

TEST(ProgressTest, FinishRepeatsNoPlainLine) {
  FakeRun run({.total_steps = 1});
  run.now_s += 1.0;
  run.progress.update({.step = 1, .loss = 2.5, .tokens = 100, .peak_bytes = 1});
  run.progress.finish();
  EXPECT_EQ(screen(run.out.str()).size(), 2u);
}

TEST(ProgressTest, NonFiniteLossIsShownAtOnceAndDoesNotPoisonTheAverage) {
  FakeRun run(terminal(100));
  run.progress.update({.step = 1, .loss = 4.0, .tokens = 1, .peak_bytes = 1});
  run.now_s += 1.0;
  run.progress.update({.step = 2, .loss = std::nan(""), .tokens = 1, .peak_bytes = 1});
  EXPECT_THAT(screen(run.out.str()).back(), HasSubstr("loss nan"));
  run.now_s += 1.0;
  run.progress.update({.step = 3, .loss = 4.0, .tokens = 1, .peak_bytes = 1});
  EXPECT_THAT(screen(run.out.str()).back(), HasSubstr("loss 4.0000"));
}

TEST(ProgressTest, SmoothedLossFollowsTheMeanOfRecentSteps) {
  FakeRun run(terminal(100));
  for (int step = 1; step <= 400; ++step) {
    run.now_s += 1.0;
    run.progress.update(
        {.step = step, .loss = step % 2 == 0 ? 1.0 : 3.0, .tokens = 1, .peak_bytes = 1});
  }
  const std::string line = screen(run.out.str()).back();
  EXPECT_NEAR(std::stod(line.substr(line.find("loss ") + 5)), 2.0, 0.06);
}

TEST(ProgressTest, ResumedRunCountsTimeLeftFromItsOwnSpeed) {
  auto options = terminal(100);
  options.first_step = 2900;
  FakeRun run(options);
  run.now_s += 10.0;
  run.progress.update({.step = 2910, .loss = 3.0, .tokens = 10, .peak_bytes = 1});
  EXPECT_THAT(screen(run.out.str()).back(), HasSubstr("1:30 left"));
}

TEST(ProgressTest, UnknownTotalShowsElapsedTimeAndNoBar) {
  FakeRun run({.is_terminal = true, .columns = 100});
  run.now_s += 61.0;
  run.progress.update({.step = 7, .loss = 3.0, .tokens = 61, .peak_bytes = 1_MiB});
  EXPECT_EQ(screen(run.out.str()).back(), "step 7  loss 3.0000  1 tok/s  1.0 MiB  1:01");
}

TEST(ProgressTest, RefusesOptionsOutOfRange) {
  std::ostringstream out;
  EXPECT_THROW(Progress(out, [] { return 0.0; }, {.total_steps = -1}), UserError);
  EXPECT_THROW(Progress(out, [] { return 0.0; }, {.line_interval_s = 0.0}), UserError);
  EXPECT_THROW(Progress(out, nullptr, {}), UserError);
}

TEST(ProgressTest, LocaleNamesFollowPosixOrder) {
  EXPECT_TRUE(names_utf8_locale(nullptr, nullptr, "en_US.UTF-8"));
  EXPECT_TRUE(names_utf8_locale("", "C.utf8", "C"));
  EXPECT_FALSE(names_utf8_locale("C", nullptr, "en_US.UTF-8"));
  EXPECT_FALSE(names_utf8_locale(nullptr, nullptr, nullptr));
}

}  // namespace
}  // namespace gradus::report
