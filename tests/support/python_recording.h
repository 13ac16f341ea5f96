#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include <unistd.h>

#include <torch/serialize.h>

namespace gradus::tests {

/// Runs a command. @throws std::runtime_error if it fails.
inline void run_command(const std::string& command) {
  if (std::system(command.c_str()) != 0) throw std::runtime_error("failed: " + command);
}

/// What a Python script put into the file whose path it is given, by torch.save of one dict.
/// @throws std::runtime_error if the script fails.
inline c10::Dict<c10::IValue, c10::IValue> python_recording(const std::string& python,
                                                            const std::string& script) {
  const auto path =
      std::filesystem::temp_directory_path() /
      (std::filesystem::path(script).stem().string() + "_" + std::to_string(::getpid()) + ".pt");
  run_command("'" + python + "' '" + script + "' '" + path.string() + "'");
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::filesystem::remove(path);
  return torch::pickle_load(bytes).toGenericDict();
}

}  // namespace gradus::tests
