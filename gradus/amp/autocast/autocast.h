#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <gradus/amp/autocast/operator_lists.h>

namespace gradus::amp {

namespace internal {
class ActiveRegion;
struct Settings;
}  // namespace internal

/// Where lower-precision operators are computed.
enum class Arithmetic : std::uint8_t {
  automatic,  ///< `rounded` for float16 on a CPU without fast float16 kernels, else `native`.
  native,     ///< LibTorch's kernels for the dtype, however slow.
  rounded,    ///< float32 kernels on arguments in the dtype; results rounded to it.
};

struct AutocastOptions {
  c10::DeviceType device = c10::DeviceType::CPU;
  std::optional<c10::ScalarType> dtype =
      std::nullopt;     ///< kHalf or kBFloat16; unset keeps the device's current one.
  bool enabled = true;  ///< False: a region in full precision inside another guard.
  bool cache = true;    ///< Cast a weight once in the region, not at every use.
  /// Unset: those of the guard outside for this device and dtype, or else the process's defaults.
  std::optional<OperatorLists> lists = std::nullopt;
  Arithmetic arithmetic = Arithmetic::automatic;
  bool hint_shapes = false;  ///< Look for shapes that tensor cores do not take: shape_hints().
};

/// Autocast for one device type while it lives, as Python's torch.autocast, with lists that can be
/// read and changed. Nests; the innermost guard decides. Acts on the operators of forward: a
/// backward pass inside the region runs as if outside. Casts of weights are kept until the
/// outermost guard ends or a backward pass runs in the region.
///
/// The thread's LibTorch autocast for the device is off inside and then as before. Threads that the
/// program starts take the region along under an at::ThreadLocalStateGuard, or enter an
/// AutocastState.
///
///     at::Tensor loss;
///     {
///       const AutocastGuard autocast({.dtype = at::kBFloat16});
///       loss = torch::mse_loss(model->forward(x), y);
///     }
///     loss.backward();
///
/// @throws UserError if the dtype is no lower precision or the device type has no autocast.
class [[nodiscard]] AutocastGuard {
 public:
  explicit AutocastGuard(const AutocastOptions& options = {});
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  c10::DeviceType device_;
  bool previous_enabled_ = false;  // LibTorch's own
  std::unique_ptr<internal::ActiveRegion> region_;
};

class AutocastStateGuard;

/// This thread's autocast settings, to be entered again later or on another thread: gradus's, and
/// LibTorch's own switches for the CPU and this build's accelerator.
class AutocastState {
 public:
  /// Everything off.
  AutocastState();

  static AutocastState capture();
  /// Makes these the thread's settings while the guard lives.
  AutocastStateGuard apply() const;

  bool enabled(c10::DeviceType device = c10::DeviceType::CPU) const;
  /// What a guard without dtype would take.
  c10::ScalarType dtype(c10::DeviceType device = c10::DeviceType::CPU) const;
  bool cache() const;

 private:
  friend class AutocastStateGuard;
  struct TorchSetting {
    c10::DeviceType device = c10::DeviceType::CPU;
    bool enabled = false;
    c10::ScalarType dtype = c10::ScalarType::Undefined;
  };
  void set_torch() const;

  std::shared_ptr<const internal::Settings> settings_;  // null: no guard
  std::vector<TorchSetting> torch_;
  bool torch_cache_ = true;
};

/// A captured state while it lives, then the one before. Entered inside a backward pass (a
/// checkpoint's second run), it acts on that pass's operators. Casts cached inside go when no guard
/// is left.
class [[nodiscard]] AutocastStateGuard {
 public:
  explicit AutocastStateGuard(const AutocastState& state);
  ~AutocastStateGuard();
  AutocastStateGuard(const AutocastStateGuard&) = delete;
  AutocastStateGuard& operator=(const AutocastStateGuard&) = delete;

 private:
  AutocastState previous_;
  std::unique_ptr<internal::ActiveRegion> region_;
};

/// Casts of weights that the region this thread is in keeps now; 0 outside.
std::size_t cast_cache_size();

/// True on the thread on which autocast itself calls operators: casts, and views of cast weights.
/// Whether it does depends on what its cache holds.
bool casting();

/// Whether Arithmetic::automatic is `rounded` for @p dtype on this CPU: float16 where oneDNN has no
/// kernels for it (they take avx512_fp16).
bool rounds(c10::ScalarType dtype);

/// One line for each layer shape that ran in lower precision, under guards that asked for hints,
/// with a dimension that is no multiple of 8: tensor cores leave it to slower units, or pad it. In
/// the order of first use. Process-wide; thread-safe.
std::vector<std::string> shape_hints();
void clear_shape_hints();

}  // namespace gradus::amp
