#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::state {

using NamedTensor = std::pair<std::string, at::Tensor>;
using Metadata = std::map<std::string, std::string>;

/// Writes tensors in the safetensors format, atomically (see AtomicFile).
///
/// Tensors go out one by one, so that beyond the tensors themselves at most one of them is in
/// memory a second time: one that is not contiguous or not on the CPU. Data lies in order of
/// element size and then of name, so that each value is aligned; the header is padded to 8 bytes.
/// Python reads it with `safetensors.torch.load_file`.
///
/// @param tensors  Any order; names unique, UTF-8, not "__metadata__". Strided tensors of dtype
/// float64, float32, float16,
///   bfloat16, float8 (e4m3fn, e4m3fnuz, e5m2, e5m2fnuz, e8m0fnu), complex64, signed and unsigned
///   integers of 8 to 64 bits, or bool; any shape, 0-d and empty included. Two names of one tensor
///   are written twice.
/// @param metadata  Free text, UTF-8; the file's `__metadata__`.
/// @throws UserError for a name or tensor that the format cannot hold, or if writing fails; the old
/// file then stands.
void save_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors,
                      const Metadata& metadata = {});

/// One safetensors file, opened and checked: reads the header at once and a tensor when asked.
///
/// The whole header is validated before anything is allocated for a tensor: its length, its JSON,
/// each dtype and shape, and that the tensors cover the data exactly, without overlap or gap. Not
/// for concurrent use with a writer that changes the file in place (gradus replaces files, and a
/// replaced file stays readable here).
class SafetensorsFile {
 public:
  struct Entry {
    at::ScalarType dtype;
    std::vector<std::int64_t> shape;
    std::size_t begin;  ///< Byte offset in the file.
    std::size_t bytes;
  };

  /// @throws UserError that names the file and the fault.
  explicit SafetensorsFile(std::string path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;

  const std::map<std::string, Entry>& entries() const { return entries_; }
  const Metadata& metadata() const { return metadata_; }
  const std::string& path() const { return path_; }

  /// A new CPU tensor. @throws UserError if there is no such name or reading fails.
  at::Tensor load(const std::string& name) const;

  /// Copies the value of @p name into @p target, on any device, under no_grad; bumps its version.
  /// @throws UserError if there is no such name, if dtype or shape differ, or if reading fails.
  void load_into(const std::string& name, const at::Tensor& target) const;

 private:
  const Entry& entry(const std::string& name) const;

  std::string path_;
  int fd_ = -1;
  std::map<std::string, Entry> entries_;
  Metadata metadata_;
};

/// What load_safetensors returns.
struct SafetensorsContent {
  std::map<std::string, at::Tensor> tensors;  ///< On the CPU, contiguous.
  Metadata metadata;
};

/// Reads a whole safetensors file. @throws UserError as SafetensorsFile does.
SafetensorsContent load_safetensors(const std::string& path);

/// Copies a file's tensors into tensors that exist, in place and under no_grad (parameters stay the
/// same parameters).
///
/// Names, shapes and dtypes are compared first, and all that is missing, unexpected or different is
/// listed in one error before anything is changed. dtypes are never converted silently. Reads one
/// tensor at a time.
/// @throws UserError on any difference, and if reading fails (then some targets may already be
/// replaced).
void load_into(const std::string& path, const std::vector<NamedTensor>& targets);

}  // namespace gradus::state
