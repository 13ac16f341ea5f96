#include <gradus/base/clock.h>

#include <chrono>

namespace gradus::base {

Clock monotonic_clock() {
  return [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
}

}  // namespace gradus::base
