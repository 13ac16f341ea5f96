#include <gradus/state/atomic_file.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gradus/base/error.h>
#include <gradus/state/internal/file_descriptor.h>

namespace gradus::state {
namespace {

using internal::FileDescriptor;
using internal::throw_system_error;
namespace fs = std::filesystem;

constexpr std::string_view kMark = ".gradus-tmp-";

/// ".<name>.gradus-tmp-<process>-<count>" beside @p path: same file system, so that rename is one
/// step.
std::string temporary_path(const std::string& path) {
  static std::atomic<std::uint64_t> count{0};
  const fs::path whole(path);
  return (fs::path(internal::parent_directory(path)) /
          base::join(".", whole.filename().string(), kMark, ::getpid(), "-", count.fetch_add(1)))
      .string();
}

bool is_temporary_name(std::string_view name) {
  const std::size_t mark = name.rfind(kMark);
  if (name.empty() || name.front() != '.' || mark == std::string_view::npos || mark < 2)
    return false;
  const std::string_view tail = name.substr(mark + kMark.size());
  const std::size_t dash = tail.find('-');
  if (dash == std::string_view::npos || dash == 0 || dash + 1 == tail.size()) return false;
  return std::all_of(tail.begin(), tail.end(),
                     [](unsigned char c) { return c == '-' || std::isdigit(c) != 0; });
}

/// True if @p fd is still what @p path names: a sweep may remove a temporary between its creation
/// and its lock.
bool still_named(int fd, const std::string& path) {
  struct stat mine{};
  struct stat there{};
  return ::fstat(fd, &mine) == 0 && ::lstat(path.c_str(), &there) == 0 &&
         mine.st_dev == there.st_dev && mine.st_ino == there.st_ino;
}

/// Strips trailing slashes, so that "run/step-1/" names its last part.
std::string without_trailing_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

void check_name(const std::string& path) {
  const std::string name = fs::path(path).filename().string();
  GRADUS_CHECK("state", !name.empty() && name != "." && name != "..",
               "a path to write must end in a name; got '", path, "'");
}

void sync_parent(const std::string& path) {
  const std::string parent = internal::parent_directory(path);
  internal::sync_file(internal::open_for_reading(parent).get(), parent);
}

void sync_tree(const std::string& directory) {
  std::error_code error;
  fs::recursive_directory_iterator entry(directory, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    if (entry->is_symlink()) continue;
    const std::string path = entry->path().string();
    if (entry->is_regular_file() || entry->is_directory()) {
      internal::sync_file(internal::open_for_reading(path).get(), path);
    }
  }
  if (error) throw_system_error("list", directory, error.value());
  internal::sync_file(internal::open_for_reading(directory).get(), directory);
}

/// Locks a temporary for the life of its writer. False if a sweep was faster. A file system without
/// locks (ENOLCK, EOPNOTSUPP) has no protection from a sweep, which cannot lock there either and so
/// removes nothing.
bool lock_temporary(int fd, const std::string& path) {
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
  return still_named(fd, path);
}

}  // namespace

struct AtomicFile::Temporary {
  explicit Temporary(const std::string& target) {
    for (int attempt = 0; attempt < 100; ++attempt) {
      path = temporary_path(target);
      fd = FileDescriptor(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
      if (!fd.open()) {
        if (errno == EEXIST) continue;  // left by a killed process that had the same id
        throw_system_error("create a file beside", target, errno);
      }
      if (lock_temporary(fd.get(), path)) return;
    }
    throw_system_error("create a file beside", target, EEXIST);
  }
  ~Temporary() {
    if (!renamed) ::unlink(path.c_str());
  }

  std::string path;
  FileDescriptor fd;
  bool renamed = false;
};

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  check_name(path_);
  struct stat there{};
  if (::lstat(path_.c_str(), &there) == 0) {
    // Renaming over a device or a symbolic link would replace it, which no caller means.
    GRADUS_CHECK("state", S_ISREG(there.st_mode),
                 "a file is written in place of a regular file or of nothing; '", path_,
                 "' is a directory, a link or a device: choose another name");
  }
  temporary_ = std::make_unique<Temporary>(path_);
}

AtomicFile::~AtomicFile() = default;

void AtomicFile::write(const void* data, std::size_t bytes) {
  GRADUS_CHECK("state", temporary_ && !temporary_->renamed,
               "no write may follow commit(); got one to '", path_, "'");
  internal::write_all(temporary_->fd.get(), data, bytes, path_);
  size_bytes_ += static_cast<std::int64_t>(bytes);
}

void AtomicFile::commit() {
  GRADUS_CHECK("state", temporary_ && !temporary_->renamed,
               "commit() is called once; got a second for '", path_, "'");
  internal::sync_file(temporary_->fd.get(), path_);
  if (::rename(temporary_->path.c_str(), path_.c_str()) != 0)
    throw_system_error("put in place", path_, errno);
  temporary_->renamed = true;
  // Network file systems report a failed write as late as close.
  if (::close(temporary_->fd.release()) != 0 && errno != EINTR)
    throw_system_error("close", path_, errno);
  sync_parent(path_);
}

void write_file_atomically(const std::string& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

struct AtomicDirectory::Temporary {
  explicit Temporary(const std::string& target) {
    for (int attempt = 0; attempt < 100; ++attempt) {
      path = temporary_path(target);
      if (::mkdir(path.c_str(), 0777) != 0) {
        if (errno == EEXIST) continue;
        throw_system_error("create a directory beside", target, errno);
      }
      lock = FileDescriptor(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
      if (lock.open() && lock_temporary(lock.get(), path)) return;
    }
    throw_system_error("create a directory beside", target, EEXIST);
  }
  ~Temporary() {
    if (renamed) return;
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }

  std::string path;
  FileDescriptor lock;
  bool renamed = false;
};

AtomicDirectory::AtomicDirectory(std::string path)
    : path_(without_trailing_slash(std::move(path))) {
  check_name(path_);
  struct stat there{};
  if (::lstat(path_.c_str(), &there) == 0) {
    GRADUS_CHECK("state", S_ISDIR(there.st_mode),
                 "a directory is written in place of a directory or of nothing; '", path_,
                 "' is something else: choose another name");
  }
  temporary_ = std::make_unique<Temporary>(path_);
}

AtomicDirectory::~AtomicDirectory() = default;

std::string AtomicDirectory::file(std::string_view name) const {
  GRADUS_CHECK(
      "state",
      !name.empty() && name.find('/') == std::string_view::npos && name != "." && name != "..",
      "a file of a directory is a plain name; got '", name, "'");
  GRADUS_CHECK("state", !temporary_->renamed, "no file may follow commit(); got '", name, "' in '",
               path_, "'");
  return (fs::path(temporary_->path) / name).string();
}

void AtomicDirectory::commit() {
  GRADUS_CHECK("state", !temporary_->renamed, "commit() is called once; got a second for '", path_,
               "'");
  const char* from = temporary_->path.c_str();
  sync_tree(temporary_->path);
  // rename(2) alone refuses a directory that holds files; the exchange leaves the old one under the
  // temporary name.
  bool exchanged = false;
  if (::renameat2(AT_FDCWD, from, AT_FDCWD, path_.c_str(), RENAME_NOREPLACE) != 0) {
    const int error = errno;
    if (error == EEXIST) {
      if (::renameat2(AT_FDCWD, from, AT_FDCWD, path_.c_str(), RENAME_EXCHANGE) != 0) {
        if (errno == EINVAL || errno == ENOSYS) {
          throw UserError(base::join(
              "[state] '", path_,
              "' exists, and its file system cannot exchange two directories in one step. "
              "Write to a new name, or remove it first."));
        }
        throw_system_error("put in place", path_, errno);
      }
      exchanged = true;
    } else if (error == EINVAL || error == ENOSYS) {
      // A file system without flags for rename: plain rename still fails on a directory that holds
      // files.
      if (::rename(from, path_.c_str()) != 0) throw_system_error("put in place", path_, errno);
    } else {
      throw_system_error("put in place", path_, error);
    }
  }
  // After an exchange the temporary's name belongs to the old directory, which the destructor then
  // removes.
  temporary_->renamed = !exchanged;
  if (exchanged) {
    std::error_code ignored;
    fs::remove_all(temporary_->path, ignored);
    temporary_->renamed = true;
  }
  sync_parent(path_);
}

std::vector<std::string> remove_stale_temporaries(const std::string& directory) {
  std::vector<std::string> removed;
  std::error_code error;
  fs::directory_iterator entry(directory, error);
  if (error == std::errc::no_such_file_or_directory) return removed;
  std::vector<std::string> names;
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  if (error) throw_system_error("list", directory, error.value());
  for (const std::string& name : names) {
    if (!is_temporary_name(name)) continue;
    const std::string path = (fs::path(directory) / name).string();
    // Never through a link, never blocking on a pipe that merely has such a name.
    const FileDescriptor fd(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!fd.open()) {
      if (errno == ENOENT || errno == ELOOP) continue;
      throw_system_error("remove the leftover", path, errno);
    }
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 || !still_named(fd.get(), path)) continue;
    std::error_code failure;
    fs::remove_all(path, failure);
    if (failure) throw_system_error("remove the leftover", path, failure.value());
    removed.push_back(name);
  }
  std::sort(removed.begin(), removed.end());
  return removed;
}

std::string read_file(const std::string& path) {
  const FileDescriptor fd = internal::open_for_reading(path);
  std::string content;
  struct stat there{};
  if (::fstat(fd.get(), &there) != 0) throw_system_error("read", path, errno);
  if (S_ISREG(there.st_mode)) content.reserve(static_cast<std::size_t>(there.st_size));
  char piece[1 << 16];
  while (true) {
    const ssize_t got = ::read(fd.get(), piece, sizeof piece);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_system_error("read", path, errno);
    if (got == 0) return content;
    content.append(piece, static_cast<std::size_t>(got));
  }
}

}  // namespace gradus::state
