#include <gradus/compress/internal/dense.h>

#include <ATen/Dispatch.h>
#include <ATen/EmptyTensor.h>

namespace gradus::compress::internal {

std::optional<DenseLayout> DenseLayout::of(const at::Tensor& tensor) {
  if (!readable(tensor) || tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) {
    return std::nullopt;
  }
  constexpr std::int64_t kAlignment = 64;
  const auto element = static_cast<std::int64_t>(tensor.element_size());
  const auto past = static_cast<std::int64_t>(
      reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % kAlignment);
  DenseLayout layout;
  layout.sizes_ = tensor.sizes().vec();
  layout.strides_ = tensor.strides().vec();
  layout.dtype_ = tensor.scalar_type();
  layout.numel_ = tensor.numel();
  layout.misaligned_ = past % element == 0 ? past / element : 0;
  return layout;
}

at::Tensor DenseLayout::make() const {
  at::Tensor tensor(at::detail::empty_cpu({numel_ + misaligned_}, dtype_));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes_, strides_, misaligned_);
  return tensor;
}

bool readable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
         tensor.has_storage() && !tensor.is_quantized() && !tensor.is_conj() && !tensor.is_neg() &&
         tensor.storage().data() != nullptr;
}

at::Tensor make_array(std::int64_t numel, at::ScalarType dtype) {
  return at::Tensor(at::detail::empty_cpu({numel}, dtype));
}

at::Tensor make_repeated(at::IntArrayRef sizes, at::ScalarType dtype, double value) {
  at::Tensor tensor(at::detail::empty_cpu({1}, dtype));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "make_repeated", [&] {
    *tensor.mutable_data_ptr<scalar_t>() = static_cast<scalar_t>(value);
  });
  const std::vector<std::int64_t> strides(sizes.size(), 0);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

}  // namespace gradus::compress::internal
