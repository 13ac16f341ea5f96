#include <gradus/report/metrics.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <csignal>
#include <limits>
#include <random>
#include <string>
#include <thread>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/report/internal/scratch_folder.h>

#include <tests/support/message_of.h>

namespace gradus::report {
namespace {

using internal::read_file;
using internal::ScratchFolder;
using internal::write_file;
using testing::HasSubstr;
using tests::message_of;

StepMetrics step_metrics(std::int64_t step) {
  StepMetrics metrics{.step = step,
                      .elapsed_s = 0.1 * static_cast<double>(step),
                      .loss = 8.0 / static_cast<double>(step)};
  metrics.tokens = 512;
  metrics.peak_bytes = 1000 + step;
  metrics.peak[base::MemoryCategory::activations] = 700;
  if (step % 2 == 0) metrics.loss_scale = 65536.0;
  metrics.skipped = step % 4 == 0;
  return metrics;
}

void write_steps(const std::filesystem::path& path, std::int64_t first, std::int64_t last) {
  MetricsWriter writer(path);
  for (std::int64_t step = first; step <= last; ++step) writer.append(step_metrics(step));
}

TEST(MetricsTest, EveryDoubleReadsBackToTheSameBits) {
  const ScratchFolder folder;
  std::mt19937_64 random(7);
  std::vector<double> values{0.0,
                             -0.0,
                             3.0,
                             -1e5,
                             0.1,
                             1.0 / 3.0,
                             std::numeric_limits<double>::denorm_min(),
                             std::numeric_limits<double>::max(),
                             std::numeric_limits<double>::lowest(),
                             std::numeric_limits<double>::min(),
                             9007199254740993.0,
                             1e22,
                             1e23};
  while (values.size() < 3000) {
    const double value = std::bit_cast<double>(random());
    if (std::isfinite(value)) values.push_back(value);
  }
  {
    MetricsWriter writer(folder / "m.jsonl");
    for (std::size_t i = 0; i < values.size(); ++i) {
      auto metrics = step_metrics(static_cast<std::int64_t>(i) + 1);
      metrics.loss = metrics.grad_norm = values[i];
      metrics.validation_loss = values[i];
      metrics.extra["scale"] = values[i];
      writer.append(metrics);
    }
  }
  const auto read = read_metrics(folder / "m.jsonl");
  ASSERT_EQ(read.size(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto bits = std::bit_cast<std::uint64_t>(values[i]);
    EXPECT_EQ(std::bit_cast<std::uint64_t>(read[i].loss), bits) << values[i];
    EXPECT_EQ(std::bit_cast<std::uint64_t>(read[i].grad_norm), bits);
    EXPECT_EQ(std::bit_cast<std::uint64_t>(read[i].validation_loss.value()), bits);
    EXPECT_EQ(std::bit_cast<std::uint64_t>(read[i].extra.at("scale")), bits);
  }
}

TEST(MetricsTest, LineIsOneJsonObjectWithNonFiniteNumbersAsNullAndAMarker) {
  const ScratchFolder folder;
  auto metrics = step_metrics(3);
  metrics.loss = std::nan("");
  metrics.grad_norm = std::numeric_limits<double>::infinity();
  metrics.lr = -std::numeric_limits<double>::infinity();
  metrics.tokens_per_s = 1234.5;
  MetricsWriter(folder / "m.jsonl").append(metrics);
  EXPECT_EQ(
      read_file(folder / "m.jsonl"),
      "{\"step\":3,\"elapsed_s\":0.30000000000000004,\"loss\":null,\"loss_nonfinite\":\"nan\","
      "\"lr\":null,"
      "\"lr_nonfinite\":\"-inf\",\"grad_norm\":null,\"grad_norm_nonfinite\":\"inf\",\"tokens\":512,"
      "\"tokens_per_s\":1234.5,\"peak_bytes\":1003,\"peak\":{\"parameters\":0,\"gradients\":0,"
      "\"optimizer state\":0,\"activations\":700,\"inputs\":0,\"workspace\":0}}\n");
  const auto read = read_metrics(folder / "m.jsonl").at(0);
  EXPECT_TRUE(std::isnan(read.loss));
  EXPECT_EQ(read.grad_norm, metrics.grad_norm);
  EXPECT_EQ(read.lr, metrics.lr);
  EXPECT_EQ(read.peak, metrics.peak);
  EXPECT_FALSE(read.validation_loss.has_value());
}

TEST(MetricsTest, ResumeDropsTheLinesPastTheTrainingStateAndGoesOn) {
  const ScratchFolder folder;
  write_steps(folder / "m.jsonl", 1, 20);
  const std::string first = read_file(folder / "m.jsonl");
  {
    MetricsWriter writer(folder / "m.jsonl");
    EXPECT_EQ(writer.last_step(), 20);
    EXPECT_THAT(message_of([&] { writer.append(step_metrics(13)); }),
                HasSubstr("steps must increase; got 13 after 20"));
    writer.truncate_after(25);
    EXPECT_EQ(writer.last_step(), 20);
    writer.truncate_after(12);
    EXPECT_EQ(writer.last_step(), 12);
    for (std::int64_t step = 13; step <= 20; ++step) writer.append(step_metrics(step));
  }
  EXPECT_EQ(read_file(folder / "m.jsonl"), first);
  MetricsWriter(folder / "m.jsonl").truncate_after(0);
  EXPECT_EQ(read_file(folder / "m.jsonl"), "");
}

TEST(MetricsTest, AFileCutAnywhereKeepsItsWholeLinesAndTakesNewOnes) {
  const ScratchFolder folder;
  write_steps(folder / "m.jsonl", 1, 3);
  const std::string whole = read_file(folder / "m.jsonl");
  for (std::size_t size = 0; size <= whole.size(); ++size) {
    SCOPED_TRACE(size);
    write_file(folder / "cut.jsonl", whole.substr(0, size));
    const auto lines = static_cast<std::size_t>(
        std::count(whole.begin(), whole.begin() + static_cast<long>(size), '\n'));
    EXPECT_EQ(read_metrics(folder / "cut.jsonl").size(), lines);
    MetricsWriter(folder / "cut.jsonl").append(step_metrics(9));
    const auto read = read_metrics(folder / "cut.jsonl");
    ASSERT_EQ(read.size(), lines + 1);
    EXPECT_EQ(read.back(), step_metrics(9));
  }
}

TEST(MetricsTest, ALastLineOfZerosAfterAPowerFailureIsRemoved) {
  const ScratchFolder folder;
  write_steps(folder / "m.jsonl", 1, 2);
  write_file(folder / "m.jsonl", read_file(folder / "m.jsonl") + std::string(100, '\0') + "\n");
  write_steps(folder / "m.jsonl", 3, 3);
  EXPECT_EQ(read_metrics(folder / "m.jsonl").size(), 3u);
}

TEST(MetricsTest, DamageBeforeTheLastLineIsRefusedWithItsNumber) {
  const ScratchFolder folder;
  write_steps(folder / "m.jsonl", 1, 4);
  std::string text = read_file(folder / "m.jsonl");
  text[text.find('\n') + 5] = '\x01';
  write_file(folder / "m.jsonl", text);
  EXPECT_THAT(message_of([&] { read_metrics(folder / "m.jsonl"); }), HasSubstr("line 2 of"));
  EXPECT_THAT(message_of([&] { MetricsWriter writer(folder / "m.jsonl"); }),
              HasSubstr("line 2 of"));
  EXPECT_EQ(read_file(folder / "m.jsonl"), text);
}

TEST(MetricsTest, AForeignFileIsRefusedAndLeftAlone) {
  const ScratchFolder folder;
  for (const std::string text : {"dear diary", "dear diary\n", "a\nb\n"}) {
    write_file(folder / "diary", text);
    EXPECT_THROW(MetricsWriter(folder / "diary"), UserError);
    EXPECT_EQ(read_file(folder / "diary"), text);
  }
}

TEST(MetricsTest, MissingPlacesAreNamed) {
  const ScratchFolder folder;
  EXPECT_THAT(message_of([&] { read_metrics(folder / "none.jsonl"); }), HasSubstr("none.jsonl"));
  EXPECT_THAT(message_of([&] { MetricsWriter writer(folder.path() / "no" / "m.jsonl"); }),
              HasSubstr("No such file or directory"));
}

TEST(MetricsTest, AFullDiskLeavesTheEarlierLinesWhole) {
  const ScratchFolder folder;
  EXPECT_THAT(message_of([] { MetricsWriter("/dev/full").append(step_metrics(1)); }),
              HasSubstr("No space left on device"));
  // A file-size limit stops a write halfway, as a disk that fills up does.
  write_steps(folder / "m.jsonl", 1, 2);
  const std::string before = read_file(folder / "m.jsonl");
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  MetricsWriter writer(folder / "m.jsonl");
  const rlimit small{before.size() + 40, old.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string message = message_of([&] { writer.append(step_metrics(3)); });
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, SIG_DFL);
  EXPECT_THAT(message, HasSubstr("File too large"));
  EXPECT_EQ(read_file(folder / "m.jsonl"), before);
  writer.append(step_metrics(3));
  EXPECT_EQ(read_metrics(folder / "m.jsonl").size(), 3u);
}

TEST(MetricsTest, KillingTheProcessLosesNoFinishedLine) {
  const ScratchFolder folder;
  int channel[2];
  ASSERT_EQ(pipe(channel), 0);
  const pid_t child = fork();
  if (child == 0) {
    // Reports each step only after append() returned. No thread was started before, so the fork is
    // safe.
    MetricsWriter writer(folder / "m.jsonl");
    for (std::int64_t step = 1;; ++step) {
      writer.append(step_metrics(step));
      if (write(channel[1], &step, sizeof step) != sizeof step) _exit(1);
    }
  }
  close(channel[1]);
  std::int64_t done = 0;
  while (done < 500)
    ASSERT_EQ(read(channel[0], &done, sizeof done), static_cast<ssize_t>(sizeof done));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  while (read(channel[0], &done, sizeof done) == static_cast<ssize_t>(sizeof done)) {
  }
  close(channel[0]);
  const auto read = read_metrics(folder / "m.jsonl");
  ASSERT_GE(static_cast<std::int64_t>(read.size()), done);
  for (std::size_t i = 0; i < read.size(); ++i)
    EXPECT_EQ(read[i], step_metrics(static_cast<std::int64_t>(i) + 1));
}

}  // namespace
}  // namespace gradus::report
