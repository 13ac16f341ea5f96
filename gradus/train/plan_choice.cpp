#include <gradus/train/plan_choice.h>

#include <algorithm>
#include <utility>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/plan/scale_trace.h>

namespace gradus::train {

using recompute::EvictionPlan;
using recompute::StepTrace;

void PassPlans::set(std::int64_t size, bool later, EvictionPlan plan) {
  plans_[{size, later}] = std::make_shared<const EvictionPlan>(std::move(plan));
}

std::shared_ptr<const EvictionPlan> PassPlans::find(std::int64_t size, bool later) const {
  const auto found = plans_.find({size, later});
  return found == plans_.end() ? nullptr : found->second;
}

bool PassPlans::compress() const {
  return std::ranges::any_of(plans_, [](const auto& entry) {
    return std::ranges::any_of(entry.second->calls, [](const recompute::PlannedCall& call) {
      return call.disposition == recompute::Disposition::leave;
    });
  });
}

std::int64_t Trial::peak_bytes() const {
  return std::max({first.peak_bytes, later ? later->peak_bytes : 0, optimizer_peak_bytes});
}

namespace {

constexpr double kTimingNoise = 1.05;     // plans closer than this count as equally fast
constexpr std::size_t kPlannedSizes = 8;  // micro-batch sizes for which dropping is planned
constexpr std::size_t kBudgetProofs = 3;  // plans that drop, tried with success
constexpr double kQuickPlanning_s = 0.3;  // for each of those sizes, at most

// The passes of one micro-batch size.
struct Passes {
  StepTrace first;
  std::optional<StepTrace> later;
  std::vector<plan::CompressedResult> first_compressed, later_compressed;

  const StepTrace& largest() const { return later ? *later : first; }
  const std::vector<plan::CompressedResult>& largest_compressed() const {
    return later ? later_compressed : first_compressed;
  }
};

// A candidate with what it takes to run it.
struct Considered {
  PlanCandidate candidate;
  Passes passes;  // of its largest micro-batch
  std::optional<plan::MemoryPlan> memory;
  PassPlans plans;
  std::optional<Trial> trial;
};

double plain_seconds(const StepTrace& trace) { return trace.seconds - trace.recording_seconds; }

plan::ResultCount saved_results(const StepTrace& trace) {
  plan::ResultCount count;
  for (const auto& call : trace.calls) {
    if (!call.saved) continue;
    ++count.calls;
    count.bytes += call.saved_bytes > 0 ? call.saved_bytes : call.bytes;
  }
  return count;
}

// Candidates by time; among equally fast ones those that drop nothing, then those of fewer
// micro-batches.
void sort_by_time(std::vector<Considered*>& candidates, bool measured) {
  const auto seconds = [&](const Considered* c) {
    return measured ? c->candidate.measured_seconds : c->candidate.seconds;
  };
  std::sort(candidates.begin(), candidates.end(), [&](const Considered* l, const Considered* r) {
    return seconds(l) != seconds(r) ? seconds(l) < seconds(r)
                                    : l->candidate.peak_bytes < r->candidate.peak_bytes;
  });
  if (candidates.empty()) return;
  const double bound = kTimingNoise * seconds(candidates.front());
  const auto end = std::find_if(candidates.begin(), candidates.end(),
                                [&](const Considered* c) { return seconds(c) > bound; });
  std::sort(candidates.begin(), end, [](const Considered* l, const Considered* r) {
    const Plan &a = l->candidate.plan, &b = r->candidate.plan;
    return a.budget != b.budget ? !a.budget : a.micro_batches < b.micro_batches;
  });
}

bool same_program(const Trial& a, const Trial& b) {
  if (!plan::program_difference(a.first.trace, b.first.trace).empty()) return false;
  if (a.later.has_value() != b.later.has_value()) return false;
  return !a.later || plan::program_difference(a.later->trace, b.later->trace).empty();
}

class Search {
 public:
  Search(const PlanChoiceOptions& options, const TrialRunner& run) : options_(options), run_(run) {}

  PlanChoice choose() {
    measure();
    consider_sizes();
    prove();
    return finish();
  }

 private:
  bool accumulating(std::int64_t micro_batches) const { return micro_batches > 1; }
  bool fits(std::int64_t bytes) const { return bytes <= options_.limit_bytes; }
  bool knows(std::int64_t size) const { return small_size_ != large_size_ || size == large_size_; }

  void measure();
  bool measure_size(std::int64_t size, bool encode = false);
  void measure_unlimited();
  [[noreturn]] void refuse();
  [[noreturn]] void below(const std::string& needs) const;
  Passes passes_of(std::int64_t size) const;
  void consider_sizes();
  void consider_plain(const Plan& plan, std::int64_t size);
  bool consider_budget(const Plan& plan, std::int64_t size);
  void consider_online(const Plan& plan);
  std::optional<plan::MemoryPlan> plan_pass(const Passes& passes, double seconds) const;
  void fill_budget(Considered& considered, Passes passes, plan::MemoryPlan memory) const;
  void prove();
  bool try_out(Considered& considered, bool moments = false);
  void refine(Considered& considered);
  void trace_anew(Considered& plain);
  PlanChoice finish();

  const PlanChoiceOptions& options_;
  const TrialRunner& run_;
  Trial small_, large_;
  std::int64_t small_size_ = 0, large_size_ = 0;
  std::vector<Considered> considered_;
  std::int64_t plain_peak_bytes_ = 0;
  double plain_seconds_ = 0.0;
  std::size_t refused_ = 0;
  bool within_limit_ = true;                       // the traces were taken
  std::optional<std::int64_t> trial_limit_bytes_;  // in place of the limit that is on
};

bool Search::measure_size(std::int64_t size, bool encode) {
  auto trial =
      run_({.size = size, .accumulating = options_.batch > 1, .budget = true, .encode = encode});
  if (!trial) return false;
  // What a pass takes that records nothing, if it fits.
  if (!options_.only) {
    const auto plain = run_({.size = size, .accumulating = options_.batch > 1});
    const auto calibrate = [](StepTrace& trace, double seconds) {
      trace.recording_seconds = std::max(0.0, trace.seconds - seconds);
    };
    if (plain) calibrate(trial->first.trace, plain->first.seconds);
    if (plain && trial->later) calibrate(trial->later->trace, plain->later->seconds);
  }
  if (small_size_ == 0) {
    small_ = *trial;
    small_size_ = size;
  }
  if (!same_program(small_, *trial)) {
    small_ = *trial;
    small_size_ = size;
  }
  large_ = std::move(*trial);
  large_size_ = size;
  return true;
}

// Two small sizes whose programs allocate alike: tensors with a dimension of 1 take other paths.
void Search::measure() {
  if (options_.only) {
    const std::int64_t size = options_.only->largest(options_.batch);
    if (!measure_size(size) && !(options_.compress && measure_size(size, /*encode=*/true)))
      measure_unlimited();
    return;
  }
  const std::int64_t small = options_.batch >= 3 ? 2 : 1,
                     large = std::min(options_.batch, small + 1);
  if (measure_size(small)) {
    if (large > small) measure_size(large);
  } else if (small == 1 || !measure_size(1)) {
    if (!options_.compress || !measure_size(1, /*encode=*/true)) measure_unlimited();
  }
}

// Online eviction could not hold one sequence; a plan that knows what comes may. It takes a trace
// to tell, which the limit does not allow: nothing of it is trained on.
void Search::measure_unlimited() {
  const std::int64_t size = options_.only ? options_.only->largest(options_.batch) : 1;
  auto trial =
      run_({.size = size, .accumulating = options_.batch > 1, .budget = true, .limit_bytes = 0});
  if (!trial) refuse();
  within_limit_ = false;
  small_ = large_ = std::move(*trial);
  small_size_ = large_size_ = size;
}

void Search::below(const std::string& needs) const {
  throw UserError(base::join(
      "[plan] the memory limit of ", base::format_bytes(options_.limit_bytes),
      " is below what this model needs", needs,
      options_.micro_batches > 0 ? "; let the plan choose the micro-batch (--accumulate 0), raise"
                                 : "; raise",
      " --memory, shorten --context, or make the model smaller"));
}

// Says which limit would do: the least that a plan of one sequence needs, shown by a trial.
void Search::refuse() {
  const auto one =
      run_({.size = 1, .accumulating = options_.batch > 1, .budget = true, .limit_bytes = 0});
  if (!one) below(" for one sequence");
  std::int64_t least = one->optimizer_peak_bytes;
  for (const MeasuredPass* pass : {&one->first, one->later ? &*one->later : &one->first}) {
    least = std::max(least, plan::least_bytes(pass->trace, {.limit_bytes = options_.limit_bytes,
                                                            .compressed = pass->compressed,
                                                            .time_limit_s = options_.planning_s}));
  }
  // As the search would go under a higher limit; then a little more, since a search is timed and
  // may be less lucky. Numbers round up to kibibytes: they are there to be typed.
  constexpr std::int64_t kUnit = 1024;
  for (const double slack : {1.0, 1.01, 1.03, 1.06, 1.1, 1.2}) {
    const auto limit = static_cast<std::int64_t>(slack * static_cast<double>(least)) + 1;
    PlanChoiceOptions raised = options_;
    raised.limit_bytes = limit;
    Search search(raised, run_);
    search.small_ = search.large_ = *one;
    search.small_size_ = search.large_size_ = 1;
    search.trial_limit_bytes_ = limit;
    if (!search.consider_budget({.micro_batches = options_.batch, .budget = true}, 1) ||
        !search.try_out(search.considered_.back())) {
      continue;
    }
    const std::int64_t named = (limit + limit / 100 + kUnit) / kUnit * kUnit;
    below(base::join(": at least ", named, " bytes (", base::format_bytes(named),
                     "), one sequence at a time"));
  }
  below(base::join(": more than ", base::format_bytes(least)));
}

Passes Search::passes_of(std::int64_t size) const {
  Passes passes;
  passes.first =
      plan::scale_trace(small_.first.trace, small_size_, large_.first.trace, large_size_, size);
  passes.first_compressed = plan::scale_compressed(small_.first.compressed, small_size_,
                                                   large_.first.compressed, large_size_, size);
  if (small_.later && large_.later) {
    passes.later =
        plan::scale_trace(small_.later->trace, small_size_, large_.later->trace, large_size_, size);
    passes.later_compressed = plan::scale_compressed(small_.later->compressed, small_size_,
                                                     large_.later->compressed, large_size_, size);
  }
  return passes;
}

void Search::consider_sizes() {
  if (options_.only) {
    if (!consider_budget(*options_.only, options_.only->largest(options_.batch)))
      consider_online(*options_.only);
    return;
  }
  std::vector<std::pair<Plan, std::int64_t>> dropping;  // sizes that need it, the largest first
  std::int64_t last_size = 0;
  for (std::int64_t count = 1; count <= options_.batch; ++count) {
    const Plan plan{.micro_batches = count};
    const std::int64_t size = plan.largest(options_.batch);
    if (options_.micro_batches > 0 && count != options_.micro_batches) continue;
    // More micro-batches of the same size gain nothing.
    if (size == last_size || !knows(size)) continue;
    last_size = size;
    consider_plain(plan, size);
    if (!considered_.back().candidate.fits)
      dropping.push_back({{.micro_batches = count, .budget = true}, size});
  }
  // From the smallest up, until no plan fits two of them: a search is timed, and may miss one. Of
  // many sizes some, evenly spread.
  std::reverse(dropping.begin(), dropping.end());
  int missed = 0;
  const std::size_t planned = std::min(dropping.size(), kPlannedSizes);
  for (std::size_t i = 0; i < planned; ++i) {
    const std::size_t index = planned == 1 ? 0 : i * (dropping.size() - 1) / (planned - 1);
    if (!consider_budget(dropping[index].first, dropping[index].second) && ++missed == 2) break;
  }
  const bool any = std::any_of(considered_.begin(), considered_.end(),
                               [](const Considered& c) { return c.candidate.fits; });
  if (!any) {
    consider_online(
        {.micro_batches = (options_.batch + large_size_ - 1) / large_size_, .budget = true});
  }
}

// No plan fits by simulation. Online eviction did, if that is how the trace came about.
void Search::consider_online(const Plan& plan) {
  if (!within_limit_ || plan.largest(options_.batch) > large_size_) refuse();
  Considered considered;
  considered.passes = passes_of(large_size_);
  PlanCandidate& candidate = considered.candidate;
  candidate.plan = plan;
  candidate.method = "online eviction";
  candidate.fits = true;
  candidate.peak_bytes = large_.peak_bytes();
  candidate.kept = saved_results(considered.passes.first);
  candidate.seconds = large_.optimizer_seconds;
  const MeasuredPass& pass = large_.later ? *large_.later : large_.first;
  for (const std::int64_t part : plan.sizes(options_.batch))
    candidate.seconds +=
        pass.seconds * static_cast<double>(part) / static_cast<double>(large_size_);
  considered_.push_back(std::move(considered));
}

void Search::consider_plain(const Plan& plan, std::int64_t size) {
  Considered considered;
  considered.passes = passes_of(size);
  const Passes& passes = considered.passes;
  PlanCandidate& candidate = considered.candidate;
  candidate.plan = plan;
  candidate.method = "plain";
  candidate.peak_bytes = std::max(small_.optimizer_peak_bytes, large_.optimizer_peak_bytes);
  candidate.peak_bytes =
      std::max(candidate.peak_bytes, plan::simulate(passes.first, {}, 0).peak_bytes);
  double a_sequence = plain_seconds(passes.first) / static_cast<double>(size);
  const std::vector<std::int64_t> sizes = plan.sizes(options_.batch);
  candidate.seconds =
      plain_seconds(passes.first) + std::min(small_.optimizer_seconds, large_.optimizer_seconds);
  if (accumulating(plan.micro_batches)) {
    candidate.peak_bytes =
        std::max(candidate.peak_bytes, plan::simulate(*passes.later, {}, 0).peak_bytes);
    a_sequence = plain_seconds(*passes.later) / static_cast<double>(size);
    for (std::size_t i = 1; i < sizes.size(); ++i)
      candidate.seconds += a_sequence * static_cast<double>(sizes[i]);
  }
  candidate.fits = fits(candidate.peak_bytes);
  candidate.kept = saved_results(passes.first);
  if (plan == Plan{}) {
    plain_peak_bytes_ = candidate.peak_bytes;
    plain_seconds_ = candidate.seconds;
  }
  considered_.push_back(std::move(considered));
}

std::optional<plan::MemoryPlan> Search::plan_pass(const Passes& passes, double seconds) const {
  try {
    return plan::make_plan(passes.largest(), {.limit_bytes = options_.limit_bytes,
                                              .offload = options_.offload,
                                              .compressed = passes.largest_compressed(),
                                              .time_limit_s = seconds});
  } catch (const UserError&) {
    return std::nullopt;  // no plan of it fits; refuse() says how much would do
  }
}

// Plans the passes of one size; false if no plan fits.
bool Search::consider_budget(const Plan& plan, std::int64_t size) {
  Passes passes = passes_of(size);
  if (!accumulating(plan.micro_batches)) passes.later.reset();
  if (!fits(std::max(small_.optimizer_peak_bytes, large_.optimizer_peak_bytes))) return false;
  // A search need not take longer than some passes of what it plans.
  const double seconds = std::min(
      options_.planning_s, std::clamp(30.0 * passes.largest().seconds, 0.05, kQuickPlanning_s));
  auto memory = plan_pass(passes, seconds);
  if (!memory) return false;
  Considered considered;
  considered.candidate.plan = plan;
  fill_budget(considered, std::move(passes), std::move(*memory));
  if (!considered.candidate.fits) return false;
  considered_.push_back(std::move(considered));
  return true;
}

// What a plan of the largest pass means for the whole step.
void Search::fill_budget(Considered& considered, Passes passes, plan::MemoryPlan memory) const {
  PlanCandidate& candidate = considered.candidate;
  const std::int64_t size = candidate.plan.largest(options_.batch);
  const std::vector<std::int64_t> sizes = candidate.plan.sizes(options_.batch);
  candidate.method = memory.method;
  candidate.fits = true;
  candidate.peak_bytes = std::max(
      {memory.predicted_peak_bytes, small_.optimizer_peak_bytes, large_.optimizer_peak_bytes});
  considered.plans = {};
  const auto set = [&](std::int64_t of_size, bool later, const StepTrace& trace) {
    if (memory.dispositions.empty() || memory.dispositions.size() != trace.calls.size()) return;
    considered.plans.set(of_size, later, plan::eviction_plan(trace, memory.dispositions));
  };
  set(size, false, passes.first);
  if (passes.later) {
    set(size, true, *passes.later);
    // The first pass has the same calls, and no gradients beside them yet.
    const plan::Simulation first = plan::simulate(
        passes.first,
        memory.dispositions.empty() ? EvictionPlan{}
                                    : plan::eviction_plan(passes.first, memory.dispositions),
        options_.limit_bytes, {.compressed = passes.first_compressed});
    candidate.fits = first.feasible;
    candidate.peak_bytes = std::max(candidate.peak_bytes, first.peak_bytes);
  }
  if (sizes.back() != size && knows(sizes.back())) {
    const Passes smaller = passes_of(sizes.back());
    if (smaller.later) set(sizes.back(), true, *smaller.later);
  }
  candidate.seconds = std::min(small_.optimizer_seconds, large_.optimizer_seconds);
  for (const std::int64_t part : sizes)
    candidate.seconds +=
        memory.predicted_seconds * static_cast<double>(part) / static_cast<double>(size);
  const auto chosen =
      std::find_if(memory.candidates.begin(), memory.candidates.end(),
                   [&](const plan::PlanCandidate& entry) { return entry.name == memory.method; });
  if (chosen != memory.candidates.end()) {
    candidate.kept = chosen->kept;
    candidate.recomputed = chosen->recomputed;
    candidate.offloaded = chosen->offloaded;
    candidate.compressed = chosen->compressed;
    candidate.runs_again = chosen->runs_again;
  }
  considered.passes = std::move(passes);
  considered.memory = std::move(memory);
}

// Runs a candidate under the limit.
bool Search::try_out(Considered& considered, bool moments) {
  PlanCandidate& candidate = considered.candidate;
  const std::int64_t size = candidate.plan.largest(options_.batch);
  auto trial = run_({.size = size,
                     .accumulating = accumulating(candidate.plan.micro_batches),
                     .budget = candidate.plan.budget,
                     .plans = candidate.plan.budget ? &considered.plans : nullptr,
                     .moments = moments,
                     .limit_bytes = trial_limit_bytes_});
  if (!trial || !fits(trial->peak_bytes())) {
    candidate.refused = true;
    ++refused_;
    return false;
  }
  candidate.refused = false;
  candidate.measured_bytes = trial->peak_bytes();
  const std::vector<std::int64_t> sizes = candidate.plan.sizes(options_.batch);
  candidate.measured_seconds = trial->first.seconds + trial->optimizer_seconds;
  for (std::size_t i = 1; i < sizes.size(); ++i) {
    candidate.measured_seconds +=
        trial->later->seconds * static_cast<double>(sizes[i]) / static_cast<double>(size);
  }
  considered.trial = std::move(trial);
  return true;
}

// Predictions choose what to try; trials under the limit prove that it fits and say how fast it is.
void Search::prove() {
  std::vector<Considered*> plain, budget;
  for (Considered& considered : considered_) {
    if (!considered.candidate.fits) continue;
    (considered.candidate.plan.budget ? budget : plain).push_back(&considered);
  }
  sort_by_time(plain, false);
  sort_by_time(budget, false);
  // Nothing beats the plain step where it fits. Else the fastest that drops nothing, which takes no
  // faith in the predicted cost of running calls again; then those that do.
  std::stable_partition(plain.begin(), plain.end(), [](const Considered* considered) {
    return considered->candidate.plan == Plan{};
  });
  for (Considered* considered : plain) {
    if (!try_out(*considered)) continue;
    if (considered->candidate.plan == Plan{}) return;
    break;
  }
  std::size_t proofs = 0;
  for (Considered* considered : budget) {
    if (!try_out(*considered)) continue;
    refine(*considered);
    if (++proofs == kBudgetProofs) break;
  }
}

// Plans anew from the trial of the very size, whose times are real ones, and keeps what is faster.
void Search::refine(Considered& considered) {
  const Trial& trial = *considered.trial;
  Passes passes;
  passes.first = trial.first.trace;
  passes.first_compressed = trial.first.compressed;
  if (trial.later) {
    passes.later = trial.later->trace;
    passes.later_compressed = trial.later->compressed;
  }
  const double seconds =
      std::min(options_.planning_s, std::max(0.05, 100.0 * passes.largest().seconds));
  auto memory = plan_pass(passes, seconds);
  if (!memory) return;
  Considered again;
  again.candidate.plan = considered.candidate.plan;
  fill_budget(again, std::move(passes), std::move(*memory));
  if (!again.candidate.fits || !try_out(again)) return;
  if (again.candidate.measured_seconds > kTimingNoise * considered.candidate.measured_seconds)
    return;
  considered = std::move(again);
}

// One sequence takes other paths than the two and three that were traced: fewer calls, whose
// moments would not stand beside those measured.
void Search::trace_anew(Considered& plain) {
  const std::int64_t size = plain.candidate.plan.largest(options_.batch);
  if (size >= small_size_) return;
  const auto trial = run_({.size = size,
                           .accumulating = accumulating(plain.candidate.plan.micro_batches),
                           .budget = true});
  if (!trial) return;
  plain.passes.first = trial->first.trace;
  if (trial->later) plain.passes.later = trial->later->trace;
}

PlanChoice Search::finish() {
  std::vector<Considered*> proved;
  std::size_t fitting = 0;
  for (Considered& considered : considered_) {
    fitting += considered.candidate.fits ? 1 : 0;
    if (considered.trial) proved.push_back(&considered);
  }
  if (proved.empty()) {
    throw UserError(base::join("[plan] no plan was proved to fit the memory limit of ",
                               base::format_bytes(options_.limit_bytes),
                               "; raise --memory by a few per cent"));
  }
  sort_by_time(proved, true);
  Considered& best = *proved.front();
  if (options_.moments) {
    const double seconds = best.candidate.measured_seconds;
    GRADUS_CHECK("plan", try_out(best, /*moments=*/true), "the chosen plan fit the limit of ",
                 base::format_bytes(options_.limit_bytes),
                 " once and then did not; raise --memory by a few per cent");
    best.candidate.measured_seconds = std::min(best.candidate.measured_seconds, seconds);
    if (!best.memory) trace_anew(best);
  }
  PlanChoice choice;
  choice.plan = best.candidate.plan;
  choice.passes = best.plans;
  choice.predicted_peak_bytes = best.candidate.peak_bytes;
  choice.trial_peak_bytes = best.candidate.measured_bytes;
  choice.predicted_seconds = best.candidate.seconds;
  choice.trial_seconds = best.candidate.measured_seconds;
  choice.plain_peak_bytes = plain_peak_bytes_;
  choice.plain_seconds = plain_seconds_;
  choice.memory = best.memory;
  const bool later = choice.plan.micro_batches > 1 && best.passes.later;
  choice.trace = later ? *best.passes.later : best.passes.first;
  choice.planned_bytes =
      best.memory ? best.memory->simulation.moment_bytes
                  : plan::simulate(choice.trace, {}, choice.plan.budget ? options_.limit_bytes : 0)
                        .moment_bytes;
  choice.measured = best.trial->later ? *best.trial->later : best.trial->first;
  choice.reason = base::join(
      choice.plan == Plan{} ? "plain training fits" : "the fastest of those tried", "; ", fitting,
      fitting == 1 ? " plan fits" : " plans fit", " by prediction, ", proved.size(),
      " proved it in a trial step", refused_ > 0 ? base::join(", ", refused_, " did not") : "",
      "; this one took ", base::format_bytes(choice.trial_peak_bytes), ", predicted ",
      base::format_bytes(best.candidate.peak_bytes));

  std::vector<Considered*> rows;
  for (Considered& considered : considered_) rows.push_back(&considered);
  std::stable_sort(rows.begin(), rows.end(), [](const Considered* l, const Considered* r) {
    if (l->candidate.fits != r->candidate.fits) return l->candidate.fits;
    return l->candidate.seconds < r->candidate.seconds;
  });
  for (const Considered* row : rows) {
    if (row == &best) choice.chosen = choice.candidates.size();
    choice.candidates.push_back(row->candidate);
  }
  return choice;
}

}  // namespace

PlanChoice choose_plan(const PlanChoiceOptions& options, const TrialRunner& run) {
  GRADUS_CHECK("plan", options.batch >= 1 && options.limit_bytes >= 1 && options.planning_s > 0.0,
               "batch, limit_bytes and planning_s must be > 0; got ", options.batch, ", ",
               options.limit_bytes, " and ", options.planning_s);
  return Search(options, run).choose();
}

}  // namespace gradus::train
