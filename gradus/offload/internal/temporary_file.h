#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace gradus::offload::internal {

/// A file for this process alone, gone with it: without a name where the file system can
/// (O_TMPFILE, or unlinked at once), else, or if @p named, locked for as long as it lives, so that
/// the next start in the same directory can tell and remove what a killed process left.
///
/// Hands out parts of itself (slots), and uses freed ones again. Thread-safe.
class TemporaryFile {
 public:
  /// @throws UserError if @p directory is no directory, or no file can be made in it.
  TemporaryFile(const std::string& directory, bool named);
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  int descriptor() const { return descriptor_; }
  /// For messages: the path, or "a file in DIRECTORY".
  const std::string& description() const { return description_; }

  /// The offset of @p bytes bytes of its own.
  std::int64_t take(std::int64_t bytes);
  void give_back(std::int64_t offset, std::int64_t bytes);

 private:
  int descriptor_ = -1;
  std::string path_;  // "" once it has no name
  std::string description_;
  std::mutex mutex_;
  std::map<std::int64_t, std::int64_t> free_;  // offset to bytes; never adjacent
  std::int64_t end_ = 0;
};

}  // namespace gradus::offload::internal
