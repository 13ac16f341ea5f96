#pragma once

#include <optional>
#include <vector>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace gradus::amp {

struct AutocastOptions {
  c10::DeviceType device = c10::DeviceType::CPU;
  std::optional<c10::ScalarType> dtype =
      std::nullopt;     ///< kHalf or kBFloat16; unset keeps the device's current one.
  bool enabled = true;  ///< False: a region in full precision inside another guard.
  bool cache = true;    ///< Cast a weight once in the region, not at every use.
};

/// Autocast for one device type while it lives, as Python's torch.autocast. Nests; the cast cache
/// is emptied when the outermost guard ends.
/// @throws UserError if the dtype is no lower precision or the device type has no autocast.
class [[nodiscard]] AutocastGuard {
 public:
  explicit AutocastGuard(const AutocastOptions& options = {});
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  c10::DeviceType device_;
  bool previous_enabled_;
  c10::ScalarType previous_dtype_;
  bool previous_cache_;
};

/// This thread's autocast settings, for the CPU and this build's accelerator, to be entered again
/// later.
class AutocastState {
 public:
  static AutocastState capture();
  /// Makes these the thread's settings. The cast cache keeps its content.
  void apply() const;

 private:
  struct Setting {
    c10::DeviceType device;
    bool enabled;
    c10::ScalarType dtype;
  };
  std::vector<Setting> settings_;
  bool cache_ = true;
};

/// A captured state while it lives, then the one before. Casts cached inside go when no guard is
/// left.
class [[nodiscard]] AutocastStateGuard {
 public:
  explicit AutocastStateGuard(const AutocastState& state);
  ~AutocastStateGuard();
  AutocastStateGuard(const AutocastStateGuard&) = delete;
  AutocastStateGuard& operator=(const AutocastStateGuard&) = delete;

 private:
  AutocastState previous_;
};

}  // namespace gradus::amp
