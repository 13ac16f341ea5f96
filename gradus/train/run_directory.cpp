#include <gradus/train/run_directory.h>

#include <filesystem>
#include <ostream>
#include <system_error>
#include <utility>

#include <gradus/base/error.h>
#include <gradus/report/metrics.h>

namespace gradus::train {

namespace fs = std::filesystem;

void make_run_directory(const std::string& directory) {
  GRADUS_CHECK("train", !directory.empty(), "a run directory is required; set train.out");
  std::error_code error;
  fs::create_directories(directory, error);
  GRADUS_CHECK("train", !error, "the run directory ", directory,
               " cannot be made: ", error.message());
}

std::optional<SavedState> starting_state(const std::string& directory, bool resume,
                                         std::ostream& out) {
  FoundState found = find_training_state(directory);
  for (const auto& [path, reason] : found.damaged)
    out << "warning: passed over a damaged training state: " << path << ": " << reason << '\n';
  if (resume) {
    GRADUS_CHECK("train", found.newest.has_value(), "to resume, ", directory,
                 " must hold a good training state; it holds ",
                 found.damaged.empty() ? "none" : "damaged ones only");
    set_aside(found.damaged);
    return std::move(found.newest);
  }
  // A run that ended before its first step has nothing to lose; its directory serves again.
  const fs::path metrics = fs::path(directory) / "metrics.jsonl";
  const bool stepped = (found.newest && found.newest->run.step > 0) ||
                       (fs::exists(metrics) && !report::read_metrics(metrics).empty());
  GRADUS_CHECK("train", !stepped && found.damaged.empty(), directory,
               " already holds a run; continue it with --resume, or choose another --out");
  return std::nullopt;
}

}  // namespace gradus::train
