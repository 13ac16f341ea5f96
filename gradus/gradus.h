#pragma once

// Everything a small training program uses of gradus. No library file includes it.

#include <gradus/accumulate/window.h>
#include <gradus/amp/autocast/autocast.h>
#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>
#include <gradus/base/rng.h>
#include <gradus/base/step_boundary.h>
#include <gradus/compress/policy.h>
#include <gradus/offload/offload.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/clip.h>
#include <gradus/optim/schedule.h>
#include <gradus/optim/sgd.h>
#include <gradus/plan/planned_budget.h>
#include <gradus/recompute/checkpoint.h>
#include <gradus/recompute/memory_budget.h>

namespace gradus {
using MemoryBudget = plan::PlannedBudget;
}  // namespace gradus
