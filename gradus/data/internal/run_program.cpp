#include <gradus/data/internal/run_program.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gradus/base/error.h>

namespace gradus::data::internal {
namespace {

/// A pipe whose ends close themselves.
struct Pipe {
  Pipe() {
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
      throw UserError(base::join("[data] cannot make a pipe to a program: ", std::strerror(errno)));
    }
  }
  ~Pipe() {
    close_end(0);
    close_end(1);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void close_end(std::size_t end) {
    if (ends[end] >= 0) ::close(ends[end]);
    ends[end] = -1;
  }
  std::array<int, 2> ends{-1, -1};
};

/// Starts the program; the parent's signal mask and ignored signals are not passed on.
int spawn(const std::vector<std::string>& arguments, const Pipe& output, const Pipe& complaint,
          pid_t& child) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawnattr_init(&attributes);
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, output.ends[1], 1);
  ::posix_spawn_file_actions_adddup2(&actions, complaint.ends[1], 2);
  sigset_t none, all;
  sigemptyset(&none);
  sigemptyset(&all);
  for (const int signal : {SIGINT, SIGTERM, SIGPIPE, SIGXFSZ}) sigaddset(&all, signal);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &all);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  const int error = ::posix_spawnp(&child, argv[0], &actions, &attributes, argv.data(), environ);
  ::posix_spawnattr_destroy(&attributes);
  ::posix_spawn_file_actions_destroy(&actions);
  return error;
}

/// Reads both pipes as data comes: a program that fills one while the other is awaited would wait
/// for ever.
void drain(Pipe& output, Pipe& complaint, ProgramResult& result) {
  std::array<pollfd, 2> polls{{{output.ends[0], POLLIN, 0}, {complaint.ends[0], POLLIN, 0}}};
  const std::array<std::string*, 2> sinks{&result.output, &result.complaint};
  std::array<char, 1 << 16> piece;
  while (polls[0].fd >= 0 || polls[1].fd >= 0) {
    if (::poll(polls.data(), polls.size(), -1) < 0 && errno != EINTR) {
      throw UserError(
          base::join("[data] cannot wait for a program's output: ", std::strerror(errno)));
    }
    for (std::size_t i = 0; i < polls.size(); ++i) {
      if (polls[i].fd < 0 || polls[i].revents == 0) continue;
      const ssize_t got = ::read(polls[i].fd, piece.data(), piece.size());
      if (got > 0) {
        sinks[i]->append(piece.data(), static_cast<std::size_t>(got));
      } else if (got == 0 || errno != EINTR) {
        polls[i].fd = -1;  // poll skips negative descriptors
      }
      polls[i].revents = 0;
    }
  }
}

}  // namespace

ProgramResult run_program(const std::vector<std::string>& arguments) {
  GRADUS_INTERNAL_CHECK("data", !arguments.empty(), "a program needs a name");
  ProgramResult result;
  Pipe output, complaint;
  pid_t child = -1;
  result.spawn_error = spawn(arguments, output, complaint, child);
  if (result.spawn_error != 0) return result;
  output.close_end(1);
  complaint.close_end(1);
  drain(output, complaint, result);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  result.exit_status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return result;
}

}  // namespace gradus::data::internal
