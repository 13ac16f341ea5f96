#include <gradus/plan/planner.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/plan/internal/contract.h>
#include <gradus/plan/internal/separate.h>
#include <gradus/solve/chain.h>

namespace gradus::plan {

using internal::Contracted;
using recompute::Disposition;
using recompute::StepTrace;

namespace {

using Dispositions = std::vector<Disposition>;

// The solver takes about a second for so many values at a few per cent of gap; beyond, neighbours
// are merged.
constexpr std::size_t kMostValues = 600;
constexpr std::int64_t kMergedValues = 300;
// Online eviction scans all candidates at each drop, as the tape does: quadratic.
// In less than a second Cbc closed gaps and never found a faster plan (docs/plan.md).
constexpr double kLeastProgramSeconds = 1.0;
std::int64_t program_terms(double seconds) {
  return seconds < kLeastProgramSeconds ? 0 : solve::KeepOptions().max_program_terms;
}
constexpr std::size_t kMostOnlineCalls = 20'000;

struct Tried {
  PlanCandidate candidate;
  Dispositions dispositions;
  Simulation simulation;
};

class Planner {
 public:
  Planner(const StepTrace& trace, const PlanOptions& options);
  MemoryPlan plan();
  std::int64_t least();

 private:
  double elapsed() const { return options_.clock() - start_; }
  double left() const { return options_.time_limit_s - elapsed(); }
  bool can(Disposition disposition, std::int64_t call) const;
  double move_seconds(std::int64_t call) const { return moves_.empty() ? -1.0 : moves_[call]; }

  Dispositions from_keep(const Contracted& graph, const solve::KeepSet& keep,
                         const Dispositions& base) const;
  Disposition dropped(std::int64_t call) const;
  void consider(const std::string& name, Dispositions dispositions);
  void baselines();
  void even_segments(const Contracted& full);
  void dear_first(const Contracted& full);
  void chain(const Contracted& full);
  void keep_or_drop(const std::string& prefix, const Contracted& graph, const Dispositions& base,
                    double share);
  void compressed();
  void all_compressed();
  void improve();
  Tried judge(const std::string& name, Dispositions dispositions, Simulation simulation) const;
  // Keeping less is no way out where nothing may be made again.
  bool fits(const Simulation& simulation) const {
    return simulation.feasible && (options_.recompute || simulation.replay_seconds <= 0.0);
  }
  double cost(const Simulation& simulation) const {
    return simulation.replay_seconds + simulation.move_seconds;
  }
  const Tried* best() const;
  void find_least();
  void bound();

  const StepTrace& trace_;
  const PlanOptions& options_;
  double start_;
  Simulator simulator_;
  internal::MoveSeconds moves_;
  Disposition dropped_default_ = Disposition::recompute;  // of results that are no values
  Contracted full_;
  Contracted reduced_;  // full_, or merged
  std::vector<Tried> tried_;
  std::int64_t simulations_ = 0;
  std::int64_t plain_peak_ = 0;
  std::int64_t least_ = -1;
  double bound_s_ = 0.0;
  std::string bound_name_;
};

SimulationOptions simulation_options(const PlanOptions& options) {
  SimulationOptions result;
  if (options.offload) result.stash = *options.offload;
  result.compressed = options.compressed;
  return result;
}

Planner::Planner(const StepTrace& trace, const PlanOptions& options)
    : trace_(trace),
      options_(options),
      start_(options.clock()),
      simulator_(trace, simulation_options(options)) {
  GRADUS_CHECK("plan", options.limit_bytes >= 1, "limit_bytes must be at least 1; got ",
               options.limit_bytes);
  GRADUS_CHECK("plan", options.time_limit_s > 0.0, "time_limit_s must be > 0; got ",
               options.time_limit_s);
  if (options.offload) {
    for (const auto& call : trace.calls) {
      const bool possible = call.saved && call.can_run_again && call.bytes > 0;
      moves_.push_back(possible ? options.offload->write_s(call.bytes) +
                                      options.offload->read_s(call.bytes)
                                : -1.0);
    }
  }
  if (!options.recompute) dropped_default_ = Disposition::keep;
  full_ = internal::contract(trace, moves_, {}, options.recompute);
  reduced_ =
      full_.graph.values.size() > kMostValues ? internal::merge(full_, kMergedValues) : full_;
  plain_peak_ = simulator_.run({}, 0).peak_bytes;
}

bool Planner::can(Disposition disposition, std::int64_t call) const {
  switch (disposition) {
    case Disposition::keep:
      return true;
    case Disposition::recompute:
      return options_.recompute;
    case Disposition::offload:
      return move_seconds(call) >= 0.0;
    case Disposition::leave:
      return !options_.compressed.empty() && options_.compressed[call].bytes > 0 &&
             trace_.calls[call].saved;
  }
  return false;
}

// The cheaper way to be without a call's results for a while.
Disposition Planner::dropped(std::int64_t call) const {
  const std::int64_t value = full_.value_of[call];
  if (!options_.recompute)
    return can(Disposition::offload, call) ? Disposition::offload : Disposition::keep;
  if (value < 0 || !can(Disposition::offload, call)) return Disposition::recompute;
  // contract() took the smaller of the two and left the inputs out where it moves.
  return full_.graph.values[value].recompute_ms >= move_seconds(call) * 1e3
             ? Disposition::offload
             : Disposition::recompute;
}

Dispositions Planner::from_keep(const Contracted& graph, const solve::KeepSet& keep,
                                const Dispositions& base) const {
  Dispositions result = base;
  for (std::size_t v = 0; v < keep.size(); ++v)
    for (const std::int64_t call : graph.members[v])
      if (base[call] != Disposition::leave)
        result[call] = keep[v] ? Disposition::keep : dropped(call);
  return result;
}

Tried Planner::judge(const std::string& name, Dispositions dispositions,
                     Simulation simulation) const {
  Tried tried;
  PlanCandidate& candidate = tried.candidate;
  candidate.name = name;
  candidate.feasible = fits(simulation);
  candidate.peak_bytes = simulation.peak_bytes;
  candidate.replay_seconds = simulation.replay_seconds;
  candidate.move_seconds = simulation.move_seconds;
  candidate.seconds = trace_.seconds + cost(simulation);
  for (std::size_t c = 0; c < trace_.calls.size(); ++c) {
    const auto& call = trace_.calls[c];
    candidate.runs_again += simulation.runs_again[c];
    if (!call.saved || call.bytes == 0) continue;
    ResultCount* count = &candidate.kept;
    if (simulation.runs_again[c] > 0) {
      count = &candidate.recomputed;
    } else if (simulation.moves[c] > 0) {
      count = &candidate.offloaded;
    } else if (!dispositions.empty() && dispositions[c] == Disposition::leave) {
      count = &candidate.compressed;
    }
    ++count->calls;
    count->bytes += call.bytes;
  }
  tried.dispositions = std::move(dispositions);
  tried.simulation = std::move(simulation);
  return tried;
}

void Planner::consider(const std::string& name, Dispositions dispositions) {
  for (const Tried& other : tried_)
    if (other.dispositions == dispositions) return;
  ++simulations_;
  Simulation simulation = simulator_.run(dispositions, options_.limit_bytes);
  tried_.push_back(judge(name, std::move(dispositions), std::move(simulation)));
}

const Tried* Planner::best() const {
  const Tried* best = nullptr;
  for (const Tried& tried : tried_) {
    if (!tried.candidate.feasible) continue;
    if (best == nullptr || tried.candidate.seconds < best->candidate.seconds) best = &tried;
  }
  return best;
}

void Planner::baselines() {
  const Dispositions keep(trace_.calls.size(), Disposition::keep);
  if (options_.recompute) {
    if (trace_.calls.size() <= kMostOnlineCalls) {
      consider("online eviction", {});
      consider("keep all, lookahead eviction", keep);
    }
    consider("recompute all", Dispositions(trace_.calls.size(), Disposition::recompute));
  } else {
    Dispositions fixed = keep;
    consider("keep all", fixed);
  }
  if (options_.offload) {
    Dispositions offload = keep;
    for (std::size_t c = 0; c < offload.size(); ++c)
      if (can(Disposition::offload, static_cast<std::int64_t>(c)))
        offload[c] = Disposition::offload;
    consider("offload all", offload);
  }
}

// Keeps what crosses cuts of even time, moved to where little crosses.
void Planner::even_segments(const Contracted& graph) {
  const auto& values = graph.graph.values;
  const std::size_t n = values.size();
  if (n < 2) return;
  std::vector<std::int64_t> last_reader(n);
  for (std::size_t v = 0; v < n; ++v) {
    last_reader[v] = static_cast<std::int64_t>(v);
    for (const std::int64_t input : values[v].inputs)
      last_reader[input] = static_cast<std::int64_t>(v);
  }
  std::vector<std::int64_t> change(n + 1, 0), crossing;
  std::vector<double> before(n + 1, 0.0);
  for (std::size_t v = 0; v < n; ++v) {
    change[v] += values[v].bytes;
    change[last_reader[v]] -= values[v].bytes;
    before[v + 1] = before[v] + values[v].recompute_ms;
  }
  std::int64_t live = 0;
  for (std::size_t v = 0; v < n; ++v) crossing.push_back(live += change[v]);
  const Dispositions base(trace_.calls.size(), dropped_default_);
  for (std::size_t segments = 2; segments <= n;
       segments = segments + std::max<std::size_t>(1, segments / 3)) {
    solve::KeepSet keep(n, false);
    for (std::size_t s = 1; s < segments; ++s) {
      const double target = before[n] * static_cast<double>(s) / static_cast<double>(segments);
      const double slack = before[n] / static_cast<double>(segments) * 0.4;
      std::size_t cut = n;
      for (auto v = static_cast<std::size_t>(
               std::lower_bound(before.begin() + 1, before.end(), target - slack) - before.begin() -
               1);
           v + 1 < n && before[v + 1] <= target + slack; ++v)
        if (cut == n || crossing[v] < crossing[cut]) cut = v;
      if (cut == n) continue;
      for (std::size_t v = 0; v <= cut; ++v)
        if (last_reader[v] > static_cast<std::int64_t>(cut)) keep[v] = true;
    }
    consider(base::join("even segments, ", segments), from_keep(graph, keep, base));
    if (left() < 0.6 * options_.time_limit_s) break;
  }
}

// Drops those first that cost least time for their bytes.
void Planner::dear_first(const Contracted& graph) {
  const auto& values = graph.graph.values;
  std::vector<std::size_t> order(values.size());
  for (std::size_t v = 0; v < order.size(); ++v) order[v] = v;
  const auto density = [&](std::size_t v) {
    return values[v].recompute_ms / static_cast<double>(std::max<std::int64_t>(1, values[v].bytes));
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return density(a) < density(b); });
  std::int64_t all = 0;
  for (const auto& value : values) all += value.bytes;
  const Dispositions base(trace_.calls.size(), dropped_default_);
  for (int step = 1; step < 16; ++step) {
    solve::KeepSet keep(values.size(), true);
    std::int64_t bytes = 0;
    for (const std::size_t v : order) {
      if (bytes >= all * step / 16) break;
      keep[v] = false;
      bytes += values[v].bytes;
    }
    consider(base::join("cheapest ", step * 100 / 16, "% dropped"), from_keep(graph, keep, base));
    if (left() < 0.5 * options_.time_limit_s) break;
  }
}

// The keep choices of the optimal chain schedule: those of its first forward, and with those of
// later ones.
void Planner::chain(const Contracted& graph) {
  if (!internal::is_chain(graph) || graph.graph.values.size() > 400) return;
  const solve::Chain stages = internal::chain_of(graph);
  const std::int64_t base_bytes = internal::chain_base(graph);
  if (options_.limit_bytes <= base_bytes) return;
  const solve::ChainPlanner planner(stages, options_.limit_bytes - base_bytes);
  const Dispositions base(trace_.calls.size(), dropped_default_);
  for (const double share : {1.0, 0.97, 0.93, 0.88}) {
    const auto limit =
        static_cast<std::int64_t>(share * static_cast<double>(options_.limit_bytes - base_bytes));
    const solve::ChainPlan plan = planner.plan(limit);
    if (!plan.feasible) continue;
    solve::KeepSet first(graph.graph.values.size(), false), every = first;
    bool forward = true;
    for (const solve::ChainOperation& operation : plan.sequence) {
      const auto i = static_cast<std::size_t>(operation.stage);
      forward = forward && operation.kind != solve::ChainOperationKind::backward;
      std::vector<std::size_t> kept;
      if (operation.kind == solve::ChainOperationKind::forward_save) kept.push_back(i);
      if (operation.kind == solve::ChainOperationKind::forward_save ||
          operation.kind == solve::ChainOperationKind::forward_keep)
        if (i > 0) kept.push_back(i - 1);
      for (const std::size_t v : kept) {
        if (forward) first[v] = true;
        if (operation.kind == solve::ChainOperationKind::forward_keep || forward) every[v] = true;
      }
    }
    consider("chain program", from_keep(graph, first, base));
    consider("chain program, all levels", from_keep(graph, every, base));
  }
}

void Planner::keep_or_drop(const std::string& prefix, const Contracted& graph,
                           const Dispositions& base, double share) {
  if (graph.graph.values.empty()) return;
  std::int64_t floor = 0;
  for (const std::int64_t bytes : graph.graph.base_bytes) floor = std::max(floor, bytes);
  const std::int64_t room = std::max<std::int64_t>(0, options_.limit_bytes - floor);
  const double end = elapsed() + share * std::max(0.0, left());
  for (const double held_back : {0.0, 0.04, 0.1, 0.2, 0.35, 0.5}) {
    const auto budget =
        options_.limit_bytes - static_cast<std::int64_t>(held_back * static_cast<double>(room));
    const std::string suffix =
        held_back > 0.0 ? base::join(", ", held_back * 100.0, "% held back") : "";
    consider(prefix + "greedy" + suffix,
             from_keep(graph, solve::drop_greedily(graph.graph, budget).keep, base));
    const double seconds = (end - elapsed()) * (held_back == 0.0 ? 0.5 : 0.4);
    if (seconds < 0.01) continue;
    const solve::KeepPlan plan =
        solve::choose_kept(graph.graph, {.budget_bytes = budget,
                                         .time_limit_s = seconds,
                                         .relative_gap = 0.005,
                                         .max_program_terms = program_terms(seconds)});
    consider(prefix + "keep-or-drop program" + suffix, from_keep(graph, plan.keep, base));
    // Merged values can only be dropped together: a bound of theirs is none of the pass.
    const bool merged = reduced_.members.size() != full_.members.size();
    if (held_back == 0.0 && prefix.empty() && plan.feasible && !merged &&
        options_.compressed.empty() && plan.bound_ms * 1e-3 > bound_s_) {
      bound_s_ = plan.bound_ms * 1e-3;
      bound_name_ = solve::to_string(plan.bound_name);
    }
  }
}

// Leaves to compression what saves a byte for less time than dropping does, most of it or some.
void Planner::compressed() {
  if (options_.compressed.empty()) return;
  struct Choice {
    double seconds_a_byte;
    std::int64_t call;
  };
  std::vector<Choice> choices;
  for (std::size_t c = 0; c < trace_.calls.size(); ++c) {
    const auto call = static_cast<std::int64_t>(c);
    if (!can(Disposition::leave, call)) continue;
    const CompressedResult& small = options_.compressed[c];
    const std::int64_t saved = trace_.calls[c].bytes - small.bytes;
    if (saved <= 0) continue;
    const double seconds = small.encode_seconds +
                           small.decode_seconds * static_cast<double>(trace_.calls[c].reads.size());
    const std::int64_t value = full_.value_of[c];
    const double density = seconds / static_cast<double>(saved);
    if (value >= 0 && options_.recompute &&
        density > full_.graph.values[value].recompute_ms * 1e-3 /
                      static_cast<double>(trace_.calls[c].bytes))
      continue;
    choices.push_back({density, call});
  }
  std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
    return a.seconds_a_byte != b.seconds_a_byte ? a.seconds_a_byte < b.seconds_a_byte
                                                : a.call < b.call;
  });
  for (const double share : {1.0, 0.5, 0.25}) {
    const auto count =
        static_cast<std::size_t>(std::ceil(share * static_cast<double>(choices.size())));
    if (count == 0) return;
    std::vector<std::int64_t> left_bytes(trace_.calls.size(), -1);
    Dispositions base(trace_.calls.size(), dropped_default_);
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t call = choices[i].call;
      left_bytes[call] = options_.compressed[call].bytes;
      base[call] = Disposition::leave;
    }
    Contracted graph = internal::contract(trace_, moves_, left_bytes, options_.recompute);
    if (graph.graph.values.size() > kMostValues) graph = internal::merge(graph, kMergedValues);
    const std::string prefix = base::join("compress ", share * 100.0, "%, ");
    consider(prefix + "rest recomputed", base);
    keep_or_drop(prefix, graph, base, 0.15);
  }
}

// Whatever it takes: for limits that nothing else meets.
void Planner::all_compressed() {
  for (const Disposition rest : {dropped_default_, Disposition::keep}) {
    Dispositions base(trace_.calls.size(), rest);
    bool any = false;
    for (std::size_t c = 0; c < trace_.calls.size(); ++c) {
      if (!can(Disposition::leave, static_cast<std::int64_t>(c)) ||
          options_.compressed[c].bytes >= trace_.calls[c].bytes)
        continue;
      base[c] = Disposition::leave;
      any = true;
    }
    if (!any) return;
    consider(
        rest == Disposition::keep ? "all compressed, rest kept" : "all compressed, rest dropped",
        base);
  }
}

// Changes one result's disposition, or that of two, and keeps what is no slower.
void Planner::improve() {
  const Tried* start = best();
  if (start == nullptr || start->dispositions.empty()) {
    // Online eviction has no dispositions to change: go on from the best that has.
    start = nullptr;
    for (const Tried& tried : tried_)
      if (tried.candidate.feasible && !tried.dispositions.empty() &&
          (start == nullptr || tried.candidate.seconds < start->candidate.seconds))
        start = &tried;
    if (start == nullptr) return;
  }
  const std::string name = start->candidate.name + ", improved";
  Dispositions current = start->dispositions;
  Simulation result = start->simulation;
  double current_cost = cost(result);
  const double first_cost = current_cost;
  std::vector<std::int64_t> calls;
  for (std::size_t c = 0; c < current.size(); ++c)
    if (full_.value_of[c] >= 0) calls.push_back(static_cast<std::int64_t>(c));
  if (calls.empty() || current_cost <= 0.0) return;
  // A fixed seed: equal traces get equal plans.
  std::mt19937_64 random(20260229);
  const auto other = [&](std::int64_t call, Disposition now) {
    std::vector<Disposition> ways;
    for (const Disposition way :
         {Disposition::keep, Disposition::recompute, Disposition::offload, Disposition::leave})
      if (way != now && can(way, call)) ways.push_back(way);
    return ways.empty() ? now : ways[random() % ways.size()];
  };
  std::int64_t idle = 0;
  const auto patience = static_cast<std::int64_t>(std::max<std::size_t>(200, 4 * calls.size()));
  std::vector<std::pair<std::int64_t, Disposition>> undo;
  while (idle < patience && left() > 0.0) {
    undo.clear();
    const auto set = [&](std::int64_t call, Disposition way) {
      if (current[call] == way) return;
      undo.emplace_back(call, current[call]);
      current[call] = way;
    };
    const std::int64_t a = calls[random() % calls.size()];
    switch (random() % 4) {
      case 0:
        set(a, other(a, current[a]));
        break;
      case 1: {  // another one in its place
        const std::int64_t b = calls[random() % calls.size()];
        const Disposition way = current[a];
        set(a, current[b]);
        set(b, way);
        break;
      }
      case 2: {  // its neighbour in its place
        const auto place = std::lower_bound(calls.begin(), calls.end(), a);
        const std::int64_t b = place + 1 == calls.end() ? calls.front() : *(place + 1);
        const Disposition way = current[a];
        set(a, current[b]);
        set(b, way);
        break;
      }
      default: {  // what is made again is kept, and another one not
        if (result.runs_again[a] == 0) {
          set(a, other(a, current[a]));
        } else {
          set(a, Disposition::keep);
          const std::int64_t b = calls[random() % calls.size()];
          if (b != a) set(b, dropped(b));
        }
      }
    }
    if (undo.empty()) {
      ++idle;
      continue;
    }
    // Moving what cannot be moved would be another plan than the one simulated.
    const bool allowed = std::all_of(undo.begin(), undo.end(), [&](const auto& change) {
      return can(current[change.first], change.first);
    });
    if (allowed) {
      ++simulations_;
      Simulation trial = simulator_.run(current, options_.limit_bytes);
      const double trial_cost = cost(trial);
      if (fits(trial) && trial_cost <= current_cost) {
        idle = trial_cost < current_cost * (1.0 - 1e-9) ? 0 : idle + 1;
        current_cost = trial_cost;
        result = std::move(trial);
        continue;
      }
    }
    ++idle;
    for (auto change = undo.rbegin(); change != undo.rend(); ++change)
      current[change->first] = change->second;
  }
  if (current_cost < first_cost)
    tried_.push_back(judge(name, std::move(current), std::move(result)));
}

// At any moment between a result's making and its last read, it is in memory, or will be made again
// or fetched for its own time at least. What does not fit at the fullest moments must be the
// cheapest for its bytes, with a fraction of the last.
void Planner::bound() {
  if (!options_.compressed.empty()) return;
  const auto& values = full_.graph.values;
  std::vector<double> own;
  for (std::size_t v = 0; v < values.size(); ++v) {
    const std::int64_t call = full_.members[v].front();
    double seconds = options_.recompute ? trace_.calls[call].seconds : move_seconds(call);
    if (can(Disposition::offload, call)) seconds = std::min(seconds, move_seconds(call));
    own.push_back(seconds);
  }
  std::vector<std::size_t> order(values.size());
  for (std::size_t v = 0; v < order.size(); ++v) order[v] = v;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return own[a] * static_cast<double>(values[b].bytes) <
           own[b] * static_cast<double>(values[a].bytes);
  });
  const auto last_read = [&](std::size_t v) {
    return trace_.calls[full_.members[v].front()].reads.back();
  };
  // The moments with most above the limit come first.
  const auto moments = static_cast<std::int64_t>(full_.graph.base_bytes.size());
  std::vector<std::int64_t> change(static_cast<std::size_t>(moments) + 1, 0);
  for (const auto& value : values) {
    change[value.made] += value.bytes;
    change[value.last_backward_use + 1] -= value.bytes;
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> over;
  std::int64_t live = 0;
  for (std::int64_t m = 0; m < moments; ++m) {
    live += change[m];
    over.emplace_back(live + full_.graph.base_bytes[m] - options_.limit_bytes, m);
  }
  std::sort(over.rbegin(), over.rend());
  for (std::size_t k = 0; k < std::min<std::size_t>(over.size(), 8); ++k) {
    auto [excess, moment] = over[k];
    double seconds = 0.0;
    for (std::size_t v = 0; v < values.size(); ++v)  // nobody will ask for these again
      if (last_read(v) <= moment && moment <= values[v].last_backward_use)
        excess -= values[v].bytes;
    for (const std::size_t v : order) {
      if (excess <= 0) break;
      if (values[v].last_forward_use >= moment || last_read(v) <= moment) continue;
      const auto share =
          std::min(1.0, static_cast<double>(excess) / static_cast<double>(values[v].bytes));
      seconds += share * own[v];
      excess -= values[v].bytes;
    }
    if (seconds > bound_s_) {
      bound_s_ = seconds;
      bound_name_ = "knapsack at the fullest moment";
    }
  }
}

// The least limit that some plan of those tried meets. A plan is bisected only if it meets a limit
// below the least so far: few do, and near the least a simulation is slow.
void Planner::find_least() {
  if (least_ >= 0) return;
  std::int64_t low = 0;  // not enough
  for (const std::int64_t bytes : reduced_.graph.base_bytes) low = std::max(low, bytes - 1);
  least_ = plain_peak_;
  const double until = elapsed() + std::max(1.0, options_.time_limit_s);
  const auto step = [&] { return std::max<std::int64_t>(1, least_ / 1000); };
  const auto meets = [&](const Tried& tried, std::int64_t limit) {
    ++simulations_;
    return fits(simulator_.run(tried.dispositions, limit));
  };
  // The last ones tried are made for a low peak.
  for (std::size_t i = tried_.size(); i-- > 0 && elapsed() < until;) {
    if (least_ - step() <= low || !meets(tried_[i], least_ - step())) continue;
    least_ -= step();
    for (std::int64_t fails = low; least_ - fails > step() && elapsed() < until;) {
      const std::int64_t middle = fails + (least_ - fails) / 2;
      if (meets(tried_[i], middle)) {
        least_ = middle;
      } else {
        fails = middle;
      }
    }
  }
}

std::int64_t Planner::least() {
  baselines();
  even_segments(full_);
  if (!reduced_.graph.values.empty()) {
    const Dispositions base(trace_.calls.size(), dropped_default_);
    consider("least peak",
             from_keep(reduced_,
                       solve::least_peak(reduced_.graph,
                                         {.time_limit_s = std::max(0.05, left() * 0.5),
                                          .max_program_terms = program_terms(left() * 0.5)})
                           .keep,
                       base));
  }
  all_compressed();
  find_least();
  return least_;
}

MemoryPlan Planner::plan() {
  const Dispositions base(trace_.calls.size(), dropped_default_);
  baselines();
  const Tried* kept = best();
  const bool plain_fits = kept != nullptr && cost(kept->simulation) <= 0.0;
  if (!plain_fits) {
    if (options_.compressed.empty()) bound();  // which knows nothing of it
    chain(reduced_);
    if (reduced_.members.size() != full_.members.size() && full_.graph.values.size() <= 20'000)
      consider(
          "greedy, all results",
          from_keep(full_, solve::drop_greedily(full_.graph, options_.limit_bytes).keep, base));
    even_segments(full_);
    dear_first(full_);
    keep_or_drop("", reduced_, base, options_.compressed.empty() ? 0.5 : 0.3);
    compressed();
    all_compressed();
    improve();
  } else {
    even_segments(full_);
  }
  if (!reduced_.graph.values.empty())
    consider("least peak",
             from_keep(reduced_,
                       solve::least_peak(
                           reduced_.graph,
                           {.time_limit_s = std::max(0.05, 0.15 * options_.time_limit_s),
                            .max_program_terms = program_terms(0.15 * options_.time_limit_s)})
                           .keep,
                       base));
  find_least();
  const Tried* chosen = best();
  GRADUS_CHECK("plan", chosen != nullptr, "a pass of this program needs at least ", least_,
               " bytes (", base::format_bytes(least_),
               ") with the techniques allowed; got a limit of ", options_.limit_bytes,
               ". Raise the limit, take a smaller batch or allow more techniques");
  MemoryPlan plan;
  plan.limit_bytes = options_.limit_bytes;
  plan.dispositions = chosen->dispositions;
  plan.simulation = chosen->simulation;
  plan.predicted_peak_bytes = chosen->candidate.peak_bytes;
  plan.predicted_seconds = chosen->candidate.seconds;
  plan.plain_seconds = trace_.seconds - trace_.recording_seconds;
  plan.predicted_ratio =
      plan.plain_seconds > 0.0 ? plan.predicted_seconds / plan.plain_seconds : 1.0;
  plan.plain_peak_bytes = plain_peak_;
  plan.least_bytes = std::min(least_, options_.limit_bytes);
  plan.method = chosen->candidate.name;
  plan.bound_seconds = bound_s_;
  plan.bound_name = bound_name_;
  const double spent = cost(chosen->simulation);
  plan.gap = spent > 0.0 ? std::max(0.0, (spent - bound_s_) / spent) : 0.0;
  plan.graph_values = static_cast<std::int64_t>(reduced_.graph.values.size());
  plan.simulations = simulations_;
  for (const Tried& tried : tried_) plan.candidates.push_back(tried.candidate);
  std::stable_sort(plan.candidates.begin(), plan.candidates.end(),
                   [](const PlanCandidate& a, const PlanCandidate& b) {
                     if (a.feasible != b.feasible) return a.feasible;
                     return a.feasible && a.seconds < b.seconds;
                   });
  plan.planning_seconds = elapsed();
  return plan;
}

}  // namespace

MemoryPlan make_plan(const StepTrace& trace, const PlanOptions& options) {
  const StepTrace separated = internal::separate_unsaved(trace);
  MemoryPlan plan = Planner(separated, options).plan();
  if (!plan.dispositions.empty()) plan.eviction = eviction_plan(trace, plan.dispositions);
  return plan;
}

std::int64_t least_bytes(const StepTrace& trace, const PlanOptions& options) {
  return Planner(internal::separate_unsaved(trace), options).least();
}

}  // namespace gradus::plan
