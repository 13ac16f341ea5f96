#pragma once

#include <cstddef>
#include <optional>
#include <ranges>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <gradus/recompute/for_each_tensor.h>

namespace gradus::amp {

/// @p tensor in @p dtype if it is a real floating one, else itself (undefined, integer, bool,
/// complex, or no dtype given). Differentiable.
at::Tensor cast_floating(const at::Tensor& tensor, std::optional<c10::ScalarType> dtype);

namespace internal {

template <typename T>
constexpr bool holds_tensors();

template <typename Tuple, std::size_t... I>
constexpr bool some_part_holds_tensors(std::index_sequence<I...>) {
  return (holds_tensors<std::remove_const_t<std::tuple_element_t<I, Tuple>>>() || ...);
}

// Whether visit_tensors may find a tensor in a T.
template <typename T>
constexpr bool holds_tensors() {
  if constexpr (std::is_same_v<T, at::Tensor> ||
                recompute::internal::VisitedByItsOwner<T, recompute::internal::AnyVisit>) {
    return true;
  } else if constexpr (recompute::internal::kIsOptional<T>) {
    return holds_tensors<typename T::value_type>();
  } else if constexpr (recompute::internal::Elements<T>) {
    using Element = std::remove_cvref_t<std::ranges::range_reference_t<T>>;
    if constexpr (recompute::internal::TupleLike<Element>) {  // of a map: key and value
      return some_part_holds_tensors<Element>(
          std::make_index_sequence<std::tuple_size_v<Element>>());
    } else {
      return holds_tensors<Element>();
    }
  } else if constexpr (recompute::internal::TupleLike<T>) {
    return some_part_holds_tensors<T>(std::make_index_sequence<std::tuple_size_v<T>>());
  } else {
    return false;
  }
}

}  // namespace internal

/// Casts every floating tensor in @p value, as visit_tensors finds them.
template <typename T>
void cast_in_place(T& value, std::optional<c10::ScalarType> dtype) {
  if (!dtype) return;
  recompute::visit_tensors(value,
                           [&](at::Tensor& tensor) { tensor = cast_floating(tensor, dtype); });
}

/// @p value with its floating tensors cast: a copy if its type may hold tensors, else @p value.
template <typename T>
decltype(auto) cast_copy(T&& value, std::optional<c10::ScalarType> dtype) {
  using Value = std::remove_cvref_t<T>;
  if constexpr (std::is_same_v<Value, at::TensorList>) {
    std::vector<at::Tensor> copy = value.vec();
    cast_in_place(copy, dtype);
    return copy;
  } else if constexpr (internal::holds_tensors<Value>() && std::is_constructible_v<Value, T&&>) {
    Value copy(std::forward<T>(value));
    cast_in_place(copy, dtype);
    return copy;
  } else {
    return std::forward<T>(value);
  }
}

}  // namespace gradus::amp
