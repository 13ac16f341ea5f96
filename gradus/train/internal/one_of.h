#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <gradus/base/error.h>

namespace gradus::train::internal {

/// @throws UserError that names all of @p known unless @p value is one of them.
inline void check_one_of(const char* key, const std::string& value,
                         const std::vector<std::string>& known) {
  std::string names;
  for (const std::string& name : known) names += (names.empty() ? "" : " or ") + name;
  GRADUS_CHECK("config", std::ranges::find(known, value) != known.end(), key, " must be ", names,
               "; got '", value, "'");
}

}  // namespace gradus::train::internal
