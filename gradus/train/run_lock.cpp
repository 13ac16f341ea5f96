#include <gradus/train/run_lock.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <gradus/base/error.h>

namespace gradus::train {

RunLock::RunLock(const std::string& directory) {
  const std::string path = (std::filesystem::path(directory) / ".lock").string();
  file_ = ::open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0666);
  GRADUS_CHECK("train", file_ >= 0, "the run directory must be writable; ", path, ": ",
               std::strerror(errno));
  if (::flock(file_, LOCK_EX | LOCK_NB) == 0) return;
  const int error = errno;
  ::close(file_);
  throw UserError(base::join(
      "[train] a run directory serves one process at a time; ", directory,
      error == EWOULDBLOCK ? " is held by another one" : base::join(": ", std::strerror(error))));
}

RunLock::~RunLock() { ::close(file_); }

}  // namespace gradus::train
