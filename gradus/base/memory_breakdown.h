#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string_view>
#include <vector>

namespace gradus::base {

/// What fills a device, as its owner asks it.
enum class MemoryCategory : std::uint8_t {
  parameters,       ///< Weights and buffers of the model.
  gradients,        ///< Accumulated gradients of parameters.
  optimizer_state,  ///< Momenta, variances, master weights.
  activations,      ///< Tensors that autograd keeps for backward.
  inputs,           ///< The batch.
  workspace,        ///< Everything else: results in flight, temporaries.
};
inline constexpr std::size_t kMemoryCategoryCount = 6;
inline constexpr std::array<std::string_view, kMemoryCategoryCount> kMemoryCategoryNames{
    "parameters", "gradients", "optimizer state", "activations", "inputs", "workspace"};

/// Bytes by category.
struct MemoryBreakdown {
  std::array<std::int64_t, kMemoryCategoryCount> bytes{};

  std::int64_t& operator[](MemoryCategory category) {
    return bytes[static_cast<std::size_t>(category)];
  }
  std::int64_t operator[](MemoryCategory category) const {
    return bytes[static_cast<std::size_t>(category)];
  }
  std::int64_t total() const {
    return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
  }
  bool operator==(const MemoryBreakdown&) const = default;
};

/// Live bytes of one device at one moment.
struct MemoryPoint {
  double time_s = 0.0;  ///< Seconds on the tracker's clock.
  MemoryBreakdown live;
};
using MemoryTimeline = std::vector<MemoryPoint>;

}  // namespace gradus::base
