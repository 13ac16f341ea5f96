#include <gradus/distributed/comm/launch.h>

#include <charconv>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include <gradus/base/error.h>

namespace gradus::distributed::comm {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();
constexpr int kMaxPort = 65535;
constexpr int kDefaultPort = 29500;  // torch.distributed's own

int parse_number(const std::string& name, std::string_view text, int low, int high) {
  int value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  GRADUS_CHECK(
      "launch",
      status == std::errc{} && end == text.data() + text.size() && value >= low && value <= high,
      name, " must be a whole number from ", low, " to ", high, "; got '", text, "'");
  return value;
}

/// Reads variables of one launcher, so that every complaint says whose they are.
class Variables {
 public:
  Variables(const Environment& environment, std::string launcher)
      : environment_(environment), launcher_(std::move(launcher)) {}

  bool has(const std::string& name) const { return environment_.contains(name); }

  const std::string& text(const std::string& name) const {
    const auto found = environment_.find(name);
    GRADUS_CHECK("launch", found != environment_.end(), "the variables of ", launcher_,
                 " must be complete; got no ", name);
    GRADUS_CHECK("launch", !found->second.empty(), name, " must not be empty");
    return found->second;
  }

  int number(const std::string& name, int low, int high) const {
    return parse_number(name, text(name), low, high);
  }

  /// The first of several names that is set; the complaint names the first.
  int number_of(const std::vector<const char*>& names, int low, int high) const {
    for (const char* name : names) {
      if (has(name)) return number(name, low, high);
    }
    return number(names.front(), low, high);
  }

 private:
  const Environment& environment_;
  std::string launcher_;
};

void check_ranks(const LaunchInfo& info) {
  GRADUS_CHECK("launch", info.rank < info.world_size, "the rank must be below the world size ",
               info.world_size, "; got ", info.rank, " from ", info.launcher);
  GRADUS_CHECK("launch", info.local_world_size <= info.world_size,
               "the local world size must be at most the world size ", info.world_size, "; got ",
               info.local_world_size, " from ", info.launcher);
  GRADUS_CHECK("launch", info.local_rank < info.local_world_size,
               "the local rank must be below the local world size ", info.local_world_size,
               "; got ", info.local_rank, " from ", info.launcher);
}

LaunchInfo from_options(const LaunchOptions& options) {
  LaunchInfo info{.launcher = "options"};
  const auto require = [](bool given, const char* name) {
    GRADUS_CHECK("launch", given, "the launch options must be complete; got no ", name);
  };
  require(options.world_size.has_value(), "world_size");
  info.world_size = *options.world_size;
  GRADUS_CHECK("launch", info.world_size >= 1, "world_size must be >= 1; got ", info.world_size);
  require(options.rank.has_value() || info.world_size == 1, "rank");
  if (info.world_size > 1) {
    require(options.master_address.has_value(), "master_address");
    require(options.master_port.has_value(), "master_port");
  }
  info.rank = options.rank.value_or(0);
  info.local_rank = options.local_rank.value_or(info.rank);
  info.local_world_size = options.local_world_size.value_or(info.world_size);
  info.master_address = options.master_address.value_or(info.master_address);
  info.master_port = options.master_port.value_or(0);
  GRADUS_CHECK("launch", info.rank >= 0, "rank must be >= 0; got ", info.rank);
  GRADUS_CHECK("launch", info.local_rank >= 0, "local_rank must be >= 0; got ", info.local_rank);
  GRADUS_CHECK("launch", info.local_world_size >= 1, "local_world_size must be >= 1; got ",
               info.local_world_size);
  GRADUS_CHECK("launch", !info.master_address.empty(), "master_address must not be empty");
  GRADUS_CHECK("launch",
               info.master_port >= (info.world_size > 1 ? 1 : 0) && info.master_port <= kMaxPort,
               "master_port must be from 1 to ", kMaxPort, "; got ", info.master_port);
  return info;
}

LaunchInfo from_torchrun(const Environment& environment) {
  const Variables variables(environment, "torchrun");
  LaunchInfo info{.launcher = "torchrun"};
  info.rank = variables.number("RANK", 0, kMaxInt);
  info.local_rank = variables.number("LOCAL_RANK", 0, kMaxInt);
  info.world_size = variables.number("WORLD_SIZE", 1, kMaxInt);
  info.local_world_size = variables.has("LOCAL_WORLD_SIZE")
                              ? variables.number("LOCAL_WORLD_SIZE", 1, kMaxInt)
                              : info.world_size;
  info.master_address = variables.text("MASTER_ADDR");
  info.master_port = variables.number("MASTER_PORT", 1, kMaxPort);
  info.agent_store = variables.has("TORCHELASTIC_USE_AGENT_STORE") &&
                     variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (variables.has("TORCHELASTIC_RESTART_COUNT")) {
    info.restart_count = variables.number("TORCHELASTIC_RESTART_COUNT", 0, kMaxInt);
  }
  if (variables.has("TORCHELASTIC_ERROR_FILE"))
    info.error_file = variables.text("TORCHELASTIC_ERROR_FILE");
  return info;
}

std::string slurm_node_list(const Environment& environment) {
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
    const auto found = environment.find(name);
    if (found != environment.end() && !found->second.empty()) return found->second;
  }
  return "";
}

/// Where the ranks meet, for launchers that say nothing of it.
void find_master(const Environment& environment, LaunchInfo& info) {
  const Variables variables(environment, info.launcher);
  if (variables.has("MASTER_ADDR")) {
    info.master_address = variables.text("MASTER_ADDR");
  } else if (const auto nodes = slurm_node_list(environment); !nodes.empty()) {
    info.master_address = first_slurm_host(nodes);
  } else if (info.local_world_size != info.world_size) {
    // Several hosts, and nothing tells which one has rank 0.
    variables.text("MASTER_ADDR");
  }
  const char* job = variables.has("SLURM_JOB_ID") ? "SLURM_JOB_ID" : "SLURM_JOBID";
  if (variables.has("MASTER_PORT")) {
    info.master_port = variables.number("MASTER_PORT", 1, kMaxPort);
  } else if (variables.has(job)) {
    // Jobs on one host must differ, and all ranks of one agree without talking.
    const auto& id = variables.text(job);
    const auto digits = std::string_view(id).substr(id.size() > 4 ? id.size() - 4 : 0);
    GRADUS_CHECK("launch", id.find_first_not_of("0123456789") == std::string::npos, job,
                 " must be a whole number; got '", id, "'");
    info.master_port = 15000 + parse_number(job, digits, 0, 9999);
  } else {
    info.master_port = kDefaultPort;
  }
}

struct MpiFamily {
  const char* launcher;
  std::vector<const char*> triggers;
  std::vector<const char*> rank, size, local_rank, local_size;
};

// PMI and PMIx do not state the local rank themselves; their launchers do.
const std::vector<MpiFamily>& mpi_families() {
  static const std::vector<MpiFamily> families{{"openmpi",
                                                {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                                                {"OMPI_COMM_WORLD_RANK"},
                                                {"OMPI_COMM_WORLD_SIZE"},
                                                {"OMPI_COMM_WORLD_LOCAL_RANK"},
                                                {"OMPI_COMM_WORLD_LOCAL_SIZE"}},
                                               {"mvapich2",
                                                {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"},
                                                {"MV2_COMM_WORLD_RANK"},
                                                {"MV2_COMM_WORLD_SIZE"},
                                                {"MV2_COMM_WORLD_LOCAL_RANK"},
                                                {"MV2_COMM_WORLD_LOCAL_SIZE"}},
                                               {"pmi",
                                                {"PMI_RANK", "PMI_SIZE"},
                                                {"PMI_RANK"},
                                                {"PMI_SIZE"},
                                                {"MPI_LOCALRANKID", "PMI_LOCAL_RANK"},
                                                {"MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"}},
                                               {"pmix",
                                                {"PMIX_RANK", "PMIX_SIZE"},
                                                {"PMIX_RANK"},
                                                {"PMIX_SIZE"},
                                                {"PMIX_LOCAL_RANK", "MPI_LOCALRANKID"},
                                                {"PMIX_LOCAL_SIZE", "MPI_LOCALNRANKS"}}};
  return families;
}

LaunchInfo from_mpi(const Environment& environment, const MpiFamily& family) {
  const Variables variables(environment, family.launcher);
  LaunchInfo info{.launcher = family.launcher};
  info.rank = variables.number_of(family.rank, 0, kMaxInt);
  info.world_size = variables.number_of(family.size, 1, kMaxInt);
  if (info.world_size > 1) {
    info.local_rank = variables.number_of(family.local_rank, 0, kMaxInt);
    info.local_world_size = variables.number_of(family.local_size, 1, kMaxInt);
  }
  find_master(environment, info);
  return info;
}

/// The entry of this node in SLURM's "2(x3),1": two tasks on each of three nodes, then one on the
/// last.
int slurm_tasks_on_node(const std::string& name, const std::string& text, int node) {
  std::string_view rest(text);
  while (!rest.empty()) {
    const auto comma = rest.find(',');
    auto entry = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
    int nodes = 1;
    if (const auto open = entry.find("(x");
        open != std::string_view::npos && entry.ends_with(')')) {
      nodes = parse_number(name, entry.substr(open + 2, entry.size() - open - 3), 1, kMaxInt);
      entry = entry.substr(0, open);
    }
    const int tasks = parse_number(name, entry, 1, kMaxInt);
    if (node < nodes) return tasks;
    node -= nodes;
  }
  throw UserError(base::join("[launch] ", name,
                             " must have an entry for this node (SLURM_NODEID); got '", text, "'"));
}

LaunchInfo from_slurm(const Environment& environment) {
  const Variables variables(environment, "slurm");
  LaunchInfo info{.launcher = "slurm"};
  info.rank = variables.number("SLURM_PROCID", 0, kMaxInt);
  info.world_size = variables.number("SLURM_NTASKS", 1, kMaxInt);
  info.local_rank = variables.number("SLURM_LOCALID", 0, kMaxInt);
  info.local_world_size = info.world_size;
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    if (!variables.has(name)) continue;
    const int node =
        variables.has("SLURM_NODEID") ? variables.number("SLURM_NODEID", 0, kMaxInt) : 0;
    info.local_world_size = slurm_tasks_on_node(name, variables.text(name), node);
    break;
  }
  GRADUS_CHECK(
      "launch",
      info.world_size == 1 || variables.has("MASTER_ADDR") || !slurm_node_list(environment).empty(),
      "the variables of slurm must be complete; got no SLURM_JOB_NODELIST");
  find_master(environment, info);
  return info;
}

bool any_of(const Environment& environment, const std::vector<const char*>& names) {
  for (const char* name : names) {
    if (environment.contains(name)) return true;
  }
  return false;
}

bool interactive_slurm(const Environment& environment) {
  // A shell inside an allocation carries the job's variables but is one process, whatever they say.
  const auto name = environment.find("SLURM_JOB_NAME");
  return name != environment.end() && (name->second == "bash" || name->second == "interactive");
}

LaunchInfo from_environment(const Environment& environment) {
  // MASTER_ADDR and MASTER_PORT alone do not speak for torchrun: users set them for MPI and SLURM
  // too.
  if (any_of(environment, {"RANK", "WORLD_SIZE", "LOCAL_RANK"})) return from_torchrun(environment);
  const bool slurm = any_of(environment, {"SLURM_PROCID"}) && !interactive_slurm(environment);
  for (const auto& family : mpi_families()) {
    if (!any_of(environment, family.triggers)) continue;
    // srun sets PMI's and PMIx's rank for MPI programs, without a local rank or a size: its own
    // variables are whole.
    const std::string_view launcher = family.launcher;
    if (slurm && (launcher == "pmi" || launcher == "pmix")) continue;
    return from_mpi(environment, family);
  }
  return slurm ? from_slurm(environment) : LaunchInfo{};
}

}  // namespace

LaunchInfo discover(const Environment& environment, const LaunchOptions& options) {
  const bool explicitly = options.rank || options.world_size || options.local_rank ||
                          options.local_world_size || options.master_address || options.master_port;
  auto info = explicitly ? from_options(options) : from_environment(environment);
  check_ranks(info);
  return info;
}

std::string first_slurm_host(const std::string& node_list) {
  const auto check = [&](bool holds) {
    GRADUS_CHECK("launch", holds, "a SLURM node list looks like 'a[01-03,7],b'; got '", node_list,
                 "'");
  };
  std::string host;
  for (std::size_t i = 0; i < node_list.size() && node_list[i] != ','; ++i) {
    if (node_list[i] != '[') {
      check(node_list[i] != ']');
      host += node_list[i];
      continue;
    }
    // Of "[003-005,9]" the first number, with its zeros: hosts are named with them.
    const auto close = node_list.find(']', i);
    check(close != std::string::npos);
    const auto inside = node_list.substr(i + 1, close - i - 1);
    const auto first = inside.substr(0, inside.find_first_of("-,"));
    check(!first.empty() && first.find_first_not_of("0123456789") == std::string::npos);
    host += first;
    i = close;
  }
  check(!host.empty());
  return host;
}

}  // namespace gradus::distributed::comm
