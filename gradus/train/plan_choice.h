#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gradus/plan/planner.h>
#include <gradus/plan/simulate.h>
#include <gradus/recompute/eviction_plan.h>
#include <gradus/recompute/step_trace.h>
#include <gradus/train/plan.h>

namespace gradus::train {

/// What the passes of a step drop when memory is short, by micro-batch. A later micro-batch adds to
/// gradients that exist, which takes calls of its own in backward.
class PassPlans {
 public:
  void set(std::int64_t size, bool later, recompute::EvictionPlan plan);
  /// The plan of a micro-batch of @p size sequences; null: online eviction.
  std::shared_ptr<const recompute::EvictionPlan> find(std::int64_t size, bool later) const;
  /// Whether any of them leaves results to compression.
  bool compress() const;

 private:
  std::map<std::pair<std::int64_t, bool>, std::shared_ptr<const recompute::EvictionPlan>> plans_;
};

/// What a trial is to run: the micro-batches that a step has, and an optimizer step.
struct TrialRequest {
  std::int64_t size = 1;      ///< Sequences of a micro-batch.
  bool accumulating = false;  ///< Also later micro-batches, which add to gradients that exist.
  bool budget = false;        ///< Under a memory budget, and traced; else plain.
  const PassPlans* plans = nullptr;  ///< What the budget follows; null: online eviction.
  bool moments = false;              ///< Note the peak of each moment.
  bool encode = false;  ///< Without plans the budget keeps smaller forms where they are half.
  /// In place of the limit that is on. 0: none, to tell how much a refused model would need.
  std::optional<std::int64_t> limit_bytes{};
};

/// Forward and backward of one micro-batch, as measured.
struct MeasuredPass {
  std::int64_t peak_bytes = 0;  ///< Of all live device memory.
  double seconds = 0.0;         ///< The least of several: others on the machine only slow it down.
  std::vector<std::int64_t> moment_bytes{};  ///< Peak of each moment, if asked for.
  recompute::StepTrace trace{};              ///< Under a budget; its seconds without the tracing.
  std::vector<plan::CompressedResult> compressed{};  ///< Of each traced call; empty: of none.
  bool strayed = false;  ///< Under a budget: it did not follow its plan.
};

/// What one trial measured.
struct Trial {
  MeasuredPass first{};                 ///< Of the step's first micro-batch.
  std::optional<MeasuredPass> later{};  ///< Of a later one.
  std::int64_t optimizer_peak_bytes = 0;
  double optimizer_seconds = 0.0;

  std::int64_t peak_bytes() const;
};

/// Runs one trial. Returns nothing if the memory limit refused it.
using TrialRunner = std::function<std::optional<Trial>(const TrialRequest&)>;

/// A plan with what is known of it.
struct PlanCandidate {
  Plan plan{};
  std::string method{};         ///< How its passes fit: "plain", or the planner's word.
  std::int64_t peak_bytes = 0;  ///< Of a step, predicted.
  double seconds = 0.0;         ///< Of an optimizer step, predicted.
  bool fits = false;            ///< By prediction.
  // Of what autograd saves in the largest micro-batch.
  plan::ResultCount kept{}, recomputed{}, offloaded{}, compressed{};
  std::int64_t runs_again = 0;      ///< Calls run again in it.
  std::int64_t measured_bytes = 0;  ///< Peak of a trial; 0: not tried, or refused.
  double measured_seconds = 0.0;    ///< Of an optimizer step, from the trial.
  bool refused = false;             ///< The limit refused its trial.
};

struct PlanChoice {
  Plan plan{};
  PassPlans passes{};  ///< If plan.budget.
  std::int64_t predicted_peak_bytes = 0;
  std::int64_t trial_peak_bytes = 0;  ///< Measured on the chosen plan, under the limit.
  double predicted_seconds = 0.0;     ///< Of an optimizer step.
  double trial_seconds = 0.0;
  std::int64_t plain_peak_bytes = 0;  ///< Predicted for the whole batch at once, nothing dropped.
  double plain_seconds = 0.0;
  std::string reason{};
  std::vector<PlanCandidate> candidates{};  ///< Those that fit first, fastest first.
  std::size_t chosen = 0;                   ///< Among them.

  // Of the largest micro-batch (a later one where there are several):
  std::optional<plan::MemoryPlan> memory{};   ///< If plan.budget.
  recompute::StepTrace trace{};               ///< What was planned for.
  std::vector<std::int64_t> planned_bytes{};  ///< Peak of each moment, predicted.
  MeasuredPass measured{};                    ///< As its last trial ran it.
};

struct PlanChoiceOptions {
  std::int64_t batch = 1;
  std::int64_t limit_bytes = 0;    ///< > 0.
  std::int64_t micro_batches = 0;  ///< Only plans of so many; 0: any number.
  /// Only passes of a plan that is known already, which runs under a budget: what they drop.
  std::optional<Plan> only{};
  bool moments = false;  ///< Measure the chosen plan once more, moment by moment.
  /// What a plan may move elsewhere goes at this speed; unset: nothing is moved.
  std::optional<offload::Bandwidth> offload{};
  /// Trials measure what compression would make of results, and plans may leave some to it.
  bool compress = false;
  double planning_s = 2.0;  ///< For the chosen plan's search; the others get less. > 0.
};

/// Finds the fastest plan that fits.
///
/// Traces micro-batches of two and of three sequences under online eviction, within the limit (one
/// of one sequence with compression where not even that fits, if allowed);
/// scales the traces to every micro-batch size, plans each size that does not fit as it is
/// (plan::make_plan), tries the best under the limit and takes the fastest that is proved to fit.
/// @throws UserError if no plan fits, naming the least limit that was seen to suffice.
PlanChoice choose_plan(const PlanChoiceOptions& options, const TrialRunner& run);

}  // namespace gradus::train
