#pragma once

#include <functional>

namespace CLI {
class App;
class ParseError;
}  // namespace CLI

namespace gradus::tools {

inline constexpr int kRunFailed = 1;  ///< The command began and failed.
inline constexpr int kBadUsage =
    2;  ///< The command line or the configuration is wrong; nothing began.

/// What the parsed command line asks for, in two parts: `prepare` checks everything that can be
/// known before work begins, and what it throws is bad usage; `run` does it and returns the exit
/// code.
struct Command {
  std::function<void()> prepare = [] {};
  std::function<int()> run;
};

/// Adds the subcommands to @p app; parsing sets @p chosen.
void add_commands(CLI::App& app, Command& chosen);

/// Prints help or one line about what is wrong, and returns the exit code.
int report_parse_error(const CLI::App& app, const CLI::ParseError& error);

/// Runs @p command; errors become one line on standard error and an exit code.
int run_command(const Command& command);

}  // namespace gradus::tools
