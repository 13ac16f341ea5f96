#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <gradus/base/memory_breakdown.h>
#include <gradus/report/metrics.h>

namespace gradus::report {

/// A named part of the measured step: "forward", "backward", "optimizer".
struct StepPhase {
  std::string name{};
  double begin_s = 0.0;  ///< On the clock of the timeline, seconds.
  double end_s = 0.0;
};

/// What a report shows. A field left empty or 0 is unknown: its row or chart is left out or says
/// so. Texts may hold anything; they are escaped.
struct ReportData {
  std::string title{};    ///< "GPT on the King James Bible".
  std::string status{};   ///< "finished", "interrupted at step 120": shown beside the title.
  std::string created{};  ///< Date and time, as it shall be shown.

  std::string model{};  ///< "GPT, 6 layers, width 384, 6 heads".
  std::int64_t parameter_count = 0;
  std::string plan{};         ///< The plan chosen: "recompute 4 of 6 segments, micro-batch 8".
  std::string plan_reason{};  ///< Why: "the fastest of 12 that fit; ...".
  std::string precision{};    ///< "bf16: operators cast by lists, weights float32".
  std::string optimizer{};    ///< "adamw, state in 8 bits".
  std::int64_t effective_batch = 0;        ///< Examples in one optimizer step.
  std::int64_t microbatch_size = 0;        ///< Examples in one forward, at most.
  std::int64_t microbatches_per_step = 0;  ///< Forwards in one optimizer step.
  std::int64_t recomputed_segments = 0;
  std::int64_t segments = 0;  ///< Segments that could be recomputed.

  std::int64_t limit_bytes = 0;       ///< Memory limit.
  std::int64_t peak_bytes = 0;        ///< Highest measured; 0: the highest of steps.
  std::int64_t plain_peak_bytes = 0;  ///< What plain training of the same batch would need.
  std::string plain_source{};         ///< How that is known: "predicted from one measured step".
  double elapsed_s = 0.0;             ///< Training time; 0: that of the last step.

  std::string loss_label = "Cross-entropy, nats per token";  ///< What the loss is, with its unit.
  std::string item = "token";        ///< What StepMetrics::tokens counts, in the singular: "image".
  std::vector<StepMetrics> steps{};  ///< The whole run, steps ascending.
  base::MemoryTimeline step_timeline{};  ///< Live memory during one step, time ascending.
  std::vector<StepPhase> phases{};       ///< Parts of that step.
  std::string timeline_label{};          ///< Which step it was: "step 3".
  base::MemoryBreakdown
      peak_breakdown{};  ///< Live memory at the peak; all zero: the highest point of the timeline.

  /// What keeps private training private, as rows: ("Budget", "epsilon 3, delta 1e-05"). With rows,
  /// or with "epsilon" among the extra metrics, the report has a part about privacy.
  std::vector<std::pair<std::string, std::string>> privacy{};
  std::vector<double> example_norms{};  ///< Gradient norms of the examples of one batch, >= 0.
  double norm_threshold = 0.0;          ///< Where they are clipped; 0 if unknown.
  std::string norms_label{};            ///< Which batch it was: "step 468".

  std::vector<std::pair<std::string, std::string>> configuration{};  ///< Every key and its value.
  std::vector<std::pair<std::string, std::string>> environment{};    ///< Versions, threads, device.
  std::string sample_prompt{};
  std::string sample_text{};  ///< Text that the trained model generated.
};

/// The report as one HTML document that needs no network: charts are inline SVG, light and dark,
/// wide and narrow. Of StepMetrics::extra it draws "accuracy" and "clip_fraction" (shares),
/// "epsilon", "norm_p10", "norm_median", "norm_p90" and "max_norm", where steps have them. Series
/// of more than 1000 points are down-sampled, keeping their extremes; non-finite values are gaps.
std::string html_report(const ReportData& data);

/// Writes html_report(data) to @p path. An older report is replaced whole or not at all.
/// @throws UserError if the file cannot be written.
void write_html_report(const std::filesystem::path& path, const ReportData& data);

}  // namespace gradus::report
