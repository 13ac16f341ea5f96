#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gradus/base/memory_breakdown.h>

namespace gradus::report {

/// What is known of one optimizer step: one line of metrics.jsonl.
struct StepMetrics {
  std::int64_t step = 0;  ///< Optimizer steps done, this one included; from 1.
  double elapsed_s =
      0.0;  ///< Training time when the step ended, over all processes of the run, seconds.
  double loss = 0.0;             ///< Mean training loss of the batch. May be non-finite.
  double lr = 0.0;               ///< Learning rate used.
  std::int64_t tokens = 0;       ///< Tokens of this step.
  double tokens_per_s = 0.0;     ///< Throughput of this step.
  double grad_norm = 0.0;        ///< L2 norm of the gradient before clipping. May be non-finite.
  std::int64_t peak_bytes = 0;   ///< Highest live memory during this step.
  base::MemoryBreakdown peak{};  ///< Live memory at that moment, by category.
  std::optional<double> validation_loss{};  ///< If the model was evaluated after this step.
  std::optional<double> loss_scale{};       ///< What the loss was multiplied by, if anything.
  bool skipped = false;  ///< A gradient overflowed at that scale: no weight was written.
  std::map<std::string, double> extra{};  ///< Further numbers by name.

  bool operator==(const StepMetrics&) const = default;
};

/// Appends one JSON object a step to a file (JSON Lines). Each line reaches the kernel before
/// append() returns: killing the process (also with SIGKILL) loses no finished line. Doubles read
/// back to the same bits; a non-finite number is null, and its name with "_nonfinite" appended
/// holds "nan", "inf" or "-inf".
class MetricsWriter {
 public:
  /// Opens @p path for appending, creating it if need be. A last line that a crash tore is removed.
  /// @throws UserError if the file cannot be opened or is no metrics file.
  explicit MetricsWriter(std::filesystem::path path);
  MetricsWriter(MetricsWriter&&) noexcept;
  MetricsWriter& operator=(MetricsWriter&&) noexcept;
  ~MetricsWriter();

  /// @throws UserError if step is not past last_step(), or on a full disk; the file then holds the
  /// earlier lines.
  void append(const StepMetrics& metrics);

  /// Drops the lines past @p step: call it on resume with the step of the training state, with 0 to
  /// start anew.
  void truncate_after(std::int64_t step);

  /// Step of the last line, 0 if there is none.
  std::int64_t last_step() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Reads a metrics file, also while it is being written: a last line without its end is left out.
/// @throws UserError if the file cannot be read or a line before the last is damaged; the message
/// has its number.
std::vector<StepMetrics> read_metrics(const std::filesystem::path& path);

}  // namespace gradus::report
