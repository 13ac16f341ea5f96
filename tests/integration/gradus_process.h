#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <sys/types.h>

namespace gradus::integration {

/// How a process ended and what it wrote.
struct Ended {
  int code = -1;   ///< Exit code; -1 if a signal ended it.
  int signal = 0;  ///< The signal that ended it; 0 if it exited.
  std::string out, err;
};

/// Lines of @p text; a last one without newline counts.
std::vector<std::string> lines(const std::string& text);

/// Where a child's standard output and error go.
enum class Output {
  pipes,     ///< Ended::out and Ended::err.
  terminal,  ///< Both to a pseudo-terminal of 100 columns, whose raw bytes become Ended::out.
};

/// A running `gradus` with the arguments given, one compute thread and quiet waiting. Ends with the
/// object.
class GradusProcess {
 public:
  /// @param working_directory  Empty: that of the test.
  explicit GradusProcess(const std::vector<std::string>& arguments, Output output = Output::pipes,
                         const std::string& working_directory = {});
  GradusProcess(const GradusProcess&) = delete;
  GradusProcess& operator=(const GradusProcess&) = delete;
  ~GradusProcess();

  /// Returns once @p ready says so, false if the process ended or @p patience passed before.
  bool wait_until(const std::function<bool()>& ready,
                  std::chrono::seconds patience = std::chrono::seconds(60));
  /// Standard output so far (as far as wait_until() has read).
  std::string output() const;
  void send(int signal) const;
  /// Reads all output and waits for the end.
  Ended wait();

 private:
  bool read_some(int timeout_ms);  // false once every output is closed

  pid_t pid_ = -1;
  std::map<int, std::string> outputs_;  // by open descriptor
  std::string out_, err_;
  int out_descriptor_ = -1;
};

/// Runs `gradus` to its end.
Ended run_gradus(const std::vector<std::string>& arguments);

}  // namespace gradus::integration
