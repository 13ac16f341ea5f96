#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <gradus/distributed/comm/environment.h>

namespace gradus::distributed::comm {

/// Which of a rank's two outputs a line came from.
enum class RankStream { out, err };

/// Takes one line, without its end, of a rank's output. Called on the thread that called run_ranks.
using LineSink = std::function<void(int rank, RankStream stream, std::string_view line)>;

/// A sink that writes "[rank] line" to std::cout or std::cerr, as the rank did.
LineSink prefixed_lines();

struct SpawnOptions {
  int world_size = 1;  ///< Ranks to start on this host. >= 1.
  std::vector<std::string> command =
      {};  ///< Program (looked up in PATH unless it has a slash) and its arguments.
  /// What the ranks inherit; unset: this process's environment.
  std::optional<Environment> base_environment = std::nullopt;
  Environment extra_environment =
      {};                 ///< Added to it, winning over it. Not the variables that run_ranks sets.
  int port = 0;           ///< MASTER_PORT; 0: a free one.
  double grace_s = 30.0;  ///< Between asking a rank to end (SIGTERM) and ending it (SIGKILL). >= 0.
  bool forward_signals =
      true;  ///< Pass this process's SIGINT and SIGTERM on to the ranks meanwhile.
  LineSink on_line = prefixed_lines();  ///< Takes the ranks' output.
};

/// How a rank ended: by itself with a status, or by a signal.
struct RankExit {
  int status = 0;  ///< Exit status; meaningful without a signal.
  int signal = 0;  ///< Signal that killed it, or 0.
  bool ok() const { return status == 0 && signal == 0; }
  bool operator==(const RankExit&) const = default;
};

struct SpawnResult {
  std::vector<RankExit> exits;  ///< By rank.
  int interrupted_by =
      0;  ///< First signal that was passed on to the ranks (SIGINT or SIGTERM), or 0.
};

/// Starts world_size ranks of a program on this host and waits for all of them.
///
/// Each gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR (127.0.0.1) and
/// MASTER_PORT, an empty standard input and a process of its own by posix_spawn: a forked copy
/// would hang in its first parallel region if this process had already run one. All ranks share a
/// process group; whatever is left in it when run_ranks ends, by return, by exception or by kill -9
/// of this process, is killed with it (not: processes that a rank moved to a group of their own).
/// If one rank fails, the others get SIGTERM and, grace_s later, SIGKILL.
///
/// A forwarded signal starts the same grace period; a second one ends it at once. Ranks may use it
/// to save and leave cleanly, so an interrupted run returns, with interrupted_by set, however its
/// ranks ended.
///
/// The free port is looked up and released before the ranks start: another program may take it in
/// between, and then rank 0 fails to bind it.
/// @throws CommError naming the first rank that failed and how it ended; UserError for an option
/// out of range, a
///         command that cannot be started, or a second call with forward_signals while one is
///         running.
SpawnResult run_ranks(const SpawnOptions& options);

/// A TCP port of 127.0.0.1 that nobody listened on a moment ago.
int find_free_port();

}  // namespace gradus::distributed::comm
