#pragma once

#include <iosfwd>

namespace gradus::tools {

/// Prints versions, devices with the dtypes that are fast on each, and what this build can do.
void print_info(std::ostream& out);

}  // namespace gradus::tools
