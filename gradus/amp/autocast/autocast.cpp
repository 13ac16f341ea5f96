#include <gradus/amp/autocast/autocast.h>

#include <utility>

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <gradus/amp/autocast/internal/hints.h>
#include <gradus/amp/autocast/internal/region.h>
#include <gradus/base/error.h>

namespace gradus::amp {
namespace {

std::shared_ptr<const internal::Settings> current_settings() {
  const auto region = internal::Region::current();
  return region == nullptr ? nullptr : region->settings();
}

// oneDNN's answer heeds ONEDNN_MAX_CPU_ISA, unlike the processor's.
bool onednn_has(const char* question) {
  const auto op = c10::Dispatcher::singleton().findSchema({question, ""});
  return op && op->typed<bool()>().call();
}

bool computes_rounded(Arithmetic arithmetic, c10::DeviceType device, c10::ScalarType dtype) {
  if (device != c10::DeviceType::CPU) {
    GRADUS_CHECK("autocast", arithmetic != Arithmetic::rounded,
                 "rounded arithmetic is for the CPU; got ", c10::DeviceTypeName(device));
    return false;
  }
  return arithmetic == Arithmetic::rounded ||
         (arithmetic == Arithmetic::automatic && rounds(dtype));
}

// Enters @p options in the settings outside.
std::shared_ptr<const internal::Settings> with(const AutocastOptions& options,
                                               c10::ScalarType dtype) {
  auto settings = std::make_shared<internal::Settings>();
  if (const auto outer = current_settings()) *settings = *outer;
  settings->cache = options.cache;
  settings->hint_shapes = options.hint_shapes;
  internal::DeviceSetting setting{options.device, options.enabled, dtype};
  const internal::DeviceSetting* const outer = settings->find(options.device);
  setting.lists = options.lists;
  if (!setting.lists && outer != nullptr && outer->dtype == dtype) setting.lists = outer->lists;
  if (options.enabled) {
    setting.rounded = computes_rounded(options.arithmetic, options.device, dtype);
    static const bool has_bfloat16 = onednn_has("mkldnn::_is_mkldnn_bf16_supported");
    setting.rounded_recurrent = options.device == c10::DeviceType::CPU && !has_bfloat16;
    setting.table = internal::OperatorTable::of(
        setting.lists ? *setting.lists : OperatorLists::defaults(options.device, dtype));
  }
  std::erase_if(settings->devices, [&](const auto& s) { return s.device == options.device; });
  settings->devices.push_back(std::move(setting));
  return settings;
}

}  // namespace

AutocastGuard::AutocastGuard(const AutocastOptions& options) : device_(options.device) {
  GRADUS_CHECK("autocast", at::autocast::is_autocast_available(device_),
               "autocast exists for CPU, CUDA and other accelerators that LibTorch lists; got ",
               c10::DeviceTypeName(device_));
  const auto dtype = options.dtype.value_or(AutocastState::capture().dtype(device_));
  GRADUS_CHECK("autocast", !options.enabled || dtype == at::kHalf || dtype == at::kBFloat16,
               "the autocast dtype must be float16 or bfloat16; got ", dtype);
  region_ = std::make_unique<internal::ActiveRegion>(with(options, dtype));
  previous_enabled_ = at::autocast::is_autocast_enabled(device_);
  at::autocast::set_autocast_enabled(device_, false);
}

AutocastGuard::~AutocastGuard() { at::autocast::set_autocast_enabled(device_, previous_enabled_); }

AutocastState::AutocastState() {
  std::vector<c10::DeviceType> devices{c10::DeviceType::CPU};
  if (const auto accelerator = at::getAccelerator()) devices.push_back(*accelerator);
  for (const auto device : devices) {
    if (!at::autocast::is_autocast_available(device)) continue;
    torch_.push_back({device, false, at::autocast::get_autocast_dtype(device)});
  }
}

AutocastState AutocastState::capture() {
  AutocastState state;
  state.settings_ = current_settings();
  for (TorchSetting& setting : state.torch_) {
    setting.enabled = at::autocast::is_autocast_enabled(setting.device);
  }
  state.torch_cache_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

AutocastStateGuard AutocastState::apply() const { return AutocastStateGuard(*this); }

bool AutocastState::enabled(c10::DeviceType device) const {
  for (const TorchSetting& setting : torch_)
    if (setting.device == device && setting.enabled) return true;
  const auto* const setting = settings_ == nullptr ? nullptr : settings_->find(device);
  return setting != nullptr && setting->enabled;
}

c10::ScalarType AutocastState::dtype(c10::DeviceType device) const {
  if (const auto* const setting = settings_ == nullptr ? nullptr : settings_->find(device)) {
    return setting->dtype;
  }
  for (const TorchSetting& setting : torch_)
    if (setting.device == device) return setting.dtype;
  return at::autocast::get_autocast_dtype(device);
}

bool AutocastState::cache() const { return settings_ == nullptr ? torch_cache_ : settings_->cache; }

void AutocastState::set_torch() const {
  for (const TorchSetting& setting : torch_) {
    at::autocast::set_autocast_enabled(setting.device, setting.enabled);
    at::autocast::set_autocast_dtype(setting.device, setting.dtype);
  }
  at::autocast::set_autocast_cache_enabled(torch_cache_);
}

AutocastStateGuard::AutocastStateGuard(const AutocastState& state)
    : previous_(AutocastState::capture()) {
  // Without settings, and none to be hidden, there is nothing to put on the planes.
  if (state.settings_ != nullptr || previous_.settings_ != nullptr) {
    region_ = std::make_unique<internal::ActiveRegion>(
        state.settings_ != nullptr ? state.settings_
                                   : std::make_shared<const internal::Settings>());
  }
  state.set_torch();
  at::autocast::increment_nesting();
}

AutocastStateGuard::~AutocastStateGuard() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  previous_.set_torch();
}

std::size_t cast_cache_size() {
  const auto region = internal::Region::current();
  return region == nullptr ? 0 : region->cache()->size();
}

bool casting() { return internal::casting_now(); }

bool rounds(c10::ScalarType dtype) {
  static const bool has_float16 = onednn_has("mkldnn::_is_mkldnn_fp16_supported");
  return dtype == at::kHalf && !has_float16;
}

std::vector<std::string> shape_hints() { return internal::noted_shapes(); }

void clear_shape_hints() { internal::clear_noted_shapes(); }

}  // namespace gradus::amp
