#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace gradus::distributed::comm::internal {

/// Cuts a stream of bytes into lines.
class LineSplitter {
 public:
  using Sink = std::function<void(std::string_view line)>;

  /// Hands every line that @p bytes completes to @p sink.
  void feed(std::string_view bytes, const Sink& sink);
  /// Hands over what is left, if anything: a last line without an end.
  void finish(const Sink& sink);

 private:
  std::string pending_;
};

}  // namespace gradus::distributed::comm::internal
