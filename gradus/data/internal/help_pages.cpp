#include <gradus/data/internal/help_pages.h>

#include <algorithm>
#include <cstddef>
#include <system_error>

#include <gradus/base/error.h>
#include <gradus/data/internal/utf8.h>
#include <gradus/state/atomic_file.h>
#include <gradus/state/content_hash.h>

namespace gradus::data::internal {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPackages = "libreoffice-help-en-us libreoffice-help-de";

}  // namespace

fs::path help_text_directory(const std::string& directory, const std::string& language) {
  fs::path pages = fs::path(directory) / language / "text";
  GRADUS_CHECK("data", fs::is_directory(pages), "help pages must be in '", pages.string(),
               "'; there is no such directory",
               directory == kLibreOfficeHelpDirectory
                   ? base::join(". Install them: apt-get install ", kPackages)
                   : std::string());
  return pages;
}

std::vector<fs::path> help_page_paths(const fs::path& directory) {
  std::vector<fs::path> paths;
  std::error_code error;
  fs::recursive_directory_iterator entry(directory, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    if (entry->is_regular_file() && entry->path().extension() == ".html")
      paths.push_back(entry->path().lexically_relative(directory));
  }
  if (error) {
    throw UserError(base::join("[data] cannot list '", directory.string(), "': ", error.message()));
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::vector<HelpParagraph> read_help_page(const fs::path& path) {
  const std::string html = state::read_file(path.string());
  const std::size_t valid = valid_utf8_bytes(html);
  GRADUS_CHECK("data", valid == html.size(), "a help page must be UTF-8 text; '", path.string(),
               "' is not at byte ", valid);
  return parse_help_page(html, path.string());
}

double place_of(std::string_view key) {
  return static_cast<double>(state::content_hash(key) >> 11) * 0x1.0p-53;
}

}  // namespace gradus::data::internal
