#pragma once

#include <string>

namespace gradus::data::internal {

/// Appends what is left of @p character after canonical decomposition (NFD), without non-spacing
/// marks (Mn), in lower case: "É" gives "e", a combining acute accent nothing. Marks are not put
/// into canonical order, which matters only between the few that are not Mn.
void append_folded(char32_t character, std::u32string& out);

/// General category P*.
bool is_punctuation(char32_t character);
/// General category Cc, Cf, Co or Cs.
bool is_control(char32_t character);
/// General category Zs, Zl or Zp, and tab, line feed and carriage return.
bool is_space(char32_t character);
/// Chinese characters, which have no spaces between words.
bool is_cjk(char32_t character);

}  // namespace gradus::data::internal
