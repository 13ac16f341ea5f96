#pragma once

#include <string>

#include <gradus/report/plan_page.h>
#include <gradus/train/config.h>
#include <gradus/train/plan_choice.h>
#include <gradus/train/trainer.h>

namespace gradus::train {

/// How a configuration would be trained inside its memory limit, and why so.
struct PlanExplanation {
  PlanChoice choice{};
  std::string text{};  ///< For a terminal: milliseconds and MiB in fixed columns.
  std::string json{};  ///< The same for programs, with each call of the chosen pass.
  report::PlanPageData page{};
};

/// Plans as train() would, and measures the chosen plan moment by moment. Trains nothing and writes
/// nothing but the token cache.
/// @throws UserError without a memory limit, with a plan that is not automatic, off the CPU, and
///   where no plan fits.
PlanExplanation explain_plan(const TrainConfig& config, const TrainerEnvironment& environment);

}  // namespace gradus::train
