#include <gradus/distributed/comm/environment.h>

#include <string_view>

#include <unistd.h>

namespace gradus::distributed::comm {

Environment process_environment() {
  Environment result;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const auto equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    result.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return result;
}

}  // namespace gradus::distributed::comm
