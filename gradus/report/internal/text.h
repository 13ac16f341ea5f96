#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace gradus::report::internal {

/// Replaces each byte that is no part of valid UTF-8 by U+FFFD (byte tokenizers emit such text).
std::string valid_utf8(std::string_view text);

/// Text fit for HTML element content and quoted attributes: & < > " ' become entities, invalid
/// UTF-8 and control characters other than tab and newline become U+FFFD.
std::string escape_html(std::string_view text);

/// A JSON string with its quotes, safe inside a script element: '<' and '&' are written as \u00XX.
std::string json_string(std::string_view text);

/// Code points of @p text: its width on a terminal, for the narrow characters used here.
std::size_t display_width(std::string_view text);

/// The first @p width code points of @p text.
std::string_view clip_to_width(std::string_view text, std::size_t width);

/// Drops or replaces what would move a terminal's cursor: control characters other than newline and
/// tab become '?'.
std::string without_control_characters(std::string_view text);

/// The shortest decimal that reads back to the same bits, always with a '.' or an exponent; finite
/// numbers only.
std::string exact_decimal(double value);

/// "1,234,567".
std::string group_digits(std::int64_t value);

/// "1234" as "1.23k", "45600000" as "45.6M": three digits at least; below 1000 without a suffix.
/// Not negative.
std::string short_count(double value);

/// "0:42", "12:05", "3:02:11"; "-:--" if not finite or negative.
std::string clock_time(double seconds);

/// "0.42 s", "42 s", "3 min 20 s", "2 h 5 min".
std::string spoken_time(double seconds);

/// @p value to @p digits significant digits as printf's %g writes it; "nan", "inf".
std::string significant(double value, int digits);

}  // namespace gradus::report::internal
