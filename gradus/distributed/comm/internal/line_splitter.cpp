#include <gradus/distributed/comm/internal/line_splitter.h>

#include <utility>

namespace gradus::distributed::comm::internal {
namespace {

// A rank that never ends its line must not fill this process's memory.
constexpr std::size_t kLongestLine = 64 << 10;

}  // namespace

void LineSplitter::feed(std::string_view bytes, const Sink& sink) {
  while (!bytes.empty()) {
    const auto end = bytes.find('\n');
    pending_.append(bytes.substr(0, end));
    if (end == std::string_view::npos) {
      if (pending_.size() >= kLongestLine) finish(sink);
      return;
    }
    bytes.remove_prefix(end + 1);
    // Moved out first: a sink that throws must not be given the same line again.
    const auto line = std::exchange(pending_, {});
    sink(line);
  }
}

void LineSplitter::finish(const Sink& sink) {
  if (pending_.empty()) return;
  const auto line = std::exchange(pending_, {});
  sink(line);
}

}  // namespace gradus::distributed::comm::internal
