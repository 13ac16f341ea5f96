#pragma once

#include <cstddef>
#include <string>
#include <utility>

namespace gradus::state::internal {

/// Owns one open file descriptor.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() { reset(); }
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }

  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset();

 private:
  int fd_ = -1;
};

/// Throws the UserError of a failed system call: "[state] cannot <doing> '<path>': <strerror>.
/// <cure>".
[[noreturn]] void throw_system_error(const std::string& doing, const std::string& path, int error);

/// Writes all @p bytes or throws; a short write is continued, an interrupted one repeated.
void write_all(int fd, const void* data, std::size_t bytes, const std::string& path);

/// Reads exactly @p bytes at @p offset or throws; the end of the file inside the range is an error.
void pread_all(int fd, void* data, std::size_t bytes, std::size_t offset, const std::string& path);

/// fsync that reports; a directory on a file system that cannot sync directories (EINVAL) passes.
void sync_file(int fd, const std::string& path);

/// Opens @p path for reading, without following it into a program started later.
FileDescriptor open_for_reading(const std::string& path);

/// The directory that holds @p path: "." for a bare name.
std::string parent_directory(const std::string& path);

}  // namespace gradus::state::internal
