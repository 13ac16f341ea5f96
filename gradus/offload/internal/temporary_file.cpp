#include <gradus/offload/internal/temporary_file.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <gradus/base/error.h>

namespace gradus::offload::internal {
namespace {

constexpr std::string_view kPrefix = "gradus-offload-";
constexpr std::int64_t kPageBytes = 4096;

std::int64_t whole_pages(std::int64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// A living process holds a lock on its file; the lock goes with the process however it ends.
void sweep(const std::string& directory) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(directory, ignored)) {
    const std::string path = entry.path().string();
    if (!entry.path().filename().string().starts_with(kPrefix)) continue;
    if (!entry.is_regular_file(ignored)) continue;
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (file < 0) continue;
    if (::flock(file, LOCK_EX | LOCK_NB) == 0) ::unlink(path.c_str());
    ::close(file);
  }
}

}  // namespace

TemporaryFile::TemporaryFile(const std::string& directory, bool named) {
  GRADUS_CHECK("offload", !directory.empty(),
               "offload to disk needs a directory; got none. Set OffloadOptions::disk.directory");
  std::error_code error;
  GRADUS_CHECK("offload", std::filesystem::is_directory(directory, error),
               "offload to disk needs an existing directory; got '", directory, "'",
               error ? ": " + error.message() : std::string(), ". Make it, or name another");
  sweep(directory);
  description_ = "a temporary file in '" + directory + "'";
  if (!named) {
    descriptor_ = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (descriptor_ >= 0) return;
  }
  std::string path =
      (std::filesystem::path(directory) / (std::string(kPrefix) + "XXXXXX")).string();
  // The sweep of another process may remove the file between its making and its lock: then a new
  // one is made.
  for (int attempt = 0; attempt < 16; ++attempt) {
    path.replace(path.size() - 6, 6, "XXXXXX");
    descriptor_ = ::mkostemp(path.data(), O_CLOEXEC);
    GRADUS_CHECK("offload", descriptor_ >= 0, "offload to disk needs a directory to write in; '",
                 directory, "' refused a file: ", std::strerror(errno));
    if (::flock(descriptor_, LOCK_EX | LOCK_NB) == 0 && ::access(path.c_str(), F_OK) == 0) break;
    ::close(descriptor_);
    descriptor_ = -1;
  }
  GRADUS_CHECK("offload", descriptor_ >= 0, "no file in '", directory,
               "' could be locked. Choose a directory on a file system with flock");
  if (named) {
    path_ = path;
    description_ = "'" + path + "'";
  } else {
    ::unlink(path.c_str());
  }
}

TemporaryFile::~TemporaryFile() {
  if (!path_.empty()) ::unlink(path_.c_str());
  if (descriptor_ >= 0) ::close(descriptor_);
}

std::int64_t TemporaryFile::take(std::int64_t bytes) {
  bytes = whole_pages(bytes);
  const std::lock_guard lock(mutex_);
  // The smallest that fits: training steps ask for the same sizes again and again.
  auto best = free_.end();
  for (auto i = free_.begin(); i != free_.end(); ++i) {
    if (i->second >= bytes && (best == free_.end() || i->second < best->second)) best = i;
  }
  if (best == free_.end()) {
    const std::int64_t offset = end_;
    end_ += bytes;
    return offset;
  }
  const auto [offset, size] = *best;
  free_.erase(best);
  if (size > bytes) free_.emplace(offset + bytes, size - bytes);
  return offset;
}

void TemporaryFile::give_back(std::int64_t offset, std::int64_t bytes) {
  bytes = whole_pages(bytes);
  const std::lock_guard lock(mutex_);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      bytes += previous->second;
      free_.erase(previous);
    }
  }
  if (offset + bytes < end_) {
    free_.emplace(offset, bytes);
    return;
  }
  end_ = offset;
}

}  // namespace gradus::offload::internal
