#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace gradus {

/// The call or the input is at fault; the message says how to mend it.
class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Gradus itself is at fault: please report the message.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// A peer failed, or the way to it.
class CommError : public std::runtime_error {
 public:
  CommError(const std::string& message, int rank, std::string operation)
      : std::runtime_error(message), rank_(rank), operation_(std::move(operation)) {}

  /// The rank that failed, or -1 if unknown.
  int rank() const { return rank_; }
  /// The operation during which it failed.
  const std::string& operation() const { return operation_; }

 private:
  int rank_;
  std::string operation_;
};

namespace base {

/// Streams its arguments into one string (GCC 12 has no std::format).
template <typename... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace base
}  // namespace gradus

/// Throws UserError "[component] message (failed check: condition)" unless @p condition holds.
/// The parts after the condition state the requirement and the value got.
#define GRADUS_CHECK(component, condition, ...)                                           \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      throw ::gradus::UserError(::gradus::base::join("[", component, "] ", __VA_ARGS__,   \
                                                     " (failed check: " #condition ")")); \
    }                                                                                     \
  } while (false)

/// Throws InternalError unless @p condition holds: for what only a defect of gradus can break.
#define GRADUS_INTERNAL_CHECK(component, condition, ...)                                      \
  do {                                                                                        \
    if (!(condition)) {                                                                       \
      throw ::gradus::InternalError(::gradus::base::join(                                     \
          "[", component, "] internal error: ", __VA_ARGS__,                                  \
          " (failed check: " #condition "). This is a defect of gradus; please report it.")); \
    }                                                                                         \
  } while (false)
