#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <tests/integration/gradus_process.h>

#include <gradus/report/metrics.h>

namespace gradus::integration {

/// Flags of `gradus train` by name without dashes, each with its value.
using Flags = std::map<std::string, std::string>;

/// A scratch folder with a small text, in which tests train small models. Removed afterwards.
class TrainingRuns : public testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  std::string path(const std::string& name) const { return (directory_ / name).string(); }
  /// `train` with the flags of a small model that trains in milliseconds a step, those in @p
  /// changes instead or added, and @p run as run directory.
  std::vector<std::string> train_arguments(const std::string& run, const Flags& changes = {}) const;
  /// Trains and expects success.
  Ended train(const std::string& run, const Flags& changes = {}) const;
  Ended try_train(const std::string& run, const Flags& changes = {}) const {
    return run_gradus(train_arguments(run, changes));
  }
  /// Continues a run and expects success.
  Ended resume(const std::string& run) const;

  std::vector<report::StepMetrics> metrics(const std::string& run) const;
  /// Finished steps of a run that may be running.
  std::int64_t steps_done(const std::string& run) const;
  /// Names in `states`, oldest first, temporaries included.
  std::vector<std::string> states(const std::string& run) const;
  /// A file of the newest training state.
  std::string state_file(const std::string& run, const std::string& name) const;

  std::filesystem::path directory_;
};

std::string read_text(const std::string& path);
void write_text(const std::string& path, const std::string& text);
std::int64_t highest_peak(const std::vector<report::StepMetrics>& metrics);

/// The first difference between two runs in what training computed (loss, learning rate, gradient
/// norm, validation loss; bit for bit, not times nor memory), or "".
std::string numeric_difference(const std::vector<report::StepMetrics>& expected,
                               const std::vector<report::StepMetrics>& got);

/// Expects exit code @p code and on standard error exactly one line, "gradus: error: ...", that
/// holds all of @p parts.
void expect_refusal(const Ended& ended, int code, const std::vector<std::string>& parts);

}  // namespace gradus::integration
