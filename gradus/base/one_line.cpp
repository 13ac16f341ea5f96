#include <gradus/base/one_line.h>

#include <sstream>

namespace gradus::base {

std::string one_line(const std::string& text) {
  std::string line;
  std::istringstream lines(text);
  for (std::string part; std::getline(lines, part);) {
    part.erase(0, part.find_first_not_of(' '));
    if (part.empty()) continue;
    if (!line.empty()) line += line.ends_with(':') ? " " : "; ";
    line += part;
  }
  return line;
}

}  // namespace gradus::base
