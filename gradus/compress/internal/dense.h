#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace gradus::compress::internal {

/// How a tensor that fills its memory without gaps or overlaps lies in it. Codecs work on the
/// values in the order of memory, and give back a tensor of the same strides and the same alignment
/// to 64 bytes: kernels that choose their path by either then compute the same bits.
class DenseLayout {
 public:
  /// nullopt unless @p tensor is a non-empty CPU tensor, dense in memory.
  static std::optional<DenseLayout> of(const at::Tensor& tensor);

  /// A new tensor of this layout; its values are undefined.
  at::Tensor make() const;

  std::int64_t numel() const { return numel_; }
  at::ScalarType dtype() const { return dtype_; }

 private:
  std::vector<std::int64_t> sizes_;
  std::vector<std::int64_t> strides_;
  at::ScalarType dtype_ = at::ScalarType::Undefined;
  std::int64_t numel_ = 0;
  std::int64_t misaligned_ = 0;  // elements past a multiple of 64 bytes
};

/// True for tensors that codecs can read: strided CPU memory, no lazy conjugation or negation.
bool readable(const at::Tensor& tensor);

/// A new contiguous CPU tensor of one dimension. No operator call: handlers of the op plane see
/// nothing of it.
at::Tensor make_array(std::int64_t numel, at::ScalarType dtype);

/// A tensor of @p sizes that repeats one value and has room for one only.
at::Tensor make_repeated(at::IntArrayRef sizes, at::ScalarType dtype, double value);

}  // namespace gradus::compress::internal
