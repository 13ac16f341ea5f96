#include <gradus/distributed/comm/internal/rank_group.h>

#include <cerrno>
#include <cstring>
#include <initializer_list>
#include <utility>

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gradus/base/error.h>

namespace gradus::distributed::comm::internal {
namespace {

// "read" returns at the end of the pipe only: nothing is ever written to it. The ranks' signals
// reach the whole group, so the watchdog blocks those that can be blocked.
constexpr const char* kWatchdogScript = "read line; kill -KILL 0";

/// Attributes and actions of posix_spawn, freed in every case.
class SpawnPlan {
 public:
  SpawnPlan() {
    posix_spawnattr_init(&attributes_);
    posix_spawn_file_actions_init(&actions_);
    sigemptyset(&blocked_);
  }
  ~SpawnPlan() {
    posix_spawn_file_actions_destroy(&actions_);
    posix_spawnattr_destroy(&attributes_);
  }
  SpawnPlan(const SpawnPlan&) = delete;
  SpawnPlan& operator=(const SpawnPlan&) = delete;

  void connect(int from, int to) { posix_spawn_file_actions_adddup2(&actions_, from, to); }
  void open_null(int to) {
    posix_spawn_file_actions_addopen(&actions_, to, "/dev/null", O_RDWR, 0);
  }

  /// The program starts with @p numbers blocked, so that they cannot end it even before its first
  /// instruction.
  void block(std::initializer_list<int> numbers) {
    for (const int number : numbers) sigaddset(&blocked_, number);
  }

  /// Starts @p command in process group @p group (0: a new one). @return 0 or an errno.
  int start(pid_t& pid, pid_t group, const std::vector<std::string>& command,
            const Environment& environment) {
    posix_spawnattr_setflags(
        &attributes_, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setpgroup(&attributes_, group);
    // The program starts with the signals a shell would give it, whatever this process blocks or
    // ignores.
    sigset_t standard;
    sigemptyset(&standard);
    for (const int number : {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGPIPE, SIGCHLD})
      sigaddset(&standard, number);
    posix_spawnattr_setsigmask(&attributes_, &blocked_);
    posix_spawnattr_setsigdefault(&attributes_, &standard);

    std::vector<std::string> settings;
    for (const auto& [name, value] : environment) settings.push_back(name + "=" + value);
    auto argv = pointers(command);
    auto envp = pointers(settings);
    return posix_spawnp(&pid, command.front().c_str(), &actions_, &attributes_, argv.data(),
                        envp.data());
  }

 private:
  static std::vector<char*> pointers(const std::vector<std::string>& strings) {
    std::vector<char*> result;
    for (const auto& string : strings) result.push_back(const_cast<char*>(string.c_str()));
    result.push_back(nullptr);
    return result;
  }

  posix_spawnattr_t attributes_;
  posix_spawn_file_actions_t actions_;
  sigset_t blocked_;
};

}  // namespace

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept
    : number_(std::exchange(other.number_, -1)) {}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    reset();
    number_ = std::exchange(other.number_, -1);
  }
  return *this;
}

void FileDescriptor::reset() {
  if (number_ >= 0) ::close(std::exchange(number_, -1));
}

Pipe make_pipe() {
  int ends[2];
  GRADUS_CHECK("spawn", ::pipe2(ends, O_CLOEXEC) == 0,
               "a pipe could not be made: ", std::strerror(errno));
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

RankGroup::RankGroup() {
  auto [read, write] = make_pipe();
  SpawnPlan plan;
  plan.connect(read.get(), STDIN_FILENO);
  plan.open_null(STDOUT_FILENO);
  plan.open_null(STDERR_FILENO);
  plan.block({SIGHUP, SIGINT, SIGQUIT, SIGTERM});
  const int error = plan.start(watchdog_, 0, {"/bin/sh", "-c", kWatchdogScript}, {});
  GRADUS_CHECK("spawn", error == 0,
               "the watchdog (/bin/sh) could not be started: ", std::strerror(error));
  lifeline_ = std::move(write);
}

RankGroup::~RankGroup() { kill_all(); }

Child RankGroup::spawn(const std::vector<std::string>& command, const Environment& environment) {
  auto out = make_pipe();
  auto err = make_pipe();
  SpawnPlan plan;
  plan.open_null(STDIN_FILENO);
  plan.connect(out.write.get(), STDOUT_FILENO);
  plan.connect(err.write.get(), STDERR_FILENO);
  Child child;
  const int error = plan.start(child.pid, watchdog_, command, environment);
  GRADUS_CHECK("spawn", error == 0, "the command must be a program that can be started; got '",
               command.front(), "': ", std::strerror(error));
  child.out = std::move(out.read);
  child.err = std::move(err.read);
  for (const int end : {child.out.get(), child.err.get()}) ::fcntl(end, F_SETFL, O_NONBLOCK);
  return child;
}

void RankGroup::send(int signal) const {
  if (watchdog_ > 0) ::kill(-watchdog_, signal);
}

void RankGroup::kill_all() {
  if (watchdog_ <= 0) return;
  send(SIGKILL);
  Child watchdog;
  watchdog.pid = std::exchange(watchdog_, -1);
  reap(watchdog, true);
}

bool reap(Child& child, bool wait) {
  if (child.wait_status) return true;
  int status = 0;
  pid_t result = 0;
  do {
    result = ::waitpid(child.pid, &status, wait ? 0 : WNOHANG);
  } while (result < 0 && errno == EINTR);
  if (result == 0) return false;
  // Without a child to wait for, someone else in this process has taken its status; 255 says that
  // it is unknown.
  child.wait_status = result > 0 ? status : 255 << 8;
  return true;
}

}  // namespace gradus::distributed::comm::internal
