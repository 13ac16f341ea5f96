#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace gradus::state {

/// Writes a file so that its path always holds the old content or all of the new, whatever happens.
///
/// Bytes go to a hidden sibling in the same directory; commit() flushes it to disk, renames it over
/// the path and flushes the directory. Without commit(), or after any error, the destructor removes
/// the sibling and the path is as it was. A process that is killed leaves the sibling behind for
/// remove_stale_temporaries().
///
/// @code
/// AtomicFile file("run/metrics.json");
/// file.write(text);
/// file.commit();
/// @endcode
///
/// One writer is used by one thread; several writers of one path may run at once, and the last
/// commit wins.
class AtomicFile {
 public:
  /// @throws UserError if the path is empty or names anything but a regular file, or if the sibling
  /// cannot be made
  ///   (missing parent, no permission, full disk); the message names the path, the system's reason
  ///   and a cure.
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Appends. @throws UserError on a failed or short write (full disk, file size limit, I/O error).
  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }

  /// Bytes written so far.
  std::int64_t size_bytes() const { return size_bytes_; }

  /// Makes the file the content of the path. Call once; no write may follow. @throws UserError as
  /// write() does.
  void commit();

  const std::string& path() const { return path_; }

 private:
  struct Temporary;
  std::string path_;
  std::unique_ptr<Temporary> temporary_;
  std::int64_t size_bytes_ = 0;
};

/// Writes @p content to @p path through AtomicFile.
void write_file_atomically(const std::string& path, std::string_view content);

/// Makes a directory appear whole, or not at all.
///
/// Write any files below file(name); commit() flushes every one of them and the directory to disk,
/// then renames. An existing directory at the path is exchanged in one step and removed afterwards.
/// Without commit() everything that was written is removed.
///
/// @code
/// AtomicDirectory state("run/step-000100");
/// save_safetensors(state.file("model.safetensors"), weights);
/// write_file_atomically(state.file("trainer.json"), json);
/// state.commit();
/// @endcode
class AtomicDirectory {
 public:
  /// @throws UserError if the path is empty or names something that is no directory, or if the
  /// temporary cannot be made.
  explicit AtomicDirectory(std::string path);
  ~AtomicDirectory();
  AtomicDirectory(const AtomicDirectory&) = delete;
  AtomicDirectory& operator=(const AtomicDirectory&) = delete;

  /// Where to write the file @p name, a plain name without '/'. The path is valid until commit().
  std::string file(std::string_view name) const;

  /// Publishes the directory. Call once. @throws UserError on any failure; the old directory is
  /// then still in place.
  void commit();

  const std::string& path() const { return path_; }

 private:
  struct Temporary;
  std::string path_;
  std::unique_ptr<Temporary> temporary_;
};

/// Removes what killed writers left in @p directory and returns the names removed, sorted.
///
/// A living writer, of this process or another, holds a lock on its temporary, which the sweep
/// respects; the kernel drops that lock with the process, so that a kill -9 needs no clean-up of
/// its own. Other names are never touched.
/// @return empty if the directory does not exist. @throws UserError if it cannot be read or
/// something cannot be removed.
std::vector<std::string> remove_stale_temporaries(const std::string& directory);

/// Reads a whole file. @throws UserError if it cannot be read.
std::string read_file(const std::string& path);

}  // namespace gradus::state
