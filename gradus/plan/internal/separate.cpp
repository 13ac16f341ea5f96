#include <gradus/plan/internal/separate.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace gradus::plan::internal {

recompute::StepTrace separate_unsaved(recompute::StepTrace trace) {
  const auto moments = static_cast<std::int64_t>(trace.moments.size());
  std::vector<std::int64_t> change(trace.moments.size() + 1, 0);
  const auto count_as_other = [&](std::int64_t first, std::int64_t last, std::int64_t bytes) {
    if (first < 0 || first >= moments) return;  // the simulator refuses it by name
    change[static_cast<std::size_t>(first)] += bytes;
    change[static_cast<std::size_t>(std::clamp(last, first, moments - 1) + 1)] -= bytes;
  };
  bool any = false;
  for (recompute::TracedCall& call : trace.calls) {
    const std::int64_t unsaved = call.bytes - call.saved_bytes;
    if (!call.saved || call.saved_bytes <= 0 || unsaved <= 0) continue;
    any = true;
    if (call.saved_bytes < unsaved) {
      const std::int64_t released = call.released_after < 0 ? moments - 1 : call.released_after;
      count_as_other(call.moment, std::max(call.held_until, released), call.saved_bytes);
      call.bytes = unsaved;
      call.saved = false;
      call.saved_bytes = 0;
      call.reads.clear();
      call.released_after = -1;
      call.saved_by.clear();
    } else {
      count_as_other(call.moment, call.held_until, unsaved);
      call.bytes = call.saved_bytes;
      call.copied_bytes += unsaved;
    }
  }
  if (!any) return trace;
  std::int64_t more = 0;
  for (std::size_t m = 0; m < trace.moments.size(); ++m) {
    for (std::int64_t& level : trace.moments[m].levels) level += more;  // from before
    more += change[m];
    trace.moments[m].other_bytes += more;
    // At the end of the moment; what ends with it is gone by then only in the next.
    trace.moments[m].rest_bytes += more;
  }
  return trace;
}

}  // namespace gradus::plan::internal
