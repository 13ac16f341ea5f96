#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/plane/saved/saved_plane.h>

namespace gradus::amp::internal {

/// While it lives, the float32 arguments of an operator that computes for a lower precision, with
/// the lower-precision tensors that hold the same values.
class RoundedOperator {
 public:
  explicit RoundedOperator(at::ScalarType dtype);
  ~RoundedOperator();
  RoundedOperator(const RoundedOperator&) = delete;
  RoundedOperator& operator=(const RoundedOperator&) = delete;

  void add(const at::Tensor& rounded, const at::Tensor& lower);

 private:
  friend class KeepLowerPrecision;
  struct Argument {
    const void* storage = nullptr;
    at::Tensor rounded;
    at::Tensor lower;
  };
  at::ScalarType dtype_;
  std::vector<Argument> arguments_;
  RoundedOperator* outer_;
};

/// Keeps what such operators save for backward in the lower precision that it was rounded to: half
/// the bytes, and the same values when it is read again.
class KeepLowerPrecision final : public plane::saved::Hooks {
 public:
  std::optional<plane::saved::Packed> pack(const plane::saved::Value& value) override;
};

}  // namespace gradus::amp::internal
