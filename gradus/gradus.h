#pragma once

// Everything a small training program uses of gradus. No library file includes it.

#include <gradus/accumulate/batch_norm.h>
#include <gradus/accumulate/learning_rate.h>
#include <gradus/accumulate/local_steps.h>
#include <gradus/accumulate/micro_batch.h>
#include <gradus/accumulate/window.h>
#include <gradus/amp/autocast/autocast.h>
#include <gradus/amp/autocast/custom_function.h>
#include <gradus/amp/autocast/operator_lists.h>
#include <gradus/amp/levels/levels.h>
#include <gradus/amp/scaler/grad_scaler.h>
#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>
#include <gradus/base/rng.h>
#include <gradus/base/step_boundary.h>
#include <gradus/compress/policy.h>
#include <gradus/offload/offload.h>
#include <gradus/optim/adafactor.h>
#include <gradus/optim/adam.h>
#include <gradus/optim/adam_mini.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/came.h>
#include <gradus/optim/clip.h>
#include <gradus/optim/eight_bit.h>
#include <gradus/optim/groups.h>
#include <gradus/optim/in_backward.h>
#include <gradus/optim/lamb.h>
#include <gradus/optim/lars.h>
#include <gradus/optim/muon.h>
#include <gradus/optim/schedule.h>
#include <gradus/optim/sgd.h>
#include <gradus/persample/engine/sample_gradients.h>
#include <gradus/persample/graph/rule.h>
#include <gradus/plan/planned_budget.h>
#include <gradus/privacy/noise/noise.h>
#include <gradus/privacy/training/make_private.h>
#include <gradus/recompute/checkpoint.h>
#include <gradus/recompute/memory_budget.h>

namespace gradus {
using MemoryBudget = plan::PlannedBudget;
}  // namespace gradus
