#include <gradus/solve/keep_or_drop.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <utility>

#include <gradus/base/clock.h>
#include <gradus/base/error.h>
#include <gradus/solve/internal/keep_program.h>

namespace gradus::solve {
namespace {

using internal::KeepProgram;
using Objective = KeepProgram::Objective;

// Bytes over the budget first, then milliseconds: smaller is better.
using Score = std::pair<std::int64_t, double>;

class Search {
 public:
  Search(const ValueGraph& graph, Objective objective, const KeepOptions& options)
      : graph_(graph),
        objective_(objective),
        options_(options),
        clock_(base::monotonic_clock()),
        end_s_(clock_() + options.time_limit_s) {
    internal::check_graph(graph);
    order_ = internal::replay_order(graph);
    GRADUS_CHECK("keep_or_drop", options.budget_bytes >= 0, "budget_bytes must be >= 0; got ",
                 options.budget_bytes);
    GRADUS_CHECK("keep_or_drop", options.time_limit_s > 0.0, "time_limit_s must be > 0; got ",
                 options.time_limit_s);
    GRADUS_CHECK("keep_or_drop", options.relative_gap >= 0.0, "relative_gap must be >= 0; got ",
                 options.relative_gap);
  }

  KeepPlan run() {
    offer(KeepSet(graph_.values.size(), true));
    if (!finished()) {
      start_from_rules();
      // Far smaller than the exact program, and its bound is hardly lower (docs/solve.md).
      relax(*KeepProgram::build(graph_, objective_, options_.budget_bytes, false, std::nullopt),
            KeepBound::kept_values, 0.5);
      round_with_reserve();
    }
    const auto exact = finished() ? std::nullopt
                                  : KeepProgram::build(graph_, objective_, options_.budget_bytes,
                                                       true, options_.max_program_terms);
    if (!finished()) improve(exact ? 0.2 : 1.0);
    if (exact && !finished() && (!feasible() || objective_ == Objective::least_peak))
      relax(*exact, KeepBound::linear_relaxation, 0.5);
    if (exact && !finished()) branch(*exact);
    return result();
  }

 private:
  double left_s() const { return end_s_ - clock_(); }

  bool feasible() const { return best_score_.first == 0; }

  bool within(double gap) const {
    const double bound = objective_ == Objective::least_peak ? std::ceil(bound_) : bound_;
    return feasible() && best_score_.second * (1.0 - gap) <= bound * (1.0 + 2e-7);
  }

  bool finished() const { return proven_ || within(options_.relative_gap); }

  Score score(const KeepCost& cost) const {
    if (!cost.possible) return {std::numeric_limits<std::int64_t>::max(), 0.0};
    if (objective_ == Objective::least_peak) return {0, static_cast<double>(cost.peak_bytes)};
    return {std::max<std::int64_t>(0, cost.peak_bytes - options_.budget_bytes), cost.recompute_ms};
  }

  bool offer(const KeepSet& keep) {
    KeepCost cost = internal::evaluate_checked(graph_, keep, order_);
    const Score offered = score(cost);
    if (!best_.empty() && offered >= best_score_) return false;
    best_ = keep;
    best_cost_ = std::move(cost);
    best_score_ = offered;
    return true;
  }

  // Evenly spaced ones kept, as checkpoints of segments; and the greedy choice.
  void start_from_rules() {
    if (objective_ == Objective::least_time)
      offer(drop_greedily(graph_, options_.budget_bytes).keep);
    std::vector<std::size_t> saved;
    for (std::size_t v = 0; v < graph_.values.size(); ++v)
      if (graph_.values[v].first_backward_use != kNotSaved) saved.push_back(v);
    for (std::size_t every = 2; every <= saved.size() && left_s() > 0.0;
         every += std::max<std::size_t>(1, every / 8)) {
      KeepSet keep = forced();
      for (std::size_t i = every - 1; i < saved.size(); i += every) keep[saved[i]] = true;
      offer(keep);
    }
    offer(forced());
  }

  KeepSet forced() const {
    KeepSet keep;
    for (const GraphValue& value : graph_.values) keep.push_back(value.must_keep);
    return keep;
  }

  // The relaxation that counts kept values leaves no memory for replays: with a smaller budget its
  // rounding has some.
  void round_with_reserve() {
    if (objective_ == Objective::least_peak) return;
    const double until = clock_() + 0.4 * left_s();
    for (const double reserve : {0.02, 0.05, 0.1, 0.16, 0.25}) {
      if (finished() || clock_() > until) return;
      const auto budget =
          static_cast<std::int64_t>((1.0 - reserve) * static_cast<double>(options_.budget_bytes));
      const auto program = KeepProgram::build(graph_, objective_, budget, false, std::nullopt);
      const LinearSolution solution = program->solve(
          {.time_limit_s = std::max(0.01, until - clock_()), .relax_integers = true});
      if (solution.status != LinearStatus::optimal) return;
      round(program->keep_values(solution));
    }
  }

  void relax(const KeepProgram& program, KeepBound name, double share) {
    if (left_s() <= 0.0) return;
    const LinearSolution solution =
        program.solve({.time_limit_s = share * left_s(), .relax_integers = true});
    if (solution.status == LinearStatus::infeasible) proven_ = !feasible();
    if (solution.status != LinearStatus::optimal) return;
    raise_bound(solution.bound, program, name);
    round(program.keep_values(solution));
  }

  void raise_bound(double bound, const KeepProgram& program, KeepBound name) {
    // A relative hair for the solver's tolerances.
    const double safe = bound - 1e-7 * std::abs(bound);
    const double value = objective_ == Objective::least_peak ? safe * program.scale_bytes() : safe;
    if (bound_name_ != KeepBound::none && value < bound_) return;
    bound_ = std::max(0.0, value);
    bound_name_ = name;
  }

  // Keeps all above a threshold, for each threshold that differs.
  void round(const std::vector<double>& kept) {
    std::vector<double> thresholds(kept);
    std::sort(thresholds.begin(), thresholds.end());
    thresholds.erase(std::unique(thresholds.begin(), thresholds.end(),
                                 [](double a, double b) { return b - a < 1e-6; }),
                     thresholds.end());
    for (const double threshold : thresholds) {
      if (left_s() <= 0.0) return;
      KeepSet keep = forced();
      for (std::size_t v = 0; v < kept.size(); ++v)
        keep[v] = keep[v] || kept[v] >= std::max(threshold, 1e-6);
      offer(keep);
    }
  }

  // Local search: one value kept or dropped, then one exchanged for another, until neither helps or
  // `share` of the time left is used.
  void improve(double share) {
    const double until = clock_() + share * left_s();
    std::mt19937_64 random(0);
    std::vector<std::size_t> order;
    for (std::size_t v = 0; v < graph_.values.size(); ++v)
      if (!graph_.values[v].must_keep) order.push_back(v);
    const auto flip = [&](std::size_t a, std::size_t b) {
      KeepSet keep = best_;
      keep[a] = !keep[a];
      if (b != a) keep[b] = !keep[b];
      return offer(keep);
    };
    for (bool better = true; better;) {
      better = false;
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t v : order) {
        if (clock_() > until || finished()) return;
        better = flip(v, v) || better;
      }
      for (std::size_t i = 0; i < order.size() && !better; ++i) {
        for (std::size_t j = 0; j < i && !better; ++j) {
          if (clock_() > until || finished()) return;
          better = best_[order[i]] != best_[order[j]] && flip(order[i], order[j]);
        }
      }
    }
  }

  void branch(const KeepProgram& first) {
    std::int64_t budget = options_.budget_bytes;
    std::optional<KeepProgram> tightened;
    // The solver's tolerance can let a choice pass that is bytes over the budget: then the budget
    // is lowered by as much. The bound of the first program stays the one that holds.
    for (int attempt = 0; attempt < 4 && left_s() > 0.0; ++attempt) {
      const KeepProgram& program = tightened ? *tightened : first;
      const LinearSolution solution = program.solve(
          {.time_limit_s = left_s(),
           .relative_gap = options_.relative_gap,
           .start = feasible() ? program.assignment(best_) : std::vector<Assignment>{}});
      if (!tightened) {
        if (solution.status == LinearStatus::infeasible) {
          proven_ = !feasible();
          return;
        }
        if (std::isfinite(solution.bound))
          raise_bound(solution.bound, program, KeepBound::integer_program);
      }
      if (!solution.has_values()) return;
      KeepSet keep;
      for (const double value : program.keep_values(solution)) keep.push_back(value > 0.5);
      const Score found = score(internal::evaluate_checked(graph_, keep, order_));
      offer(keep);
      if (found.first == 0 || objective_ == Objective::least_peak) {
        proven_ =
            !tightened && solution.status == LinearStatus::optimal && options_.relative_gap == 0.0;
        return;
      }
      if (found.first > budget) return;
      budget -= found.first;
      tightened = KeepProgram::build(graph_, objective_, budget, true, options_.max_program_terms);
      if (!tightened) return;
    }
  }

  KeepPlan result() const {
    KeepPlan plan;
    plan.feasible = feasible();
    plan.keep = best_;
    plan.recompute_ms = best_cost_.recompute_ms;
    plan.peak_bytes = best_cost_.peak_bytes;
    plan.bound_name = bound_name_;
    if (objective_ == Objective::least_time) {
      plan.bound_ms = plan.feasible ? std::min(bound_, plan.recompute_ms) : bound_;
      plan.proven = proven_ || within(0.0);
    } else {
      plan.proven = proven_ || within(0.0);
      plan.bound_bytes = std::min(static_cast<std::int64_t>(std::ceil(bound_)), plan.peak_bytes);
    }
    return plan;
  }

  const ValueGraph& graph_;
  Objective objective_;
  KeepOptions options_;
  base::Clock clock_;
  double end_s_;
  std::vector<std::size_t> order_;
  KeepSet best_;
  KeepCost best_cost_;
  Score best_score_;
  double bound_ = 0.0;
  KeepBound bound_name_ = KeepBound::none;
  bool proven_ = false;
};

// Time to make a dropped value again: its own and that of the dropped values it is made from.
double replay_ms(const ValueGraph& graph, const KeepSet& keep, std::size_t value) {
  std::vector<std::size_t> open{value};
  std::vector<std::size_t> seen{value};
  double time = 0.0;
  while (!open.empty()) {
    const std::size_t v = open.back();
    open.pop_back();
    time += graph.values[v].recompute_ms;
    for (const std::int64_t input : graph.values[v].inputs) {
      const auto u = static_cast<std::size_t>(input);
      if (keep[u] || std::find(seen.begin(), seen.end(), u) != seen.end()) continue;
      seen.push_back(u);
      open.push_back(u);
    }
  }
  return time;
}

}  // namespace

std::string_view to_string(KeepBound bound) {
  switch (bound) {
    case KeepBound::none:
      return "none";
    case KeepBound::kept_values:
      return "linear relaxation over kept values";
    case KeepBound::linear_relaxation:
      return "linear relaxation";
    case KeepBound::integer_program:
      return "integer program";
  }
  return "unknown";
}

double KeepPlan::gap() const {
  return recompute_ms > 0.0 ? std::max(0.0, (recompute_ms - bound_ms) / recompute_ms) : 0.0;
}

KeepPlan choose_kept(const ValueGraph& graph, const KeepOptions& options) {
  return Search(graph, Objective::least_time, options).run();
}

KeepPlan least_peak(const ValueGraph& graph, const KeepOptions& options) {
  return Search(graph, Objective::least_peak, options).run();
}

KeepPlan drop_greedily(const ValueGraph& graph, std::int64_t budget_bytes) {
  KeepSet keep(graph.values.size(), true);
  KeepCost cost = evaluate(graph, keep);
  KeepPlan best;
  while (true) {
    if (best.keep.empty() || cost.peak_bytes < best.peak_bytes) {
      best.keep = keep;
      best.peak_bytes = cost.peak_bytes;
      best.recompute_ms = cost.recompute_ms;
      best.feasible = cost.peak_bytes <= budget_bytes;
    }
    if (best.feasible) return best;
    const std::int64_t peak =
        std::max_element(cost.position_bytes.begin(), cost.position_bytes.end()) -
        cost.position_bytes.begin();
    std::vector<std::pair<double, std::size_t>> idle;  // (h, value)
    for (std::size_t v = 0; v < keep.size(); ++v) {
      const GraphValue& value = graph.values[v];
      if (!keep[v] || value.must_keep || value.bytes == 0 ||
          value.first_backward_use == kNotSaved || peak <= value.last_forward_use ||
          peak >= value.first_backward_use)
        continue;
      const auto staleness = static_cast<double>(peak - value.last_forward_use);
      idle.emplace_back(replay_ms(graph, keep, v) / (static_cast<double>(value.bytes) * staleness),
                        v);
    }
    if (idle.empty()) return best;
    std::sort(idle.begin(), idle.end());
    // Each drop makes others dearer: no more than half of what is too much before h is taken anew.
    std::int64_t excess = (cost.peak_bytes - budget_bytes) / 2;
    for (const auto& [h, value] : idle) {
      keep[value] = false;
      excess -= graph.values[value].bytes;
      if (excess <= 0) break;
    }
    cost = evaluate(graph, keep);
  }
}

}  // namespace gradus::solve
