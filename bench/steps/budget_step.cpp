// A training step of one of memory_models.h, plain or under a memory budget: zero_grad, forward,
// loss, backward, SGD. bench/steps/checkpoint_peer.py has the same with torch.utils.checkpoint.

#include <cstdint>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "memory_models.h"
#include "protocol.h"
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/module.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/optim/sgd.h>
#include <gradus/plan/planned_budget.h>

namespace gradus::bench {

namespace {

/// Keeps the steps of one process within a limit for as long as it lives.
std::unique_ptr<plan::PlannedBudget> make_budget(const StepOptions& options) {
  plan::PlannedBudgetOptions budget;
  budget.limit_bytes = options.bytes;
  return std::make_unique<plan::PlannedBudget>(budget);
}

struct Training {
  MemoryModel model;
  optim::SGD optimizer;
  std::unique_ptr<plan::PlannedBudget> budget;

  explicit Training(const StepOptions& options)
      : model(make_memory_model(options.model,
                                at::make_generator<at::CPUGeneratorImpl>(options.seed))),
        optimizer(model.module->parameters(), {.lr = model.learning_rate}) {
    if (options.mode == "budget") budget = make_budget(options);
  }

  double run() {
    optimizer.zero_grad();
    const at::Tensor loss = model.loss();
    loss.backward();
    optimizer.step();
    return loss.item<double>();
  }

  // Of one step: all live tensor bytes at their highest; those that live between steps without
  // gradients; and those of the gradients.
  std::string peak() {
    base::MemoryTracker* const tracker = base::MemoryTracker::installed();
    GRADUS_CHECK("bench", tracker != nullptr, "peak needs --track 1 in mode plain");
    optimizer.zero_grad();
    const std::int64_t resting = tracker->live().total();
    tracker->reset_peak();
    const double loss = run();
    const std::int64_t peak = tracker->peak().total();
    std::int64_t gradients = 0;
    for (const at::Tensor& parameter : model.module->parameters()) {
      if (parameter.grad().defined()) {
        gradients += static_cast<std::int64_t>(parameter.grad().nbytes());
      }
    }
    std::ostringstream answer;
    answer.precision(17);
    answer << "{\"peak\": " << peak << ", \"resting\": " << resting
           << ", \"gradients\": " << gradients << ", \"loss\": " << loss;
    if (budget) {
      const recompute::BudgetStatistics did = budget->statistics();
      answer << ", \"recorded\": " << did.recorded << ", \"evicted\": " << did.evicted
             << ", \"replayed\": " << did.replayed << ", \"replay_s\": " << did.replay_seconds;
      if (const auto plan = budget->plan()) {
        answer << ", \"predicted_peak\": " << plan->predicted_peak_bytes
               << ", \"predicted_ratio\": " << plan->predicted_ratio
               << ", \"least\": " << plan->least_bytes << ", \"method\": \"" << plan->method << '"';
      } else {
        answer << ", \"method\": \"online\"";
      }
    }
    answer << "}";
    return answer.str();
  }
};

}  // namespace

Program make_budget_step(const StepOptions& options) {
  GRADUS_CHECK("bench", options.mode == "plain" || options.mode == "budget",
               "--mode must be plain or budget; got '", options.mode, "'");
  // Before the model is made: a tracker does not know of tensors older than itself. Without need
  // there is none, for it would be in the time of the plain step.
  if (options.mode == "budget" || options.track) base::MemoryTracker::install();
  const auto training = std::make_shared<Training>(options);
  return {.step = [training] { return training->run(); },
          .requests = {{"peak", [training] { return training->peak(); }}}};
}

}  // namespace gradus::bench
