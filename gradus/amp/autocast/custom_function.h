#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include <gradus/amp/autocast/autocast.h>

namespace torch::autograd {
struct AutogradContext;
}

namespace gradus::amp {

/// The first line of a custom autograd function's forward: remembers the autocast settings for its
/// backward and, with a dtype, turns autocast off while it lives. For kernels that take one type.
///
///     static at::Tensor forward(torch::autograd::AutogradContext* ctx, at::Tensor x) {
///       const amp::CustomForward autocast(ctx, at::kFloat);
///       x = autocast.cast(x);
///       ...
///     }
///     static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* ctx,
///                                                  torch::autograd::tensor_list grads) {
///       const amp::CustomBackward autocast(ctx);
///       ...
///     }
class [[nodiscard]] CustomForward {
 public:
  /// @param cast_inputs  Floating dtype for cast(); unset leaves autocast as it is in forward.
  /// @throws UserError if @p cast_inputs is no floating type.
  explicit CustomForward(torch::autograd::AutogradContext* context,
                         std::optional<at::ScalarType> cast_inputs = std::nullopt);
  CustomForward(const CustomForward&) = delete;
  CustomForward& operator=(const CustomForward&) = delete;

  /// The tensor in the dtype given, if autocast was on for its device and it is of a floating type
  /// other than float64; else as it is. Its gradient is cast back by autograd.
  at::Tensor cast(const at::Tensor& tensor) const;

 private:
  AutocastState outside_;
  std::optional<at::ScalarType> dtype_;
  std::optional<AutocastStateGuard> off_;
};

/// The first line of the backward: the settings that hold for the body of forward, while it lives.
/// @throws UserError if forward had no CustomForward.
class [[nodiscard]] CustomBackward {
 public:
  explicit CustomBackward(torch::autograd::AutogradContext* context);
  CustomBackward(const CustomBackward&) = delete;
  CustomBackward& operator=(const CustomBackward&) = delete;

 private:
  std::optional<AutocastStateGuard> state_;
};

}  // namespace gradus::amp
