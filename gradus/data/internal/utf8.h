#pragma once

#include <cstddef>
#include <string_view>

namespace gradus::data::internal {

/// Bytes of the UTF-8 character at the start of @p text, or 0 if there is none: overlong forms,
/// surrogates, values past U+10FFFF and cut sequences are none (Unicode 15, table 3-7).
std::size_t utf8_character_bytes(std::string_view text);

/// Offset of the first byte that is no UTF-8, or the size of @p text.
std::size_t valid_utf8_bytes(std::string_view text);

}  // namespace gradus::data::internal
