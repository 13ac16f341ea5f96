#pragma once

#include <string>

namespace gradus::train {

/// Holds a run directory for this process: two runs in one directory would mix their files. The
/// kernel drops the lock with the process, however that ends.
class [[nodiscard]] RunLock {
 public:
  /// @throws UserError if another process holds @p directory, or the lock file cannot be made.
  explicit RunLock(const std::string& directory);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int file_ = -1;
};

}  // namespace gradus::train
