#pragma once

#include <map>
#include <string>

namespace gradus::distributed::comm {

/// Environment variables by name. Passed in wherever they are read, so that tests own them.
using Environment = std::map<std::string, std::string>;

/// This process's environment: the one place that reads it.
Environment process_environment();

}  // namespace gradus::distributed::comm
