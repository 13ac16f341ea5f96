// What a run writes for people: progress, logs, report and configuration, which must agree.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <integration_paths.h>
#include <sys/wait.h>

#include <gmock/gmock.h>
#include <nlohmann/json.hpp>
#include <tests/integration/training_runs.h>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/train/config.h>
#include <gradus/train/training_state.h>

namespace gradus::integration {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

class RunDirectoryTest : public TrainingRuns {};

TEST_F(RunDirectoryTest, ProgressOnAPipeIsPlainLines) {
  const Ended ended = train("run", {{"steps", "40"}, {"eval-every", "10"}, {"sample-tokens", "0"}});
  for (const char c : ended.out) {
    ASSERT_TRUE(c == '\n' || static_cast<unsigned char>(c) >= 0x20)
        << "control character " << static_cast<int>(c);
  }
  EXPECT_THAT(ended.out, HasSubstr("\nstep 1/40  loss "));
  EXPECT_THAT(ended.out, HasSubstr("\nstep 40/40  loss "));
  EXPECT_THAT(ended.out, HasSubstr("\nstep 20: validation loss "));
}

TEST_F(RunDirectoryTest, ProgressOnATerminalRedrawsOneLine) {
  const Ended ended =
      GradusProcess(train_arguments("run", {{"steps", "150"}, {"eval-every", "60"}}),
                    Output::terminal)
          .wait();
  ASSERT_EQ(ended.code, 0) << ended.out;
  // Redrawn in place: the bar's states share a line of their own each time, and no bar ends a line
  // but the last.
  int redraws = 0, bars_left = 0;
  for (const std::string& line : lines(ended.out)) {
    std::size_t begin = 0;
    std::string shown;
    while (begin <= line.size()) {
      const std::size_t end = std::min(line.find('\r', begin), line.size());
      const std::string drawn = line.substr(begin, end - begin);
      if (drawn.find("/150  loss ") != std::string::npos) {
        ++redraws;
        EXPECT_TRUE(drawn.ends_with("\x1b[K"))
            << "what a longer line left behind must go: " << drawn;
        const auto columns = std::count_if(drawn.begin(), drawn.end() - 3,
                                           [](char c) { return (c & 0xC0) != 0x80; });
        EXPECT_LE(columns, 100) << drawn;
      }
      if (!drawn.empty()) shown = drawn;
      begin = end + 1;
    }
    if (shown.find("/150  loss ") != std::string::npos) ++bars_left;
    if (line.find("validation loss") != std::string::npos) {
      EXPECT_THAT(shown, HasSubstr("validation loss")) << "a note replaces the bar on its line";
    }
  }
  EXPECT_GE(redraws, 3);
  EXPECT_EQ(bars_left, 1) << ended.out;
  EXPECT_THAT(ended.out, HasSubstr("150/150  loss "));
}

TEST_F(RunDirectoryTest, TheConfigurationLoadsAgainAndGivesTheSameRun) {
  train("run", {{"steps", "8"},
                {"dropout", "0.15"},
                {"seed", "7"},
                {"prompt", "it's \"so\"\n"},
                {"lr", "3e-3"}});
  const auto config = train::load_config(path("run") + "/config.toml");
  EXPECT_EQ(config.train.steps, 8);
  EXPECT_EQ(config.train.seed, 7);
  EXPECT_EQ(config.model.dropout, 0.15);
  EXPECT_EQ(config.optimizer.lr, 3e-3);
  EXPECT_EQ(config.sample.prompt, "it's \"so\"\n");
  EXPECT_EQ(config.data.corpus, "file:" + path("text.txt"));
  EXPECT_EQ(train::config_toml(config), read_text(path("run") + "/config.toml"));
  const Ended ended = run_gradus({"train", path("run") + "/config.toml", "--out", path("again")});
  ASSERT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(numeric_difference(metrics("run"), metrics("again")), "");
}

TEST_F(RunDirectoryTest, FlagsWinOverTheFileWhichWinsOverDefaults) {
  write_text(path("own.toml"),
             "[model]\nlayers = 1\nwidth = 16\n\n[train]\nsteps = 3\n[optimizer]\nwarmup = 1\n");
  const Ended ended = run_gradus({"train",           path("own.toml"),
                                  "--width",         "24",
                                  "--heads",         "2",
                                  "--context",       "8",
                                  "--batch",         "2",
                                  "--tokenizer",     "bytes",
                                  "--corpus",        "file:" + path("text.txt"),
                                  "--cache",         path("cache"),
                                  "--sample-tokens", "0",
                                  "--threads",       "1",
                                  "--out",           path("run")});
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto config = train::load_config(path("run") + "/config.toml");
  EXPECT_EQ(config.model.layers, 1);
  EXPECT_EQ(config.model.width, 24);
  EXPECT_EQ(config.train.steps, 3);
  EXPECT_EQ(config.train.keep, train::TrainConfig().train.keep);
  EXPECT_EQ(metrics("run").size(), 3u);
}

TEST_F(RunDirectoryTest, MetricsStateSummaryAndReportAgree) {
  const Ended ended = train("run", {{"layers", "4"},
                                    {"batch", "16"},
                                    {"context", "32"},
                                    {"steps", "20"},
                                    {"eval-every", "10"},
                                    {"memory", "3MiB"},
                                    {"dropout", "0.1"},
                                    {"sample-tokens", "12"},
                                    {"prompt", "the <b>king"}});
  const auto steps = metrics("run");
  ASSERT_EQ(steps.size(), 20u);
  double previous = 0.0;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i].step, static_cast<std::int64_t>(i) + 1);
    EXPECT_EQ(steps[i].tokens, 16 * 32);
    EXPECT_GT(steps[i].elapsed_s, previous);
    EXPECT_EQ(steps[i].validation_loss.has_value(), (i + 1) % 10 == 0);
    previous = steps[i].elapsed_s;
  }
  EXPECT_LT(steps.back().loss, steps.front().loss);
  const train::RunState state = train::find_training_state(path("run")).newest->run;
  EXPECT_EQ(state.step, 20);
  EXPECT_EQ(state.first_loss, steps.front().loss);
  EXPECT_EQ(state.peak_bytes, highest_peak(steps));

  const std::string report = read_text(path("run") + "/report.html");
  const auto row = [&](const std::string& name) {
    const std::string head = "<th scope=\"row\">" + name + "</th><td>";
    const std::size_t begin = report.find(head);
    return begin == std::string::npos
               ? ""
               : report.substr(begin + head.size(),
                               report.find("</td>", begin) - begin - head.size());
  };
  EXPECT_THAT(report, Not(HasSubstr("https://"))) << "self-contained";
  EXPECT_THAT(report, HasSubstr("finished 20 steps"));
  EXPECT_EQ(row("Plan"), train::describe_plan(state.plan, 16, 4));
  EXPECT_THAT(ended.out, HasSubstr(row("Plan")));
  EXPECT_EQ(row("Memory limit"), "3.0 MiB");
  EXPECT_THAT(row("Measured peak"), HasSubstr(base::format_bytes(state.peak_bytes)));
  EXPECT_THAT(row("Plain training would need"),
              HasSubstr(base::format_bytes(state.plain_peak_bytes)));
  const auto config = train::load_config(path("run") + "/config.toml");
  for (const auto& [key, value] : train::describe_config(config)) {
    if (value.find_first_of("<>&'\"") != std::string::npos) continue;  // escaped there
    EXPECT_THAT(report, HasSubstr("<span>" + key + "</span><span>" + value + "</span>"));
  }
  EXPECT_THAT(report, HasSubstr("the &lt;b&gt;king"));
  EXPECT_THAT(report, Not(HasSubstr("<b>king")));

  // The loss curve's points are the metrics.
  const std::size_t chart = report.find("<figcaption>Loss</figcaption>");
  ASSERT_NE(chart, std::string::npos);
  const std::string open = "<script type=\"application/json\">";
  const std::size_t begin = report.find(open, chart) + open.size();
  const auto json =
      nlohmann::json::parse(report.substr(begin, report.find("</script>", begin) - begin));
  const auto& series = json.at("series").at(0);
  ASSERT_EQ(series.at("y").size(), 20u);
  for (std::size_t i = 0; i < 20; ++i) {
    EXPECT_EQ(series.at("x").at(i).get<double>(), static_cast<double>(i) + 1);
    EXPECT_NEAR(series.at("y").at(i).get<double>(), steps[i].loss, 1e-6 * steps[i].loss);
  }
}

TEST_F(RunDirectoryTest, TensorBoardReadsTheSameNumbersAlsoAcrossAResume) {
  if (!fs::exists(kPython)) GTEST_SKIP() << "no Python at " << kPython << ": run scripts/setup.sh";
  GradusProcess process(
      train_arguments("run", {{"steps", "400"}, {"eval-every", "8"}, {"save-every", "10"}}));
  ASSERT_TRUE(process.wait_until([&] { return steps_done("run") >= 13; }));
  process.send(SIGKILL);
  ASSERT_EQ(process.wait().signal, SIGKILL);
  const std::int64_t killed_at = steps_done("run");
  ASSERT_LT(killed_at, 380);
  const Ended resumed =
      run_gradus({"train", "--resume", path("run"), "--steps", std::to_string(killed_at + 4)});
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(metrics("run").size(), static_cast<std::size_t>(killed_at) + 4);
  const std::string command =
      base::join("'", kPython, "' '", kIntegrationFolder, "/check_events.py' '", path("run"),
                 "' >'", path("log"), "' 2>&1");
  const int code = std::system(command.c_str());
  if (WEXITSTATUS(code) == 77) GTEST_SKIP() << read_text(path("log"));
  EXPECT_EQ(code, 0) << read_text(path("log"));
}

}  // namespace
}  // namespace gradus::integration
