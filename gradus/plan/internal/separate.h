#pragma once

#include <gradus/recompute/step_trace.h>

namespace gradus::plan::internal {

/// @p trace with calls whose results autograd saves all or none of, as one disposition a call wants
/// it.
///
/// Where the saved results are the lesser part (statistics of a normalisation, the mask of a
/// dropout), the call counts as one that saves nothing, and they as other memory for as long as
/// they live: the budget drops them last. Where they are the greater part, the rest counts as
/// memory that the program holds, and that a replay needs for a moment. Calls that do not say
/// (saved_bytes of 0) save all.
recompute::StepTrace separate_unsaved(recompute::StepTrace trace);

}  // namespace gradus::plan::internal
