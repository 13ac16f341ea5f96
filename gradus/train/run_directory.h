#pragma once

#include <iosfwd>
#include <optional>
#include <string>

#include <gradus/train/training_state.h>

namespace gradus::train {

/// Makes @p directory if need be. @throws UserError if it has no name or cannot be made.
void make_run_directory(const std::string& directory);

/// The state that a run begins with: with @p resume the newest good one of @p directory, which
/// damaged ones are set aside for; else nothing. Damaged states are told to @p out.
/// @throws UserError to resume where no good state is; without @p resume where a run has made a
/// step, which a new one would bury.
std::optional<SavedState> starting_state(const std::string& directory, bool resume,
                                         std::ostream& out);

}  // namespace gradus::train
