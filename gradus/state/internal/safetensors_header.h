#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

#include <gradus/state/safetensors.h>

namespace gradus::state::internal {

/// The reference implementation's own limit: a longer header is refused by every reader.
inline constexpr std::size_t kMaxHeaderBytes = 100'000'000;
inline constexpr std::string_view kMetadataName = "__metadata__";

struct Header {
  std::map<std::string, SafetensorsFile::Entry> entries;
  Metadata metadata;
};

/// Parses and validates the JSON of a header. @p data_begin and @p data_bytes say where the
/// tensors' data lies.
/// @throws UserError "[safetensors] '<path>' ...".
Header parse_header(const std::string& path, std::string_view json, std::size_t data_begin,
                    std::size_t data_bytes);

/// Writes the JSON of a header, padded with spaces so that 8 + its size is a multiple of 8.
/// Offsets are made relative to @p data_begin of the entries, which begin at 0.
std::string write_header(const std::string& path, const Header& header);

}  // namespace gradus::state::internal
