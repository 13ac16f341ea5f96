#include <gradus/train/explain.h>

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <ostream>
#include <sstream>
#include <utility>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>
#include <torch/utils.h>

#include <gradus/amp/levels/levels.h>
#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/plan/describe.h>
#include <gradus/train/language_model.h>
#include <gradus/train/memory_attribution.h>
#include <gradus/train/planning.h>
#include <gradus/train/precision.h>
#include <gradus/train/run_data.h>

namespace gradus::train {
namespace {

using base::format_bytes;
using nlohmann::json;

std::string fixed(double value, int decimals) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(decimals) << value;
  return out.str();
}
std::string mebibytes(std::int64_t bytes) {
  return fixed(static_cast<double>(bytes) / (1 << 20), 1);
}
std::string mebibytes_or_dash(std::int64_t bytes) { return bytes == 0 ? "-" : mebibytes(bytes); }
std::string milliseconds(double seconds) { return fixed(seconds * 1e3, 1); }
std::string milliseconds_or_dash(double seconds) {
  return seconds == 0.0 ? "-" : milliseconds(seconds);
}
std::string deviation(double predicted, double measured) {
  const double per_cent = 100.0 * (predicted / measured - 1.0);
  return (per_cent < 0.0 ? "-" : "+") + fixed(std::abs(per_cent), 1) + "%";
}

report::PageTable candidates_table(const PlanChoice& choice, std::int64_t batch) {
  report::PageTable table{
      .title = "Plans: MiB of memory, milliseconds of a step",
      .columns = {"micro-batch", "a step", "kept", "recomputed", "offloaded", "compressed",
                  "peak MiB", "ms a step", "x plain", "measured MiB", "measured ms", "how"},
      .last_is_text = true};
  for (std::size_t i = 0; i < choice.candidates.size(); ++i) {
    const PlanCandidate& c = choice.candidates[i];
    table.rows.push_back(
        {.cells = {base::join(c.plan.largest(batch)), base::join(c.plan.micro_batches),
                   mebibytes(c.kept.bytes), mebibytes_or_dash(c.recomputed.bytes),
                   mebibytes_or_dash(c.offloaded.bytes), mebibytes_or_dash(c.compressed.bytes),
                   mebibytes(c.peak_bytes), milliseconds(c.seconds),
                   choice.plain_seconds > 0.0 ? fixed(c.seconds / choice.plain_seconds, 2) : "-",
                   c.refused ? "refused" : mebibytes_or_dash(c.measured_bytes),
                   milliseconds_or_dash(c.measured_seconds),
                   c.fits ? c.method : c.method + ", does not fit"},
         .marked = i == choice.chosen,
         .pale = !c.fits || c.refused});
  }
  table.note =
      "Of what autograd saves in the largest micro-batch: kept, dropped and made again, moved to "
      "other memory, kept in a smaller form. Peak and time are of an optimizer step, predicted "
      "from "
      "small measured ones; plain is the whole batch at once. Measured are those tried.";
  return table;
}

report::PageTable operators_table(const PlanChoice& choice) {
  report::PageTable table{.title = "What is dropped, by operator: MiB, milliseconds",
                          .columns = {"operator", "results", "saved MiB", "dropped MiB",
                                      "runs again", "ms again", "fixed MiB"}};
  for (const plan::OperatorSummary& sum : plan::summarise(choice.trace, *choice.memory)) {
    if (sum.bytes == 0 && sum.runs_again == 0) continue;
    table.rows.push_back(
        {.cells = {sum.op, base::join(sum.calls), mebibytes(sum.bytes),
                   mebibytes_or_dash(sum.dropped_bytes), base::join(sum.runs_again),
                   milliseconds_or_dash(sum.again_seconds), mebibytes_or_dash(sum.fixed_bytes)}});
  }
  table.note =
      "Of one micro-batch, the largest. A call also runs again on the way to what depends on it. "
      "What is fixed cannot be made again.";
  return table;
}

// Columns as wide as their widest cell, numbers to the right; the chosen row begins with '>'.
void write_table(std::ostream& out, const report::PageTable& table) {
  std::vector<std::size_t> widths;
  for (const std::string& column : table.columns) widths.push_back(column.size());
  for (const auto& row : table.rows)
    for (std::size_t i = 0; i < row.cells.size(); ++i)
      widths[i] = std::max(widths[i], row.cells[i].size());
  const auto line = [&](char mark, const std::vector<std::string>& cells) {
    out << mark;
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const bool text = table.last_is_text ? i + 1 == cells.size() : i == 0;
      const std::string space(widths[i] - cells[i].size(), ' ');
      if (!text) {
        out << (i == 0 ? " " : "  ") << space << cells[i];
      } else {
        out << (i == 0 ? " " : "  ") << cells[i] << (i + 1 < cells.size() ? space : "");
      }
    }
    out << '\n';
  };
  line(' ', table.columns);
  for (const auto& row : table.rows) line(row.marked ? '>' : ' ', row.cells);
}

std::string text_of(const PlanChoice& choice, const report::PlanPageData& page,
                    std::int64_t batch) {
  std::ostringstream out;
  out << page.model << "\nbatch " << batch << ", memory limit " << format_bytes(page.limit_bytes);
  if (choice.plain_peak_bytes > 0) {
    out << "; plain training needs " << format_bytes(choice.plain_peak_bytes) << " and "
        << milliseconds(choice.plain_seconds) << " ms a step";
  }
  out << "\n\n";
  write_table(out, page.tables[0]);
  out << "\nchosen    " << page.plan << "\nwhy       " << page.reason << "\npeak      measured "
      << format_bytes(page.measured_peak_bytes) << " ("
      << fixed(100.0 * static_cast<double>(page.measured_peak_bytes) /
                   static_cast<double>(page.limit_bytes),
               1)
      << "% of the limit), predicted " << format_bytes(page.predicted_peak_bytes) << " ("
      << deviation(static_cast<double>(page.predicted_peak_bytes),
                   static_cast<double>(page.measured_peak_bytes))
      << ")\nstep      measured " << milliseconds(page.measured_seconds) << " ms, predicted "
      << milliseconds(page.predicted_seconds) << " ms ("
      << deviation(page.predicted_seconds, page.measured_seconds) << ")\n";
  if (!choice.memory) return out.str();
  const plan::MemoryPlan& memory = *choice.memory;
  out << "search    " << memory.simulations << " plans of a micro-batch simulated in "
      << milliseconds(memory.planning_seconds) << " ms";
  if (!memory.bound_name.empty()) {
    out << "; at least " << milliseconds(memory.bound_seconds) << " ms again (" << memory.bound_name
        << "), gap " << fixed(100.0 * memory.gap, 1) << "%";
  }
  out << "\n\n";
  write_table(out, page.tables[1]);
  return out.str();
}

json counts(const plan::ResultCount& count) {
  return {{"calls", count.calls}, {"bytes", count.bytes}};
}

std::string json_of(const PlanChoice& choice, const report::PlanPageData& page,
                    std::int64_t batch) {
  json rows = json::array();
  for (const PlanCandidate& c : choice.candidates) {
    rows.push_back({{"micro_batch", c.plan.largest(batch)},
                    {"micro_batches", c.plan.micro_batches},
                    {"drops", c.plan.budget},
                    {"method", c.method},
                    {"fits", c.fits},
                    {"refused", c.refused},
                    {"peak_bytes", c.peak_bytes},
                    {"seconds", c.seconds},
                    {"measured_bytes", c.measured_bytes},
                    {"measured_seconds", c.measured_seconds},
                    {"kept", counts(c.kept)},
                    {"recomputed", counts(c.recomputed)},
                    {"offloaded", counts(c.offloaded)},
                    {"compressed", counts(c.compressed)},
                    {"runs_again", c.runs_again}});
  }
  json all{
      {"model", page.model},
      {"batch", batch},
      {"limit_bytes", page.limit_bytes},
      {"plain", {{"peak_bytes", choice.plain_peak_bytes}, {"seconds", choice.plain_seconds}}},
      {"plan", page.plan},
      {"reason", page.reason},
      {"chosen", choice.chosen},
      {"predicted",
       {{"peak_bytes", page.predicted_peak_bytes}, {"seconds", page.predicted_seconds}}},
      {"measured", {{"peak_bytes", page.measured_peak_bytes}, {"seconds", page.measured_seconds}}},
      {"candidates", std::move(rows)},
      {"timeline", {{"planned", page.planned_bytes}, {"measured", page.measured_bytes}}}};
  if (choice.memory) all["pass"] = json::parse(plan::to_json(choice.trace, *choice.memory));
  return all.dump(1) + "\n";
}

report::PlanPageData page_of(const PlanChoice& choice, const TrainConfig& config,
                             std::int64_t vocabulary, const std::string& date) {
  const std::int64_t batch = config.train.batch;
  const auto& model = config.model;
  report::PlanPageData page;
  page.title = base::join("Memory plan: GPT on ", config.data.corpus);
  page.created = date;
  page.model = base::join("GPT, ", model.layers, " layers, width ", model.width, ", ", model.heads,
                          " heads, context ", model.context, ", vocabulary ", vocabulary);
  page.plan = describe_plan(choice.plan, batch, model.layers);
  page.reason = choice.reason;
  page.limit_bytes = base::parse_bytes(config.memory.limit);
  page.plain_peak_bytes = choice.plain_peak_bytes;
  page.predicted_peak_bytes = choice.predicted_peak_bytes;
  page.measured_peak_bytes = choice.trial_peak_bytes;
  page.plain_seconds = choice.plain_seconds;
  page.predicted_seconds = choice.predicted_seconds;
  page.measured_seconds = choice.trial_seconds;
  page.timeline_label =
      base::join(choice.plan.micro_batches > 1 ? "a later micro-batch of " : "the batch of ",
                 choice.plan.largest(batch));
  page.planned_bytes = choice.planned_bytes;
  page.measured_bytes = choice.measured.moment_bytes;
  const auto& moments = choice.trace.moments;
  page.backward_begin =
      std::find_if(moments.begin(), moments.end(), [](const auto& m) { return m.backward; }) -
      moments.begin();
  // What a program does behind the pass is not of the plan.
  page.measured_bytes.resize(std::min(page.measured_bytes.size(), moments.size()));
  page.tables.push_back(candidates_table(choice, batch));
  if (choice.memory) page.tables.push_back(operators_table(choice));
  page.configuration = describe_config(config);
  return page;
}

}  // namespace

PlanExplanation explain_plan(const TrainConfig& config, const TrainerEnvironment& environment) {
  validate(config);
  GRADUS_CHECK("plan", !config.memory.limit.empty(),
               "a memory limit is required to plan for; give --memory or set memory.limit");
  GRADUS_CHECK("plan", config.memory.plan == "auto",
               "memory.plan must be auto to be planned; got '", config.memory.plan, "'");
  GRADUS_CHECK("plan", config.train.device == "cpu", "plans are made on the CPU so far; got ",
               config.train.device);
  const std::int64_t limit_bytes = base::parse_bytes(config.memory.limit);
  base::MemoryTracker::install({.clock = environment.clock});
  if (config.train.threads > 0) at::set_num_threads(static_cast<int>(config.train.threads));
  RunData data = make_data(config);
  const std::int64_t vocabulary = data.prepared.tokenizer->vocabulary_size();

  // As train() does: before the first tensor.
  const base::MemoryLimit limit({.device_bytes = limit_bytes});
  torch::manual_seed(static_cast<std::uint64_t>(config.train.seed));
  models::Gpt gpt = [&] {
    const base::MemoryCategoryScope parameters(base::MemoryCategory::parameters);
    return make_gpt(config, vocabulary);
  }();
  amp::Amp amp = [&] {
    const base::MemoryCategoryScope parameters(base::MemoryCategory::parameters);
    return amp::initialize(*gpt, precision_options(config));
  }();
  const MemoryAttribution attribution(*gpt);
  PlanExplanation explanation;
  explanation.choice =
      plan_training(config, gpt, amp, data.training,
                    {.batch = config.train.batch, .limit_bytes = limit_bytes, .moments = true},
                    environment)
          .choice;
  explanation.page = page_of(explanation.choice, config, vocabulary, environment.date);
  explanation.text = text_of(explanation.choice, explanation.page, config.train.batch);
  explanation.json = json_of(explanation.choice, explanation.page, config.train.batch);
  return explanation;
}

}  // namespace gradus::train
