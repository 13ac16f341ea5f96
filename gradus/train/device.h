#pragma once

#include <string>

#include <c10/core/Device.h>

namespace gradus::train {

/// The device that @p name names, if this build and machine have it.
/// @throws UserError that lists what there is.
c10::Device find_device(const std::string& name);

/// "cpu", "cuda:0", ...: the devices of this build and machine.
std::string available_devices();

}  // namespace gradus::train
