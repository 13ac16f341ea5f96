#include <gradus/state/internal/file_descriptor.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include <fcntl.h>
#include <unistd.h>

#include <gradus/base/error.h>

namespace gradus::state::internal {
namespace {

const char* cure(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "Free some space there, or choose a directory on another disk.";
    case EFBIG:
      return "Raise the file size limit (ulimit -f), or choose another file system.";
    case EACCES:
    case EPERM:
      return "Grant this user the permission, or choose a directory of your own.";
    case EROFS:
      return "The file system is read-only: choose a directory elsewhere.";
    case ENOENT:
      return "Create what is missing, or correct the path.";
    case ENOTDIR:
      return "A part of the path is a file: correct the path.";
    case EISDIR:
      return "A directory stands there: remove it or choose another name.";
    case ENAMETOOLONG:
      return "Choose a shorter name.";
    case EMFILE:
    case ENFILE:
      return "Too many files are open: raise the limit (ulimit -n).";
    case EIO:
      return "The disk reports a fault: look at the kernel log and choose another disk.";
    default:
      return "Check the path and its file system.";
  }
}

}  // namespace

void FileDescriptor::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void throw_system_error(const std::string& doing, const std::string& path, int error) {
  throw UserError(base::join("[state] cannot ", doing, " '", path, "': ", std::strerror(error),
                             ". ", cure(error)));
}

void write_all(int fd, const void* data, std::size_t bytes, const std::string& path) {
  // Linux moves at most 0x7ffff000 bytes a call; a smaller piece also keeps a signal's wait short.
  constexpr std::size_t kPiece = std::size_t{1} << 30;
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(fd, at, bytes < kPiece ? bytes : kPiece);
    if (written < 0) {
      if (errno == EINTR) continue;
      throw_system_error("write", path, errno);
    }
    // A write of a positive count that moves nothing sets no error; repeating it could go on for
    // ever.
    if (written == 0) throw_system_error("write", path, ENOSPC);
    at += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void pread_all(int fd, void* data, std::size_t bytes, std::size_t offset, const std::string& path) {
  constexpr std::size_t kPiece = std::size_t{1} << 30;
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got =
        ::pread(fd, at, bytes < kPiece ? bytes : kPiece, static_cast<off_t>(offset));
    if (got < 0) {
      if (errno == EINTR) continue;
      throw_system_error("read", path, errno);
    }
    if (got == 0) {
      throw UserError(base::join(
          "[state] '", path, "' ended at byte ", offset, " while ", bytes,
          " more bytes were expected: it was cut short while being read. Restore it from a copy."));
    }
    at += got;
    offset += static_cast<std::size_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
}

void sync_file(int fd, const std::string& path) {
  while (::fsync(fd) != 0) {
    if (errno == EINTR) continue;
    if (errno == EINVAL) return;
    throw_system_error("flush to disk", path, errno);
  }
}

FileDescriptor open_for_reading(const std::string& path) {
  FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.open()) throw_system_error("open", path, errno);
  return fd;
}

std::string parent_directory(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

}  // namespace gradus::state::internal
