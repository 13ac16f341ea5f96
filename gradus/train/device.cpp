#include <gradus/train/device.h>

#include <ATen/DeviceAccelerator.h>

#include <gradus/base/error.h>

namespace gradus::train {

std::string available_devices() {
  std::string names = "cpu";
  if (const auto accelerator = at::getAccelerator()) {
    for (c10::DeviceIndex i = 0; i < at::accelerator::deviceCount(); ++i) {
      names += ", " + c10::Device(*accelerator, i).str();
    }
  }
  return names;
}

c10::Device find_device(const std::string& name) {
  c10::Device device(c10::kCPU);
  try {
    device = c10::Device(name);
  } catch (const c10::Error&) {
    throw UserError(base::join("[device] a device such as cpu or cuda:0 is required; got '", name,
                               "'. Here: ", available_devices()));
  }
  if (device.is_cpu()) return device;
  if (!device.has_index()) device = c10::Device(device.type(), 0);
  const auto accelerator = at::getAccelerator();
  GRADUS_CHECK(
      "device", accelerator == device.type() && device.index() < at::accelerator::deviceCount(),
      "this build and machine have no device ", device.str(), "; here: ", available_devices());
  return device;
}

}  // namespace gradus::train
