#include <gradus/base/byte_count.h>

#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>

#include <gradus/base/error.h>

namespace gradus::base {
namespace {

struct Unit {
  std::string_view name;
  double factor;
};

constexpr std::array<Unit, 10> kUnits{{{"B", 1.0},
                                       {"kB", 1e3},
                                       {"KiB", 1024.0},
                                       {"MB", 1e6},
                                       {"MiB", 1048576.0},
                                       {"GB", 1e9},
                                       {"GiB", 1073741824.0},
                                       {"TB", 1e12},
                                       {"TiB", 1099511627776.0},
                                       {"", 1.0}}};

}  // namespace

std::int64_t parse_bytes(std::string_view text) {
  const auto refuse = [&](const char* why) {
    throw UserError(
        join("[bytes] a byte count is a number and a unit of B, kB, KiB, MB, MiB, GB, GiB, TB or "
             "TiB; got '",
             text, "' (", why, ")"));
  };
  double number = 0.0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (status != std::errc{}) refuse("no number");
  std::string_view unit(end, text.data() + text.size() - end);
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  for (const auto& known : kUnits) {
    if (unit != known.name) continue;
    const double bytes = number * known.factor;
    if (!(bytes >= 0.0)) refuse("negative or not a number");
    if (!(bytes < 9.223372036854775807e18)) refuse("past 2^63 - 1");
    return static_cast<std::int64_t>(std::llround(bytes));
  }
  refuse("unknown unit");
  return 0;
}

std::string format_bytes(std::int64_t bytes) {
  static constexpr std::array<const char*, 5> names{"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (std::abs(value) >= 1024.0 && unit + 1 < names.size()) {
    value /= 1024.0;
    ++unit;
  }
  char text[48];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", value, names[unit]);
  return text;
}

}  // namespace gradus::base
