#include <gradus/report/internal/text.h>

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace gradus::report::internal {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

bool is_continuation(unsigned char byte) { return (byte & 0xC0) == 0x80; }

/// Bytes of the valid UTF-8 sequence at the start of @p text (not empty), 0 if there is none
/// (Unicode 15, table 3-7).
std::size_t sequence_length(std::string_view text) {
  const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = at(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if (!is_continuation(at(i))) return 0;
  }
  const unsigned char second = at(1);
  if (lead == 0xE0 && second < 0xA0) return 0;  // overlong
  if (lead == 0xED && second > 0x9F) return 0;  // surrogates
  if (lead == 0xF0 && second < 0x90) return 0;  // overlong
  if (lead == 0xF4 && second > 0x8F) return 0;  // past U+10FFFF
  return length;
}

bool is_control(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return (byte < 0x20 && c != '\n' && c != '\t') || byte == 0x7F;
}

std::string print(const char* format, auto... values) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

}  // namespace

std::string valid_utf8(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = sequence_length(text);
    result += length == 0 ? kReplacement : text.substr(0, length);
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return result;
}

std::string escape_html(std::string_view text) {
  std::string result;
  for (const char c : valid_utf8(text)) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      case '\'':
        result += "&#39;";
        break;
      default:
        if (is_control(c)) {
          result += kReplacement;
        } else {
          result += c;
        }
    }
  }
  return result;
}

std::string json_string(std::string_view text) {
  std::string result = "\"";
  for (const char c : valid_utf8(text)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (byte < 0x20 || c == '<' || c == '>' || c == '&' || byte == 0x7F) {
      result += print("\\u%04x", static_cast<unsigned>(byte));
    } else {
      result += c;
    }
  }
  return result + '"';
}

std::size_t display_width(std::string_view text) {
  std::size_t width = 0;
  for (const char c : text) width += is_continuation(static_cast<unsigned char>(c)) ? 0 : 1;
  return width;
}

std::string_view clip_to_width(std::string_view text, std::size_t width) {
  std::size_t end = 0;
  for (; end < text.size(); ++end) {
    if (is_continuation(static_cast<unsigned char>(text[end]))) continue;
    if (width == 0) break;
    --width;
  }
  return text.substr(0, end);
}

std::string without_control_characters(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (is_control(c)) c = '?';
  }
  return result;
}

std::string exact_decimal(double value) {
  std::array<char, 40> buffer{};
  const auto [end, status] = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value);
  std::string text(buffer.data(), end);
  // "-0" and "3" are integers to JSON readers, and an integer has no negative zero.
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string group_digits(std::int64_t value) {
  std::string digits = std::to_string(value);
  const std::size_t first = value < 0 ? 1 : 0;
  for (std::size_t i = digits.size(); i > first + 3;) {
    i -= 3;
    digits.insert(i, ",");
  }
  return digits;
}

std::string short_count(double value) {
  if (!std::isfinite(value)) return "-";
  static constexpr std::array<const char*, 5> suffixes{"", "k", "M", "G", "T"};
  std::size_t suffix = 0;
  // 999.5 would print as 1000.
  while (value >= 999.5 && suffix + 1 < suffixes.size()) {
    value /= 1000.0;
    ++suffix;
  }
  const int decimals = suffix == 0 ? 0 : value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  return print("%.*f%s", decimals, value, suffixes[suffix]);
}

std::string clock_time(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 3.6e9) return "-:--";
  const auto whole = static_cast<long long>(std::llround(seconds));
  if (whole < 3600) return print("%lld:%02lld", whole / 60, whole % 60);
  return print("%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
}

std::string spoken_time(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0 || seconds > 3.6e9) return "unknown";
  if (seconds < 9.995) return print("%.2f s", seconds);
  const auto whole = static_cast<long long>(std::llround(seconds));
  if (whole < 60) return print("%lld s", whole);
  if (whole < 3600) return print("%lld min %lld s", whole / 60, whole % 60);
  return print("%lld h %lld min", whole / 3600, whole / 60 % 60);
}

std::string significant(double value, int digits) { return print("%.*g", digits, value); }

}  // namespace gradus::report::internal
