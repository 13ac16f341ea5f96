#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace gradus::data::internal {

/// Bytes of the UTF-8 character at the start of @p text, or 0 if there is none: overlong forms,
/// surrogates, values past U+10FFFF and cut sequences are none (Unicode 15, table 3-7).
std::size_t utf8_character_bytes(std::string_view text);

/// Offset of the first byte that is no UTF-8, or the size of @p text.
std::size_t valid_utf8_bytes(std::string_view text);

/// The characters of @p text; each byte that begins none gives U+FFFD.
std::u32string decode_utf8(std::string_view text);

/// Appends @p character, a code point up to U+10FFFF.
void append_utf8(std::string& text, char32_t character);

}  // namespace gradus::data::internal
