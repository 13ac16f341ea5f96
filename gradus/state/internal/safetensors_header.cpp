#include <gradus/state/internal/safetensors_header.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <gradus/base/error.h>
#include <gradus/state/internal/safetensors_dtype.h>

namespace gradus::state::internal {
namespace {

using nlohmann::json;

// LibTorch's reductions refuse tensors of more dimensions, so that none is made from a file.
constexpr std::size_t kMaxDimensions = 64;

/// Names from a hostile file are cut before they go into a message.
std::string shown(std::string_view name) {
  constexpr std::size_t kShown = 120;
  return name.size() <= kShown ? std::string(name) : std::string(name.substr(0, kShown)) + "...";
}

class HeaderParser {
 public:
  HeaderParser(const std::string& path, std::size_t data_begin, std::size_t data_bytes)
      : path_(path), data_begin_(data_begin), data_bytes_(data_bytes) {}

  Header parse(std::string_view text) {
    const json root = parse_json(text);
    if (!root.is_object()) refuse("has a header that is no JSON object");
    Header header;
    for (const auto& [name, value] : root.items()) {
      if (name == kMetadataName) {
        header.metadata = metadata(value);
      } else {
        header.entries.emplace(name, entry(name, value));
      }
    }
    check_coverage(header);
    return header;
  }

 private:
  template <typename... Parts>
  [[noreturn]] void refuse(const Parts&... parts) const {
    throw UserError(
        base::join("[safetensors] '", path_, "' ", parts...,
                   ". It is truncated, corrupt or no safetensors file: restore it from a copy."));
  }

  json parse_json(std::string_view text) const {
    // A key twice would silently hide one tensor; depth is bounded because a header needs three
    // levels and a hostile one of a hundred million brackets would cost gigabytes.
    std::vector<std::set<std::string>> keys;
    const auto watch = [&](int depth, json::parse_event_t event, json& value) {
      if (depth > 3) refuse("has a header nested more than 3 deep");
      if (event == json::parse_event_t::object_start) keys.emplace_back();
      if (event == json::parse_event_t::object_end) keys.pop_back();
      if (event == json::parse_event_t::key &&
          !keys.back().insert(value.get<std::string>()).second) {
        refuse("names '", shown(value.get<std::string>()), "' twice in its header");
      }
      return true;
    };
    try {
      return json::parse(text.begin(), text.end(), watch);
    } catch (const json::exception& error) {
      refuse("has a header that is not valid JSON (", shown(error.what()), ")");
    }
  }

  Metadata metadata(const json& value) const {
    if (!value.is_object()) refuse("has a __metadata__ that is no object");
    Metadata result;
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string())
        refuse("has a value in __metadata__ that is no string, at '", shown(key), "'");
      result.emplace(key, text.get<std::string>());
    }
    return result;
  }

  SafetensorsFile::Entry entry(const std::string& name, const json& value) const {
    if (!value.is_object()) refuse("describes tensor '", shown(name), "' by no object");
    for (const auto& [key, unused] : value.items()) {
      if (key != "dtype" && key != "shape" && key != "data_offsets") {
        refuse("gives tensor '", shown(name), "' an unknown field '", shown(key), "'");
      }
    }
    SafetensorsFile::Entry result{};
    result.dtype = dtype(name, value);
    result.shape = shape(name, value);
    const auto [begin, end] = offsets(name, value);
    const std::uint64_t bytes = byte_count(name, result);
    if (end - begin != bytes) {
      refuse("gives tensor '", shown(name), "' ", end - begin,
             " bytes where its shape and dtype take ", bytes);
    }
    result.begin = data_begin_ + static_cast<std::size_t>(begin);
    result.bytes = static_cast<std::size_t>(bytes);
    return result;
  }

  at::ScalarType dtype(const std::string& name, const json& value) const {
    const auto field = value.find("dtype");
    if (field == value.end() || !field->is_string())
      refuse("gives tensor '", shown(name), "' no dtype");
    const auto& text = field->get_ref<const std::string&>();
    const auto known = dtype_of(text);
    if (!known)
      refuse("gives tensor '", shown(name), "' the dtype '", shown(text),
             "', which gradus cannot hold");
    return *known;
  }

  std::vector<std::int64_t> shape(const std::string& name, const json& value) const {
    const auto field = value.find("shape");
    if (field == value.end() || !field->is_array())
      refuse("gives tensor '", shown(name), "' no shape");
    if (field->size() > kMaxDimensions) {
      refuse("gives tensor '", shown(name), "' ", field->size(), " dimensions; at most ",
             kMaxDimensions, " are read");
    }
    std::vector<std::int64_t> result;
    for (const json& size : *field) {
      if (!size.is_number_unsigned() ||
          size.get<std::uint64_t>() >
              static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        refuse("gives tensor '", shown(name), "' a size that is no integer from 0 to 2^63 - 1");
      }
      result.push_back(static_cast<std::int64_t>(size.get<std::uint64_t>()));
    }
    return result;
  }

  std::pair<std::uint64_t, std::uint64_t> offsets(const std::string& name,
                                                  const json& value) const {
    const auto field = value.find("data_offsets");
    if (field == value.end() || !field->is_array() || field->size() != 2 ||
        !(*field)[0].is_number_unsigned() || !(*field)[1].is_number_unsigned()) {
      refuse("gives tensor '", shown(name), "' no data_offsets of two integers >= 0");
    }
    const auto begin = (*field)[0].get<std::uint64_t>();
    const auto end = (*field)[1].get<std::uint64_t>();
    if (begin > end || end > data_bytes_) {
      refuse("places tensor '", shown(name), "' at bytes ", begin, " to ", end, " of ", data_bytes_,
             " bytes of data");
    }
    return {begin, end};
  }

  std::uint64_t byte_count(const std::string& name, const SafetensorsFile::Entry& entry) const {
    // Strides multiply the other sizes even where one is 0, so that each non-zero size counts.
    std::int64_t strided = static_cast<std::int64_t>(c10::elementSize(entry.dtype));
    bool empty = false;
    for (const std::int64_t size : entry.shape) {
      empty = empty || size == 0;
      if (size != 0 && __builtin_mul_overflow(strided, size, &strided)) {
        refuse("gives tensor '", shown(name), "' a shape whose bytes pass 2^63 - 1");
      }
    }
    return empty ? 0 : static_cast<std::uint64_t>(strided);
  }

  void check_coverage(const Header& header) const {
    std::vector<std::pair<const std::string*, const SafetensorsFile::Entry*>> order;
    for (const auto& [name, entry] : header.entries) order.emplace_back(&name, &entry);
    std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
      return std::pair(a.second->begin, a.second->bytes) <
             std::pair(b.second->begin, b.second->bytes);
    });
    std::size_t at = data_begin_;
    for (const auto& [name, entry] : order) {
      if (entry->begin < at) refuse("lets tensor '", shown(*name), "' overlap the one before it");
      if (entry->begin > at) refuse("leaves a gap before tensor '", shown(*name), "'");
      at += entry->bytes;
    }
    if (at != data_begin_ + data_bytes_) {
      refuse("holds ", data_bytes_, " bytes of data where its header describes ", at - data_begin_);
    }
  }

  const std::string& path_;
  std::size_t data_begin_;
  std::size_t data_bytes_;
};

}  // namespace

Header parse_header(const std::string& path, std::string_view json, std::size_t data_begin,
                    std::size_t data_bytes) {
  return HeaderParser(path, data_begin, data_bytes).parse(json);
}

std::string write_header(const std::string& path, const Header& header) {
  json root = json::object();
  if (!header.metadata.empty()) root[std::string(kMetadataName)] = header.metadata;
  for (const auto& [name, entry] : header.entries) {
    root[name] = {{"dtype", *dtype_name(entry.dtype)},
                  {"shape", entry.shape},
                  {"data_offsets", {entry.begin, entry.begin + entry.bytes}}};
  }
  std::string text;
  try {
    text = root.dump();
  } catch (const json::exception& error) {
    throw UserError(base::join("[safetensors] names and metadata must be UTF-8 to be written to '",
                               path, "'; got text that is not (", error.what(), ")"));
  }
  text.append((8 - text.size() % 8) % 8, ' ');
  GRADUS_CHECK("safetensors", text.size() <= kMaxHeaderBytes, "a header holds at most ",
               kMaxHeaderBytes, " bytes; the names and metadata for '", path, "' take ",
               text.size());
  return text;
}

}  // namespace gradus::state::internal
