#pragma once

#include <functional>
#include <string>

namespace gradus::persample::internal {

/// Names of the operators, of two runs of one program whose batches differ in one of @p examples
/// examples, that carry the difference to others: the first whose result differs in more places
/// than its arguments do; if there is none, all that move elements about. For a message.
std::string culprits(const std::function<void()>& run, const std::function<void()>& run_changed,
                     std::int64_t examples);

}  // namespace gradus::persample::internal
