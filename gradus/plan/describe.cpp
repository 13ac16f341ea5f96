#include <gradus/plan/describe.h>

#include <algorithm>
#include <iomanip>
#include <map>
#include <sstream>
#include <string_view>

#include <nlohmann/json.hpp>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>

namespace gradus::plan {

using base::format_bytes;
using recompute::Disposition;
using recompute::StepTrace;

namespace {

std::string_view name_of(Disposition disposition) {
  switch (disposition) {
    case Disposition::keep:
      return "keep";
    case Disposition::recompute:
      return "recompute";
    case Disposition::offload:
      return "offload";
    case Disposition::leave:
      return "leave";
  }
  return "";
}

bool online(const MemoryPlan& plan) { return plan.dispositions.empty(); }

std::string fixed(double number, int digits) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(digits) << number;
  return out.str();
}
std::string milliseconds(double seconds) { return fixed(seconds * 1e3, 2) + " ms"; }

// Columns as wide as their widest cell; the first is aligned left.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  void write(std::ostream& out) const {
    std::vector<std::size_t> width(rows_[0].size(), 0);
    for (const auto& row : rows_)
      for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
    for (const auto& row : rows_) {
      for (std::size_t i = 0; i < row.size(); ++i) {
        const std::string space(width[i] - row[i].size(), ' ');
        out << (i == 0 ? "  " + row[i] + space : "  " + space + row[i]);
      }
      out << '\n';
    }
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

std::string count(const ResultCount& results) {
  return results.calls == 0 ? "-"
                            : base::join(format_bytes(results.bytes), " (", results.calls, ")");
}

void write_choice(std::ostream& out, const MemoryPlan& plan) {
  out << "Limit " << format_bytes(plan.limit_bytes) << "; a pass that drops nothing takes "
      << format_bytes(plan.plain_peak_bytes) << ", the least that a plan is known for is "
      << format_bytes(plan.least_bytes) << ".\n";
  out << "Chosen: " << plan.method << ", because it is the fastest of " << plan.simulations
      << " simulated plans that fits.\n";
  out << "Predicted: peak " << format_bytes(plan.predicted_peak_bytes) << ", "
      << milliseconds(plan.predicted_seconds) << " a pass, " << fixed(plan.predicted_ratio, 3)
      << " of plain (" << milliseconds(plan.plain_seconds) << ").\n";
  const double extra = plan.simulation.replay_seconds + plan.simulation.move_seconds;
  out << "Running again and moving: " << milliseconds(extra);
  if (!plan.bound_name.empty())
    out << ", at least " << milliseconds(plan.bound_seconds) << " (" << plan.bound_name << "), gap "
        << fixed(plan.gap * 100.0, 1) << " %";
  out << ".\nPlanned in " << milliseconds(plan.planning_seconds) << ".\n";
}

}  // namespace

std::vector<OperatorSummary> summarise(const StepTrace& trace, const MemoryPlan& plan) {
  GRADUS_CHECK("plan", plan.simulation.runs_again.size() == trace.calls.size(),
               "the plan must be one of this trace, of ", trace.calls.size(), " calls; got one of ",
               plan.simulation.runs_again.size());
  std::map<std::string, OperatorSummary> by_name;
  for (std::size_t c = 0; c < trace.calls.size(); ++c) {
    const auto& call = trace.calls[c];
    const std::int32_t again = plan.simulation.runs_again[c];
    const bool counts = call.saved && call.bytes > 0;
    if (!counts && again == 0) continue;
    OperatorSummary& sum = by_name[call.op];
    sum.op = call.op;
    sum.runs_again += again;
    sum.again_seconds += again * call.seconds;
    if (!counts) continue;
    ++sum.calls;
    sum.bytes += call.bytes;
    if (!call.can_run_again) {
      ++sum.fixed_calls;
      sum.fixed_bytes += call.bytes;
    } else if (again > 0 || plan.simulation.moves[c] > 0 ||
               (!online(plan) && plan.dispositions[c] == Disposition::leave)) {
      ++sum.dropped_calls;
      sum.dropped_bytes += call.bytes;
    }
  }
  std::vector<OperatorSummary> result;
  for (auto& [name, sum] : by_name) result.push_back(std::move(sum));
  std::stable_sort(result.begin(), result.end(), [](const auto& a, const auto& b) {
    return a.dropped_bytes != b.dropped_bytes ? a.dropped_bytes > b.dropped_bytes
                                              : a.bytes > b.bytes;
  });
  return result;
}

std::string describe(const StepTrace& trace, const MemoryPlan& plan, std::size_t max_candidates) {
  const std::vector<OperatorSummary> operators = summarise(trace, plan);
  std::ostringstream out;
  write_choice(out, plan);
  out << "\nPlans, fastest first (bytes and numbers of results):\n";
  Table plans(
      {"plan", "peak", "time", "runs again", "kept", "recomputed", "offloaded", "compressed"});
  std::size_t unfit = 0, shown = 0;
  for (const PlanCandidate& c : plan.candidates) {
    if (!c.feasible) {
      ++unfit;
    } else if (shown++ < max_candidates) {
      plans.add({(c.name == plan.method ? "* " : "  ") + c.name, format_bytes(c.peak_bytes),
                 milliseconds(c.seconds), base::join(c.runs_again), count(c.kept),
                 count(c.recomputed), count(c.offloaded), count(c.compressed)});
    }
  }
  plans.write(out);
  if (shown > max_candidates)
    out << "  and " << shown - max_candidates << " slower ones that fit\n";
  if (unfit > 0) out << "  and " << unfit << " that do not fit\n";
  out << "\nBy operator:\n";
  Table table({"operator", "results", "bytes", "dropped", "dropped bytes", "runs again", "time"});
  std::ostringstream fixed_results;
  for (const OperatorSummary& sum : operators) {
    table.add({sum.op, base::join(sum.calls), format_bytes(sum.bytes),
               base::join(sum.dropped_calls), format_bytes(sum.dropped_bytes),
               base::join(sum.runs_again), milliseconds(sum.again_seconds)});
    if (sum.fixed_calls > 0)
      fixed_results << "  " << sum.op << ": " << format_bytes(sum.fixed_bytes) << " ("
                    << sum.fixed_calls << ")\n";
  }
  table.write(out);
  if (!fixed_results.str().empty())
    out << "\nCannot be made again, and is kept:\n" << fixed_results.str();
  return out.str();
}

std::string to_json(const StepTrace& trace, const MemoryPlan& plan) {
  using nlohmann::json;
  const std::vector<OperatorSummary> operators = summarise(trace, plan);
  const auto results = [](const ResultCount& count) {
    return json{{"calls", count.calls}, {"bytes", count.bytes}};
  };
  json candidates = json::array();
  for (const PlanCandidate& c : plan.candidates)
    candidates.push_back({{"name", c.name},
                          {"feasible", c.feasible},
                          {"peak_bytes", c.peak_bytes},
                          {"seconds", c.seconds},
                          {"replay_seconds", c.replay_seconds},
                          {"move_seconds", c.move_seconds},
                          {"runs_again", c.runs_again},
                          {"kept", results(c.kept)},
                          {"recomputed", results(c.recomputed)},
                          {"offloaded", results(c.offloaded)},
                          {"compressed", results(c.compressed)}});
  json by_operator = json::array();
  for (const OperatorSummary& sum : operators)
    by_operator.push_back({{"op", sum.op},
                           {"calls", sum.calls},
                           {"bytes", sum.bytes},
                           {"dropped_calls", sum.dropped_calls},
                           {"dropped_bytes", sum.dropped_bytes},
                           {"runs_again", sum.runs_again},
                           {"again_seconds", sum.again_seconds},
                           {"fixed_calls", sum.fixed_calls},
                           {"fixed_bytes", sum.fixed_bytes}});
  json calls = json::array();
  for (std::size_t c = 0; c < trace.calls.size(); ++c) {
    const auto& call = trace.calls[c];
    if (call.bytes == 0) continue;
    calls.push_back({{"call", c},
                     {"op", call.op},
                     {"bytes", call.bytes},
                     {"seconds", call.seconds},
                     {"made", call.moment},
                     {"saved", call.saved},
                     {"can_run_again", call.can_run_again},
                     {"reads", call.reads},
                     {"released_after", call.released_after},
                     {"disposition", online(plan) ? "online" : name_of(plan.dispositions[c])},
                     {"runs_again", plan.simulation.runs_again[c]}});
  }
  json measured = json::array();
  for (const auto& moment : trace.moments)
    measured.push_back(moment.other_bytes + moment.own_bytes);
  const json page = {
      {"limit_bytes", plan.limit_bytes},
      {"predicted",
       {{"peak_bytes", plan.predicted_peak_bytes},
        {"seconds", plan.predicted_seconds},
        {"ratio", plan.predicted_ratio},
        {"replay_seconds", plan.simulation.replay_seconds},
        {"move_seconds", plan.simulation.move_seconds},
        {"moved_bytes", plan.simulation.moved_bytes}}},
      {"plain", {{"peak_bytes", plan.plain_peak_bytes}, {"seconds", plan.plain_seconds}}},
      {"least_bytes", plan.least_bytes},
      {"method", plan.method},
      {"bound", {{"name", plan.bound_name}, {"seconds", plan.bound_seconds}, {"gap", plan.gap}}},
      {"planning_seconds", plan.planning_seconds},
      {"simulations", plan.simulations},
      {"candidates", candidates},
      {"operators", by_operator},
      {"calls", calls},
      {"timeline", {{"planned_bytes", plan.simulation.moment_bytes}, {"traced_bytes", measured}}}};
  return page.dump(1);
}

}  // namespace gradus::plan
