#include <gradus/plan/planned_budget.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/plan/budget_compression.h>
#include <gradus/plan/store_stash.h>

namespace gradus::plan {

using recompute::StepTrace;

namespace {

// What outlives the first pass (an optimizer's state, gradients) is in memory from the beginning of
// the next one.
StepTrace with_growth(StepTrace trace, std::int64_t live_bytes) {
  if (trace.moments.empty()) return trace;
  const std::int64_t growth = live_bytes - trace.moments.front().rest_bytes;
  if (growth <= 0) return trace;
  // Gradients that the pass made are counted from where they were made; at its end there is no less
  // than what is there now.
  const std::int64_t end = trace.moments.back().rest_bytes;
  for (auto& moment : trace.moments) {
    const std::int64_t made =
        std::clamp<std::int64_t>(moment.rest_bytes - trace.moments.front().rest_bytes, 0,
                                 std::max<std::int64_t>(0, end - trace.moments.front().rest_bytes));
    const std::int64_t more = std::max<std::int64_t>(0, growth - (moment.backward ? made : 0));
    moment.other_bytes += more;
    moment.rest_bytes += more;
    for (std::int64_t& level : moment.levels) level += more;
  }
  return trace;
}

// The calls of a pass are what a program is known by.
bool same_calls(const StepTrace& a, const StepTrace& b) {
  return std::equal(
      a.calls.begin(), a.calls.end(), b.calls.begin(), b.calls.end(),
      [](const auto& l, const auto& r) { return l.op == r.op && l.bytes == r.bytes; });
}

// A program that the budget has seen: training with one shape, say.
struct Known {
  std::shared_ptr<const StepTrace> trace;  // the last one that was planned for
  std::shared_ptr<const MemoryPlan> plan;  // null: refused
  recompute::ProgramPlan eviction;
  std::string refusal;
  std::int64_t traced = 0;       // passes planned for; two are enough
  std::int64_t last_pass = 0;    // of it
  std::int64_t least_start = 0;  // bytes that a pass must begin with to be planned for anew
};

constexpr std::int64_t kTraces = 2;
constexpr std::int64_t kPatience = 16;  // passes of known programs while others are waited for
// What is in memory before a pass has grown if it is more by this part of the limit: optimizer
// state that came behind several micro-batches.
constexpr std::int64_t kGrowth = 50;

std::int64_t bytes_at_start(const StepTrace& trace) {
  return trace.moments.front().rest_bytes + trace.moments.front().own_bytes;
}

}  // namespace

struct PlannedBudget::State {
  explicit State(const PlannedBudgetOptions& given) : options(given) {}

  void begin(const std::weak_ptr<State>& self) {
    recompute::MemoryBudgetOptions budget_options;
    budget_options.limit_bytes = options.limit_bytes;
    if (options.offload) {
      budget_options.stash = make_stash(*options.offload);
      if (!options.bandwidth) options.bandwidth = offload::measure_bandwidth(*options.offload);
    }
    if (options.compress) {
      compression.emplace(options.compression.value_or(compress::CompressOptions()));
      budget_options.encoder = compression->encoder();
      budget_options.encode_unplanned = true;
    }
    budget = std::make_unique<recompute::MemoryBudget>(budget_options);
    trace_passes(self);
    budget->on_pass([self](const recompute::EvictionPlan* followed) {
      if (const auto state = self.lock()) state->check(self, followed);
    });
  }

  void trace_passes(const std::weak_ptr<State>& self) {
    tracing = true;
    learned = false;
    idle = 0;
    if (compression) compression->begin_pass(options.planning_seconds);
    budget->trace(
        [self](const StepTrace& pass) {
          if (const auto state = self.lock()) state->on_trace(pass);
        },
        [self](const plane::saved::Value& value, std::int64_t call) {
          const auto state = self.lock();
          if (state && state->compression) state->compression->saved(value, call);
        });
  }

  Known& known_of(const StepTrace& pass) {
    const auto found = std::find_if(known.begin(), known.end(), [&](const Known& program) {
      return same_calls(*program.trace, pass);
    });
    if (found != known.end()) return *found;
    if (static_cast<std::int64_t>(known.size()) >= options.max_programs) {
      known.erase(std::min_element(known.begin(), known.end(), [](const Known& l, const Known& r) {
        return l.last_pass < r.last_pass;
      }));
    }
    known.emplace_back().trace = std::make_shared<const StepTrace>(pass);
    return known.back();
  }

  void on_trace(const StepTrace& pass) {
    std::vector<CompressedResult> compressed;
    if (compression) {
      compressed = compression->results(pass);
      compression->begin_pass(options.planning_seconds);
    }
    // A pass without backward, as an evaluation, says nothing about training.
    const bool backward = std::any_of(pass.moments.begin(), pass.moments.end(),
                                      [](const auto& moment) { return moment.backward; });
    if (!backward || pass.calls.empty()) return;
    Known& program = known_of(pass);
    program.last_pass = ++passes;
    if (program.traced >= kTraces || bytes_at_start(pass) < program.least_start) {
      ++idle;
    } else {
      const bool first = program.traced++ == 0;
      learned = true;
      idle = 0;
      make(program, first ? with_growth(pass, base::MemoryTracker::install().live().total()) : pass,
           std::move(compressed),
           first ? options.planning_seconds * 0.25 : options.planning_seconds);
    }
    show(program);
    const bool done = std::all_of(known.begin(), known.end(),
                                  [](const Known& each) { return each.traced >= kTraces; });
    if (!(done && learned) && idle < kPatience && plans < options.max_plans) return;
    tracing = false;
    budget->trace(nullptr);
    strayed_before = budget->statistics().strayed_passes;
  }

  void make(Known& program, StepTrace pass, std::vector<CompressedResult> compressed,
            double seconds) {
    PlanOptions plan_options;
    plan_options.limit_bytes = options.limit_bytes;
    plan_options.offload = options.offload ? options.bandwidth : std::nullopt;
    plan_options.time_limit_s = seconds;
    plan_options.compressed = std::move(compressed);
    program.plan = nullptr;
    program.refusal.clear();
    try {
      program.plan = std::make_shared<const MemoryPlan>(make_plan(pass, plan_options));
    } catch (const UserError& error) {
      // The traced pass did fit: the simulation errs on the safe side. Online eviction goes on.
      program.refusal = error.what();
    }
    const bool online = program.plan == nullptr || program.plan->dispositions.empty();
    program.eviction = {.plan = std::make_shared<const recompute::EvictionPlan>(
                            online ? eviction_plan(pass, std::vector(pass.calls.size(),
                                                                     recompute::Disposition::keep))
                                   : program.plan->eviction),
                        .online = online};
    program.trace = std::make_shared<const StepTrace>(std::move(pass));
    {
      const std::lock_guard lock(mutex);
      ++plans;
    }
    std::vector<const Known*> latest_first;
    for (const Known& each : known) latest_first.push_back(&each);
    std::sort(latest_first.begin(), latest_first.end(),
              [](const Known* l, const Known* r) { return l->last_pass > r->last_pass; });
    std::vector<recompute::ProgramPlan> evictions;
    for (const Known* each : latest_first) evictions.push_back(each->eviction);
    budget->set_plans(std::move(evictions));
    if (program.plan != nullptr && options.on_plan) options.on_plan(*program.plan);
  }

  // Says that the pass that ended was of @p program.
  void show(const Known& program) {
    const std::lock_guard lock(mutex);
    plan = program.plan;
    trace = program.plan != nullptr ? program.trace : nullptr;
    refusal = program.refusal;
  }

  // Between passes: do they still follow their plans?
  void check(const std::weak_ptr<State>& self, const recompute::EvictionPlan* followed) {
    if (tracing) return;
    ++passes;
    if (followed != nullptr) {
      const auto program = std::find_if(known.begin(), known.end(), [&](const Known& each) {
        return each.eviction.plan.get() == followed;
      });
      if (program == known.end()) return;  // made way for another meanwhile
      program->last_pass = passes;
      show(*program);
      const std::int64_t live = base::MemoryTracker::install().live().total();
      if (plans < options.max_plans &&
          live - bytes_at_start(*program->trace) > options.limit_bytes / kGrowth) {
        program->traced = 1;
        program->least_start = live - options.limit_bytes / (2 * kGrowth);
        trace_passes(self);
        return;
      }
    }
    const std::int64_t strayed = budget->statistics().strayed_passes - strayed_before;
    if (strayed < options.replan_after) return;
    if (plans < options.max_plans) {
      trace_passes(self);
    } else if (followed == nullptr) {
      const std::lock_guard lock(mutex);
      plan = nullptr;
      trace = nullptr;
      refusal = base::join("passes differed from each of ", plans, " plans");
    }
  }

  PlannedBudgetOptions options;
  std::optional<BudgetCompression> compression;
  std::unique_ptr<recompute::MemoryBudget> budget;
  std::vector<Known> known;
  bool tracing = false;
  bool learned = false;     // something, since tracing began
  std::int64_t idle = 0;    // traced passes that told nothing new
  std::int64_t passes = 0;  // that ended
  std::int64_t strayed_before = 0;
  mutable std::mutex mutex;  // of what any thread may ask for
  std::shared_ptr<const MemoryPlan> plan;
  std::shared_ptr<const StepTrace> trace;
  std::string refusal;
  std::int64_t plans = 0;
};

PlannedBudget::PlannedBudget(const PlannedBudgetOptions& options) {
  GRADUS_CHECK("plan", options.limit_bytes >= 1, "limit_bytes must be at least 1; got ",
               options.limit_bytes);
  GRADUS_CHECK("plan", options.planning_seconds > 0.0, "planning_seconds must be > 0; got ",
               options.planning_seconds);
  GRADUS_CHECK("plan",
               options.replan_after >= 1 && options.max_plans >= 1 && options.max_programs >= 1,
               "replan_after, max_plans and max_programs must be at least 1; got ",
               options.replan_after, ", ", options.max_plans, " and ", options.max_programs);
  state_ = std::make_shared<State>(options);
  state_->begin(state_);
}

PlannedBudget::~PlannedBudget() = default;

std::shared_ptr<const MemoryPlan> PlannedBudget::plan() const {
  const std::lock_guard lock(state_->mutex);
  return state_->plan;
}
std::shared_ptr<const StepTrace> PlannedBudget::trace() const {
  const std::lock_guard lock(state_->mutex);
  return state_->trace;
}
std::string PlannedBudget::refusal() const {
  const std::lock_guard lock(state_->mutex);
  return state_->refusal;
}
std::int64_t PlannedBudget::plans_made() const {
  const std::lock_guard lock(state_->mutex);
  return state_->plans;
}
recompute::BudgetStatistics PlannedBudget::statistics() const {
  return state_->budget->statistics();
}

compress::CompressStatistics PlannedBudget::compression() const {
  return state_->compression ? state_->compression->statistics() : compress::CompressStatistics();
}

}  // namespace gradus::plan
