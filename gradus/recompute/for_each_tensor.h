#pragma once

#include <concepts>
#include <cstddef>
#include <optional>
#include <ranges>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>

namespace gradus::recompute {
namespace internal {

// A user's for_each_tensor, found by the type's own namespace alone.
template <typename T, typename Visit>
concept VisitedByItsOwner = requires(T& value, Visit& visit) { for_each_tensor(value, visit); };

template <typename T>
inline constexpr bool kIsOptional = false;
template <typename T>
inline constexpr bool kIsOptional<std::optional<T>> = true;

template <typename T>
concept TupleLike =
    requires { std::tuple_size<T>::value; } && !std::ranges::range<T>;  // NOLINT: a size, no call

// Ranges of real elements: no std::vector<bool>, whose elements are proxies, and no string.
template <typename T>
concept Elements =
    std::ranges::range<T> && std::is_lvalue_reference_v<std::ranges::range_reference_t<T>> &&
    !std::convertible_to<T, std::string_view>;

struct AnyVisit {
  void operator()(at::Tensor&) const {}
};

}  // namespace internal

/// Calls visit(at::Tensor&) on every tensor in @p value, in a fixed order: a tensor itself, and
/// what lies in optionals, pairs, tuples, arrays, vectors, lists, maps (their values) and nests of
/// these.
///
/// A struct takes part by a function beside it, in its own namespace:
///
///     struct Batch { at::Tensor ids, mask; std::vector<at::Tensor> extra; double scale = 1; };
///     template <typename Visit>
///     void for_each_tensor(Batch& batch, Visit&& visit) {
///       visit(batch.ids);
///       visit(batch.mask);
///       gradus::recompute::visit_tensors(batch.extra, visit);
///     }
///
/// Any other type is taken to hold no tensors.
template <typename T, typename Visit>
void visit_tensors(T& value, Visit&& visit) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    visit(value);
  } else if constexpr (internal::VisitedByItsOwner<T, Visit>) {
    for_each_tensor(value, visit);
  } else if constexpr (internal::kIsOptional<T>) {
    if (value) visit_tensors(*value, visit);
  } else if constexpr (internal::Elements<T>) {
    for (auto& element : value) visit_tensors(element, visit);
  } else if constexpr (internal::TupleLike<T>) {
    std::apply([&](auto&... part) { (visit_tensors(part, visit), ...); }, value);
  }
}

namespace internal {

// Whether visit_tensors surely reaches every tensor of a T.
template <typename T>
constexpr bool sees_every_tensor();

template <typename Tuple, std::size_t... I>
constexpr bool sees_every_part(std::index_sequence<I...>) {
  return (sees_every_tensor<std::remove_const_t<std::tuple_element_t<I, Tuple>>>() && ...);
}

template <typename T>
constexpr bool sees_every_tensor() {
  if constexpr (std::is_same_v<T, at::Tensor> || std::is_arithmetic_v<T> || std::is_enum_v<T> ||
                std::is_void_v<T> || std::is_same_v<T, std::string> ||
                VisitedByItsOwner<T, AnyVisit>) {
    return true;
  } else if constexpr (kIsOptional<T>) {
    return sees_every_tensor<typename T::value_type>();
  } else if constexpr (Elements<T>) {
    return sees_every_tensor<std::remove_cvref_t<std::ranges::range_reference_t<T>>>();
  } else if constexpr (TupleLike<T>) {
    return sees_every_part<T>(std::make_index_sequence<std::tuple_size_v<T>>());
  } else {
    return false;
  }
}

}  // namespace internal
}  // namespace gradus::recompute
