#pragma once

#include <string>

namespace gradus::base {

/// An error as one line: the lines of @p text joined by "; ", or by " " behind a colon, without
/// empty ones and the spaces that they begin with.
std::string one_line(const std::string& text);

}  // namespace gradus::base
