#include <gradus/distributed/comm/spawn.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <thread>

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/distributed/comm/internal/line_splitter.h>

namespace gradus::distributed::comm {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::UnorderedElementsAre;
using namespace std::chrono_literals;

SpawnOptions shell(int world_size, const std::string& script) {
  return {.world_size = world_size,
          .command = {"/bin/sh", "-c", script},
          .grace_s = 5.0,
          .on_line = [](int, RankStream, std::string_view) {}};
}

/// The error of a run that must fail, and how long it took.
struct Failure {
  std::string message;
  int rank = -1;
  double seconds = 0.0;
};

Failure failure_of(const SpawnOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  Failure failure{.message = "no CommError"};
  try {
    run_ranks(options);
  } catch (const CommError& error) {
    failure.message = error.what();
    failure.rank = error.rank();
    EXPECT_EQ(error.operation(), "run_ranks");
  }
  failure.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return failure;
}

/// True unless the process is gone or only waits to be reaped.
bool runs(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  if (!std::getline(file, stat)) return false;
  return stat.at(stat.rfind(')') + 2) != 'Z';
}

bool comes_true(const std::function<bool()>& condition) {
  for (int i = 0; i < 500; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(10ms);
  }
  return false;
}

class SpawnTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        std::filesystem::temp_directory_path() / ("gradus_spawn_test_" + std::to_string(getpid()));
    std::filesystem::create_directory(folder_);
  }
  void TearDown() override {
    std::filesystem::remove_all(folder_);
    // Whatever a test did, this process has no child left: neither running nor a zombie.
    EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
    EXPECT_EQ(errno, ECHILD);
  }

  std::string file(const std::string& name) const { return (folder_ / name).string(); }

  /// The numbers that processes wrote into files of the test's folder, once there are as many.
  std::vector<pid_t> pids(std::size_t count) const {
    std::vector<pid_t> result;
    EXPECT_TRUE(comes_true([&] {
      result.clear();
      for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
        pid_t pid = 0;
        if (entry.path().extension() == ".pid" && std::ifstream(entry.path()) >> pid)
          result.push_back(pid);
      }
      return result.size() == count;
    }));
    return result;
  }

  /// A launcher in a process of its own, which a test may signal.
  pid_t start_launcher(int world_size, const std::string& grace, const std::string& script) const {
    const std::string world = std::to_string(world_size);
    const char* const argv[] = {GRADUS_SPAWN_TEST_PROGRAM,
                                "launch",
                                world.c_str(),
                                grace.c_str(),
                                "/bin/sh",
                                "-c",
                                script.c_str(),
                                nullptr};
    // A shell's background job ignores SIGINT, and the launcher would rightly go on ignoring it.
    posix_spawnattr_t attributes;
    sigset_t standard;
    sigemptyset(&standard);
    sigaddset(&standard, SIGINT);
    sigaddset(&standard, SIGTERM);
    ::posix_spawnattr_init(&attributes);
    ::posix_spawnattr_setsigdefault(&attributes, &standard);
    ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
    pid_t pid = -1;
    EXPECT_EQ(
        ::posix_spawn(&pid, argv[0], nullptr, &attributes, const_cast<char* const*>(argv), environ),
        0);
    ::posix_spawnattr_destroy(&attributes);
    return pid;
  }

  static int status_of(pid_t pid) {
    int status = 0;
    EXPECT_EQ(::waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  std::filesystem::path folder_;
};

TEST_F(SpawnTest, EveryRankIsToldItsPlace) {
  std::vector<std::string> lines;
  auto options = shell(
      3, "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $EXTRA");
  options.extra_environment = {{"EXTRA", "more"}};
  options.port = 23456;
  options.on_line = [&](int rank, RankStream stream, std::string_view line) {
    EXPECT_EQ(stream, RankStream::out);
    lines.push_back(std::to_string(rank) + ": " + std::string(line));
  };
  const auto result = run_ranks(options);
  EXPECT_THAT(lines, UnorderedElementsAre("0: 0 0 3 3 127.0.0.1 23456 more",
                                          "1: 1 1 3 3 127.0.0.1 23456 more",
                                          "2: 2 2 3 3 127.0.0.1 23456 more"));
  EXPECT_THAT(result.exits, ElementsAre(RankExit{}, RankExit{}, RankExit{}));
  EXPECT_EQ(result.interrupted_by, 0);
}

TEST_F(SpawnTest, FreePortIsTheSameForAllRanks) {
  std::vector<std::string> ports;
  auto options = shell(2, "echo $MASTER_PORT");
  options.on_line = [&](int, RankStream, std::string_view line) { ports.emplace_back(line); };
  run_ranks(options);
  ASSERT_EQ(ports.size(), 2);
  EXPECT_EQ(ports[0], ports[1]);
  EXPECT_GT(std::stoi(ports[0]), 0);
}

TEST_F(SpawnTest, BaseEnvironmentReplacesThisProcessesAndAnOuterTorchrunIsForgotten) {
  std::string line;
  auto options = shell(1, "echo ${HOME-none} ${KEPT-none} ${TORCHELASTIC_USE_AGENT_STORE-none}");
  options.base_environment = Environment{{"KEPT", "yes"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
  options.on_line = [&](int, RankStream, std::string_view text) { line = text; };
  run_ranks(options);
  EXPECT_EQ(line, "none yes none");
}

TEST_F(SpawnTest, OutputIsPrefixedByRankAndKeepsItsStream) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  auto options = shell(2, "echo out $RANK; echo err $RANK >&2; printf 'no end'");
  options.on_line = prefixed_lines();
  run_ranks(options);
  const auto out = testing::internal::GetCapturedStdout();
  const auto err = testing::internal::GetCapturedStderr();
  EXPECT_THAT(out,
              AllOf(HasSubstr("[0] out 0\n"), HasSubstr("[1] out 1\n"), HasSubstr("[0] no end\n")));
  EXPECT_THAT(err, AllOf(HasSubstr("[0] err 0\n"), HasSubstr("[1] err 1\n")));
}

TEST_F(SpawnTest, LargeOutputArrivesWhole) {
  std::int64_t lines = 0, bytes = 0;
  auto options = shell(2,
                       "i=0; while [ $i -lt 20000 ]; do echo "
                       "0123456789012345678901234567890123456789; i=$((i+1)); done");
  options.on_line = [&](int, RankStream, std::string_view line) {
    ++lines;
    bytes += static_cast<std::int64_t>(line.size());
  };
  run_ranks(options);
  EXPECT_EQ(lines, 40000);
  EXPECT_EQ(bytes, 40000 * 40);
}

TEST_F(SpawnTest, RankThatExitsWithAStatusIsNamedAndTheOthersAreEnded) {
  const auto failure =
      failure_of(shell(3, "if [ $RANK = 2 ]; then echo 'disk full' >&2; exit 3; fi; sleep 60"));
  EXPECT_EQ(failure.message,
            "[spawn] rank 2 exited with status 3 of 3 ranks; the others were ended. Its last error "
            "line: disk full");
  EXPECT_EQ(failure.rank, 2);
  EXPECT_LT(failure.seconds, 4.0) << "ended by SIGTERM, not by the end of the grace period";
}

TEST_F(SpawnTest, RankThatIsKilledIsNamedWithTheSignal) {
  const auto failure = failure_of(shell(2, "if [ $RANK = 0 ]; then kill -9 $$; fi; sleep 60"));
  EXPECT_THAT(failure.message, HasSubstr("rank 0 was killed by signal 9 (Killed)"));
  EXPECT_EQ(failure.rank, 0);
  EXPECT_LT(failure.seconds, 4.0);
}

TEST_F(SpawnTest, OfFailuresFoundTogetherTheKilledRankIsNamedFirstAndAllAreListed) {
  auto options = shell(3, "echo $$ > " + file("$RANK.pid") +
                              "; if [ $RANK = 0 ]; then sleep 0.2; echo go; exit 4; fi; "
                              "while [ ! -e " +
                              file("go") +
                              " ]; do sleep 0.02; done; "
                              "if [ $RANK = 2 ]; then kill -9 $$; fi; exit 5");
  // The loop stands still in the sink until all three are dead, and so finds them at once.
  options.on_line = [&](int, RankStream, std::string_view) {
    std::ofstream(file("go")) << "now";
    for (const auto pid : pids(3)) EXPECT_TRUE(comes_true([&] { return !runs(pid); }));
  };
  const auto failure = failure_of(options);
  EXPECT_EQ(failure.rank, 2);
  EXPECT_THAT(failure.message,
              AllOf(HasSubstr("[spawn] rank 2 was killed by signal 9"),
                    HasSubstr("found at the same time: rank 0 exited with status 4; "
                              "found at the same time: rank 1 exited with status 5")));
}

TEST_F(SpawnTest, RankThatIgnoresTheRequestToEndIsKilledAfterTheGracePeriod) {
  auto options = shell(
      2, "if [ $RANK = 1 ]; then sleep 0.3; exit 7; fi; trap '' TERM; while :; do sleep 1; done");
  options.grace_s = 0.5;
  const auto failure = failure_of(options);
  EXPECT_THAT(failure.message, HasSubstr("rank 1 exited with status 7"));
  EXPECT_GT(failure.seconds, 0.7);
  EXPECT_LT(failure.seconds, 4.0);
}

TEST_F(SpawnTest, CommandThatCannotBeStartedIsAUserError) {
  for (const auto* command : {"/no/such/program", "gradus-no-such-program", "/etc/hostname"}) {
    SCOPED_TRACE(command);
    SpawnOptions options{.world_size = 2, .command = {command}};
    try {
      run_ranks(options);
      ADD_FAILURE() << "started";
    } catch (const UserError& error) {
      EXPECT_THAT(error.what(),
                  AllOf(HasSubstr("[spawn] the command must be a program that can be started"),
                        HasSubstr(command)));
    }
  }
}

TEST_F(SpawnTest, ProcessesThatARankLeavesBehindAreKilled) {
  run_ranks(shell(1, "sleep 60 & echo $! > " + file("grandchild.pid")));
  const auto grandchild = pids(1).front();
  EXPECT_TRUE(comes_true([&] { return !runs(grandchild); }));
}

TEST_F(SpawnTest, ExceptionFromTheSinkEndsTheRanks) {
  auto options = shell(2, "echo $$ > " + file("$RANK.pid") + "; echo hello; sleep 60");
  options.on_line = [&](int, RankStream, std::string_view) {
    pids(2);
    throw std::runtime_error("sink is full");
  };
  EXPECT_THROW(run_ranks(options), std::runtime_error);
  for (const auto pid : pids(2)) EXPECT_FALSE(runs(pid));
}

TEST_F(SpawnTest, LauncherKilledOutrightTakesItsRanksAndTheirChildrenAlong) {
  const auto launcher =
      start_launcher(2, "30",
                     "trap '' TERM; sleep 60 & echo $! > " + file("child$RANK.pid") +
                         "; echo $$ > " + file("$RANK.pid") + "; wait");
  const auto all = pids(4);
  for (const auto pid : all) EXPECT_TRUE(runs(pid));
  ::kill(launcher, SIGKILL);
  EXPECT_EQ(status_of(launcher), -SIGKILL);
  for (const auto pid : all) EXPECT_TRUE(comes_true([&] { return !runs(pid); })) << pid;
}

TEST_F(SpawnTest, SignalsAreForwardedAndTheRanksMayFinish) {
  for (const auto& [number, name] :
       std::vector<std::pair<int, std::string>>{{SIGTERM, "TERM"}, {SIGINT, "INT"}}) {
    SCOPED_TRACE(name);
    const auto launcher = start_launcher(
        2, "30",
        "trap 'echo saved > " + file(name + "$RANK") + "; exit 0' " + name + "; echo $$ > " +
            file(name + "$RANK.pid") + "; while :; do sleep 0.05; done");
    pids(2);
    ::kill(launcher, number);
    EXPECT_EQ(status_of(launcher), 128 + number);
    for (const auto* rank : {"0", "1"}) {
      EXPECT_TRUE(std::filesystem::exists(file(name + rank)));
      std::filesystem::remove(file(name + rank + ".pid"));
    }
  }
}

TEST_F(SpawnTest, SecondSignalEndsTheGracePeriod) {
  const auto launcher = start_launcher(1, "60",
                                       "trap 'touch " + file("first") + "' INT; echo $$ > " +
                                           file("0.pid") + "; while :; do sleep 0.05; done");
  const auto rank = pids(1).front();
  ::kill(launcher, SIGINT);
  EXPECT_TRUE(comes_true([&] { return std::filesystem::exists(file("first")); }));
  EXPECT_TRUE(runs(rank));
  ::kill(launcher, SIGINT);
  EXPECT_EQ(status_of(launcher), 128 + SIGINT);
  EXPECT_FALSE(runs(rank));
}

TEST_F(SpawnTest, HandlersOfThisProcessAreRestored) {
  struct sigaction before{}, after{};
  ::sigaction(SIGTERM, nullptr, &before);
  run_ranks(shell(1, "exit 0"));
  ::sigaction(SIGTERM, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
}

// A forked copy of a process that has run a parallel region hangs in its own first one.
TEST_F(SpawnTest, RanksComputeInParallelAfterTheLauncherDid) {
  const auto output = file("output");
  const auto command =
      std::string("timeout 60 ") + GRADUS_SPAWN_TEST_PROGRAM + " warm 2 > " + output;
  EXPECT_EQ(std::system(command.c_str()), 0);
  std::stringstream text;
  text << std::ifstream(output).rdbuf();
  EXPECT_THAT(text.str(), AllOf(HasSubstr("[0] sum 16777216 of rank 0"),
                                HasSubstr("[1] sum 16777216 of rank 1")));
}

TEST_F(SpawnTest, OptionsOutOfRangeAreRefused) {
  EXPECT_THROW(run_ranks(shell(0, "exit 0")), UserError);
  EXPECT_THROW(run_ranks({.command = {}}), UserError);
  auto options = shell(1, "exit 0");
  options.port = 65536;
  EXPECT_THROW(run_ranks(options), UserError);
  options = shell(1, "exit 0");
  options.grace_s = -1.0;
  EXPECT_THROW(run_ranks(options), UserError);
  options = shell(1, "exit 0");
  options.extra_environment = {{"RANK", "5"}};
  EXPECT_THROW(run_ranks(options), UserError);
}

TEST_F(SpawnTest, LinesAreJoinedAcrossReadsAndBoundedInLength) {
  internal::LineSplitter splitter;
  std::vector<std::string> lines;
  const auto sink = [&](std::string_view line) { lines.emplace_back(line); };
  splitter.feed("a", sink);
  splitter.feed("b\n\nc", sink);
  splitter.finish(sink);
  EXPECT_THAT(lines, ElementsAre("ab", "", "c"));
  lines.clear();
  for (int i = 0; i < 100; ++i) splitter.feed(std::string(1024, 'x'), sink);
  EXPECT_EQ(lines.size(), 1);
}

}  // namespace
}  // namespace gradus::distributed::comm
