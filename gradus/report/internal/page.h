#pragma once

// Parts that all pages share. Titles, labels and values are escaped; content is HTML.

#include <string>
#include <utility>
#include <vector>

namespace gradus::report::internal {

/// @p value with so many decimals.
std::string fixed(double value, int decimals);

/// A number that the reader sees first, with its name above and a remark below.
std::string tile(const std::string& label, const std::string& value, const std::string& detail);

std::string section(const std::string& title, const std::string& content);

/// Keys and values in columns; "" if there are none.
std::string key_list(const char* title,
                     const std::vector<std::pair<std::string, std::string>>& entries);

/// The head of the text: title, a badge (green if @p good, left out if empty) and a line below.
std::string page_header(const std::string& title, const std::string& badge, bool good,
                        const std::string& line);

/// A whole document that loads nothing: style, @p body and the script for hover boxes.
std::string page(const std::string& title, const std::string& body);

}  // namespace gradus::report::internal
