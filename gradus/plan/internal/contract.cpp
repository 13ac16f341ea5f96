#include <gradus/plan/internal/contract.h>

#include <algorithm>

#include <gradus/solve/partition.h>

namespace gradus::plan::internal {

using recompute::StepTrace;
using recompute::TracedCall;
using solve::GraphValue;

namespace {

// A graph that is not let go keeps what it saved to the end.
std::int64_t released(const StepTrace& trace, const TracedCall& call) {
  return call.released_after < 0 ? static_cast<std::int64_t>(trace.moments.size()) - 1
                                 : call.released_after;
}

// Until when the results of calls that are no values are in memory.
std::vector<std::int64_t> last_moments(const StepTrace& trace) {
  std::vector<std::int64_t> life(trace.calls.size(), -1);
  for (std::size_t c = trace.calls.size(); c-- > 0;) {
    const TracedCall& call = trace.calls[c];
    if (call.saved) life[c] = std::max(life[c], released(trace, call));
    if (!call.can_run_again) continue;
    for (const std::int64_t input : call.inputs) life[input] = std::max(life[input], life[c]);
  }
  std::vector<std::int64_t> last;
  for (std::size_t c = 0; c < trace.calls.size(); ++c) {
    const TracedCall& call = trace.calls[c];
    const bool stays = !call.can_run_again || (call.saved && call.reads.empty());
    last.push_back(stays ? std::max(call.held_until, life[c]) : call.held_until);
  }
  return last;
}

void add(std::vector<std::int64_t>& change, std::int64_t first, std::int64_t last,
         std::int64_t bytes) {
  const auto end = static_cast<std::int64_t>(change.size()) - 1;
  first = std::clamp<std::int64_t>(first, 0, end - 1);
  last = std::clamp<std::int64_t>(last, first, end - 1);
  change[first] += bytes;
  change[last + 1] -= bytes;
}

}  // namespace

Contracted contract(const StepTrace& trace, const MoveSeconds& moves,
                    const std::vector<std::int64_t>& left_bytes, bool can_recompute) {
  Contracted result;
  const auto moments = static_cast<std::int64_t>(trace.moments.size());
  std::int64_t forward = 0;
  while (forward < moments && !trace.moments[forward].backward) ++forward;
  result.graph.forward_positions = forward;
  result.value_of.assign(trace.calls.size(), -1);
  const std::vector<std::int64_t> last = last_moments(trace);
  std::vector<std::int64_t> change(trace.moments.size() + 1, 0);
  std::vector<std::int64_t> seen(trace.calls.size(), -1);
  for (std::size_t c = 0; c < trace.calls.size(); ++c) {
    const TracedCall& call = trace.calls[c];
    if (call.bytes == 0) continue;
    const bool left = !left_bytes.empty() && left_bytes[c] >= 0;
    const double move = moves.empty() ? -1.0 : moves[c];
    const bool wanted = call.saved && !call.reads.empty() && call.can_run_again && !left &&
                        call.moment < forward && call.reads.front() >= forward &&
                        (can_recompute || move >= 0.0);
    if (!wanted) {
      add(change, call.moment, last[c], call.bytes);
      if (left) add(change, call.moment, released(trace, call), left_bytes[c]);
      continue;
    }
    GraphValue value;
    value.bytes = call.bytes;
    value.made = call.moment;
    value.last_forward_use = std::clamp(call.held_until, call.moment, forward - 1);
    value.first_backward_use = call.reads.front();
    value.last_backward_use = std::clamp(std::max(call.reads.back(), released(trace, call)),
                                         call.reads.front(), moments - 1);
    // All that must run to make it from other values.
    double seconds = 0.0;
    std::vector<std::int64_t> open{static_cast<std::int64_t>(c)};
    seen[c] = static_cast<std::int64_t>(c);
    while (!open.empty()) {
      const TracedCall& step = trace.calls[open.back()];
      open.pop_back();
      if (step.bytes > 0) seconds += step.seconds;
      for (const std::int64_t input : step.inputs) {
        if (seen[input] == static_cast<std::int64_t>(c)) continue;
        seen[input] = static_cast<std::int64_t>(c);
        if (result.value_of[input] >= 0) {
          value.inputs.push_back(result.value_of[input]);
        } else if (trace.calls[input].can_run_again &&
                   trace.calls[input].held_until < value.first_backward_use) {
          open.push_back(input);
        } else if (trace.calls[input].bytes == 0) {
          open.push_back(input);
        }
      }
    }
    if (move >= 0.0 && (move <= seconds || !can_recompute)) {
      seconds = move;
      value.inputs.clear();
    }
    value.recompute_ms = seconds * 1e3;
    std::sort(value.inputs.begin(), value.inputs.end());
    result.value_of[c] = static_cast<std::int64_t>(result.graph.values.size());
    result.graph.values.push_back(std::move(value));
    result.members.push_back({static_cast<std::int64_t>(c)});
  }
  std::int64_t live = 0;
  for (std::int64_t m = 0; m < moments; ++m) {
    live += change[m];
    result.graph.base_bytes.push_back(
        std::max<std::int64_t>(0, live + trace.moments[m].other_bytes));
  }
  return result;
}

Contracted merge(const Contracted& full, std::int64_t max_values) {
  const auto& values = full.graph.values;
  std::vector<double> times;
  std::vector<std::int64_t> change(values.size() + 1, 0);
  std::vector<std::int64_t> last_reader(values.size());
  for (std::size_t v = 0; v < values.size(); ++v) {
    times.push_back(values[v].recompute_ms);
    last_reader[v] = static_cast<std::int64_t>(v);
    for (const std::int64_t input : values[v].inputs)
      last_reader[input] = static_cast<std::int64_t>(v);
  }
  for (std::size_t v = 0; v < values.size(); ++v) {
    change[v] += values[v].bytes;
    change[last_reader[v]] -= values[v].bytes;
  }
  std::vector<std::int64_t> cuts;
  std::int64_t crossing = 0;
  for (std::size_t v = 0; v + 1 < values.size(); ++v) {
    crossing += change[v];
    cuts.push_back(crossing);
  }
  const solve::Partition parts = solve::partition(times, cuts, {.max_stages = max_values});
  Contracted merged;
  merged.graph.forward_positions = full.graph.forward_positions;
  merged.graph.base_bytes = full.graph.base_bytes;
  merged.value_of.assign(full.value_of.size(), -1);
  std::vector<std::int64_t> stage_of(values.size(), 0);
  std::int64_t start = 0;
  for (const std::int64_t end : parts.ends) {
    const auto stage = static_cast<std::int64_t>(merged.graph.values.size());
    GraphValue value = values[start];
    value.inputs.clear();
    value.bytes = 0;
    value.recompute_ms = 0.0;
    std::vector<std::int64_t> calls;
    for (std::int64_t v = start; v < end; ++v) {
      const GraphValue& part = values[v];
      stage_of[v] = stage;
      value.bytes += part.bytes;
      value.recompute_ms += part.recompute_ms;
      value.last_forward_use = std::max(value.last_forward_use, part.last_forward_use);
      value.first_backward_use = std::min(value.first_backward_use, part.first_backward_use);
      value.last_backward_use = std::max(value.last_backward_use, part.last_backward_use);
      for (const std::int64_t input : part.inputs)
        if (stage_of[input] != stage) value.inputs.push_back(stage_of[input]);
      for (const std::int64_t call : full.members[v]) {
        merged.value_of[call] = stage;
        calls.push_back(call);
      }
    }
    std::sort(value.inputs.begin(), value.inputs.end());
    value.inputs.erase(std::unique(value.inputs.begin(), value.inputs.end()), value.inputs.end());
    merged.graph.values.push_back(std::move(value));
    merged.members.push_back(std::move(calls));
    start = end;
  }
  return merged;
}

bool is_chain(const Contracted& contracted) {
  const auto& values = contracted.graph.values;
  for (std::size_t v = 0; v < values.size(); ++v) {
    if (v == 0 ? !values[v].inputs.empty()
               : values[v].inputs != std::vector<std::int64_t>{static_cast<std::int64_t>(v) - 1})
      return false;
    if (v > 0 && values[v].first_backward_use > values[v - 1].first_backward_use) return false;
  }
  return values.size() >= 2;
}

std::int64_t chain_base(const Contracted& contracted) {
  std::int64_t least = contracted.graph.base_bytes.empty() ? 0 : contracted.graph.base_bytes[0];
  for (const auto& value : contracted.graph.values)
    for (const std::int64_t p : {value.made, value.first_backward_use})
      least = std::min(least, contracted.graph.base_bytes[p]);
  return least;
}

solve::Chain chain_of(const Contracted& contracted) {
  const std::int64_t base = chain_base(contracted);
  solve::Chain chain;
  for (const auto& value : contracted.graph.values) {
    solve::ChainStage stage;
    stage.forward_ms = value.recompute_ms;
    stage.output_bytes = value.bytes;
    stage.saved_bytes = value.bytes;
    stage.gradient_bytes = 0;
    stage.forward_transient_bytes = contracted.graph.base_bytes[value.made] - base;
    for (std::int64_t p = value.first_backward_use; p <= value.last_backward_use; ++p)
      stage.backward_transient_bytes =
          std::max(stage.backward_transient_bytes, contracted.graph.base_bytes[p] - base);
    chain.stages.push_back(stage);
  }
  return chain;
}

}  // namespace gradus::plan::internal
