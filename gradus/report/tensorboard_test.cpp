#include <gradus/report/tensorboard.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include <sys/wait.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <gradus/base/error.h>
#include <gradus/report/internal/crc32c.h>
#include <gradus/report/internal/scratch_folder.h>

namespace gradus::report {
namespace {

using internal::read_file;
using internal::ScratchFolder;

TensorBoardOptions at_time(double wall_time_s, std::int64_t first_step = 0) {
  return {.wall_clock = [wall_time_s] { return wall_time_s; }, .first_step = first_step};
}

/// The data of each TFRecord frame; fails the test on a wrong length or checksum.
std::vector<std::string> frames(const std::string& file) {
  std::vector<std::string> result;
  for (std::size_t at = 0; at < file.size();) {
    std::uint64_t length = 0;
    std::uint32_t crc = 0;
    if (file.size() - at < 16) {
      ADD_FAILURE() << "the file ends inside a frame";
      break;
    }
    std::memcpy(&length, file.data() + at, 8);
    std::memcpy(&crc, file.data() + at + 8, 4);
    EXPECT_EQ(crc, internal::masked_crc32c(std::string_view(file).substr(at, 8)));
    if (file.size() - at - 16 < length) {
      ADD_FAILURE() << "the file ends inside a frame";
      break;
    }
    result.push_back(file.substr(at + 12, length));
    std::memcpy(&crc, file.data() + at + 12 + length, 4);
    EXPECT_EQ(crc, internal::masked_crc32c(result.back()));
    at += 16 + length;
  }
  return result;
}

TEST(TensorBoardTest, AScalarEventHasTheBytesThatProtobufGives) {
  const ScratchFolder folder;
  TensorBoardWriter writer(folder.path(), at_time(1.5));
  writer.scalar("ab", 0.5, 300);
  const auto data = frames(read_file(writer.path()));
  ASSERT_EQ(data.size(), 2u);
  using namespace std::string_literals;
  const std::string time = "\x09\x00\x00\x00\x00\x00\x00\xF8\x3F"s;  // field 1, fixed64, 1.5
  EXPECT_EQ(data[0], time + "\x1A\x0D" + "brain.Event:2");
  // step 300; summary { value { tag "ab" simple_value 0.5 } }
  EXPECT_EQ(data[1], time + "\x10\xAC\x02" + "\x2A\x0B\x0A\x09" + "\x0A\x02" + "ab" +
                         "\x15\x00\x00\x00\x3F"s);
}

TEST(TensorBoardTest, EveryRunWritesAFileOfItsOwn) {
  const ScratchFolder folder;
  TensorBoardWriter first(folder.path() / "new" / "events", at_time(1e9));
  TensorBoardWriter second(folder.path() / "new" / "events", at_time(1e9));
  EXPECT_NE(first.path(), second.path());
  EXPECT_EQ(first.path().filename(), "events.out.tfevents.1000000000.gradus.0000");
}

TEST(TensorBoardTest, RefusesAnEmptyTagANegativeStepAndABadFolder) {
  const ScratchFolder folder;
  TensorBoardWriter writer(folder.path(), at_time(1.0));
  EXPECT_THROW(writer.scalar("", 1.0, 1), UserError);
  EXPECT_THROW(writer.scalar("loss", 1.0, -1), UserError);
  internal::write_file(folder / "file", "x");
  EXPECT_THROW(TensorBoardWriter(folder / "file"), UserError);
}

/// The Python interpreter with tensorboard: GRADUS_PYTHON of the environment, else that of the
/// build.
std::string python() {
  const char* named = std::getenv("GRADUS_PYTHON");
  return named != nullptr ? named : GRADUS_REPORT_TEST_PYTHON;
}

/// Runs @p command; its standard output, or "" with a failure if it does not exit with 0.
std::string output_of(const std::string& command) {
  std::string output;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) {
    ADD_FAILURE() << "popen failed";
    return output;
  }
  std::array<char, 4096> buffer{};
  while (const std::size_t got = std::fread(buffer.data(), 1, buffer.size(), pipe))
    output.append(buffer.data(), got);
  EXPECT_EQ(pclose(pipe), 0) << command;
  return output;
}

TEST(TensorBoardTest, TensorBoardItselfReadsScalarsTextsAndAResumedRun) {
  const ScratchFolder folder;
  const std::string events = folder / "events";
  {
    TensorBoardWriter writer(events, at_time(1700000000.25));
    for (std::int64_t step = 1; step <= 20; ++step) {
      writer.scalars({{"train/loss", 1.0 / static_cast<double>(step)}, {"memory/peak_bytes", 6e8}},
                     step);
    }
    writer.scalar("odd/nan", std::nan(""), 1);
    writer.scalar("odd/inf", std::numeric_limits<double>::infinity(), std::int64_t{1} << 40);
    writer.text("configuration", "| key | value |\n|---|---|\n| caf\xC3\xA9 | \xFF |", 0);
    // Longer than one varint byte and one read buffer.
    writer.text("long", std::string(100000, 'x'), 0);
  }
  // The run died at 20 and resumes from the state of step 10.
  {
    TensorBoardWriter writer(events, at_time(1700000100.0, 11));
    for (std::int64_t step = 11; step <= 12; ++step) {
      writer.scalars(
          {{"train/loss", 100.0 + static_cast<double>(step)}, {"memory/peak_bytes", 5e8}}, step);
    }
  }
  if (std::system((python() + " -c 'import tensorboard' >/dev/null 2>&1").c_str()) != 0) {
    GTEST_SKIP() << python() << " has no tensorboard: run scripts/setup.sh, or set GRADUS_PYTHON";
  }
  internal::write_file(folder / "read.py", R"(
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0, "tensors": 0})
events.Reload()
scalars = {tag: [[e.wall_time, e.step, repr(e.value)] for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
plugins = {tag: events.SummaryMetadata(tag).plugin_data.plugin_name for tag in texts}
print(json.dumps({"scalars": scalars, "texts": texts, "plugins": plugins, "version": events.file_version}))
)");
  const std::string json = output_of(python() + " " + (folder / "read.py").string() + " " + events +
                                     " 2>" + (folder / "err").string());
  ASSERT_FALSE(json.empty()) << read_file(folder / "err");
  const auto read = nlohmann::json::parse(json);
  EXPECT_EQ(read["version"], 2);
  const auto& loss = read["scalars"]["train/loss"];
  ASSERT_EQ(loss.size(), 12u) << "steps 11 to 20 of the first process must be gone";
  for (std::int64_t step = 1; step <= 12; ++step) {
    const auto& point = loss[static_cast<std::size_t>(step - 1)];
    EXPECT_EQ(point[0].get<double>(), step <= 10 ? 1700000000.25 : 1700000100.0);
    EXPECT_EQ(point[1].get<std::int64_t>(), step);
    const double value =
        step <= 10 ? 1.0 / static_cast<double>(step) : 100.0 + static_cast<double>(step);
    EXPECT_EQ(static_cast<float>(std::stod(point[2].get<std::string>())),
              static_cast<float>(value));
  }
  EXPECT_EQ(read["scalars"]["memory/peak_bytes"].size(), 12u);
  EXPECT_EQ(read["texts"]["configuration"],
            "| key | value |\n|---|---|\n| caf\xC3\xA9 | \xEF\xBF\xBD |");
  EXPECT_EQ(read["texts"]["long"].get<std::string>().size(), 100000u);
  EXPECT_EQ(read["plugins"]["configuration"], "text");
  // "odd/inf" has a step past the resumed one and so is purged as well.
  EXPECT_EQ(read["scalars"]["odd/nan"][0][2], "nan");
}

}  // namespace
}  // namespace gradus::report
