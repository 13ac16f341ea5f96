#pragma once

#include <functional>
#include <string>

#include <gradus/base/error.h>

namespace gradus::tests {

/// What the UserError that @p fn throws says, or "no UserError".
inline std::string message_of(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const UserError& error) {
    return error.what();
  }
  return "no UserError";
}

}  // namespace gradus::tests
