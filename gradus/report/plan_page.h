#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace gradus::report {

/// A table: the first column names a row, the others hold numbers, the last maybe words.
struct PageTable {
  std::string title{};
  std::string note{};  ///< Below the table; may be empty.
  std::vector<std::string> columns{};
  bool last_is_text = false;
  struct Row {
    std::vector<std::string> cells{};  ///< As many as columns.
    bool marked = false;               ///< The one chosen.
    bool pale = false;                 ///< One that was not to be had.
  };
  std::vector<Row> rows{};
};

/// What a page about a memory plan shows. A field left empty or 0 is unknown and left out. Texts
/// may hold anything; they are escaped.
struct PlanPageData {
  std::string title{};
  std::string created{};  ///< Date and time, as it shall be shown.
  std::string model{};
  std::string plan{};    ///< The plan chosen, in words.
  std::string reason{};  ///< Why.

  std::int64_t limit_bytes = 0;
  std::int64_t plain_peak_bytes = 0;      ///< What plain training of the same batch would need.
  std::int64_t predicted_peak_bytes = 0;  ///< Of a step by the plan.
  std::int64_t measured_peak_bytes = 0;
  double plain_seconds = 0.0;  ///< Of an optimizer step.
  double predicted_seconds = 0.0;
  double measured_seconds = 0.0;

  std::string timeline_label{};               ///< Whose timeline: "a micro-batch of 8".
  std::vector<std::int64_t> planned_bytes{};  ///< Peak of each operator call of a pass.
  std::vector<std::int64_t> measured_bytes{};
  std::int64_t backward_begin = 0;  ///< Its first call of backward.

  std::vector<PageTable> tables{};
  std::vector<std::pair<std::string, std::string>> configuration{};
};

/// One HTML document in the report's style that needs no network: what was chosen and why, the
/// memory of a pass as planned over as measured, and the tables.
std::string plan_page(const PlanPageData& data);

/// Writes plan_page(data) to @p path. An older one is replaced whole or not at all.
/// @throws UserError if the file cannot be written.
void write_plan_page(const std::filesystem::path& path, const PlanPageData& data);

}  // namespace gradus::report
