#include <gradus/amp/autocast/internal/rounded.h>

#include <string_view>
#include <utility>

#include <ATen/ops/_to_copy.h>
#include <ATen/ops/as_strided.h>

#include <gradus/base/error.h>
#include <gradus/base/names.h>

namespace gradus::amp::internal {
namespace {

// An operator saves on the thread it was called on.
thread_local RoundedOperator* running = nullptr;

// The one operator that saves its own result. A float16 kernel would save it rounded; its other
// saved result, the logarithms of sums, is float32 there too.
constexpr std::string_view kSavesItsResult = "aten::_scaled_dot_product_flash_attention_for_cpu";
constexpr int kResultDims = 4;

plane::saved::Packed keep(at::Tensor lower) {
  // LibTorch would notice a change of what it saved; here it saved a copy. The counter is shared
  // with the tensor that the program has.
  const bool versioned = !lower.is_inference();
  c10::VariableVersion counter;
  if (versioned) counter = lower.unsafeGetTensorImpl()->version_counter();
  const std::uint32_t version = versioned ? counter.current_version() : 0;
  plane::saved::Packed packed;
  packed.as_saved = true;
  packed.payload.push_back(std::move(lower));
  packed.restore = [versioned, counter, version](std::vector<at::Tensor> payload) {
    if (versioned && counter.current_version() != version) {
      throw UserError(
          base::join("[autocast] a tensor saved for backward must not change before it is used; ",
                     base::describe_tensor(payload.at(0)), " was saved at version ", version,
                     " and is now at version ", counter.current_version(),
                     ". Change it in place only after backward, or change a clone."));
    }
    return at::_to_copy(payload.at(0), at::kFloat);
  };
  return packed;
}

}  // namespace

RoundedOperator::RoundedOperator(at::ScalarType dtype)
    : dtype_(dtype), outer_(std::exchange(running, this)) {}

RoundedOperator::~RoundedOperator() { running = outer_; }

void RoundedOperator::add(const at::Tensor& rounded, const at::Tensor& lower) {
  if (!rounded.has_storage() || rounded.is_nested()) return;
  arguments_.push_back({rounded.storage().unsafeGetStorageImpl(), rounded, lower});
}

std::optional<plane::saved::Packed> KeepLowerPrecision::pack(const plane::saved::Value& value) {
  const at::Tensor& tensor = value.tensor;
  if (running == nullptr || !value.saved_by_maker || tensor.scalar_type() != at::kFloat ||
      !tensor.has_storage()) {
    return std::nullopt;
  }
  const void* const storage = tensor.storage().unsafeGetStorageImpl();
  for (const RoundedOperator::Argument& argument : running->arguments_) {
    if (argument.storage != storage) continue;
    const at::Tensor& lower = argument.lower;
    const at::Tensor& rounded = argument.rounded;
    const auto shift = tensor.storage_offset() - rounded.storage_offset();
    if (shift == 0 && tensor.sizes() == rounded.sizes() && tensor.strides() == rounded.strides()) {
      return keep(lower.detach());
    }
    // A cast of a sliced tensor has other strides; its views are kept as they are.
    if (rounded.strides() != lower.strides()) return std::nullopt;
    return keep(lower.detach().as_strided(tensor.sizes(), tensor.strides(),
                                          lower.storage_offset() + shift));
  }
  if (value.maker == kSavesItsResult && tensor.dim() == kResultDims) {
    return keep(at::_to_copy(tensor, running->dtype_));
  }
  return std::nullopt;
}

}  // namespace gradus::amp::internal
