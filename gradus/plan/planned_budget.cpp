#include <gradus/plan/planned_budget.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/plan/internal/compression_probe.h>
#include <gradus/plan/store_stash.h>

namespace gradus::plan {

using internal::CompressionProbe;
using internal::LeftSaves;
using recompute::Disposition;
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

bool leaves_any(const MemoryPlan& plan) {
  return std::find(plan.dispositions.begin(), plan.dispositions.end(), Disposition::leave) !=
         plan.dispositions.end();
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
    budget = std::make_unique<recompute::MemoryBudget>(budget_options);
    if (options.compress) {
      compress::CompressOptions how = options.compression.value_or(compress::CompressOptions());
      may_not = how.keep;
      how.keep = [left = left, may_not = may_not](const plane::saved::Value& value) {
        return !left->contains(value) || (may_not && may_not(value));
      };
      compression.emplace(how);
    }
    trace_passes(self);
    budget->on_pass([self] {
      if (const auto state = self.lock()) state->check(self);
    });
  }

  void trace_passes(const std::weak_ptr<State>& self) {
    tracing = true;
    passes_traced = 0;
    // What is left to compression is in no trace.
    if (plan != nullptr && leaves_any(*plan)) {
      budget->set_plan(nullptr);
      left->set({});
    }
    begin_probe();
    budget->trace(
        [self](const StepTrace& pass) {
          if (const auto state = self.lock()) state->on_trace(pass);
        },
        [self](const plane::saved::Value& value, std::int64_t call) {
          if (const auto state = self.lock()) state->on_saved(value, call);
        });
  }

  void begin_probe() { probe.emplace(options.planning_seconds, base::monotonic_clock()); }

  // The plan of the first traced pass only serves the second one, whose trace must be whole.
  void on_saved(const plane::saved::Value& value, std::int64_t call) {
    if (!compression || passes_traced == 0) return;
    probe->saved(*compression, value, call, !may_not || !may_not(value));
  }

  void stop_tracing() {
    tracing = false;
    budget->trace(nullptr);
  }

  void on_trace(const StepTrace& pass) {
    const bool first = passes_traced++ == 0;
    const CompressionProbe probed = std::move(*probe);
    begin_probe();
    // A pass without backward, as an evaluation, says nothing about training.
    const bool backward = std::any_of(pass.moments.begin(), pass.moments.end(),
                                      [](const auto& moment) { return moment.backward; });
    if (!backward || pass.calls.empty()) {
      --passes_traced;
      return;
    }
    StepTrace next = pass;
    next.seconds -= probed.seconds();
    if (first) {
      next = with_growth(pass, base::MemoryTracker::install().live().total());
    } else {
      stop_tracing();
    }
    make(std::move(next), probed,
         first ? options.planning_seconds * 0.25 : options.planning_seconds);
  }

  void make(StepTrace pass, const CompressionProbe& probed, double seconds) {
    PlanOptions plan_options;
    plan_options.limit_bytes = options.limit_bytes;
    plan_options.offload = options.offload ? options.bandwidth : std::nullopt;
    plan_options.time_limit_s = seconds;
    plan_options.compressed = probed.results(pass);
    std::shared_ptr<const MemoryPlan> made;
    std::string why;
    try {
      made = std::make_shared<const MemoryPlan>(make_plan(pass, plan_options));
    } catch (const UserError& error) {
      // The traced pass did fit: the simulation errs on the safe side. Online eviction goes on.
      why = error.what();
    }
    std::shared_ptr<const recompute::EvictionPlan> eviction;
    if (made != nullptr && !made->dispositions.empty())
      eviction = std::make_shared<const recompute::EvictionPlan>(made->eviction);
    {
      const std::lock_guard lock(mutex);
      plan = made;
      trace = made != nullptr ? std::make_shared<const StepTrace>(std::move(pass)) : nullptr;
      refusal = std::move(why);
      ++plans;
    }
    budget->set_plan(eviction);
    left->set(made != nullptr ? probed.kinds(made->dispositions)
                              : std::set<CompressionProbe::Kind>());
    strayed_before = budget->statistics().strayed_passes;
    if (made != nullptr && options.on_plan) options.on_plan(*made);
  }

  // Between passes: do they still follow the plan?
  void check(const std::weak_ptr<State>& self) {
    if (tracing || plan == nullptr) return;
    const std::int64_t strayed = budget->statistics().strayed_passes - strayed_before;
    if (strayed < options.replan_after) return;
    if (plans >= options.max_plans) {
      const std::lock_guard lock(mutex);
      plan = nullptr;
      trace = nullptr;
      refusal = base::join("passes differed from each of ", plans, " plans");
      budget->set_plan(nullptr);
      left->set({});
      return;
    }
    trace_passes(self);
  }

  PlannedBudgetOptions options;
  std::unique_ptr<recompute::MemoryBudget> budget;
  // What the plan leaves; the guard asks it.
  const std::shared_ptr<LeftSaves> left = std::make_shared<LeftSaves>();
  std::function<bool(const plane::saved::Value&)> may_not;  // the user's, may be null
  std::optional<compress::CompressGuard> compression;
  std::optional<CompressionProbe> probe;  // of the pass being traced
  bool tracing = false;
  std::int64_t passes_traced = 0;
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
  GRADUS_CHECK("plan", options.replan_after >= 1 && options.max_plans >= 1,
               "replan_after and max_plans must be at least 1; got ", options.replan_after, " and ",
               options.max_plans);
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
