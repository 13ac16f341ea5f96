#include <gradus/distributed/comm/spawn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <iostream>
#include <utility>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gradus/base/clock.h>
#include <gradus/base/error.h>
#include <gradus/distributed/comm/internal/line_splitter.h>
#include <gradus/distributed/comm/internal/rank_group.h>

namespace gradus::distributed::comm {
namespace {

using internal::Child;
using internal::FileDescriptor;

// A rank's end closes its pipes, which wakes the loop at once, unless a process of the rank's own
// still holds them.
constexpr int kPollMs = 50;

// ---- Signals of this process
// -----------------------------------------------------------------------------------

std::atomic<int> signal_pipe{-1};

void note_signal(int number) {
  const int saved = errno;
  const char byte = static_cast<char>(number);
  // A full pipe means that signals wait to be handled already.
  [[maybe_unused]] const auto written = ::write(signal_pipe.load(), &byte, 1);
  errno = saved;
}

/// While it lives, SIGINT and SIGTERM arrive as bytes of a pipe.
class SignalCatcher {
 public:
  explicit SignalCatcher(bool active) {
    if (!active) return;
    auto [read, write] = internal::make_pipe();
    ::fcntl(read.get(), F_SETFL, O_NONBLOCK);
    ::fcntl(write.get(), F_SETFL, O_NONBLOCK);
    int none = -1;
    GRADUS_CHECK("spawn", signal_pipe.compare_exchange_strong(none, write.get()),
                 "only one run_ranks at a time can forward signals; set forward_signals to false "
                 "in the others");
    read_ = std::move(read);
    write_ = std::move(write);
    for (std::size_t i = 0; i < kNumbers.size(); ++i) {
      struct sigaction action{};
      action.sa_handler = note_signal;
      action.sa_flags = SA_RESTART;
      ::sigaction(kNumbers[i], nullptr, &previous_[i]);
      // Whoever started this program with a signal ignored (nohup, a shell's background job) wants
      // it ignored.
      if (previous_[i].sa_handler != SIG_IGN) ::sigaction(kNumbers[i], &action, nullptr);
    }
  }
  ~SignalCatcher() {
    if (!read_.open()) return;
    for (std::size_t i = 0; i < kNumbers.size(); ++i)
      ::sigaction(kNumbers[i], &previous_[i], nullptr);
    signal_pipe.store(-1);
  }
  SignalCatcher(const SignalCatcher&) = delete;
  SignalCatcher& operator=(const SignalCatcher&) = delete;

  int descriptor() const { return read_.get(); }
  /// The next signal that arrived, or 0.
  int next() {
    char byte = 0;
    return read_.open() && ::read(read_.get(), &byte, 1) == 1 ? byte : 0;
  }

 private:
  static constexpr std::array<int, 2> kNumbers{SIGINT, SIGTERM};
  FileDescriptor read_, write_;
  std::array<struct sigaction, 2> previous_{};
};

// ---- Ranks
// -----------------------------------------------------------------------------------------------------

struct Rank {
  Child child;
  internal::LineSplitter out, err;
  std::string last_error_line;
};

RankExit exit_of(int wait_status) {
  if (WIFSIGNALED(wait_status)) return {.status = 0, .signal = WTERMSIG(wait_status)};
  return {.status = WEXITSTATUS(wait_status), .signal = 0};
}

std::string describe(int rank, const RankExit& exit) {
  return exit.signal != 0 ? base::join("rank ", rank, " was killed by signal ", exit.signal, " (",
                                       ::strsignal(exit.signal), ")")
                          : base::join("rank ", rank, " exited with status ", exit.status);
}

constexpr std::array<const char*, 6> kRankVariables{
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};

void check_options(const SpawnOptions& options) {
  GRADUS_CHECK("spawn", options.world_size >= 1, "world_size must be >= 1; got ",
               options.world_size);
  GRADUS_CHECK("spawn", !options.command.empty() && !options.command.front().empty(),
               "command must name a program; got none");
  GRADUS_CHECK("spawn", options.port >= 0 && options.port <= 65535,
               "port must be from 0 to 65535; got ", options.port);
  GRADUS_CHECK("spawn", std::isfinite(options.grace_s) && options.grace_s >= 0.0,
               "grace_s must be finite and >= 0; "
               "got ",
               options.grace_s);
  GRADUS_CHECK("spawn", options.on_line != nullptr, "on_line must be callable");
  for (const char* name : kRankVariables) {
    GRADUS_CHECK("spawn", !options.extra_environment.contains(name),
                 "extra_environment must leave ", name, " to run_ranks");
  }
}

Environment rank_environment(const SpawnOptions& options) {
  auto environment = options.base_environment ? *options.base_environment : process_environment();
  // Of a torchrun around this process: its agent's store does not serve the ranks started here.
  std::erase_if(environment,
                [](const auto& entry) { return entry.first.starts_with("TORCHELASTIC_"); });
  for (const auto& [name, value] : options.extra_environment) environment[name] = value;
  environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = std::to_string(options.world_size);
  environment["MASTER_ADDR"] = "127.0.0.1";
  environment["MASTER_PORT"] = std::to_string(options.port == 0 ? find_free_port() : options.port);
  return environment;
}

class Run {
 public:
  explicit Run(const SpawnOptions& options)
      : options_(options), signals_(options.forward_signals) {}
  // Reached by an exception too, such as one of on_line: no rank may stay, running or as a zombie.
  ~Run() {
    kill_ranks();
    for (auto& rank : ranks_) {
      if (rank.child.pid > 0) internal::reap(rank.child, true);
    }
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // Not the constructor's work: if the second rank cannot be started, the destructor must see the
  // first one.
  void start() {
    auto environment = rank_environment(options_);
    ranks_.reserve(static_cast<std::size_t>(options_.world_size));
    for (int rank = 0; rank < options_.world_size; ++rank) {
      environment["RANK"] = environment["LOCAL_RANK"] = std::to_string(rank);
      ranks_.emplace_back().child = group_.spawn(options_.command, environment);
    }
  }

  SpawnResult wait() {
    while (alive()) {
      wait_for_events();
      forward_signals();
      for (int rank = 0; rank < options_.world_size; ++rank) read_output(rank);
      reap_ended();
      if (deadline_ && clock_() >= *deadline_) kill_ranks();
    }
    // What a rank left behind must not outlive the run; what it wrote is in the pipes already.
    group_.kill_all();
    for (int rank = 0; rank < options_.world_size; ++rank) finish_output(rank);
    SpawnResult result{.exits = {}, .interrupted_by = interrupted_by_};
    for (const auto& rank : ranks_) result.exits.push_back(exit_of(*rank.child.wait_status));
    if (!failed_.empty()) throw_failure(result);
    return result;
  }

 private:
  bool alive() const {
    return std::any_of(ranks_.begin(), ranks_.end(),
                       [](const Rank& rank) { return !rank.child.wait_status; });
  }

  void wait_for_events() const {
    std::vector<pollfd> events;
    const auto watch = [&](int descriptor) {
      if (descriptor >= 0) events.push_back({.fd = descriptor, .events = POLLIN, .revents = 0});
    };
    watch(signals_.descriptor());
    for (const auto& rank : ranks_) {
      watch(rank.child.out.get());
      watch(rank.child.err.get());
    }
    ::poll(events.data(), events.size(), kPollMs);
  }

  void forward_signals() {
    while (const int number = signals_.next()) {
      if (interrupted_by_ != 0) {
        kill_ranks();
        continue;
      }
      interrupted_by_ = number;
      group_.send(number);
      start_grace();
    }
  }

  void start_grace() {
    if (!deadline_) deadline_ = clock_() + options_.grace_s;
  }

  void read_output(int number) {
    auto& rank = ranks_[static_cast<std::size_t>(number)];
    drain(rank.child.out,
          [&](std::string_view bytes) { rank.out.feed(bytes, sink(number, RankStream::out)); });
    drain(rank.child.err,
          [&](std::string_view bytes) { rank.err.feed(bytes, sink(number, RankStream::err)); });
  }

  void finish_output(int number) {
    read_output(number);
    auto& rank = ranks_[static_cast<std::size_t>(number)];
    rank.out.finish(sink(number, RankStream::out));
    rank.err.finish(sink(number, RankStream::err));
  }

  internal::LineSplitter::Sink sink(int number, RankStream stream) {
    return [this, number, stream](std::string_view line) {
      if (stream == RankStream::err && !line.empty())
        ranks_[static_cast<std::size_t>(number)].last_error_line = line;
      options_.on_line(number, stream, line);
    };
  }

  static void drain(FileDescriptor& pipe, const std::function<void(std::string_view)>& take) {
    std::array<char, 16384> buffer;
    // A bound, so that one rank that writes without pause does not keep the loop from the others.
    for (int turn = 0; turn < 64 && pipe.open(); ++turn) {
      const auto count = ::read(pipe.get(), buffer.data(), buffer.size());
      if (count > 0) {
        take({buffer.data(), static_cast<std::size_t>(count)});
      } else if (count == 0) {
        pipe.reset();
      } else if (errno != EINTR) {
        if (errno != EAGAIN) pipe.reset();
        return;
      }
    }
  }

  void reap_ended() {
    std::vector<int> failed;
    for (int number = 0; number < options_.world_size; ++number) {
      auto& child = ranks_[static_cast<std::size_t>(number)].child;
      if (child.wait_status || !internal::reap(child, false)) continue;
      if (!exit_of(*child.wait_status).ok()) failed.push_back(number);
    }
    // Later failures are of our own making: the ranks were asked to end.
    if (failed.empty() || !failed_.empty() || interrupted_by_ != 0) return;
    // Of several found together the one killed by a signal comes first: ranks that lose a peer
    // leave with a status.
    std::sort(failed.begin(), failed.end(), [this](int a, int b) {
      const auto left_by_itself = [this](int number) {
        return exit_of(*ranks_[static_cast<std::size_t>(number)].child.wait_status).signal == 0;
      };
      return std::pair(left_by_itself(a), a) < std::pair(left_by_itself(b), b);
    });
    failed_ = std::move(failed);
    group_.send(SIGTERM);
    start_grace();
  }

  void kill_ranks() {
    // By number too: a rank may have left the group.
    for (const auto& rank : ranks_) {
      if (rank.child.pid > 0 && !rank.child.wait_status) ::kill(rank.child.pid, SIGKILL);
    }
    group_.kill_all();
  }

  [[noreturn]] void throw_failure(const SpawnResult& result) const {
    const int first = failed_.front();
    auto message =
        base::join("[spawn] ", describe(first, result.exits[static_cast<std::size_t>(first)]));
    if (options_.world_size > 1)
      message += base::join(" of ", options_.world_size, " ranks; the others were ended");
    for (std::size_t i = 1; i < failed_.size(); ++i) {
      message +=
          base::join("; found at the same time: ",
                     describe(failed_[i], result.exits[static_cast<std::size_t>(failed_[i])]));
    }
    const auto& last = ranks_[static_cast<std::size_t>(first)].last_error_line;
    if (!last.empty()) message += base::join(". Its last error line: ", last);
    throw CommError(message, first, "run_ranks");
  }

  const SpawnOptions& options_;
  SignalCatcher signals_;
  internal::RankGroup group_;
  std::vector<Rank> ranks_;
  base::Clock clock_ = base::monotonic_clock();
  std::optional<double> deadline_;
  std::vector<int> failed_;
  int interrupted_by_ = 0;
};

}  // namespace

LineSink prefixed_lines() {
  return [](int rank, RankStream stream, std::string_view line) {
    (stream == RankStream::out ? std::cout : std::cerr) << '[' << rank << "] " << line << std::endl;
  };
}

SpawnResult run_ranks(const SpawnOptions& options) {
  check_options(options);
  Run run(options);
  run.start();
  return run.wait();
}

int find_free_port() {
  const FileDescriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  GRADUS_CHECK("spawn",
               socket.open() && ::bind(socket.get(), generic, size) == 0 &&
                   ::getsockname(socket.get(), generic, &size) == 0,
               "a free port of 127.0.0.1 could not be found: ", std::strerror(errno));
  return ntohs(address.sin_port);
}

}  // namespace gradus::distributed::comm
