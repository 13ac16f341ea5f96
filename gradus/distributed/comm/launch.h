#pragma once

#include <optional>
#include <string>

#include <gradus/distributed/comm/environment.h>

namespace gradus::distributed::comm {

/// Where this process stands among those that train together.
struct LaunchInfo {
  int rank = 0;              ///< In [0, world_size).
  int world_size = 1;        ///< Processes in all.
  int local_rank = 0;        ///< Among the processes of this host: picks the device.
  int local_world_size = 1;  ///< Processes of this host.
  std::string master_address = "127.0.0.1";  ///< Host of rank 0.
  int master_port = 0;            ///< Port on which the ranks meet; 0 only in a world of one.
  std::string launcher = "none";  ///< Whose word this is: options, torchrun, openmpi, mvapich2,
                                  ///< pmi, pmix, slurm, none.

  /// torchrun's agent already runs the store on the port: every rank is a client, rank 0 too.
  bool agent_store = false;
  int restart_count =
      0;  ///< torchrun's attempt; prefixes store keys, so that attempts do not read each other's.
  std::string error_file =
      "";  ///< Where torchrun reads the reason of a failure, as JSON; empty if it does not.
};

/// What the user said explicitly; any field set makes these options the whole truth.
struct LaunchOptions {
  std::optional<int> rank = std::nullopt;
  std::optional<int> world_size = std::nullopt;
  std::optional<int> local_rank = std::nullopt;  ///< Default: rank, which is right on one host.
  std::optional<int> local_world_size =
      std::nullopt;  ///< Default: world_size, which is right on one host.
  std::optional<std::string> master_address = std::nullopt;
  std::optional<int> master_port = std::nullopt;
};

/// Finds this process's place. The first that says anything wins: @p options; torchrun's variables
/// (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); Open MPI's, MVAPICH2's, PMI's (MPICH,
/// Intel MPI) or PMIx's; SLURM's, unless the job's name is bash or interactive; else this is the
/// only process.
///
/// Under MPI and SLURM, MASTER_ADDR and MASTER_PORT are honoured where set. Else the address is the
/// first host of SLURM's node list, or 127.0.0.1 where all ranks are on one host; the port is 15000
/// + the last four digits of SLURM's job id, or 29500.
/// @throws UserError naming the variable: one of a set is missing, a number is malformed or out of
/// range, or
///         rank >= world size. Never guesses.
LaunchInfo discover(const Environment& environment, const LaunchOptions& options = {});

/// The first host of a SLURM node list: "node[003-005,9],x" gives "node003".
/// @throws UserError on an empty or malformed list.
std::string first_slurm_host(const std::string& node_list);

}  // namespace gradus::distributed::comm
