#pragma once

#include <string>
#include <vector>

namespace gradus::data::internal {

/// How a program ended.
struct ProgramResult {
  int spawn_error = 0;    ///< errno of starting it; 0 if it ran.
  int exit_status = 0;    ///< Its exit status; 128 + signal if a signal ended it.
  std::string output;     ///< Its standard output.
  std::string complaint;  ///< Its standard error.
};

/// Runs a program found on PATH, with an empty standard input and no shell, and waits for its end.
/// @throws UserError only if pipes cannot be made or read; the caller judges the rest.
ProgramResult run_program(const std::vector<std::string>& arguments);

}  // namespace gradus::data::internal
