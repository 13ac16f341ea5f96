#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace gradus::report::internal {

/// A file that grows by whole records: each reaches the kernel in one call, so that killing the
/// process loses none, and a record that does not fit (full disk) leaves no part of itself behind.
class AppendFile {
 public:
  enum class Mode { open_or_create, create_new };

  /// @param component  Prefix of error messages.
  /// @throws UserError if the file cannot be opened, or exists already with Mode::create_new.
  AppendFile(std::filesystem::path path, std::string component, Mode mode);
  AppendFile(AppendFile&& other) noexcept;
  AppendFile& operator=(AppendFile&&) = delete;
  ~AppendFile();

  /// @throws UserError if the record could not be written whole; the file is then as it was before.
  void append(std::string_view record);

  /// Cuts the file to its first @p size_bytes bytes. @throws UserError if it cannot.
  void truncate(std::int64_t size_bytes);

  const std::filesystem::path& path() const { return path_; }

 private:
  std::int64_t size_bytes() const;
  [[noreturn]] void fail(const char* action, int error_number, const char* hint) const;

  std::filesystem::path path_;
  std::string component_;
  int descriptor_;
};

}  // namespace gradus::report::internal
