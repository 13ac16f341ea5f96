#include <gradus/plan/simulate.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <utility>

#include <gradus/base/error.h>
#include <gradus/plan/internal/separate.h>

namespace gradus::plan {

using recompute::Disposition;
using recompute::StepTrace;
using recompute::TracedCall;

namespace {

using Call = std::int32_t;

constexpr std::int64_t kNever = -1;
// A node of backward runs a few calls with what it unpacked; a result that autograd keeps for
// longer after its last read is kept for other reasons (retain_graph), and nobody uses it.
constexpr std::int64_t kLongestUse = 16;

// Lists of calls by moment, in one array.
class ByMoment {
 public:
  ByMoment() = default;
  ByMoment(std::size_t moments, const std::vector<std::pair<std::int64_t, Call>>& entries)
      : start_(moments + 1, 0), calls_(entries.size()) {
    for (const auto& [moment, call] : entries) ++start_[static_cast<std::size_t>(moment) + 1];
    for (std::size_t m = 0; m < moments; ++m) start_[m + 1] += start_[m];
    std::vector<std::size_t> next = start_;
    for (const auto& [moment, call] : entries)
      calls_[next[static_cast<std::size_t>(moment)]++] = call;
  }
  const Call* begin(std::size_t moment) const { return calls_.data() + start_[moment]; }
  const Call* end(std::size_t moment) const { return calls_.data() + start_[moment + 1]; }

 private:
  std::vector<std::size_t> start_;
  std::vector<Call> calls_;
};

struct Range {
  const Call* first;
  const Call* last;
  const Call* begin() const { return first; }
  const Call* end() const { return last; }
};
Range at(const ByMoment& lists, std::int64_t moment) {
  const auto m = static_cast<std::size_t>(moment);
  return {lists.begin(m), lists.end(m)};
}

double transfer_seconds(double latency_s, double bytes_per_s, std::int64_t bytes) {
  return bytes_per_s > 0.0 ? latency_s + static_cast<double>(bytes) / bytes_per_s : 0.0;
}

}  // namespace

struct internal::TraceTables {
  struct Item {
    std::int64_t bytes = 0, compressed_bytes = 0;
    std::int64_t moment = 0, held_until = 0, released_after = kNever, life_end = kNever;
    std::int64_t workspace_bytes = 0;  // what a replay needs beside the results
    double seconds = 0.0, encode_seconds = 0.0, decode_seconds = 0.0;
    bool saved = false, can_run_again = false;
    std::size_t first_input = 0, last_input = 0, first_read = 0, last_read = 0;
  };
  std::vector<Item> items;
  std::vector<Call> inputs;  // views replaced by what they view
  std::vector<std::int64_t> reads;
  std::vector<std::int64_t> other, rest;          // at a moment, and just before it
  std::vector<std::vector<std::int64_t>> levels;  // on the way to a moment's peak
  ByMoment made, held_ends, releases, deaths, read_by;
  offload::Bandwidth stash;
  std::int64_t moments = 0;

  TraceTables(const StepTrace& trace, const SimulationOptions& options);
  void add_inputs(const StepTrace& trace);
  void find_lives();
};

internal::TraceTables::TraceTables(const StepTrace& trace, const SimulationOptions& options)
    : stash(options.stash), moments(static_cast<std::int64_t>(trace.moments.size())) {
  const auto count = static_cast<std::int64_t>(trace.calls.size());
  GRADUS_CHECK(
      "plan",
      options.compressed.empty() || static_cast<std::int64_t>(options.compressed.size()) == count,
      "compressed must have one entry for each of the ", count, " calls; got ",
      options.compressed.size());
  for (const auto& moment : trace.moments) {
    other.push_back(moment.other_bytes);
    levels.push_back(moment.levels);
  }
  for (std::int64_t m = 0; m < moments; ++m)
    rest.push_back(m == 0 ? other[0] : std::min(trace.moments[m - 1].rest_bytes, other[m]));
  std::vector<std::pair<std::int64_t, Call>> at_made, at_read, at_hold_end, at_release;
  for (std::int64_t c = 0; c < count; ++c) {
    const TracedCall& call = trace.calls[c];
    GRADUS_CHECK(
        "plan",
        call.moment >= 0 && call.moment < moments && call.bytes >= 0 &&
            std::isfinite(call.seconds) && call.seconds >= 0.0,
        "a traced call must run at a moment of the trace, with bytes and seconds >= 0; call ", c,
        " (", call.op, ") has moment ", call.moment, " of ", moments, ", ", call.bytes, " bytes, ",
        call.seconds, " s");
    Item item;
    item.bytes = call.bytes;
    item.moment = call.moment;
    item.held_until = std::clamp(call.held_until, call.moment, moments - 1);
    item.saved = call.saved;
    // A graph that is not let go keeps it to the end.
    if (item.saved)
      item.released_after = call.released_after < 0
                                ? moments - 1
                                : std::clamp(call.released_after, call.moment, moments - 1);
    item.can_run_again = call.can_run_again;
    item.seconds = call.seconds;
    item.compressed_bytes = call.bytes;
    if (!options.compressed.empty()) {
      const CompressedResult& small = options.compressed[c];
      if (small.bytes > 0) item.compressed_bytes = small.bytes;
      item.encode_seconds = small.encode_seconds;
      item.decode_seconds = small.decode_seconds;
    }
    item.workspace_bytes =
        call.copied_bytes +
        std::max<std::int64_t>(
            0, other[call.moment] -
                   std::max(rest[call.moment], trace.moments[call.moment].rest_bytes));
    item.first_read = reads.size();
    if (item.saved) {
      for (const std::int64_t read : call.reads) {
        GRADUS_CHECK("plan",
                     read >= call.moment && read < moments &&
                         (reads.size() == item.first_read || reads.back() <= read),
                     "reads must be moments behind the call, ascending; call ", c, " (", call.op,
                     ") of moment ", call.moment, " has ", read);
        if (reads.size() > item.first_read && reads.back() == read) continue;
        reads.push_back(read);
        at_read.emplace_back(read, static_cast<Call>(c));
      }
    }
    item.last_read = reads.size();
    at_made.emplace_back(call.moment, static_cast<Call>(c));
    at_hold_end.emplace_back(item.held_until, static_cast<Call>(c));
    if (item.saved) at_release.emplace_back(item.released_after, static_cast<Call>(c));
    items.push_back(item);
  }
  add_inputs(trace);
  find_lives();
  std::vector<std::pair<std::int64_t, Call>> at_death;
  for (std::size_t c = 0; c < items.size(); ++c)
    if (items[c].life_end != kNever) at_death.emplace_back(items[c].life_end, static_cast<Call>(c));
  const auto size = static_cast<std::size_t>(moments);
  made = ByMoment(size, at_made);
  held_ends = ByMoment(size, at_hold_end);
  releases = ByMoment(size, at_release);
  deaths = ByMoment(size, at_death);
  read_by = ByMoment(size, at_read);
}

// A view holds no memory of its own: whoever reads it reads what it views.
void internal::TraceTables::add_inputs(const StepTrace& trace) {
  std::vector<std::vector<Call>> direct(items.size());
  for (std::size_t c = 0; c < items.size(); ++c) {
    std::vector<Call>& own = direct[c];
    for (const std::int64_t input : trace.calls[c].inputs) {
      GRADUS_CHECK("plan", input >= 0 && input < static_cast<std::int64_t>(c),
                   "inputs must be calls before; call ", c, " (", trace.calls[c].op, ") has ",
                   input);
      if (items[input].bytes > 0) {
        own.push_back(static_cast<Call>(input));
      } else {
        own.insert(own.end(), direct[input].begin(), direct[input].end());
      }
    }
    std::vector<Call> once;
    for (const Call input : own)
      if (std::find(once.begin(), once.end(), input) == once.end()) once.push_back(input);
    own = std::move(once);
    items[c].first_input = inputs.size();
    inputs.insert(inputs.end(), own.begin(), own.end());
    items[c].last_input = inputs.size();
  }
}

// Until when a result may be needed, by backward or to make another one.
void internal::TraceTables::find_lives() {
  for (std::size_t c = items.size(); c-- > 0;) {
    Item& item = items[c];
    item.life_end = std::max(item.life_end, item.released_after);
    if (!item.can_run_again) continue;  // what made it is not remembered
    for (std::size_t i = item.first_input; i < item.last_input; ++i)
      items[inputs[i]].life_end = std::max(items[inputs[i]].life_end, item.life_end);
  }
}

namespace {

// What a heap of results to drop holds; entries of an older stamp are void.
struct Entry {
  std::int64_t key;  // least first
  Call call;
  std::int32_t stamp;
};
struct Later {
  bool operator()(const Entry& a, const Entry& b) const {
    return a.key != b.key ? a.key > b.key : a.call > b.call;
  }
};
using Heap = std::priority_queue<Entry, std::vector<Entry>, Later>;

// One pass. State of each call's results, and the order in which they go.
class Pass {
 public:
  Pass(const internal::TraceTables& tables, const std::vector<Disposition>& plan,
       std::int64_t limit);
  Simulation run();

 private:
  struct State {
    bool made = false;       // ran in this pass
    bool in_memory = false;  // in full
    bool held = false;       // by the program
    bool kept = false;       // by the budget, which may drop it
    bool saved = false;      // autograd still keeps it
    bool stashed = false;
    bool listed = false;  // in scored_
    std::int32_t pins = 0;
    std::int32_t stamp = 0;
    std::size_t next_read = 0;
    std::int64_t last_used = 0;
  };
  using Item = internal::TraceTables::Item;

  bool online() const { return plan_.empty(); }
  Disposition disposition(Call c) const { return online() ? Disposition::keep : plan_[c]; }
  // The budget may drop it: it was recorded, and not left to others.
  bool managed(Call c) const {
    return tables_.items[c].can_run_again && disposition(c) != Disposition::leave;
  }
  bool left(Call c) const { return disposition(c) == Disposition::leave && tables_.items[c].saved; }

  void begin(Call c);
  void read(Call c);
  void end_moment();
  void take(Call c);
  void drop(Call c);
  void forget(Call c);
  void list(Call c);
  bool evictable(Call c) const {
    const State& state = states_[c];
    return state.kept && state.in_memory && !state.held && state.pins == 0;
  }
  bool make_room(std::int64_t more, std::int64_t other);
  void evict_queued(Heap& heap, std::int64_t target);
  void evict_scored(std::int64_t target);
  double cost_of(Call c);
  void materialise(Call c);
  void note(std::int64_t extra, std::int64_t other);

  const internal::TraceTables& tables_;
  const std::vector<Disposition>& plan_;
  const std::int64_t limit_;
  Simulation result_;
  std::vector<State> states_;
  std::vector<std::vector<Call>> unpin_;  // by moment
  Heap unwanted_, planned_;
  std::vector<Call> scored_;
  std::vector<double> cost_;
  std::vector<std::int32_t> cost_of_round_;
  std::int32_t round_ = 0;
  std::int64_t now_ = 0, clock_ = 0;
  std::int64_t memory_ = 0;  // results in memory, in full or small
  bool failed_ = false;
};

Pass::Pass(const internal::TraceTables& tables, const std::vector<Disposition>& plan,
           std::int64_t limit)
    : tables_(tables),
      plan_(plan),
      limit_(limit),
      states_(tables.items.size()),
      unpin_(static_cast<std::size_t>(tables.moments)),
      cost_(tables.items.size(), 0.0),
      cost_of_round_(tables.items.size(), 0) {
  result_.runs_again.assign(tables.items.size(), 0);
  result_.moves.assign(tables.items.size(), 0);
  result_.moment_bytes.reserve(static_cast<std::size_t>(tables.moments));
}

Simulation Pass::run() {
  for (now_ = 0; now_ < tables_.moments && !failed_; ++now_) {
    result_.moment_bytes.push_back(0);
    for (const Call c : at(tables_.read_by, now_)) {
      if (!failed_) read(c);
    }
    if (failed_) break;
    for (const std::int64_t level : tables_.levels[now_]) {
      if (!make_room(0, level)) break;
    }
    if (failed_) break;
    for (const Call c : at(tables_.made, now_)) begin(c);
    if (!make_room(0, tables_.other[now_])) break;
    end_moment();
  }
  result_.feasible = !failed_;
  for (const std::int64_t bytes : result_.moment_bytes)
    result_.peak_bytes = std::max(result_.peak_bytes, bytes);
  return std::move(result_);
}

// The program runs the call.
void Pass::begin(Call c) {
  const Item& item = tables_.items[c];
  State& state = states_[c];
  ++clock_;
  state.made = state.in_memory = state.held = true;
  state.saved = item.saved;
  state.last_used = clock_;
  state.next_read = item.first_read;
  memory_ += item.bytes;
  if (left(c)) {
    memory_ += item.compressed_bytes;
    result_.move_seconds += item.encode_seconds;
  }
  for (std::size_t i = item.first_input; i < item.last_input; ++i)
    states_[tables_.inputs[i]].last_used = clock_;
  state.kept = item.saved && managed(c);
}

// Backward asks for it; its node holds it for the calls that it runs.
void Pass::read(Call c) {
  const Item& item = tables_.items[c];
  State& state = states_[c];
  ++clock_;
  state.last_used = clock_;
  if (left(c)) {
    result_.move_seconds += item.decode_seconds;
    if (!state.in_memory) {
      ++state.pins;
      if (!make_room(item.bytes, tables_.rest[now_])) return;
      memory_ += item.bytes;
      state.in_memory = true;
      --state.pins;
    }
  } else {
    materialise(c);
    if (failed_) return;
  }
  ++state.pins;
  while (state.next_read < item.last_read && tables_.reads[state.next_read] <= now_)
    ++state.next_read;
  std::int64_t until = now_;
  if (state.next_read == item.last_read && item.released_after - now_ <= kLongestUse)
    until = std::max(until, item.released_after);
  unpin_[until].push_back(c);
}

void Pass::end_moment() {
  for (const Call c : unpin_[now_]) {
    State& state = states_[c];
    if (--state.pins == 0) {
      if (left(c)) {
        if (!state.held && state.in_memory) {
          state.in_memory = false;
          memory_ -= tables_.items[c].bytes;
        }
      } else if (state.in_memory) {
        list(c);
      }
    }
  }
  for (const Call c : at(tables_.releases, now_)) {
    State& state = states_[c];
    if (!state.saved) continue;
    state.saved = false;
    if (left(c)) memory_ -= tables_.items[c].compressed_bytes;
    if (state.pins == 0) state.kept = false;
    forget(c);
  }
  for (const Call c : at(tables_.held_ends, now_)) {
    states_[c].held = false;
    forget(c);
    if (states_[c].in_memory) list(c);
  }
  for (const Call c : at(tables_.deaths, now_)) {
    states_[c].kept = false;
    forget(c);
  }
}

// Frees what nobody holds any more.
void Pass::forget(Call c) {
  const Item& item = tables_.items[c];
  State& state = states_[c];
  if (!state.in_memory || state.held || state.kept || state.pins > 0) return;
  // The tape's recipes hold what they cannot make again.
  const bool needed = !item.can_run_again && item.life_end > now_;
  const bool autograd = state.saved && !managed(c) && !left(c);
  if (needed || autograd) return;
  state.in_memory = false;
  memory_ -= item.bytes;
}

// Puts an evictable result where eviction finds it.
void Pass::list(Call c) {
  const Item& item = tables_.items[c];
  State& state = states_[c];
  if (!evictable(c) || item.bytes == 0 || limit_ == 0) return;
  ++state.stamp;
  if (!online()) {
    if (!state.saved) {
      unwanted_.push({c, c, state.stamp});
      return;
    }
    if (plan_[c] != Disposition::keep) {
      const std::int64_t next =
          state.next_read < item.last_read ? tables_.reads[state.next_read] : tables_.moments;
      planned_.push({-next, c, state.stamp});
      return;
    }
  }
  if (!state.listed) {
    state.listed = true;
    scored_.push_back(c);
  }
}

void Pass::drop(Call c) {
  const Item& item = tables_.items[c];
  State& state = states_[c];
  state.in_memory = false;
  state.kept = false;
  ++state.stamp;
  memory_ -= item.bytes;
  ++result_.evictions;
  // A copy once away stays there.
  if (!online() && plan_[c] == Disposition::offload && state.saved && !state.stashed) {
    state.stashed = true;
    ++result_.moves[c];
    result_.moved_bytes += item.bytes;
    result_.move_seconds += transfer_seconds(tables_.stash.write_latency_s,
                                             tables_.stash.write_bytes_per_s, item.bytes);
  }
}

void Pass::note(std::int64_t extra, std::int64_t other) {
  std::int64_t& moment = result_.moment_bytes.back();
  moment = std::max(moment, memory_ + extra + other);
}

// Drops results until @p more bytes fit beside all else.
bool Pass::make_room(std::int64_t more, std::int64_t other) {
  if (limit_ > 0 && memory_ + more + other > limit_) {
    const std::int64_t target = limit_ - more - other;
    evict_queued(unwanted_, target);
    evict_queued(planned_, target);
    if (memory_ > target) evict_scored(target);
    if (memory_ > target) {
      failed_ = true;
      result_.failed_moment = now_;
    }
  }
  note(more, other);
  return !failed_;
}

void Pass::evict_queued(Heap& heap, std::int64_t target) {
  std::vector<Entry> aside;
  while (memory_ > target && !heap.empty()) {
    const Entry entry = heap.top();
    heap.pop();
    const State& state = states_[entry.call];
    if (state.stamp != entry.stamp) continue;
    if (evictable(entry.call)) {
      drop(entry.call);
    } else if (state.in_memory && state.kept) {
      aside.push_back(entry);  // pinned
    }
  }
  for (const Entry& entry : aside) heap.push(entry);
}

// What it takes to make a result again: its call, and all before it whose results are gone.
double Pass::cost_of(Call first) {
  std::vector<Call> stack{first};
  while (!stack.empty()) {
    const Call c = stack.back();
    if (cost_of_round_[c] == round_) {
      stack.pop_back();
      continue;
    }
    const Item& item = tables_.items[c];
    double sum = item.seconds;
    bool complete = true;
    for (std::size_t i = item.first_input; i < item.last_input; ++i) {
      const Call input = tables_.inputs[i];
      if (states_[input].in_memory || !tables_.items[input].can_run_again) continue;
      if (states_[input].stashed) continue;
      if (cost_of_round_[input] == round_) {
        sum += cost_[input];
      } else {
        stack.push_back(input);
        complete = false;
      }
    }
    if (!complete) continue;
    cost_[c] = sum;
    cost_of_round_[c] = round_;
    stack.pop_back();
  }
  return cost_[first];
}

void Pass::evict_scored(std::int64_t target) {
  ++round_;
  struct Candidate {
    double score;
    Call call;
  };
  std::vector<Candidate> candidates;
  std::size_t left_over = 0;
  for (const Call c : scored_) {
    State& state = states_[c];
    if (!state.in_memory || !state.kept || state.held) {
      state.listed = false;
      continue;
    }
    scored_[left_over++] = c;
    if (state.pins > 0) continue;
    const Item& item = tables_.items[c];
    double score = 0.0;
    if (state.saved) {
      // Nobody asks again: as if in the far future.
      double wait = static_cast<double>(clock_ - state.last_used);
      if (!online())
        wait = state.next_read < item.last_read
                   ? static_cast<double>(tables_.reads[state.next_read] - now_)
                   : static_cast<double>(std::numeric_limits<std::int64_t>::max());
      score = (cost_of(c) + 1e-7) / (static_cast<double>(item.bytes) * (wait + 1.0));
    }
    candidates.push_back({score, c});
  }
  scored_.resize(left_over);
  const auto later = [](const Candidate& a, const Candidate& b) {
    return a.score != b.score ? a.score > b.score : a.call > b.call;
  };
  std::make_heap(candidates.begin(), candidates.end(), later);
  auto end = candidates.end();
  while (memory_ > target && end != candidates.begin()) {
    std::pop_heap(candidates.begin(), end, later);
    drop((--end)->call);
  }
}

// Marks a result as kept by the budget, which found it with the program or made it.
void Pass::take(Call c) {
  State& state = states_[c];
  if (!managed(c) || state.kept) return;
  state.kept = true;
  list(c);
}

void Pass::materialise(Call wanted) {
  struct Visit {
    Call call;
    std::vector<Call> pinned;
  };
  std::vector<Visit> path;
  path.push_back({wanted, {}});
  const auto unpin = [&](Visit& visit) {
    for (const Call c : visit.pinned)
      if (--states_[c].pins == 0) list(c);
    visit.pinned.clear();
  };
  while (!path.empty() && !failed_) {
    Visit& visit = path.back();
    const Call c = visit.call;
    const Item& item = tables_.items[c];
    State& state = states_[c];
    unpin(visit);
    if (state.in_memory) {
      take(c);
      path.pop_back();
      continue;
    }
    if (state.stashed) {
      if (!make_room(item.bytes, tables_.rest[now_])) break;
      result_.move_seconds += transfer_seconds(tables_.stash.read_latency_s,
                                               tables_.stash.read_bytes_per_s, item.bytes);
      memory_ += item.bytes;
      state.in_memory = state.kept = true;
      list(c);
      path.pop_back();
      continue;
    }
    if (!item.can_run_again) {
      failed_ = true;
      result_.failed_moment = now_;
      break;
    }
    Call missing = -1;
    for (std::size_t i = item.first_input; i < item.last_input; ++i) {
      const Call input = tables_.inputs[i];
      if (states_[input].in_memory) {
        take(input);
        ++states_[input].pins;
        visit.pinned.push_back(input);
      } else if (missing < 0) {
        missing = input;
      }
    }
    if (missing >= 0) {
      path.push_back({missing, {}});
      continue;
    }
    for (const std::int64_t level : tables_.levels[item.moment]) {
      const std::int64_t more =
          std::min(level - tables_.rest[item.moment], item.bytes + item.workspace_bytes);
      if (more > 0 && !make_room(more, tables_.rest[now_])) break;
    }
    if (failed_ || !make_room(item.bytes + item.workspace_bytes, tables_.rest[now_])) break;
    result_.replay_seconds += item.seconds;
    ++result_.runs_again[c];
    memory_ += item.bytes;
    state.in_memory = true;
    state.kept = true;
    state.last_used = clock_;
    unpin(visit);
    list(c);
    path.pop_back();
  }
  for (Visit& visit : path) unpin(visit);
}

}  // namespace

Simulator::Simulator(const StepTrace& trace, SimulationOptions options)
    : tables_(std::make_unique<const internal::TraceTables>(internal::separate_unsaved(trace),
                                                            options)) {}
Simulator::~Simulator() = default;
Simulator::Simulator(Simulator&&) noexcept = default;
Simulator& Simulator::operator=(Simulator&&) noexcept = default;

Simulation Simulator::run(const std::vector<Disposition>& plan, std::int64_t limit_bytes) const {
  GRADUS_CHECK("plan", plan.empty() || plan.size() == tables_->items.size(),
               "a plan must have one disposition for each of the ", tables_->items.size(),
               " calls; got ", plan.size());
  GRADUS_CHECK("plan", limit_bytes >= 0, "limit_bytes must be >= 0; got ", limit_bytes);
  return Pass(*tables_, plan, limit_bytes).run();
}

Simulation simulate(const StepTrace& trace, const recompute::EvictionPlan& plan,
                    std::int64_t limit_bytes, SimulationOptions options) {
  std::vector<Disposition> dispositions;
  dispositions.reserve(plan.calls.size());
  for (const auto& call : plan.calls) dispositions.push_back(call.disposition);
  return Simulator(trace, std::move(options)).run(dispositions, limit_bytes);
}

recompute::EvictionPlan eviction_plan(const StepTrace& trace,
                                      const std::vector<Disposition>& dispositions) {
  GRADUS_CHECK("plan", dispositions.size() == trace.calls.size(),
               "there must be one disposition for each of the ", trace.calls.size(), " calls; got ",
               dispositions.size());
  recompute::EvictionPlan plan;
  plan.calls.reserve(trace.calls.size());
  for (std::size_t c = 0; c < trace.calls.size(); ++c)
    plan.calls.push_back(
        {trace.calls[c].op, trace.calls[c].bytes, dispositions[c], trace.calls[c].reads});
  return plan;
}

}  // namespace gradus::plan
