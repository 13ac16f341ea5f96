#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include <gradus/report/html_report.h>
#include <gradus/report/metrics.h>
#include <gradus/report/progress.h>
#include <gradus/report/tensorboard.h>
#include <gradus/train/trainer.h>

namespace gradus::train {

/// All that a run writes for people: progress, metrics.jsonl, TensorBoard events and report.html.
class RunLog {
 public:
  /// Continues an earlier log from @p first_step (0: a new one). @p item is what
  /// StepMetrics::tokens counts, in the singular.
  RunLog(const std::string& run_directory, std::int64_t first_step, std::int64_t total_steps,
         std::int64_t limit_bytes, const TrainerEnvironment& environment,
         const std::string& item = "token");

  /// @param remark  Shown on the progress line after the loss: "epsilon 1.23".
  void step(const report::StepMetrics& metrics, const std::string& remark = {});
  /// The mean loss of the run's last ten steps, finite ones only: what summaries show.
  double recent_loss() const;
  void note(const std::string& text) { progress_.note(text); }
  /// Ends the progress line.
  void finish() { progress_.finish(); }

  /// What the report shows besides the metrics.
  report::ReportData& report() { return report_; }
  /// Writes report.html with the metrics of the whole run and returns its path.
  std::string write_report();

 private:
  void remember_loss(double loss);

  std::string directory_;
  report::MetricsWriter metrics_;
  report::TensorBoardWriter board_;
  report::Progress progress_;
  report::ReportData report_;
  std::int64_t peak_bytes_ = 0;
  std::deque<double> recent_losses_;
};

}  // namespace gradus::train
