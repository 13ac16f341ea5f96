#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>

#include <ATen/core/Tensor.h>

#include <gradus/base/error.h>
#include <gradus/state/safetensors.h>

namespace gradus::tests {

/// What two private states (privacy.safetensors) differ in, bit by bit; empty if in nothing. A run
/// that was resumed released under several random ids, so that of its releases only the sum is
/// compared.
inline std::string private_difference(const std::string& path, const std::string& other_path) {
  const auto read = [](const std::string& from, std::int64_t& steps) {
    std::map<std::string, at::Tensor> tensors = state::load_safetensors(from).tensors;
    for (auto each = tensors.begin(); each != tensors.end();) {
      if (each->first.ends_with("releases.counts")) {
        steps += each->second.select(1, 1).sum().item<std::int64_t>();
      }
      each = each->first.find("releases.") == std::string::npos ? std::next(each)
                                                                : tensors.erase(each);
    }
    return tensors;
  };
  std::int64_t steps = 0;
  std::int64_t other_steps = 0;
  const auto tensors = read(path, steps);
  const auto others = read(other_path, other_steps);
  std::string difference;
  if (steps == 0) difference += " no releases;";
  if (steps != other_steps)
    difference += base::join(" ", steps, " and ", other_steps, " releases;");
  if (tensors.size() != others.size()) difference += " other tensors;";
  for (const auto& [name, tensor] : tensors) {
    const auto found = others.find(name);
    const bool same =
        found != others.end() && found->second.sizes() == tensor.sizes() &&
        found->second.scalar_type() == tensor.scalar_type() &&
        std::memcmp(found->second.const_data_ptr(), tensor.const_data_ptr(), tensor.nbytes()) == 0;
    if (!same) difference += " " + name + ";";
  }
  return difference;
}

}  // namespace gradus::tests
