#pragma once

#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include <gradus/distributed/comm/environment.h>

namespace gradus::distributed::comm::internal {

/// Closes a file descriptor when it goes.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int number) : number_(number) {}
  FileDescriptor(FileDescriptor&& other) noexcept;
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor() { reset(); }

  int get() const { return number_; }
  bool open() const { return number_ >= 0; }
  void reset();

 private:
  int number_ = -1;
};

struct Pipe {
  FileDescriptor read, write;
};

/// A pipe that no spawned program inherits. @throws UserError if the system has no more
/// descriptors.
Pipe make_pipe();

/// A child process with the ends of its output.
struct Child {
  pid_t pid = -1;
  FileDescriptor out, err;
  std::optional<int> wait_status;  ///< As waitpid gives it, once it has ended.
};

/// A process group whose members end when this object goes, and also when this process is killed.
///
/// Its leader is a watchdog: a shell that does nothing but wait on a pipe whose other end only this
/// process holds. When this process ends, for whatever reason, the kernel closes that end, and the
/// watchdog kills its own group. The group cannot be mistaken for a newer one, for its leader lives
/// until this object reaps it.
class RankGroup {
 public:
  RankGroup();
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  /// Starts a program in the group. @throws UserError if it cannot be started.
  Child spawn(const std::vector<std::string>& command, const Environment& environment);

  /// Sends @p signal to every member; the watchdog ignores all but SIGKILL.
  void send(int signal) const;

  /// Kills what is left of the group, the watchdog too.
  void kill_all();

 private:
  pid_t watchdog_ = -1;
  FileDescriptor lifeline_;
};

/// Reaps @p child if it has ended; waits for that if @p wait. @return true once it has ended.
bool reap(Child& child, bool wait);

}  // namespace gradus::distributed::comm::internal
