#include <tools/stop_signal.h>

#include <csignal>

namespace gradus::tools {
namespace {

volatile std::sig_atomic_t received = 0;

void remember(int signal) {
  received = signal;
  std::signal(signal, SIG_DFL);
}

}  // namespace

void catch_stop_signals() {
  std::signal(SIGINT, &remember);
  std::signal(SIGTERM, &remember);
  // A reader of our output that leaves (gradus train | head) is no reason to lose a run.
  std::signal(SIGPIPE, SIG_IGN);
}

int stop_signal() { return received; }

}  // namespace gradus::tools
