#include <gradus/amp/autocast/autocast.h>

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>

#include <gradus/base/error.h>

namespace gradus::amp {
namespace {

void leave() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

}  // namespace

AutocastGuard::AutocastGuard(const AutocastOptions& options) : device_(options.device) {
  GRADUS_CHECK("autocast", at::autocast::is_autocast_available(device_),
               "autocast exists for CPU, CUDA and other accelerators that LibTorch lists; got ",
               c10::DeviceTypeName(device_));
  const auto dtype = options.dtype.value_or(at::autocast::get_autocast_dtype(device_));
  GRADUS_CHECK("autocast", !options.enabled || dtype == at::kHalf || dtype == at::kBFloat16,
               "the autocast dtype must be float16 or bfloat16; got ", dtype);
  previous_enabled_ = at::autocast::is_autocast_enabled(device_);
  previous_dtype_ = at::autocast::get_autocast_dtype(device_);
  previous_cache_ = at::autocast::is_autocast_cache_enabled();
  at::autocast::set_autocast_enabled(device_, options.enabled);
  at::autocast::set_autocast_dtype(device_, dtype);
  at::autocast::set_autocast_cache_enabled(options.cache);
  at::autocast::increment_nesting();
}

AutocastGuard::~AutocastGuard() {
  leave();
  at::autocast::set_autocast_enabled(device_, previous_enabled_);
  at::autocast::set_autocast_dtype(device_, previous_dtype_);
  at::autocast::set_autocast_cache_enabled(previous_cache_);
}

AutocastState AutocastState::capture() {
  AutocastState state;
  std::vector<c10::DeviceType> devices{c10::DeviceType::CPU};
  if (const auto accelerator = at::getAccelerator()) devices.push_back(*accelerator);
  for (const auto device : devices) {
    if (!at::autocast::is_autocast_available(device)) continue;
    state.settings_.push_back({device, at::autocast::is_autocast_enabled(device),
                               at::autocast::get_autocast_dtype(device)});
  }
  state.cache_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

void AutocastState::apply() const {
  for (const Setting& setting : settings_) {
    at::autocast::set_autocast_enabled(setting.device, setting.enabled);
    at::autocast::set_autocast_dtype(setting.device, setting.dtype);
  }
  at::autocast::set_autocast_cache_enabled(cache_);
}

AutocastStateGuard::AutocastStateGuard(const AutocastState& state)
    : previous_(AutocastState::capture()) {
  state.apply();
  at::autocast::increment_nesting();
}

AutocastStateGuard::~AutocastStateGuard() {
  leave();
  previous_.apply();
}

}  // namespace gradus::amp
