#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/amp/autocast/internal/operator_table.h>

namespace gradus::amp::internal {

/// Autocast for one device type.
struct DeviceSetting {
  c10::DeviceType device = c10::DeviceType::CPU;
  bool enabled = false;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  bool rounded = false;
  bool rounded_recurrent =
      false;  ///< oneDNN's recurrent layers throw without kernels of the dtype.
  std::optional<OperatorLists> lists = std::nullopt;  ///< Where a guard was given some.
  std::shared_ptr<const OperatorTable> table = nullptr;
};

/// What a region goes by. Immutable once a region has it.
struct Settings {
  std::vector<DeviceSetting> devices = {};
  bool cache = true;
  bool hint_shapes = false;

  const DeviceSetting* find(c10::DeviceType device) const {
    for (const DeviceSetting& setting : devices)
      if (setting.device == device) return &setting;
    return nullptr;
  }
};

}  // namespace gradus::amp::internal
