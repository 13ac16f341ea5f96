#include <gradus/state/internal/safetensors_dtype.h>

#include <array>
#include <utility>

namespace gradus::state::internal {
namespace {

// The names of safetensors 0.8.0. F4, F6_E2M3 and F6_E3M2 pack values below a byte; F6 has no dtype
// in LibTorch and Python's torch reader refuses F4, so that neither is written or read here.
constexpr std::array<std::pair<at::ScalarType, std::string_view>, 19> kDtypes{{
    {at::ScalarType::Double, "F64"},
    {at::ScalarType::Float, "F32"},
    {at::ScalarType::Half, "F16"},
    {at::ScalarType::BFloat16, "BF16"},
    {at::ScalarType::Float8_e4m3fn, "F8_E4M3"},
    {at::ScalarType::Float8_e4m3fnuz, "F8_E4M3FNUZ"},
    {at::ScalarType::Float8_e5m2, "F8_E5M2"},
    {at::ScalarType::Float8_e5m2fnuz, "F8_E5M2FNUZ"},
    {at::ScalarType::Float8_e8m0fnu, "F8_E8M0"},
    {at::ScalarType::ComplexFloat, "C64"},
    {at::ScalarType::Long, "I64"},
    {at::ScalarType::Int, "I32"},
    {at::ScalarType::Short, "I16"},
    {at::ScalarType::Char, "I8"},
    {at::ScalarType::UInt64, "U64"},
    {at::ScalarType::UInt32, "U32"},
    {at::ScalarType::UInt16, "U16"},
    {at::ScalarType::Byte, "U8"},
    {at::ScalarType::Bool, "BOOL"},
}};

}  // namespace

std::optional<std::string_view> dtype_name(at::ScalarType dtype) {
  for (const auto& [known, name] : kDtypes) {
    if (known == dtype) return name;
  }
  return std::nullopt;
}

std::optional<at::ScalarType> dtype_of(std::string_view name) {
  for (const auto& [dtype, known] : kDtypes) {
    if (known == name) return dtype;
  }
  return std::nullopt;
}

}  // namespace gradus::state::internal
