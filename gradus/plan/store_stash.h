#pragma once

#include <memory>

#include <gradus/offload/offload.h>
#include <gradus/recompute/memory_budget.h>

namespace gradus::plan {

/// Where a memory budget moves what its plan offloads. Of @p options, target, disk and device
/// count. @throws UserError as offload::OffloadGuard's constructor.
std::shared_ptr<recompute::Stash> make_stash(const offload::OffloadOptions& options);

}  // namespace gradus::plan
