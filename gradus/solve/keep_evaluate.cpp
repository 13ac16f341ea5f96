#include <algorithm>
#include <cmath>
#include <numeric>

#include <gradus/base/error.h>
#include <gradus/solve/internal/keep_program.h>
#include <gradus/solve/keep_or_drop.h>

namespace gradus::solve {
namespace internal {

void check_graph(const ValueGraph& graph) {
  const std::int64_t forward = graph.forward_positions;
  const auto positions = static_cast<std::int64_t>(graph.base_bytes.size());
  GRADUS_CHECK("keep_or_drop", forward >= 0 && forward <= positions,
               "forward_positions must lie in 0 to the size of base_bytes; got ", forward, " and ",
               positions);
  for (const std::int64_t bytes : graph.base_bytes)
    GRADUS_CHECK("keep_or_drop", bytes >= 0, "base_bytes must be >= 0; got ", bytes);
  for (std::size_t v = 0; v < graph.values.size(); ++v) {
    const GraphValue& value = graph.values[v];
    GRADUS_CHECK("keep_or_drop", value.bytes >= 0, "bytes must be >= 0; value ", v, " has ",
                 value.bytes);
    GRADUS_CHECK("keep_or_drop", std::isfinite(value.recompute_ms) && value.recompute_ms >= 0.0,
                 "recompute_ms must be finite and >= 0; value ", v, " has ", value.recompute_ms);
    GRADUS_CHECK(
        "keep_or_drop",
        0 <= value.made && value.made <= value.last_forward_use && value.last_forward_use < forward,
        "made and last_forward_use must be forward positions in this order; value ", v, " has ",
        value.made, " and ", value.last_forward_use, " of ", forward);
    const bool saved = value.first_backward_use != kNotSaved;
    GRADUS_CHECK(
        "keep_or_drop",
        saved ? forward <= value.first_backward_use &&
                    value.first_backward_use <= value.last_backward_use &&
                    value.last_backward_use < positions
              : value.last_backward_use == kNotSaved,
        "backward uses must be backward positions in their order, or both kNotSaved; value ", v,
        " has ", value.first_backward_use, " and ", value.last_backward_use);
    for (const std::int64_t input : value.inputs)
      GRADUS_CHECK("keep_or_drop", input >= 0 && input < static_cast<std::int64_t>(v),
                   "inputs must be values made before; value ", v, " has ", input);
  }
}

}  // namespace internal

namespace {

// Where each value is made again, and until when it is wanted in backward.
class Replays {
 public:
  Replays(const ValueGraph& graph, const KeepSet& keep, const std::vector<std::size_t>& order)
      : start(graph.values.size(), kNotSaved),
        end(graph.values.size(), kNotSaved),
        graph_(graph),
        keep_(keep) {
    for (std::size_t v = 0; v < graph.values.size(); ++v)
      end[v] = graph.values[v].last_backward_use;
    for (const std::size_t v : order)
      if (!keep[v]) replay(v, graph.values[v].first_backward_use);
  }

  std::vector<std::int64_t> start, end;
  double time_ms = 0.0;
  bool possible = true;

 private:
  void replay(std::size_t first, std::int64_t position) {
    if (start[first] != kNotSaved) return;
    std::vector<std::size_t> open{first};
    start[first] = position;
    while (!open.empty()) {
      const std::size_t v = open.back();
      open.pop_back();
      possible = possible && !graph_.values[v].must_keep;
      time_ms += graph_.values[v].recompute_ms;
      for (const std::int64_t input : graph_.values[v].inputs) {
        end[input] = std::max(end[input], position);
        if (keep_[input] || start[input] != kNotSaved) continue;
        start[input] = position;
        open.push_back(static_cast<std::size_t>(input));
      }
    }
  }

  const ValueGraph& graph_;
  const KeepSet& keep_;
};

}  // namespace

std::vector<std::size_t> internal::replay_order(const ValueGraph& graph) {
  std::vector<std::size_t> order;
  for (std::size_t v = 0; v < graph.values.size(); ++v)
    if (graph.values[v].first_backward_use != kNotSaved) order.push_back(v);
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return graph.values[a].first_backward_use < graph.values[b].first_backward_use;
  });
  return order;
}

KeepCost evaluate(const ValueGraph& graph, const KeepSet& keep) {
  internal::check_graph(graph);
  GRADUS_CHECK("keep_or_drop", keep.size() == graph.values.size(),
               "there must be one flag for each of the ", graph.values.size(), " values; got ",
               keep.size());
  return internal::evaluate_checked(graph, keep, internal::replay_order(graph));
}

KeepCost internal::evaluate_checked(const ValueGraph& graph, const KeepSet& keep,
                                    const std::vector<std::size_t>& order) {
  const Replays replays(graph, keep, order);
  std::vector<std::int64_t> change(graph.base_bytes.size() + 1, 0);
  const auto alive = [&](std::int64_t first, std::int64_t last, std::int64_t bytes) {
    change[first] += bytes;
    change[last + 1] -= bytes;
  };
  for (std::size_t v = 0; v < graph.values.size(); ++v) {
    const GraphValue& value = graph.values[v];
    const bool kept = keep[v];
    alive(value.made,
          kept ? std::max(value.last_forward_use, replays.end[v]) : value.last_forward_use,
          value.bytes);
    if (!kept && replays.start[v] != kNotSaved)
      alive(replays.start[v], std::max(replays.start[v], replays.end[v]), value.bytes);
  }
  KeepCost cost;
  cost.possible = replays.possible;
  cost.recompute_ms = replays.time_ms;
  std::int64_t live = 0;
  for (std::size_t p = 0; p < graph.base_bytes.size(); ++p) {
    live += change[p];
    cost.position_bytes.push_back(live + graph.base_bytes[p]);
    cost.peak_bytes = std::max(cost.peak_bytes, cost.position_bytes.back());
  }
  return cost;
}

}  // namespace gradus::solve
