#include <gradus/solve/internal/keep_program.h>

#include <algorithm>
#include <utility>

namespace gradus::solve::internal {

KeepProgram::KeepProgram(const ValueGraph& graph, Objective objective, std::int64_t budget_bytes)
    : graph_(&graph), objective_(objective), budget_bytes_(budget_bytes) {}

std::optional<KeepProgram> KeepProgram::build(const ValueGraph& graph, Objective objective,
                                              std::int64_t budget_bytes, bool exact,
                                              std::optional<std::int64_t> max_terms) {
  KeepProgram result(graph, objective, budget_bytes);
  result.add_events();
  if (exact && max_terms) {
    // Most terms are those of in_memory: one in a memory row, four in its own rows and edges.
    std::int64_t terms = 0;
    for (std::size_t v = 0; v < graph.values.size(); ++v)
      terms += (5 + 3 * static_cast<std::int64_t>(graph.values[v].inputs.size())) *
               std::max<std::int64_t>(0, result.latest_[v] - result.earliest_[v]);
    if (terms > *max_terms) return std::nullopt;
  }
  result.add_values(exact);
  result.add_edges(exact);
  result.add_memory_rows(exact);
  if (max_terms && result.program_.term_count() > *max_terms) return std::nullopt;
  return result;
}

std::int64_t KeepProgram::interval_of(std::int64_t position) const {
  return std::upper_bound(events_.begin(), events_.end(), position) - events_.begin() - 1;
}

std::int64_t KeepProgram::first_event(std::int64_t value) const {
  const std::int64_t use = graph_->values[value].first_backward_use;
  return use == kNotSaved ? -1 : interval_of(use);
}

void KeepProgram::add_events() {
  const auto count = static_cast<std::int64_t>(graph_->values.size());
  double largest = 1.0;
  for (const GraphValue& value : graph_->values) {
    if (value.first_backward_use != kNotSaved) events_.push_back(value.first_backward_use);
    largest = std::max(largest, static_cast<double>(value.bytes));
  }
  // Sizes near 1 suit the solver's tolerances.
  scale_ = largest;
  std::sort(events_.begin(), events_.end());
  events_.erase(std::unique(events_.begin(), events_.end()), events_.end());
  consumers_.resize(count);
  earliest_.assign(count, -1);
  latest_.assign(count, -1);
  for (std::int64_t v = 0; v < count; ++v)
    for (const std::int64_t input : graph_->values[v].inputs) consumers_[input].push_back(v);
  // Backward reaches consumers' replays before their inputs'.
  for (std::int64_t v = count; v-- > 0;) {
    earliest_[v] = latest_[v] = first_event(v);
    for (const std::int64_t consumer : consumers_[v]) {
      if (latest_[consumer] < 0) continue;
      earliest_[v] =
          earliest_[v] < 0 ? earliest_[consumer] : std::min(earliest_[v], earliest_[consumer]);
      if (first_event(v) < 0) latest_[v] = std::max(latest_[v], latest_[consumer]);
    }
  }
}

void KeepProgram::add_values(bool exact) {
  const bool time = objective_ == Objective::least_time;
  if (!time) peak_ = program_.add_variable({.cost = 1.0});
  for (std::size_t v = 0; v < graph_->values.size(); ++v) {
    const GraphValue& value = graph_->values[v];
    const bool saved = value.first_backward_use != kNotSaved;
    keep_.push_back(program_.add_variable({.lower = value.must_keep && saved ? 1.0 : 0.0,
                                           .upper = latest_[v] < 0 ? 0.0 : 1.0,
                                           .integer = true}));
    replay_.push_back(program_.add_variable({.upper = value.must_keep || latest_[v] < 0 ? 0.0 : 1.0,
                                             .cost = time ? value.recompute_ms : 0.0}));
    if (saved) program_.add_row({{replay_[v], 1.0}, {keep_[v], 1.0}}, 1.0, kUnbounded);
    in_memory_.emplace_back();
    if (!exact || latest_[v] < 0) continue;
    // From its first use in backward on a saved value is in memory for certain.
    const std::int64_t last = saved ? latest_[v] - 1 : latest_[v];
    for (std::int64_t event = earliest_[v]; event <= last; ++event) {
      const std::int64_t before = in_memory_[v].empty() ? keep_[v] : in_memory_[v].back();
      const std::int64_t now = program_.add_variable({.upper = 1.0});
      in_memory_[v].push_back(now);
      program_.add_row({{now, 1.0}, {before, -1.0}}, 0.0, kUnbounded);
    }
    if (!saved && !in_memory_[v].empty())
      program_.add_row({{replay_[v], 1.0}, {keep_[v], 1.0}, {in_memory_[v].back(), -1.0}}, 0.0,
                       kUnbounded);
  }
}

KeepProgram::Level KeepProgram::in_memory(std::int64_t value, std::int64_t interval) const {
  if (interval < earliest_[value] || latest_[value] < 0) return {keep_[value]};
  if (first_event(value) >= 0 && interval >= first_event(value)) return {};
  const auto& levels = in_memory_[value];
  return {levels[std::min<std::size_t>(interval - earliest_[value], levels.size() - 1)]};
}

void KeepProgram::add_edges(bool exact) {
  const auto count = static_cast<std::int64_t>(graph_->values.size());
  for (std::int64_t v = 0; v < count; ++v) {
    if (latest_[v] < 0) continue;
    for (const std::int64_t input : graph_->values[v].inputs) {
      program_.add_row({{replay_[input], 1.0}, {keep_[input], 1.0}, {replay_[v], -1.0}}, 0.0,
                       kUnbounded);
      if (!exact) continue;
      // In memory and not kept means made again by then, from inputs in memory.
      const std::int64_t first = earliest_[v];
      for (std::int64_t event = first; event <= latest_[v]; ++event) {
        const Level of_input = in_memory(input, event), own = in_memory(v, event);
        if (of_input.variable < 0) break;
        std::vector<Term> terms{{of_input.variable, 1.0}, {keep_[v], 1.0}};
        if (own.variable >= 0) terms.push_back({own.variable, -1.0});
        program_.add_row(terms, own.variable >= 0 ? 0.0 : 1.0, kUnbounded);
      }
    }
  }
}

// 1 where a value is in memory during an interval and a replay at `event` or later reads it.
std::int64_t KeepProgram::needed(std::int64_t value, std::int64_t interval, std::int64_t event) {
  const auto [entry, added] = needed_.try_emplace({value, interval, event}, -1);
  if (!added) return entry->second;
  const std::int64_t variable = program_.add_variable({.upper = 1.0});
  entry->second = variable;
  const Level own = in_memory(value, interval);
  for (const std::int64_t consumer : consumers_[value]) {
    if (latest_[consumer] < event) continue;
    const Level started = in_memory(consumer, event - 1);
    if (started.variable < 0) continue;
    // variable >= own + replay - started - 1. A fraction of `started` must not hide a replay.
    std::vector<Term> terms{{variable, 1.0}, {replay_[consumer], -1.0}, {started.variable, 1.0}};
    double constant = -1.0;
    if (own.variable >= 0)
      terms.push_back({own.variable, -1.0});
    else
      constant = 0.0;
    program_.set_integer(started.variable);
    program_.add_row(terms, constant, kUnbounded);
  }
  return variable;
}

void KeepProgram::add_memory_row(std::vector<Term> terms, std::int64_t constant_bytes) {
  if (peak_ >= 0) {
    terms.push_back({peak_, -1.0});
    program_.add_row(terms, -kUnbounded, -scaled(constant_bytes));
  } else {
    program_.add_row(terms, -kUnbounded, scaled(budget_bytes_ - constant_bytes));
  }
}

void KeepProgram::add_memory_rows(bool exact) {
  const auto positions = static_cast<std::int64_t>(graph_->base_bytes.size());
  const auto count = static_cast<std::int64_t>(graph_->values.size());
  // What is alive whatever is chosen: in forward up to the last use, in backward between uses.
  std::vector<std::int64_t> constant(positions + 1, 0);
  for (const GraphValue& value : graph_->values) {
    constant[value.made] += value.bytes;
    constant[value.last_forward_use + 1] -= value.bytes;
    if (value.first_backward_use == kNotSaved) continue;
    constant[value.first_backward_use] += value.bytes;
    constant[value.last_backward_use + 1] -= value.bytes;
  }
  for (std::int64_t p = 1; p < positions; ++p) constant[p] += constant[p - 1];
  for (std::int64_t p = 0; p < positions; ++p) constant[p] += graph_->base_bytes[p];

  // In forward what may be kept only grows: a row with no more constant than a later one is idle.
  std::vector<std::int64_t> rows;
  for (std::int64_t p = graph_->forward_positions; p-- > 0;)
    if (rows.empty() || constant[p] > constant[rows.back()]) rows.push_back(p);
  // Between two events what may be in memory only shrinks.
  for (std::int64_t p = graph_->forward_positions; p < positions; ++p) {
    const bool same = p > graph_->forward_positions && !rows.empty() &&
                      rows.back() >= graph_->forward_positions &&
                      interval_of(rows.back()) == interval_of(p);
    if (!same || constant[p] > constant[rows.back()]) rows.push_back(p);
  }
  if (!exact) {
    // The first row is the end of forward, where most is kept.
    const std::int64_t most = std::max<std::int64_t>(1, 500'000 / std::max<std::int64_t>(1, count));
    const std::int64_t step = (static_cast<std::int64_t>(rows.size()) + most - 1) / most;
    std::vector<std::int64_t> thinned;
    for (std::size_t i = 0; i < rows.size(); i += step) thinned.push_back(rows[i]);
    rows = std::move(thinned);
  }
  for (const std::int64_t p : rows) {
    std::vector<Term> terms;
    const std::int64_t interval = interval_of(p);
    for (std::int64_t v = 0; v < count; ++v) {
      const GraphValue& value = graph_->values[v];
      if (latest_[v] < 0 || value.bytes == 0) continue;
      std::int64_t variable = -1;
      if (p < graph_->forward_positions) {
        if (p > value.last_forward_use) variable = keep_[v];
      } else if (value.first_backward_use != kNotSaved && p <= value.last_backward_use) {
        if (p < value.first_backward_use)
          variable = exact ? in_memory(v, interval).variable : keep_[v];
      } else if (exact) {
        // Past backward's own uses: only replays to come hold it. At an event itself they run.
        const std::int64_t event = interval < 0 || p > events_[interval] ? interval + 1 : interval;
        const bool read = std::any_of(consumers_[v].begin(), consumers_[v].end(),
                                      [&](std::int64_t w) { return latest_[w] >= event; });
        if (read) variable = interval < 0 ? keep_[v] : needed(v, interval, event);
      }
      if (variable >= 0) terms.push_back({variable, scaled(value.bytes)});
    }
    add_memory_row(std::move(terms), constant[p]);
  }
}

std::vector<double> KeepProgram::keep_values(const LinearSolution& solution) const {
  std::vector<double> values;
  for (const std::int64_t variable : keep_) values.push_back(solution.values[variable]);
  return values;
}

std::vector<Assignment> KeepProgram::assignment(const KeepSet& keep) const {
  std::vector<Assignment> result;
  for (std::size_t v = 0; v < keep.size(); ++v)
    result.push_back({keep_[v], keep[v] && latest_[v] >= 0 ? 1.0 : 0.0});
  return result;
}

}  // namespace gradus::solve::internal
