// Bad input, damaged files, full and read-only disks: one line, the right exit code, nothing lost.
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <integration_paths.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <tests/integration/training_runs.h>

namespace gradus::integration {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class CommandLineTest : public TrainingRuns {
 protected:
  std::string config(const std::string& text) const {
    static int count = 0;
    const std::string file = path("config" + std::to_string(count++) + ".toml");
    write_text(file, text);
    return file;
  }
  // Flips one bit in the middle of a file.
  static void damage(const std::string& file) {
    std::string content = read_text(file);
    ASSERT_FALSE(content.empty());
    content[content.size() / 2] = static_cast<char>(content[content.size() / 2] ^ 1);
    write_text(file, content);
  }
};

struct BadInput {
  std::vector<std::string> arguments;
  int code;
  std::vector<std::string> parts;  // of the one line on standard error
};

TEST_F(CommandLineTest, BadInputIsNamedInOneLineWithExitCodeTwo) {
  fs::create_directory(path("empty"));
  const BadInput table[] = {
      {{}, 2, {"subcommand is required"}},
      {{"train", "--wdith", "3"}, 2, {"--wdith"}},
      {{"train", "--steps"}, 2, {"--steps"}},
      {{"train", "--layers", "two"}, 2, {"--layers must be a whole number; got 'two'"}},
      {{"train", "--lr", "fast"}, 2, {"--lr must be a number; got 'fast'"}},
      {{"train", "--bias", "maybe"}, 2, {"--bias must be true or false; got 'maybe'"}},
      {{"train", "--steps", "0"}, 2, {"train.steps must be at least 1; got 0"}},
      {{"train", "--heads", "5", "--width", "32"}, 2, {"width", "heads"}},
      {{"train", "--tokenizer", "words"},
       2,
       {"data.tokenizer", "sentencepiece or bytes", "'words'"}},
      {{"train", "--device", "cuda:77"}, 2, {"no device cuda:77", "here: "}},
      {{"train", "--device", "toaster"}, 2, {"'toaster'", "Here: "}},
      {{"train", "--plan", "fast"}, 2, {"micro-batch=N,recompute=N", "'fast'"}},
      {{"train", "--plan", "micro-batch=33,recompute=0"},
       2,
       {"between 1 and 32", "micro-batch=33"}},
      {{"train", "--plan", "micro-batch=1,recompute=7"}, 2, {"between 0 and 6", "recompute=7"}},
      {{"train", "--memory", "12parsecs"}, 2, {"'12parsecs'", "MiB"}},
      {{"train", "--memory", "-5MiB"}, 2, {"'-5MiB'"}},
      {{"train", "--memory", "0"}, 2, {"memory.limit must be above 0"}},
      {{"train", path("nowhere.toml")}, 2, {"'" + path("nowhere.toml") + "'"}},
      {{"train", config("[model]\nlayesr = 3\n")},
       2,
       {":2: unknown key 'model.layesr'; did you mean 'model.layers'?"}},
      {{"train", config("layers = 3\n")},
       2,
       {":1: unknown key 'layers'; did you mean 'model.layers'?"}},
      {{"train", config("[model]\n\nlayers = \"three\"\n")},
       2,
       {":3: model.layers must be a whole number; got 'three'"}},
      {{"train", config("[model]\nlayers = 3\nwidth = \n")}, 2, {".toml:3: "}},
      {{"train", "--resume", path("nowhere")}, 2, {"'" + path("nowhere") + "'"}},
      {{"train", "--resume", path("empty")}, 2, {path("empty")}},
      {{"train", config(""), "--resume", path("empty")}, 2, {"not both"}},
      {{"plan"}, 2, {"memory limit is required", "--memory"}},
      {{"plan", "--memory", "5MiB", "--plan", "none"}, 2, {"must be auto", "'none'"}},
      {{"plan", "--memory", "5MiB", "--html"}, 2, {"--html"}},
      {{"plan", path("nowhere.toml"), "--memory", "5MiB"}, 2, {"'" + path("nowhere.toml") + "'"}},
      {{"eval"}, 2, {"run is required"}},
      {{"sample", path("empty")}, 2, {path("empty")}},
      {{"launch", "-n", "2"}, 2, {"command is required"}},
  };
  // The next one starts while one is waited for: starting takes most of the time.
  const auto start = [&](const BadInput& row) {
    return std::make_unique<GradusProcess>(row.arguments, Output::pipes, directory_.string());
  };
  auto process = start(table[0]);
  for (std::size_t i = 0; i < std::size(table); ++i) {
    SCOPED_TRACE(testing::PrintToString(table[i].arguments));
    auto next = i + 1 < std::size(table) ? start(table[i + 1]) : nullptr;
    expect_refusal(process->wait(), table[i].code, table[i].parts);
    process = std::move(next);
  }
  EXPECT_FALSE(fs::exists(path("runs"))) << "nothing may begin";
}

TEST_F(CommandLineTest, WhatFailsAfterTheStartIsNamedInOneLineWithExitCodeOne) {
  write_text(path("binary"), "good\n\xff\xfe bad\n");
  write_text(path("short"), "abc\n");
  write_text(path("file"), "");
  const std::pair<Flags, std::vector<std::string>> table[] = {
      {{{"corpus", "file:" + path("nowhere.txt")}}, {path("nowhere.txt")}},
      {{{"corpus", "war-and-peace"}}, {"war-and-peace", "bible-kjv"}},
      {{{"corpus", "file:" + path("binary")}}, {path("binary"), "UTF-8"}},
      {{{"corpus", "file:" + path("short")}}, {"4 tokens"}},
      {{{"context", "1000000"}}, {"1000001 tokens"}},
      {{{"cache", path("file") + "/cache"}}, {path("file")}},
      {{{"out", path("file")}}, {path("file")}},
      {{{"out", path("file") + "/run"}}, {path("file") + "/run"}},
  };
  for (const auto& [flags, parts] : table) {
    SCOPED_TRACE(testing::PrintToString(flags));
    expect_refusal(try_train("run", flags), 1, parts);
    EXPECT_EQ(states("run").size(), 0u);
  }
  expect_refusal(run_gradus({"launch", "-n", "1", "--", "/no/such/program"}), 1,
                 {"/no/such/program"});
  expect_refusal(run_gradus({"launch", "-n", "2", "--", "sh", "-c", "exit $((RANK * 3))"}), 1,
                 {"rank 1", "status 3"});
}

TEST_F(CommandLineTest, ARunDirectoryInUseIsRefusedAndLeftAsItIs) {
  train("run");
  const std::string before = read_text(path("run") + "/metrics.jsonl");
  const std::string model = read_text(state_file("run", "model.safetensors"));
  expect_refusal(try_train("run", {{"seed", "2"}}), 1,
                 {path("run") + " already holds a run", "--resume"});
  EXPECT_EQ(read_text(path("run") + "/metrics.jsonl"), before);
  EXPECT_TRUE(read_text(state_file("run", "model.safetensors")) == model);
}

TEST_F(CommandLineTest, ADamagedNewestStateIsPassedOverWithAWarningAndTheRunEndsTheSame) {
  const Flags flags{{"steps", "12"}, {"save-every", "6"}, {"dropout", "0.1"}, {"keep", "5"}};
  train("whole", flags);
  for (const char* file :
       {"model.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"}) {
    SCOPED_TRACE(file);
    fs::remove_all(path("run"));
    fs::copy(path("whole"), path("run"), fs::copy_options::recursive);
    damage(state_file("run", file));
    const Ended evaluated = run_gradus({"eval", path("run")});
    EXPECT_EQ(evaluated.code, 0) << evaluated.err;
    EXPECT_THAT(evaluated.err, HasSubstr("warning: passed over a damaged training state: "));
    EXPECT_THAT(evaluated.err, HasSubstr("step-000000012"));
    EXPECT_THAT(evaluated.out, HasSubstr("step 6: "));
    const Ended resumed = run_gradus({"train", "--resume", path("run")});
    EXPECT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_THAT(resumed.out + resumed.err,
                HasSubstr("warning: passed over a damaged training state: "));
    EXPECT_EQ(numeric_difference(metrics("whole"), metrics("run")), "");
    EXPECT_TRUE(read_text(state_file("run", "model.safetensors")) ==
                read_text(state_file("whole", "model.safetensors")));
  }
}

TEST_F(CommandLineTest, MissingAndShortenedStateFilesCountAsDamage) {
  train("whole", {{"steps", "12"}, {"save-every", "6"}});
  const std::function<void(const std::string&)> faults[] = {
      [](const std::string& file) { fs::remove(file); },
      [](const std::string& file) { fs::resize_file(file, fs::file_size(file) / 2); },
      [](const std::string& file) { fs::resize_file(file, 0); },
      [](const std::string& file) { write_text(file, read_text(file) + "x"); },
  };
  int index = 0;
  for (const auto& fault : faults) {
    for (const char* file : {"model.safetensors", "state.json"}) {
      if (index == 3 && std::string(file) == "state.json")
        continue;  // JSON with more behind it: seen by its parser
      SCOPED_TRACE(testing::Message() << "fault " << index << " of " << file);
      fs::remove_all(path("run"));
      fs::copy(path("whole"), path("run"), fs::copy_options::recursive);
      fault(state_file("run", file));
      const Ended evaluated = run_gradus({"eval", path("run")});
      EXPECT_EQ(evaluated.code, 0) << evaluated.err;
      EXPECT_THAT(evaluated.out, HasSubstr("step 6: "));
    }
    ++index;
  }
}

TEST_F(CommandLineTest, IfEveryStateIsDamagedResumeEvalAndSampleRefuse) {
  train("run", {{"steps", "12"}, {"save-every", "6"}});
  for (const std::string& state : states("run"))
    damage(path("run") + "/states/" + state + "/model.safetensors");
  const auto before = states("run");
  const std::vector<std::string> parts{path("run"), "good training state", "damaged ones only"};
  expect_refusal(run_gradus({"train", "--resume", path("run")}), 1, parts);
  for (const char* command : {"eval", "sample"}) {
    Ended ended =
        run_gradus({command, path("run"),
                    command == std::string("eval") ? "--eval-sequences" : "--sample-tokens", "4"});
    EXPECT_EQ(ended.code, 1);
    const auto all = lines(ended.err);
    ASSERT_FALSE(all.empty());
    // Warnings say which states; the last line is the error.
    for (const std::string& line : all) EXPECT_TRUE(line.starts_with("gradus: ")) << line;
    for (const std::string& part : parts) EXPECT_THAT(all.back(), HasSubstr(part));
  }
  EXPECT_EQ(states("run"), before) << "damaged states stay for whoever can mend them";
}

// Runs `body` on a thread with a mount namespace of its own, with a file system of `options` at
// `directory`. Processes that the thread starts see it too; it goes with the thread. False where
// that is not allowed.
bool with_file_system(const std::string& directory, const char* options,
                      const std::function<void()>& body) {
  bool mounted = false;
  std::thread([&] {
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", directory.c_str(), "tmpfs", 0, options) != 0) {
      return;
    }
    mounted = true;
    try {
      body();
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }).join();
  return mounted;
}

constexpr const char* kNeedsMount = "mounting a small file system needs CAP_SYS_ADMIN";

TEST_F(CommandLineTest, AFullDiskIsOneLineAndTheRunGoesOnBitForBitOnceThereIsSpace) {
  const Flags flags{{"steps", "20"}, {"save-every", "4"}, {"dropout", "0.1"}, {"keep", "3"}};
  train("whole", flags);
  fs::create_directory(path("disk"));
  // A training state of this model is 0.4 MB: the third one does not fit.
  const bool mounted = with_file_system(path("disk"), "size=1100k", [&] {
    expect_refusal(try_train("disk/run", flags), 1, {"No space left on device", path("disk/run")});
    const auto kept = states("disk/run");
    EXPECT_THAT(kept, testing::Not(testing::IsEmpty()));
    for (const std::string& name : kept) EXPECT_TRUE(name.starts_with("step-")) << name;
    const Ended evaluated = run_gradus({"eval", path("disk/run")});
    EXPECT_EQ(evaluated.code, 0) << evaluated.err;
    EXPECT_EQ(evaluated.err, "");

    ASSERT_EQ(::mount("tmpfs", path("disk").c_str(), "tmpfs", MS_REMOUNT, "size=16m"), 0);
    resume("disk/run");
    EXPECT_EQ(numeric_difference(metrics("whole"), metrics("disk/run")), "");
    EXPECT_TRUE(read_text(state_file("disk/run", "model.safetensors")) ==
                read_text(state_file("whole", "model.safetensors")));
  });
  if (!mounted) GTEST_SKIP() << kNeedsMount;
}

TEST_F(CommandLineTest, ADiskFullFromTheStartIsOneLine) {
  fs::create_directory(path("disk"));
  const bool mounted = with_file_system(path("disk"), "size=4k", [&] {
    write_text(path("disk/filler"), std::string(4096, 'x'));
    expect_refusal(try_train("disk/run"), 1, {"No space left on device", path("disk/run")});
  });
  if (!mounted) GTEST_SKIP() << kNeedsMount;
}

TEST_F(CommandLineTest, AReadOnlyRunDirectoryIsOneLineAndStillEvaluates) {
  fs::create_directory(path("disk"));
  const bool mounted = with_file_system(path("disk"), "size=16m", [&] {
    train("disk/run", {{"steps", "6"}});
    ASSERT_EQ(::mount("tmpfs", path("disk").c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=16m"),
              0);
    expect_refusal(run_gradus({"train", "--resume", path("disk/run"), "--steps", "9"}), 1,
                   {path("disk/run"), "Read-only file system"});
    expect_refusal(try_train("disk/other"), 1, {path("disk/other"), "Read-only file system"});
    const Ended evaluated = run_gradus({"eval", path("disk/run")});
    EXPECT_EQ(evaluated.code, 0) << evaluated.err;
    const Ended sampled = run_gradus({"sample", path("disk/run"), "--sample-tokens", "3"});
    EXPECT_EQ(sampled.code, 0) << sampled.err;
  });
  if (!mounted) GTEST_SKIP() << kNeedsMount;
}

TEST_F(CommandLineTest, ARunDirectoryWithoutPermissionIsOneLine) {
  if (::geteuid() == 0)
    GTEST_SKIP() << "root may write everywhere; the read-only file system is tested apart";
  fs::create_directory(path("closed"));
  fs::permissions(path("closed"), fs::perms::owner_read | fs::perms::owner_exec);
  expect_refusal(try_train("closed/run"), 1, {path("closed/run"), "Permission denied"});
  fs::permissions(path("closed"), fs::perms::owner_all);
}

// Flags in a help text: the first word of each line that begins with a dash.
std::vector<std::string> flags_of_help(const std::string& command) {
  const Ended ended = run_gradus(command.empty() ? std::vector<std::string>{"--help"}
                                                 : std::vector<std::string>{command, "--help"});
  EXPECT_EQ(ended.code, 0);
  EXPECT_EQ(ended.err, "");
  std::vector<std::string> flags;
  for (const std::string& line : lines(ended.out)) {
    const std::size_t begin = line.find_first_not_of(' ');
    if (begin == std::string::npos || begin == 0 || line[begin] != '-') continue;
    flags.push_back((command.empty() ? "gradus" : command) + " " +
                    line.substr(begin, line.find(' ', begin) - begin));
  }
  return flags;
}

TEST_F(CommandLineTest, TheFlagsAreTheFrozenOnes) {
  std::vector<std::string> flags;
  for (const char* command : {"", "train", "plan", "eval", "sample", "info", "launch"}) {
    for (std::string& flag : flags_of_help(command)) flags.push_back(std::move(flag));
  }
  std::vector<std::string> frozen;
  for (const std::string& line : lines(read_text(std::string(kIntegrationFolder) + "/flags.txt"))) {
    if (!line.empty() && line[0] != '#') frozen.push_back(line);
  }
  const std::set<std::string> now(flags.begin(), flags.end()), then(frozen.begin(), frozen.end());
  for (const std::string& flag : now) {
    EXPECT_TRUE(then.contains(flag))
        << "new flag '" << flag << "': decide for it by adding it to flags.txt";
  }
  for (const std::string& flag : then) {
    EXPECT_TRUE(now.contains(flag))
        << "flag '" << flag << "' is gone: users' scripts break; see flags.txt";
  }
  // Every subcommand is in the list.
  const std::string help = run_gradus({"--help"}).out;
  std::set<std::string> subcommands;
  const std::size_t begin = help.find("Subcommands:");
  ASSERT_NE(begin, std::string::npos);
  for (const std::string& line : lines(help.substr(begin + 13))) {
    if (line.starts_with("  ")) subcommands.insert(line.substr(2, line.find(' ', 2) - 2));
  }
  EXPECT_THAT(subcommands,
              testing::ElementsAre("eval", "info", "launch", "plan", "sample", "train"));
}

}  // namespace
}  // namespace gradus::integration
