#include <tests/integration/gradus_process.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <fcntl.h>
#include <integration_paths.h>
#include <poll.h>
#include <pty.h>
#include <spawn.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

extern char** environ;  // NOLINT(readability-redundant-declaration): not every unistd.h declares it

namespace gradus::integration {
namespace {

// The test's environment, with what keeps children quick and alike on a busy machine.
std::vector<std::string> child_environment() {
  const std::map<std::string, std::string> wanted{{"OMP_WAIT_POLICY", "passive"},
                                                  {"OMP_NUM_THREADS", "1"},
                                                  {"LC_ALL", "C.UTF-8"},
                                                  {"TERM", "xterm"}};
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    if (!wanted.contains(text.substr(0, text.find('=')))) environment.push_back(text);
  }
  for (const auto& [name, value] : wanted) environment.push_back(name + "=" + value);
  return environment;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

void require(bool good, const char* what, int error) {
  if (!good) throw std::runtime_error(std::string(what) + ": " + std::strerror(error));
}

}  // namespace

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> result;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    result.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return result;
}

GradusProcess::GradusProcess(const std::vector<std::string>& arguments, Output output,
                             const std::string& working_directory) {
  std::vector<std::string> command{kProgram};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::vector<std::string> environment = child_environment();

  int out[2], err[2] = {-1, -1};
  if (output == Output::terminal) {
    winsize size{};
    size.ws_col = 100;
    size.ws_row = 24;
    require(::openpty(&out[0], &out[1], nullptr, nullptr, &size) == 0, "openpty", errno);
    termios raw{};
    ::tcgetattr(out[1], &raw);
    ::cfmakeraw(&raw);  // the bytes as they were written
    ::tcsetattr(out[1], TCSANOW, &raw);
    ::fcntl(out[0], F_SETFD, FD_CLOEXEC);
    ::fcntl(out[1], F_SETFD, FD_CLOEXEC);
  } else {
    require(::pipe2(out, O_CLOEXEC) == 0, "pipe2", errno);
    require(::pipe2(err, O_CLOEXEC) == 0, "pipe2", errno);
  }

  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_adddup2(&actions, out[1], 1);
  ::posix_spawn_file_actions_adddup2(&actions, output == Output::terminal ? out[1] : err[1], 2);
  if (!working_directory.empty()) {
    ::posix_spawn_file_actions_addchdir_np(&actions, working_directory.c_str());
  }
  const int error = ::posix_spawn(&pid_, kProgram, &actions, nullptr, pointers(command).data(),
                                  pointers(environment).data());
  ::posix_spawn_file_actions_destroy(&actions);
  ::close(out[1]);
  out_descriptor_ = out[0];
  outputs_[out[0]];
  if (err[0] >= 0) {
    ::close(err[1]);
    outputs_[err[0]];
  }
  if (error != 0) {
    for (const auto& [descriptor, text] : outputs_) ::close(descriptor);
    pid_ = -1;
    require(false, kProgram, error);
  }
}

GradusProcess::~GradusProcess() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  for (const auto& [descriptor, text] : outputs_) ::close(descriptor);
}

bool GradusProcess::read_some(int timeout_ms) {
  if (outputs_.empty()) return false;
  std::vector<pollfd> polled;
  for (const auto& [descriptor, text] : outputs_) polled.push_back({descriptor, POLLIN, 0});
  ::poll(polled.data(), polled.size(), timeout_ms);
  for (const pollfd& entry : polled) {
    if (entry.revents == 0) continue;
    char buffer[4096];
    const ssize_t count = ::read(entry.fd, buffer, sizeof buffer);
    if (count > 0) {
      outputs_[entry.fd].append(buffer, static_cast<std::size_t>(count));
    } else if (count == 0 || (errno != EINTR && errno != EAGAIN)) {  // a terminal's end is EIO
      (entry.fd == out_descriptor_ ? out_ : err_) = std::move(outputs_[entry.fd]);
      outputs_.erase(entry.fd);
      ::close(entry.fd);
    }
  }
  return !outputs_.empty();
}

bool GradusProcess::wait_until(const std::function<bool()>& ready, std::chrono::seconds patience) {
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (std::chrono::steady_clock::now() < deadline) {
    if (ready()) return true;
    if (!read_some(1)) return ready();
  }
  return false;
}

std::string GradusProcess::output() const {
  const auto open = outputs_.find(out_descriptor_);
  return open == outputs_.end() ? out_ : open->second;
}

void GradusProcess::send(int signal) const {
  if (pid_ > 0) ::kill(pid_, signal);
}

Ended GradusProcess::wait() {
  while (read_some(-1)) {
  }
  int status = 0;
  while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  Ended ended;
  if (WIFEXITED(status)) ended.code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) ended.signal = WTERMSIG(status);
  ended.out = std::move(out_);
  ended.err = std::move(err_);
  return ended;
}

Ended run_gradus(const std::vector<std::string>& arguments) {
  return GradusProcess(arguments).wait();
}

}  // namespace gradus::integration
