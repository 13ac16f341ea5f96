#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <gradus/plan/simulate.h>
#include <gradus/recompute/step_trace.h>

namespace gradus::plan {

/// Says in what two traces are not of one program ("call 12 is aten::mm in one and aten::bmm in
/// the other"), or "" if they are: the same calls, which read, save and give back the same results
/// at the same moments. Bytes and times may differ.
std::string program_difference(const recompute::StepTrace& a, const recompute::StepTrace& b);

/// The trace that one program would give for @p size examples, from those of two other sizes.
///
/// Bytes of each call and moment lie on the line through the two measured ones, which is exact
/// where a program allocates in proportion to its examples; of two calls that take turns at being a
/// moment's peak it may choose the wrong one. Seconds lie on a line too, whose slope is held
/// between a tenth of the time of one example and all of it: two measurements of microseconds apart
/// must not make more work free, or dearer than it was measured. The time of recording a call does
/// not depend on the size.
///
/// @param small, large  Of @p small_size and @p large_size examples, > 0; equal sizes: @p large
///   itself serves for that size only.
/// @throws UserError if the traces are not of one program, on sizes out of range, and if the sizes
///   are equal and @p size is another.
recompute::StepTrace scale_trace(const recompute::StepTrace& small, std::int64_t small_size,
                                 const recompute::StepTrace& large, std::int64_t large_size,
                                 std::int64_t size);

/// The same for what compression makes of each call's results. A call that can be compressed at
/// one size only (small tensors are left alone) counts as one that cannot.
/// @throws UserError as scale_trace() on sizes, and if both have entries and not as many.
std::vector<CompressedResult> scale_compressed(const std::vector<CompressedResult>& small,
                                               std::int64_t small_size,
                                               const std::vector<CompressedResult>& large,
                                               std::int64_t large_size, std::int64_t size);

}  // namespace gradus::plan
