#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include <gradus/data/parallel_text.h>

namespace gradus::data::internal {

/// Where @p directory keeps the pages of @p language ("en-US", "de"). @throws UserError if there is
/// no such directory; for LibreOffice's own it names the packages to install.
std::filesystem::path help_text_directory(const std::string& directory,
                                          const std::string& language);

/// Paths of the pages below @p directory, relative to it, sorted. @throws UserError if it cannot be
/// listed.
std::vector<std::filesystem::path> help_page_paths(const std::filesystem::path& directory);

/// @throws UserError naming @p path if it cannot be read, is not UTF-8 or is no help page.
std::vector<HelpParagraph> read_help_page(const std::filesystem::path& path);

/// A number in [0, 1) that depends on @p key alone: which part of a split something belongs to.
double place_of(std::string_view key);

}  // namespace gradus::data::internal
