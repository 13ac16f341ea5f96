#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace gradus {

namespace base {

/// Reads "1024", "600MiB", "1.5 GiB", "4GB" (binary units KiB..TiB, decimal kB..TB, a bare number
/// is bytes).
/// @throws UserError on anything else, on a negative number and on one past 2^63 - 1.
std::int64_t parse_bytes(std::string_view text);

/// Writes "0 B", "1023 B", "1.0 KiB", "600.0 MiB", "1.5 GiB": one decimal from KiB on.
std::string format_bytes(std::int64_t bytes);

}  // namespace base

namespace literals {
constexpr std::int64_t operator""_KiB(unsigned long long n) {
  return static_cast<std::int64_t>(n) << 10;
}
constexpr std::int64_t operator""_MiB(unsigned long long n) {
  return static_cast<std::int64_t>(n) << 20;
}
constexpr std::int64_t operator""_GiB(unsigned long long n) {
  return static_cast<std::int64_t>(n) << 30;
}
}  // namespace literals

}  // namespace gradus
