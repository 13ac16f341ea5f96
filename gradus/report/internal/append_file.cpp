#include <gradus/report/internal/append_file.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gradus/base/error.h>

namespace gradus::report::internal {
namespace {

/// Writes all of @p bytes; returns 0, or the error number of the call that failed.
int write_all(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor, bytes.data(), bytes.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return 0;
}

}  // namespace

AppendFile::AppendFile(std::filesystem::path path, std::string component, Mode mode)
    : path_(std::move(path)), component_(std::move(component)) {
  const int exclusive = mode == Mode::create_new ? O_EXCL : 0;
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | exclusive, 0644);
  if (descriptor_ < 0) fail("open", errno, "the folder must exist and be writable");
}

AppendFile::AppendFile(AppendFile&& other) noexcept
    : path_(std::move(other.path_)),
      component_(std::move(other.component_)),
      descriptor_(std::exchange(other.descriptor_, -1)) {}

AppendFile::~AppendFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void AppendFile::append(std::string_view record) {
  const std::int64_t size_before = size_bytes();
  const int error_number = write_all(descriptor_, record);
  if (error_number == 0) return;
  // A device such as a pipe cannot be cut; the error below is then all that can be done.
  [[maybe_unused]] const int cut = ::ftruncate(descriptor_, size_before);
  fail("append to", error_number, "records written before are kept; make room and resume");
}

void AppendFile::truncate(std::int64_t size_bytes) {
  if (::ftruncate(descriptor_, size_bytes) != 0)
    fail("shorten", errno, "it must be a regular file");
}

std::int64_t AppendFile::size_bytes() const {
  struct stat status{};
  if (::fstat(descriptor_, &status) != 0) fail("examine", errno, "it must stay open");
  return status.st_size;
}

void AppendFile::fail(const char* action, int error_number, const char* hint) const {
  throw UserError(base::join("[", component_, "] cannot ", action, " '", path_.string(),
                             "': ", std::strerror(error_number), " (", hint, ")"));
}

}  // namespace gradus::report::internal
